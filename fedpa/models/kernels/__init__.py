"""Layers whose plain formulation is slow on CPUs, each with a backward pass of its own."""
