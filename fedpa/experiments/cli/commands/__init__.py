"""The table of commands: their summaries for `fedpa --help`, and the functions that run them.

The summaries are here, so that `fedpa --help` imports none of the commands.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    summary: str
    function: str = ""
    """`module.function` in this package, of (words, console)."""
    options: str = ""
    """Its dataclass in `training_commands`, if that is where it is: help needs no more."""
    computes: bool = False
    """Whether it runs compiled programs; then `fedpa.configure` is called first."""
    commands: "Mapping[str, Command]" = {}
    """Its subcommands, if any."""
    note: str = ""
    """Text below them in its help."""


DATA = {
    "list": Command("list data sets, and where each was found", "data.list_data_sets"),
    "get": Command("download data sets; interrupted downloads are resumed", "data.get"),
    "info": Command("describe a data set, with the numbers of the paper's table 2", "data.info"),
    "partition": Command("partition a data set into clients", "partition.main"),
}
DATA_NOTE = (
    "Data sets are searched for in --data-dir if it is given, otherwise in the directory of\n"
    "the environment variable FEDPA_DATA, then in ~/.local/share/fedpa (or\n"
    "$XDG_DATA_HOME/fedpa, if that variable is set)."
)
COMMANDS = {
    "compare": Command(
        "run several methods on one task and compare them",
        "compare.main",
        "CompareCommand",
        computes=True,
    ),
    "data": Command(
        "find, download, describe and partition data sets", commands=DATA, note=DATA_NOTE
    ),
    "eval": Command(
        "evaluate a run's model on a split of its task", "model.evaluate", computes=True
    ),
    "export": Command(
        "write a run's parameters to a .npz or .safetensors file", "model.export_params"
    ),
    "methods": Command("list methods: what they send, keep and cost", "listing.list_methods"),
    "posterior": Command(
        "make a run's posterior, in one more round, and compare it with its controls",
        "posterior.main",
        computes=True,
    ),
    "privacy": Command(
        "compute the noise that differential privacy needs, or the epsilon of a noise",
        "privacy.main",
    ),
    "report": Command("write one HTML page that summarizes runs", "report.main"),
    "resume": Command(
        "resume an interrupted run, or extend a finished one", "run.resume", computes=True
    ),
    "run": Command("train one method on one task", "run.start", "RunCommand", True),
    "study": Command("rerun and plot the paper's studies", "study.main", computes=True),
    "sweep": Command(
        "search for a method's hyperparameters on a task",
        "sweep.main",
        "SweepCommand",
        computes=True,
    ),
    "tasks": Command(
        "list tasks, their models and presets, and the data they need", "listing.list_tasks"
    ),
}
FEDPA = Command(
    "Simulate federated learning on one machine, compare methods fairly, infer\n"
    "posteriors, and run the same methods on real machines through Flower",
    commands=COMMANDS,
    note="fedpa help COMMAND lists a command's options; fedpa --version prints the version.",
)
