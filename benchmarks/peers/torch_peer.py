"""PyTorch, eager: one client's training steps. `python torch_peer.py SPEC.json`."""

import json
import sys
import time

import numpy as np
import torch
import torch_models


def main(path: str) -> None:
    with open(path) as file:
        spec = json.load(file)
    arrays = dict(np.load(spec["data"]))
    torch.manual_seed(spec["seed"])
    module = torch_models.build(spec["model"], arrays, spec["variant"])
    x, y = torch_models.tensors(spec["model"], arrays)
    seconds = []
    for _ in range(spec["warmup"] + spec["rounds"]):
        started = time.perf_counter()
        torch_models.train(module, x[0], y[0], spec)
        seconds.append(time.perf_counter() - started)
    report = {
        "seconds": seconds[spec["warmup"] :],
        "warmup": seconds[: spec["warmup"]],
        "loss": torch_models.mean_loss(module, x, y),
        "versions": {"torch": torch.__version__},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
