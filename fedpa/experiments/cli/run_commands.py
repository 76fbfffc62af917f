"""What the commands that train have in common: their settings, their data, their end."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console

from fedpa.engines import EngineOptions
from fedpa.engines.distributed import Processes
from fedpa.errors import FedpaError, NoUsableClientError, refuse
from fedpa.experiments.cli.arguments import (
    HELP_ALL,
    Help,
    asks_for_help,
    list_options,
    make_command,
    read_words,
    show_help,
)
from fedpa.experiments.config import RunConfig, StoppingOptions, default_config, read_toml
from fedpa.experiments.evaluation import curve_split
from fedpa.experiments.hyperparameters import (
    COVARIANCE_FIELDS,
    SAMPLING_FIELDS,
    Hyperparameters,
    replace_fields,
)
from fedpa.experiments.methods import METHODS, list_own_fields
from fedpa.experiments.report.live import show_file_progress
from fedpa.experiments.tasks.task import task_named
from fedpa.experiments.workers import WAITING
from fedpa.training.callbacks import Callback, Event
from fedpa.training.problem import Problem
from fedpa.training.run import StorageOptions

C = TypeVar("C")
ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)
"""A timer's; not on Windows."""
GRACE = 2.0
"""Seconds that a round has to end in peace."""
GROUPS = {
    "method, task and rounds": (
        "method",
        "preset",
        "rounds",
        "clients_per_round",
        "seed",
        "min_success",
        "init",
        "init_round",
    ),
    "data and model": (
        "data_dir",
        "dataset",
        "model",
        "max_examples",
        "vocabulary",
        "tags",
        "words",
        "groups",
        "prior_sd",
        "label_skew",
        "partition_seed",
    ),
    "evaluation": (
        "eval_every",
        "eval_split",
        "eval_examples",
        "validation_share",
        "test_at_end",
    ),
    "clients": (
        "epochs",
        "batch_size",
        "order",
        "client_optimizer",
        "client_learning_rate",
        "client_momentum",
        "client_schedule",
        "weighting",
    ),
    "server": (
        "server_optimizer",
        "server_learning_rate",
        "server_momentum",
        "server_b1",
        "server_b2",
        "server_tau",
        "server_schedule",
        "iterate_averaging",
    ),
    "posterior samples (fedpa and its controls)": (
        "burn_in_rounds",
        "samples",
        "burn_in_epochs",
        "steps_per_sample",
        "burn_in_steps",
        "discard_steps",
        "sampler",
        "temperature",
        "friction",
        "integration_steps",
        "max_doublings",
        "target_acceptance",
    ),
    "posterior delta (fedpa)": COVARIANCE_FIELDS,
    "settings of other methods": tuple(list_own_fields()),
    "early stopping": tuple(list_options(StoppingOptions)),
    "checkpoints and records": tuple(list_options(StorageOptions)),
    "engine and devices": ("engine", *list_options(EngineOptions)),
    "several processes": tuple(list_options(Processes)),
}
"""Titles under which `--help-all` shows the options of a run."""


def parse_run_command(
    command: type[C], argv: Sequence[str], prog: str, common: tuple[str, ...] = ()
) -> tuple[C, dict[str, Any]]:
    """The command that the words describe, and the fields that they set.

    Args:
        command: A dataclass with fields `run: RunConfig` and `config`, a file to start from.
        argv: The words after the command's name.
        prog: What messages call the command.
        common: The fields that `--help` shows, in their order.
    """
    given = read_words(command, argv, prog)
    asked = asks_for_help(argv)
    if asked is not None:
        shown = Help(groups=GROUPS) if asked == HELP_ALL else Help(common)
        show_help(command, prog, shown, run=_find_defaults(given, None))
    return make_command(command, given, prog, run=configure_run(given)), given


def configure_run(given: Mapping[str, Any], method: str | None = None) -> RunConfig:
    """A run with the given fields; others are the file's, or the task's defaults for the method.

    method: overrides the one that is given.
    """
    fields = given if method is None else {**given, "method": method}
    return replace_fields(_find_defaults(given, method), **fields)


def _find_defaults(given: Mapping[str, Any], method: str | None) -> RunConfig:
    named = replace_fields(RunConfig(), **given)
    path = given.get("config")
    if path is None:
        return default_config(named.task, method or named.method, named.preset)
    stored = read_toml(path)
    for field in ("task", "preset"):  # half of another task's settings would make no sense
        if field in given and getattr(named, field) != getattr(stored, field):
            other = getattr(stored, field)
            raise refuse(field, getattr(named, field), f"{path} is of {field} {other}: omit one")
    return stored


def refuse_unused(
    asked: Sequence[RunConfig], resolved: Sequence[RunConfig], given: Collection[str]
) -> None:
    """Refuse a given hyperparameter that none of the methods reads.

    asked, resolved: each method's run, before and after what it fixes itself is put in.
    """

    def reads(before: RunConfig, after: RunConfig, field: str) -> bool:
        if field in SAMPLING_FIELDS and not METHODS[before.method].samples:
            return False
        same = getattr(before.hyperparameters, field) == getattr(after.hyperparameters, field)
        return bool(same)

    for name, option in list_options(Hyperparameters).items():
        pairs = zip(asked, resolved, strict=True)
        if name in given and not any(reads(*pair, name) for pair in pairs):
            methods = ", ".join(config.method for config in asked)
            raise FedpaError(f"{option.name} does not apply to {methods}: leave it out")


def load_problem(config: RunConfig) -> Problem:
    """The task's data and model; unpacking and indexing are shown on standard error."""
    with show_file_progress(Console(stderr=True)):
        problem = task_named(config.task).load(config.task_options)
    curve_split(problem, config.task_options)  # refuses a split that is not there
    return problem


@contextlib.contextmanager
def handle_interrupts(how_far: Callable[[], str], going_on: str) -> Iterator[Callback]:
    """Ctrl-C, SIGTERM and SIGHUP save the last round, say how to resume, and end the command.

    how_far: what is said behind "interrupted".
    going_on: what to do once an error is mended.

    Gives a callback for the run, which ends it after its round. An exception that a signal raises
    anywhere may come between taking a lock and knowing it, and then threads wait for ever; or where
    Python can't pass it on (in JAX's part of garbage collection), and is lost. So that is done only
    to a round that takes long, or when the signal comes again.
    """
    received: list[int] = []
    begun = False

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 2:
            os._exit(128 + number)  # files are whole at any time
        if len(received) == 2 or ALARM is None:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    def too_long(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def look(event: Event) -> None:
        nonlocal begun
        begun = True
        if received:
            raise KeyboardInterrupt

    # A signal that is ignored (`nohup`) stays so.
    kept = {
        number: signal.signal(number, interrupt)
        for number in WAITING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    if ALARM is not None:
        kept[ALARM] = signal.signal(ALARM, too_long)
    try:
        yield look
    except KeyboardInterrupt:  # by now the run has saved what it has
        print(f"interrupted{how_far()}", file=sys.stderr)
        while kept:  # the process ends: one more Ctrl-C has nothing left to say
            signal.signal(kept.popitem()[0], signal.SIG_IGN)
        sys.exit(128 + (received[0] if received else signal.SIGINT))
    except FedpaError as error:
        if not begun or isinstance(error, NoUsableClientError):  # resumed, it would fail again
            raise
        raise FedpaError(f"{error}; once that is mended, {going_on}") from None
    finally:
        if ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in kept.items():
            signal.signal(number, handler)
