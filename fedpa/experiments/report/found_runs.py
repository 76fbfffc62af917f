"""The runs a report is of: found in directories, read as far as they have come, put in groups.

A group is what differs in nothing but the seed and in what decides no number: the seeds of one
method. Files are read as they are, not through `RunConfig`: a run of an older version, or one that
is being written, can be looked at, too.
"""

import itertools
import re
import typing
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.algorithms.fedopt import SAMPLING, stage
from fedpa.errors import FedpaError, convert_value, explain, match_name, refuse
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.methods import METHODS, label_method, reads_setting
from fedpa.experiments.report.summary import WINDOW
from fedpa.experiments.tasks.task import Preset, tasks
from fedpa.training import run_directory
from fedpa.training.history import History
from fedpa.training.loggers.logger import flatten
from fedpa.training.run_directory import ENVIRONMENT

OWN = "a model of one's own"
"""Stands for the task of runs by `fedpa.fit`, which have none."""
SAME_NUMBERS = ("seed", "rounds", "stopping", "recording", "task_options.data_dir")
"""Settings, or tables of them, in which the seeds of one method may differ."""
PROGRAM = "program"
"""The setting of runs by `fedpa.fit` that stands for all that is in the caller's code."""
UNUSED = "–"
"""Stands for a setting that a method does not read."""


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
                "holds no runs: give a run, or a directory that fedpa compare or fedpa sweep wrote",
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
        below = (f"*/{run_directory.CONFIG}", *_OF_SWEEPS)
        found = (sorted(directory.glob(pattern), key=_in_order) for pattern in below)
        inside = [path.parent for paths in found for path in paths]
    read = [_read_if_whole(run, directory) for run in inside]
    return [run for run in read if run is not None]


_OF_SWEEPS = tuple(
    f"{stage}{run_directory.TRIALS}/*/{run_directory.CONFIG}" for stage in ("", "*/")
)


def _in_order(path: Path) -> tuple[Path, int, str]:
    """Trials by number: 10 after 9."""
    name = path.parent.name
    return path.parent.parent, int(name) if name.isdecimal() else -1, name


def _read_if_whole(directory: Path, origin: Path) -> FoundRun | None:
    """A run; one among others that is damaged is left out, with a warning."""
    try:
        return _read(directory, origin)
    except FedpaError as error:
        if directory == origin:
            raise
        warnings.warn(f"{directory} is left out: {error}", stacklevel=2)
        return None


def _read(directory: Path, origin: Path) -> FoundRun | None:
    """A run as far as it has come; None where config.toml is another program's."""
    recorded = run_directory.read_run(directory)
    settings, environment = recorded.made
    if not environment:
        if (directory / run_directory.METRICS).exists():
            warnings.warn(
                f"{directory} is left out: its config.toml is cut, or not one of ours",
                stacklevel=2,
            )
        return None
    fields = flatten(settings)
    if not isinstance(fields.get("rounds", 0), int):
        where = f"{directory / run_directory.CONFIG}: rounds"
        raise refuse(where, fields["rounds"], "must be a whole number")
    for name, value in fields.items():
        field = name.removeprefix(_SETTINGS)
        if name.startswith(_SETTINGS) and field in _HINTS and not isinstance(value, str):
            convert_value(_HINTS[field], value, f"{directory / run_directory.CONFIG}: {name}")
    return FoundRun(
        directory,
        origin,
        fields,
        flatten({ENVIRONMENT: environment}),
        _history(directory),
        recorded.is_finished(int(fields.get("rounds", 0))),
        (recorded.summary or {}).get("stopped"),
    )


def _history(directory: Path) -> History:
    """The complete lines: a process may be writing the next."""
    try:
        return run_directory.read_metrics(directory, torn=True)
    except FileNotFoundError:
        return History()
    except OSError as error:
        path = directory / run_directory.METRICS
        raise FedpaError(f"{path} can't be read: {explain(error)}") from None


def group_runs(runs: Sequence[FoundRun]) -> list[Group]:
    """The runs by method, each with a label of its own.

    A seed that comes twice, as in comparisons made before and after a change of the code, begins
    another group: two of the same are not two seeds. Seeds are in order, however they were named;
    within a task no two labels are the same.
    """
    found: dict[tuple[Any, int], list[FoundRun]] = {}
    for run in runs:
        key, copy = _key(run), 0
        while any(other.seed == run.seed for other in found.get((key, copy), ())):
            copy += 1
        found.setdefault((key, copy), []).append(run)
    groups = [Group(of[0].task, _label(of[0]), sorted(of, key=_by_seed)) for of in found.values()]
    labels = _told_apart(groups)
    return _numbered([g._replace(label=x) for g, x in zip(groups, labels, strict=True)])


def _by_seed(run: FoundRun) -> tuple[bool, Any]:
    return (True, str(run.seed)) if not isinstance(run.seed, int) else (False, run.seed)


def _numbered(groups: Sequence[Group]) -> list[Group]:
    """With a number behind labels that are the same in spite of all: a file may say anything."""
    taken: set[tuple[str, str]] = set()
    found = []
    for group in groups:
        label, number = group.label, 1
        while (group.task, label) in taken:
            number += 1
            label = f"{group.label} #{number}"
        taken.add((group.task, label))
        found.append(group._replace(label=label))
    return found


def _key(run: FoundRun) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(run.settings[name])) for name in sorted(_deciding(run)))


def _deciding(run: FoundRun) -> list[str]:
    return [
        name
        for name in run.settings
        if name not in SAME_NUMBERS and name.split(".")[0] not in SAME_NUMBERS
    ]


