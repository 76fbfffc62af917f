"""The settings of the commands that train: `fedpa run`, `fedpa compare`, `fedpa sweep`.

Nothing here imports JAX: their help is there at once.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedpa.engines.options import EngineOptions, Processes
from fedpa.errors import FedpaError, refuse
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
from fedpa.experiments.hyperparameters import (
    COVARIANCE_FIELDS,
    SWITCH_FIELDS,
    Hyperparameters,
    list_sampling_fields,
    replace_fields,
)
from fedpa.experiments.methods import METHODS, list_own_fields
from fedpa.experiments.privacy import PrivacyOptions
from fedpa.experiments.sweeps.space import Kind
from fedpa.training.options import StorageOptions

C = TypeVar("C")
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
        "metrics",
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
        "aggregation",
        "iterate_averaging",
    ),
    "the switch from FedAvg to sampling": (*SWITCH_FIELDS, "at_switch_rate"),
    "posterior samples (fedpa and its controls)": (
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
    "differential privacy (needs fedpa[privacy])": tuple(list_options(PrivacyOptions)),
    "early stopping": tuple(list_options(StoppingOptions)),
    "checkpoints and records": tuple(list_options(StorageOptions)),
    "engine and devices": ("engine", *list_options(EngineOptions)),
    "several processes": tuple(list_options(Processes)),
}
"""Titles under which `--help-all` shows the options of a run."""
COMMON = {
    "fedpa run": (
        "method",
        "preset",
        "rounds",
        "clients_per_round",
        "epochs",
        "batch_size",
        "client_learning_rate",
        "server_learning_rate",
        "burn_in_rounds",
        "rho",
        "seed",
        "data_dir",
        "out",
        "config",
        "overwrite",
        "dry_run",
    ),
    "fedpa compare": (
        "methods",
        "seeds",
        "reference",
        "tune",
        "preset",
        "rounds",
        "clients_per_round",
        "epochs",
        "client_learning_rate",
        "server_learning_rate",
        "burn_in_rounds",
        "rho",
        "seed",
        "data_dir",
        "jobs",
        "out",
        "overwrite",
    ),
    "fedpa sweep": (
        "method",
        "space",
        "search",
        "trials",
        "prune",
        "paper",
        "preset",
        "rounds",
        "clients_per_round",
        "seed",
        "data_dir",
        "jobs",
        "out",
        "quiet",
    ),
}
"""What `--help` shows of a command."""


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Train one method on one task.

    examples:
      fedpa run digits                                FedPA, bundled data, seconds
      fedpa run digits --method fedavg --out runs/a   another method and directory
      fedpa run emnist --preset paper --dry-run       show settings and costs
      fedpa run --config runs/a/config.toml --seed 1  same settings, another seed
    """

    run: RunConfig
    out: Path | None = None
    """Directory to write to (default: a new runs/<time>-<task>-<method>)."""
    config: Path | None = None
    """Start from the settings in this config.toml; options given here replace them."""
    overwrite: bool = False
    """Replace the run that --out contains."""
    dry_run: bool = False
    """Print all settings and what a round will cost, without training."""
    max_minutes: float | None = None
    """Stop after this many minutes; fedpa resume continues the run (default: no limit)."""
    quiet: bool = False
    """Show no progress; print only the run's directory."""
    processes: Processes = dataclasses.field(default_factory=Processes)


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Compare methods on one task, with the same clients in every round.

    examples:
      fedpa compare digits                              the task's methods
      fedpa compare digits --methods fedavg,fedpa,mean  your choice of methods
      fedpa compare digits --tune 0.3,1,3               tune learning rates first
      fedpa compare --out runs/c                        continue a comparison
    """

    run: RunConfig = dataclasses.field(metadata={"without": ("method",)})
    methods: str | None = None
    """Methods with commas between them; fedpa methods lists them (default: the task's choice)."""
    seeds: int | None = None
    """Number of runs of each method, at least 1, with the seeds --seed, --seed + 1, … (default: 3
    for digits, 1 for other tasks)."""
    reference: str | None = None
    """Method that the others are compared with (default: fedavg if it takes part, else the
    first)."""
    tune: str | None = None
    """Try these multiples of the server learning rate (of the client's, for methods with a fixed
    server rate) and keep the best on validation clients, e.g. 0.3,1,3 (default: no search)."""
    tune_rounds: int | None = None
    """Rounds of the runs of --tune, at least 1 (default: --rounds)."""
    tune_by: str | None = None
    """What --tune compares: loss or the task's metric (default: the task's metric)."""
    published: bool = False
    """Show the paper's results beside the measured ones."""
    jobs: int | None = None
    """Number of runs in parallel, at least 1 (default: half of the cores for small models, 1 for
    models that use all cores by themselves)."""
    out: Path | None = None
    """Directory to write to (default: a new runs/<time>-<task>-compare). If it contains a
    comparison, that is continued: finished runs are kept, interrupted runs resumed, missing runs
    started."""
    config: Path | None = None
    """Start from the settings in this config.toml; options given here replace them."""
    overwrite: bool = False
    """Replace the comparison that --out contains."""
    quiet: bool = False
    """Show no progress; print only the table."""


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """Search for a method's hyperparameters on a task. Validation clients decide.

    examples:
      fedpa sweep digits --method fedavg              the task's grid
      fedpa sweep digits --search tpe --trials 30     30 trials, chosen by TPE
      fedpa sweep digits --space mine.toml            values of your own
      fedpa sweep --out runs/s                        continue a sweep
    """

    run: RunConfig
    space: Path | None = None
    """TOML file with the values to try, in a table [space] (default: the task's grid)."""
    search: Kind = "grid"
    """Order of the trials: grid tries all values, random draws them, tpe learns from earlier
    trials."""
    trials: int | None = None
    """Number of trials, at least 1 (default: all of a grid; 20 for random and tpe)."""
    search_seed: int = 0
    """Random seed of random and tpe, at least 0. All trials train with --seed."""
    prune: bool = False
    """Stop a trial that is worse than the median of the others at the same round."""
    jobs: int | None = None
    """Number of trials in parallel, at least 1 (default: half of the cores for small models, 1 for
    models that use all cores by themselves)."""
    paper: bool = False
    """Search in two stages, as the paper did: learning rates and epochs with FedAvg, then burn-in
    rounds and ρ with FedPA."""
    out: Path | None = None
    """Directory to write to (default: a new runs/<time>-<task>-sweep). If it contains a sweep, that
    is continued."""
    config: Path | None = None
    """Start from the settings in this config.toml; options given here replace them."""
    force: bool = False
    """Resume interrupted trials even if versions or data have changed."""
    quiet: bool = False
    """Show no progress; print only the sweep's directory."""


def parse_run_command(command: type[C], argv: Sequence[str], prog: str) -> tuple[C, dict[str, Any]]:
    """The command that the words describe, and the fields that they set.

    Args:
        command: A dataclass with fields `run: RunConfig` and `config`, a file to start from.
        argv: The words after the command's name.
        prog: What messages call the command.
    """
    given = read_words(command, argv, prog)
    asked = asks_for_help(argv)
    if asked is not None:
        shown = Help(groups=GROUPS) if asked == HELP_ALL else Help(COMMON[prog])
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
        drawn = METHODS[before.method].samples
        if not drawn and field in list_sampling_fields(before.hyperparameters):
            return False
        same = getattr(before.hyperparameters, field) == getattr(after.hyperparameters, field)
        return bool(same)

    for name, option in list_options(Hyperparameters).items():
        pairs = zip(asked, resolved, strict=True)
        if name in given and not any(reads(*pair, name) for pair in pairs):
            methods = ", ".join(config.method for config in asked)
            raise FedpaError(f"{option.name} does not apply to {methods}: leave it out")
