"""Layers written for speed where XLA's CPU code is slow. Each equals a plain formulation."""