def _label(run: FoundRun) -> str:
    """The label that a person gave, else the method's, else the directory's name."""
    label, method = run.settings.get("label"), run.settings.get("method")
    if label or method is None:
        return str(label or _name_without_seed(run))
    name = match_name(str(method), METHODS)
    if name is None:
        return str(method)
    # What says how much local work there is may be missing: `fedpa.fit` takes any function.
    if not any(f"{_SETTINGS}{field}" in run.settings for field in ("epochs", "steps_per_sample")):
        return METHODS[name].label.replace("[M]", "")
    return label_method(name, _hyperparameters(run))


def _name_without_seed(run: FoundRun) -> str:
    """fedavg, of fedavg-0, fedavg_seed0, or fedavg/0."""
    places = [run.directory.resolve().name, run.directory.resolve().parent.name]
    seed = rf"(^|[-_. ]|(^|[-_. ])seed[-_=. ]?){re.escape(str(run.seed))}$"
    stems = [re.sub(seed, "", place) for place in places]
    return next((stem for stem in stems if stem), places[0])


_SETTINGS = "hyperparameters."


def _hyperparameters(run: FoundRun) -> Hyperparameters:
    given = {name: _typed_setting(name, run.settings.get(f"{_SETTINGS}{name}")) for name in _HINTS}
    return Hyperparameters(**{name: x for name, x in given.items() if x is not None})


def _typed_setting(field: str, value: Any) -> Any:
    """None for what the command has no setting for: `fedpa.fit` takes rho="oas", too."""
    try:
        return None if value is None else convert_value(_HINTS[field], value, field)
    except FedpaError:
        return None


_HINTS = typing.get_type_hints(Hyperparameters)


def _told_apart(groups: Sequence[Group]) -> list[str]:
    """The labels with what sets apart those that are the same: settings, else where runs lie."""
    labels = [group.label for group in groups]
    for task, label in dict.fromkeys((group.task, group.label) for group in groups):
        alike = [k for k, g in enumerate(groups) if (g.task, g.label) == (task, label)]
        if len(alike) > 1:
            marks = _marks([groups[k] for k in alike])
            for k, mark in zip(alike, marks, strict=True):
                labels[k] = f"{label} ({mark})"
    return labels


def _marks(alike: Sequence[Group]) -> list[str]:
    settings = [group.runs[0].settings for group in alike]
    names = list(dict.fromkeys(name for group in alike for name in _deciding(group.runs[0])))
    shown = {name: _shown([own.get(name) for own in settings]) for name in names}
    differing = [name for name in names if len(shown[name]) > 1 and name != PROGRAM]
    marks = [
        [f"{name.split('.')[-1]}={shown[name][repr(own.get(name))]}" for name in differing]
        for own in settings
    ]
    # Groups that look the same: marked by the directories that were named.
    keys = [tuple(own) for own in marks]
    places = list(zip(keys, [group.runs[0].origin.name for group in alike], strict=True))
    for k, (key, place) in enumerate(places):
        if keys.count(key) > 1:
            number = keys[: k + 1].count(key)
            marks[k].append(place if places.count((key, place)) == 1 else f"{place} {number}")
    return [", ".join(own) for own in marks]


def _shown(values: Sequence[Any]) -> dict[str, str]:
    """repr → how a person writes it; repr again where two that differ would look alike."""
    short = {repr(value): _short(value) for value in values}
    forms = Counter(short.values())
    return {exact: form if forms[form] == 1 else exact for exact, form in short.items()}


def _short(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def describe_unequal_burn_in(groups: Sequence[Group]) -> str | None:
    """Which methods begin to sample in which round, if not all that sample in the same."""
    starts: dict[int, list[str]] = {}
    for group in groups:
        for run in group.runs:
            phases = ((record["round"], str(record.get("phase"))) for record in run.history)
            first = next((t for t, phase in phases if stage(phase) == SAMPLING), None)
            if first is not None and group.label not in starts.setdefault(first, []):
                starts[first].append(group.label)
    if len(starts) < 2:
        return None
    some = {
        t: ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
        for t, labels in sorted(starts.items())
    }
    told = "; ".join(f"round {t}: {labels}" for t, labels in some.items())
    return (
        f"the runs begin to sample in different rounds ({told}): their differences are of burn-in, "
        "too. Give all of them one burn_in_rounds"
    )


def choose_scale(groups: Sequence[Group]) -> Scale:
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


def list_differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """field of config.toml → its values by group, for the fields in which the runs differ.

    A setting that a group's method does not read is `UNUSED` there.
    """
    runs = [run for group in groups for run in group.runs]
    fields = [{**run.settings, **run.environment} for run in runs]
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for own in fields for name in own):
        values = [own.get(name) for own in fields]
        read = [_reads(run, name, values) for run in runs]
        plain = getattr(Hyperparameters(), name.removeprefix(_SETTINGS), None)
        values = [value if used else plain for value, used in zip(values, read, strict=True)]
        shown = _shown(values)
        if len(shown) > 1:
            cells = iter(
                shown[repr(value)] if used else UNUSED
                for value, used in zip(values, read, strict=True)
            )
            found[name] = [
                ", ".join(dict.fromkeys(itertools.islice(cells, len(group.runs))))
                for group in groups
            ]
    return found


def _reads(run: FoundRun, name: str, values: Sequence[Any]) -> bool:
    """Whether the run's method reads a setting; of other fields, and methods, yes."""
    field = name.removeprefix(_SETTINGS)
    method = match_name(str(run.settings.get("method")), METHODS)
    if method is None or not name.startswith(_SETTINGS) or not hasattr(Hyperparameters, field):
        return True
    given = [x for x in (_typed_setting(field, value) for value in values) if x is not None]
    return reads_setting(method, _hyperparameters(run), field, given)
