"""The runs of a report: read from directories, finished or not, and grouped by method.

Runs of a group differ only in the seed and in settings that do not affect the numbers. Files are
read directly, not through `RunConfig`, so that runs of an older version or runs that are still
being written can be reported, too.
"""

import itertools
import re
import typing
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.errors import FedpaError, convert_value, explain, match_name, refuse
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.methods import METHODS, label_method, label_private, reads_setting
from fedpa.training import run_directory
from fedpa.training.history import History
from fedpa.training.provenance import flatten

OWN = "own model"
"""The task's name for runs of `fedpa.fit`, which have no task."""
SAME_NUMBERS = (
    "seed",
    "rounds",
    "stopping",
    "recording",
    "task_options.data_dir",
    "task_options.metrics",
)
"""Settings, or tables of them, in which the seeds of one method may differ."""
PROGRAM = "program"
"""The setting of runs of `fedpa.fit` that represents the user's code."""
UNUSED = "–"
"""Shown for a setting that a method does not read."""
RUNS_BELOW = ("*", f"{run_directory.TRIALS}/*", f"*/{run_directory.TRIALS}/*")
"""Directories of the runs of comparisons and sweeps."""
_HYPERPARAMETERS = "hyperparameters."
_HINTS = typing.get_type_hints(Hyperparameters)


class Run(NamedTuple):
    directory: Path
    origin: Path
    """The directory given by the user: the run's, or its comparison's."""
    settings: Mapping[str, Any]
    """`config.toml`, flat: hyperparameters.rho."""
    environment: Mapping[str, Any]
    history: History
    is_finished: bool
    stopped: str | None = None
    """Why it ended early, if it did."""
    hyperparameters: Hyperparameters = Hyperparameters()
    """The settings that the command knows."""

    @property
    def task(self) -> str:
        return str(self.settings.get("task", OWN))

    @property
    def method(self) -> str | None:
        """Its name in `METHODS`, if it is there."""
        return match_name(str(self.settings.get("method")), METHODS)

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        return int(self.settings.get("rounds", 0))

    @property
    def seed(self) -> Any:
        return self.settings.get("seed", "–")


class Group(NamedTuple):
    """The seeds of one method on one task."""

    task: str
    label: str
    runs: Sequence[Run]

    @property
    def histories(self) -> list[History]:
        return [run.history for run in self.runs]


def find_runs(directories: Sequence[Path]) -> list[Run]:
    """Read the runs in directories, each once, in the given order; refuses one without runs.

    A damaged run among others is left out, with a warning.
    """
    if not directories:
        raise FedpaError("no directory given: name runs, or directories that contain runs")
    found: dict[Path, Run] = {}
    for directory in directories:
        if not directory.exists():
            raise refuse("DIR", str(directory), "does not exist")
        if not directory.is_dir():
            raise refuse("DIR", str(directory), "is a file: give a run's directory")
        runs = [run for place in _list_places(directory) if (run := _read_run(place, directory))]
        if not runs:
            raise refuse(
                "DIR",
                str(directory),
                "contains no runs: give a run, or a directory of fedpa compare or fedpa sweep",
            )
        for run in runs:
            found.setdefault(run.directory.resolve(), run)
    return list(found.values())


def check_tasks(runs: Sequence[Run]) -> None:
    """Refuse runs of different tasks."""
    names = list(dict.fromkeys(run.task for run in runs))
    if len(names) > 1:
        raise FedpaError(
            f"the runs have different tasks ({', '.join(names)}): give runs of one task, or --mixed"
        )


def _list_places(directory: Path) -> list[Path]:
    """List the directories that may be runs; trials by number, 10 after 9."""
    if (directory / run_directory.CONFIG).exists():
        return [directory]

    def order(place: Path) -> tuple[Path, int, str]:
        return place.parent, int(place.name) if place.name.isdecimal() else -1, place.name

    places = [place for below in RUNS_BELOW for place in sorted(directory.glob(below), key=order)]
    return [place for place in places if (place / run_directory.CONFIG).exists()]


def _read_run(directory: Path, origin: Path) -> Run | None:
    """Read a run, finished or not; None if config.toml was written by another program."""
    config, metrics = directory / run_directory.CONFIG, directory / run_directory.METRICS
    try:
        recorded = run_directory.read_run(directory)
        if not recorded.environment:
            if metrics.exists():
                raise FedpaError(f"{config} is truncated, or fedpa did not write it")
            return None
        settings = flatten(recorded.settings)
        rounds = settings.get("rounds", 0)
        if not isinstance(rounds, int):
            raise refuse(f"{config}: rounds", rounds, "must be a whole number")
        return Run(
            directory,
            origin,
            settings,
            flatten({run_directory.ENVIRONMENT: recorded.environment}),
            _read_records(recorded) if metrics.exists() else History(),
            recorded.is_finished(rounds),
            (recorded.summary or {}).get("stopped"),
            _read_hyperparameters(settings, config),
        )
    except (FedpaError, OSError) as error:
        if isinstance(error, OSError):
            error = FedpaError(f"{metrics} can't be read: {explain(error)}")
        if directory == origin:
            raise error from None
        warnings.warn(f"{directory} is left out: {error}", stacklevel=3)
        return None


def _read_records(recorded: run_directory.Recorded) -> History:
    """Read the complete lines of a run that may still be writing."""
    return run_directory.read_metrics(recorded.out, torn=recorded.summary is None)


