"""FedPA in an app whose model and training step are its own."""
