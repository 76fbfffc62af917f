"""Flower as its users write it: FedAvg, and a client in JAX."""
