"""One file per command, with `main(argv, console)`; what they do, for `fedpa --help`.

The summaries are here and not in the commands' files: showing them imports none.
"""

from typing import NamedTuple


class Command(NamedTuple):
    summary: str
    computes: bool = False
    """Whether it runs compiled programs, for which `fedpa.configure` sets JAX up."""


COMMANDS = {
    "compare": Command("run several methods on one task and compare them", computes=True),
    "data": Command("find, download, describe and partition data sets"),
    "eval": Command("evaluate a run's model on a split of its task", computes=True),
    "export": Command("write a run's parameters to a .npz or .safetensors file"),
    "methods": Command("list methods: what they send, keep and cost"),
    "report": Command("make a page of runs: curves, tables, diagnostics"),
    "resume": Command("resume a run that was interrupted, or give it more rounds", computes=True),
    "run": Command("train one method on one task", computes=True),
    "study": Command("measure and draw the paper's synthetic studies", computes=True),
    "sweep": Command("search for a method's hyperparameters on a task", computes=True),
    "tasks": Command("list tasks, their models and presets, and the data they need"),
}
