"""Hyperparameters searched for: which there are to try, in which order, and what came of each."""
