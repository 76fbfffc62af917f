"""A model and data that have nothing to do with fedpa: softmax regression in NumPy."""

import numpy as np

FEATURES, CLASSES = 20, 4


def fresh():
    return [np.zeros((FEATURES, CLASSES), np.float32), np.zeros(CLASSES, np.float32)]


def site_data(site, examples=200):
    """Each site sees some of the classes more than others, and features of its own scale."""
    truth = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    rng = np.random.default_rng([1, site])
    scale = np.exp(rng.normal(size=FEATURES))
    x = (rng.normal(size=(4 * examples, FEATURES)) * scale).astype(np.float32)
    y = np.argmax(x @ truth + rng.gumbel(size=(len(x), CLASSES)), axis=1)
    liked = rng.dirichlet(np.ones(CLASSES))
    keep = rng.choice(len(x), examples, replace=False, p=liked[y] / liked[y].sum())
    return x[keep], y[keep]


def probabilities(arrays, x):
    weights, bias = arrays
    logits = x @ weights + bias
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def with_one_epoch(arrays, x, y, rng, rate=0.05, batch=20):
    """SGD over the examples once, in a new order."""
    weights, bias = arrays
    for rows in np.array_split(rng.permutation(len(x)), len(x) // batch):
        error = probabilities([weights, bias], x[rows])
        error[np.arange(len(rows)), y[rows]] -= 1
        weights -= rate * x[rows].T @ error / len(rows)
        bias -= rate * error.mean(axis=0)
    return [weights, bias]


def loss(arrays, x, y):
    return float(-np.log(probabilities(arrays, x)[np.arange(len(y)), y] + 1e-12).mean())
