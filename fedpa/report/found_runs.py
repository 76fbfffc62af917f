"""The runs a report is of: found in directories, read as far as they have come, put in groups.

A group is what differs in nothing but the seed and in what decides no number: the seeds of one
method. Files are read as they are, not through `RunConfig`: a run of an older version, or one that
is being written, can be looked at, too.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.algorithms.hyperparameters import Hyperparameters
from fedpa.algorithms.method import labelled, methods
from fedpa.errors import FedpaError, refuse
from fedpa.report.summary import WINDOW
from fedpa.tasks.task import Preset, tasks
from fedpa.training import run_directory
from fedpa.training.config import ENVIRONMENT
from fedpa.training.history import History
from fedpa.training.loggers.logger import flat

OWN = "a model of one's own"
"""Stands for the task of runs by `fedpa.fit`, which have none."""
SAME_NUMBERS = ("seed", "rounds", "stopping", "recording", "task_options.data_dir")
"""Settings, or tables of them, in which the seeds of one method may differ."""


class FoundRun(NamedTuple):
    directory: Path
    origin: Path
    """The directory that was named: the run's own, or that of its comparison."""
    settings: Mapping[str, Any]
    """`config.toml`, flat: hyperparameters.rho."""
    environment: Mapping[str, Any]
    history: History
    finished: bool
    stopped: str | None
    """Why it ended before its rounds were over, if it did."""

    @property
    def task(self) -> str:
        return str(self.settings.get("task", OWN))

    @property
    def rounds(self) -> int:
        """How many it is to have."""
        return int(self.settings.get("rounds", 0))

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", "–")


class Group(NamedTuple):
    """The seeds of one method on one task."""

    task: str
    label: str
    runs: Sequence[FoundRun]

    @property
    def histories(self) -> list[History]:
        return [run.history for run in self.runs]


class Scale(NamedTuple):
    """How a task's numbers are reported."""

    metric: str
    targets: tuple[float, ...]
    last: int


def find_runs(directories: Sequence[Path]) -> list[FoundRun]:
    """The runs there, each once, in the order named; a directory without any is refused."""
    if not directories:
        raise FedpaError("no directory given: name runs, or directories that hold runs")
    found: dict[Path, FoundRun] = {}
    for directory in directories:
        if not directory.exists():
            raise refuse("DIR", str(directory), "does not exist")
        if not directory.is_dir():
            raise refuse("DIR", str(directory), "is a file: give a run's directory")
        runs = _runs_of(directory)
        if not runs:
            raise refuse(
                "DIR",
                str(directory),
                "holds no runs: give a run, or a directory of runs as fedpa compare writes it",
            )
        for run in runs:
            found.setdefault(run.directory.resolve(), run)
    return list(found.values())


def check_tasks(runs: Sequence[FoundRun]) -> None:
    """Refuse runs whose numbers can't stand in one table."""
    names = list(dict.fromkeys(run.task for run in runs))
    if len(names) > 1:
        raise FedpaError(
            f"the runs are of different tasks ({', '.join(names)}): give those of one, or --mixed"
        )


def _runs_of(directory: Path) -> list[FoundRun]:
    if (directory / run_directory.CONFIG).exists():
        inside = [directory]
    else:
        inside = sorted(path.parent for path in directory.glob(f"*/{run_directory.CONFIG}"))
    read = [_read(run, directory) for run in inside]
    return [run for run in read if run is not None]


def _read(directory: Path, origin: Path) -> FoundRun | None:
    """A run as far as it has come; None where config.toml is another program's."""
    settings, environment = run_directory.read_config(directory)
    if not environment:
        return None
    fields = flat(settings)
    summary = run_directory.read_summary(directory) or {}
    return FoundRun(
        directory,
        origin,
        fields,
        flat({ENVIRONMENT: environment}),
        _history(directory),
        run_directory.is_finished(directory, int(fields.get("rounds", 0))),
        summary.get("stopped"),
    )


def _history(directory: Path) -> History:
    """The whole lines: somebody may be writing the next."""
    try:
        return run_directory.read_metrics(directory, torn=True)
    except FileNotFoundError:
        return History()
    except OSError as error:
        path = directory / run_directory.METRICS
        raise FedpaError(f"{path} can't be read: {error.strerror}") from None