def _read_hyperparameters(settings: Mapping[str, Any], config: Path) -> Hyperparameters:
    """Read the command's settings: `fedpa.fit` takes others, and values such as rho="oas"."""
    given = {}
    for field, hint in _HINTS.items():
        value = settings.get(f"{_HYPERPARAMETERS}{field}")
        if value is not None:
            try:
                given[field] = convert_value(hint, value, f"{config}: {_HYPERPARAMETERS}{field}")
            except FedpaError:
                if not isinstance(value, str):
                    raise
    return Hyperparameters(**given)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs by method, each with a unique label.

    A repeated seed, as in comparisons before and after a change of the code, starts another group.
    Seeds are sorted. Equal labels are extended by the settings in which the groups differ,
    otherwise by their directories, otherwise by numbers.
    """
    groups: dict[tuple[Any, int], list[Run]] = defaultdict(list)
    for run in runs:
        key, copy = tuple(sorted((k, repr(v)) for k, v in _deciding(run).items())), 0
        while any(other.seed == run.seed for other in groups[key, copy]):
            copy += 1
        groups[key, copy].append(run)
    grouped = [sorted(own, key=_order_seed) for own in groups.values()]
    marks: list[list[str]] = [[] for _ in grouped]
    for describe in (_describe_settings, _describe_origins):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for k, own in enumerate(grouped):
            alike[own[0].task, _label(own[0]), *marks[k]].append(k)
        for same in alike.values():
            for k, mark in zip(same, describe([grouped[k][0] for k in same]), strict=True):
                marks[k] += mark
    labelled: dict[tuple[str, str], list[Run]] = {}
    for own, mark in zip(grouped, marks, strict=True):
        task, name = own[0].task, _label(own[0]) + (f" ({', '.join(mark)})" if mark else "")
        numbered = itertools.chain([name], (f"{name} #{n}" for n in itertools.count(2)))
        labelled[task, next(x for x in numbered if (task, x) not in labelled)] = own
    return [Group(task, label, own) for (task, label), own in labelled.items()]


def _deciding(run: Run) -> dict[str, Any]:
    """Select the settings that determine the run's numbers."""
    return {
        name: value
        for name, value in run.settings.items()
        if name not in SAME_NUMBERS and name.split(".")[0] not in SAME_NUMBERS
    }


def _order_seed(run: Run) -> tuple[bool, Any]:
    return (False, run.seed) if isinstance(run.seed, int) else (True, str(run.seed))


def _label(run: Run) -> str:
    """Label a run: the user's label, otherwise its method, otherwise the directory's name."""
    label, method = run.settings.get("label"), run.settings.get("method")
    if label or method is None:
        return str(label or _name_without_seed(run))
    if run.method is None:
        return str(method)
    # The number of epochs may be missing: `fedpa.fit` takes any function.
    work = (f"{_HYPERPARAMETERS}{field}" for field in ("epochs", "steps_per_sample"))
    if not any(name in run.settings for name in work):
        return METHODS[run.method].label.replace("[M]", "")
    label = label_method(run.method, run.hyperparameters)
    return label_private(label, "privacy.clip" in run.settings)


def _name_without_seed(run: Run) -> str:
    """Name a directory without its seed: fedavg for fedavg-0, fedavg_seed0 or fedavg/0."""
    places = [run.directory.resolve().name, run.directory.resolve().parent.name]
    seed = rf"(^|[-_. ]|(^|[-_. ])seed[-_=. ]?){re.escape(str(run.seed))}$"
    stems = [re.sub(seed, "", place) for place in places]
    return next((stem for stem in stems if stem), places[0])


def _describe_settings(runs: Sequence[Run]) -> list[list[str]]:
    """Describe each run by the settings in which they differ: rho=0.1."""
    settings = [_deciding(run) for run in runs]
    marks: list[list[str]] = [[] for _ in runs]
    for name in dict.fromkeys(itertools.chain(*settings)):
        values = _format_values([own.get(name) for own in settings])
        if len(set(values)) > 1 and name != PROGRAM:
            for mark, value in zip(marks, values, strict=True):
                mark.append(f"{name.split('.')[-1]}={value}")
    return marks


def _describe_origins(runs: Sequence[Run]) -> list[list[str]]:
    """Describe each run by its given directory, if these differ."""
    names = [run.origin.name for run in runs]
    return [[name] if len(set(names)) > 1 else [] for name in names]


def _format_values(values: Sequence[Any]) -> list[str]:
    """Format values briefly, or in full if two different values would look alike."""
    short = {
        repr(x): "unset" if x is None else f"{x:g}" if isinstance(x, float) else str(x)
        for x in values
    }
    counts = Counter(short.values())
    return [short[repr(x)] if counts[short[repr(x)]] == 1 else repr(x) for x in values]


def list_differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """List the fields of config.toml in which the runs differ, with their values by group.

    A setting that a group's method does not read is `UNUSED` there.
    """
    runs = [run for group in groups for run in group.runs]
    fields = [{**run.settings, **run.environment} for run in runs]
    differences: dict[str, list[str]] = {}
    for name in dict.fromkeys(itertools.chain(*fields)):
        values, used = [own.get(name) for own in fields], [True] * len(runs)
        field = name.removeprefix(_HYPERPARAMETERS)
        if name.startswith(_HYPERPARAMETERS) and field in _HINTS:
            asked = dict.fromkeys(getattr(run.hyperparameters, field) for run in runs)
            used = [
                run.method is None or reads_setting(run.method, run.hyperparameters, field, asked)
                for run in runs
            ]
            default = getattr(Hyperparameters(), field)
            values = [v if read else default for v, read in zip(values, used, strict=True)]
        texts = _format_values(values)
        if len(set(texts)) > 1:
            cells = iter(x if read else UNUSED for x, read in zip(texts, used, strict=True))
            differences[name] = [
                ", ".join(dict.fromkeys(itertools.islice(cells, len(group.runs))))
                for group in groups
            ]
    return differences
