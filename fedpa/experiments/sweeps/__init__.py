"""Search for hyperparameters: the space, the order of trials, and their results."""