def grouped(runs: Sequence[FoundRun]) -> list[Group]:
    """The runs by method, told apart by label.

    A seed that comes twice, as in comparisons made before and after a change of the code, begins
    another group: two of the same are not two seeds.
    """
    found: dict[tuple[Any, int], list[FoundRun]] = {}
    for run in runs:
        key, copy = _key(run), 0
        while any(other.seed == run.seed for other in found.get((key, copy), ())):
            copy += 1
        found.setdefault((key, copy), []).append(run)
    groups = [Group(of[0].task, _label(of[0]), of) for of in found.values()]
    return [group._replace(label=_told_apart(group, groups)) for group in groups]


def _key(run: FoundRun) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(run.settings[name])) for name in sorted(_deciding(run)))


def _deciding(run: FoundRun) -> list[str]:
    return [
        name
        for name in run.settings
        if name not in SAME_NUMBERS and name.split(".")[0] not in SAME_NUMBERS
    ]


def _label(run: FoundRun) -> str:
    method = run.settings.get("method")
    if method is None:
        return run.directory.name
    if method not in methods():
        return str(method)
    known = {field.name for field in dataclasses.fields(Hyperparameters)}
    values = {name.split(".")[-1]: value for name, value in run.settings.items()}
    return labelled(method, Hyperparameters(**{k: v for k, v in values.items() if k in known}))


def _told_apart(group: Group, groups: Sequence[Group]) -> str:
    """The label with what sets it apart from others of the same: settings, else where it lies."""
    alike = [g for g in groups if (g.task, g.label) == (group.task, group.label)]
    if len(alike) == 1:
        return group.label
    names = list(dict.fromkeys(name for g in alike for name in _deciding(g.runs[0])))
    values = {name: [repr(g.runs[0].settings.get(name)) for g in alike] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    own = [f"{n.split('.')[-1]}={_shown(group.runs[0].settings.get(n))}" for n in differing]
    # Groups of the same settings: copies, told apart by the directories that were named.
    same = [g for g in alike if _key(g.runs[0]) == _key(group.runs[0])]
    if len(same) > 1:
        places = [g.runs[0].origin.name for g in same]
        place = group.runs[0].origin.name
        own.append(place if places.count(place) == 1 else f"{place} {same.index(group) + 1}")
    return f"{group.label} ({', '.join(own)})"


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def scale_of(groups: Sequence[Group]) -> Scale:
    """The task's metric, targets and number of last rounds; for a model of one's own, a guess."""
    task = tasks().get(groups[0].task)
    if task is None:
        return Scale(_likely_metric([h for g in groups for h in g.histories]), (), WINDOW)
    presets = [_preset(task.presets, run) for group in groups for run in group.runs]
    targets = sorted({target for preset in presets for target in preset.targets})
    return Scale(task.metric, tuple(targets), min(preset.last for preset in presets))


def _preset(presets: Mapping[str, Preset], run: FoundRun) -> Preset:
    first = next(iter(presets.values()))
    return presets.get(str(run.settings.get("preset")), first)


def _likely_metric(histories: Sequence[History]) -> str:
    """The first that is evaluated and no loss."""
    names = dict.fromkeys(
        key.removeprefix("eval/")
        for history in histories
        for record in history
        for key in record
        if key.startswith("eval/")
    )
    return next((name for name in names if name != "loss"), "loss")


def differing(groups: Sequence[Group]) -> dict[str, list[str]]:
    """field of config.toml → its values by group, for the fields in which the runs differ."""
    runs = [run for group in groups for run in group.runs]
    every = [{**run.settings, **run.environment} for run in runs]
    names = list(dict.fromkeys(name for values in every for name in values))
    differ = [name for name in names if len({repr(values.get(name)) for values in every}) > 1]
    return {name: [_values(group, name) for group in groups] for name in differ}


def _values(group: Group, name: str) -> str:
    values = [{**run.settings, **run.environment}.get(name) for run in group.runs]
    return ", ".join(dict.fromkeys(_shown(value) for value in values))
