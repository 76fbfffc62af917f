"""The configuration of a run: one set of dataclasses for commands, files and code.

JAX is imported where values are checked: commands show their help without it.
"""

import dataclasses
import tomllib
import typing
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedpa.engines.options import EngineOptions
from fedpa.errors import (
    FedpaError,
    check_integer,
    convert_value,
    explain,
    find_name,
    match_name,
    refuse,
    suggest,
)
from fedpa.experiments.hyperparameters import (
    Hyperparameters,
    check_switch,
    list_sampling_fields,
    replace_fields,
    resolve_hyperparameters,
    unset,
)
from fedpa.experiments.methods import (
    METHODS,
    build_method,
    check_own,
    label_method,
    label_private,
)
from fedpa.experiments.privacy import PrivacyOptions, make_private, resolve_privacy
from fedpa.experiments.tasks.task import (
    TaskOptions,
    check_task_options,
    preset_named,
    task_named,
    tasks,
)
from fedpa.training.options import WINDOW, StorageOptions

if TYPE_CHECKING:
    from fedpa.algorithms.methods import Method


@dataclasses.dataclass(frozen=True)
class StoppingOptions:
    """Conditions for ending a run before its last round."""

    patience: int | None = None
    """Stop after this many consecutive evaluations without a new best, at least 1 (default:
    never)."""
    stop_metric: str | None = None
    """Metric of --patience (default: the task's, on validation clients if there are any:
    valid/accuracy, otherwise eval/accuracy)."""
    min_improvement: float = 0.0
    """Smallest improvement that --patience counts as a new best, at least 0."""
    target: float | None = None
    """Stop when the running average of --target-metric reaches this value (default: never)."""
    target_metric: str | None = None
    """Metric of --target (default: eval/ and the task's metric)."""
    target_window: int = WINDOW
    """Rounds of the running average of --target, at least 1."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings that determine a run's numbers."""

    task: str = dataclasses.field(
        default="digits",
        metadata={
            "positional": "[TASK]",
            "help": f"What to train: {', '.join(tasks())} (see fedpa tasks), or the module of "
            "your own task, package.module.",
        },
    )
    method: str = dataclasses.field(
        default="fedpa",
        metadata={"value": "NAME", "help": "Method to train with; fedpa methods lists them."},
    )
    preset: str | None = None
    """Set of defaults: laptop (minutes on two cores) or paper (the paper's settings); fedpa tasks
    lists them."""
    rounds: int = 100
    """Communication rounds, at least 1."""
    clients_per_round: int = 20
    """Clients that take part in each round, at least 1."""
    seed: int = 0
    """Random seed, at least 0. The same seed gives the same numbers, bit for bit."""
    eval_every: int = 1
    """Rounds between evaluations, at least 1. The last round is always evaluated."""
    test_at_end: bool = True
    """Evaluate the whole test split after the last round."""
    min_success: float = 0.0
    """Share of a round's clients that must succeed, in [0, 1]; with fewer the run stops."""
    init: str | None = None
    """Start from these parameters: a run's directory, a .npz or a .safetensors file (default: the
    model's initialization)."""
    init_round: str = "last"
    """Which parameters of the run in --init: last, best, or a round that has a checkpoint."""
    engine: str = "local"
    """How clients run: local chooses automatically, per-client one by one, vectorized many in one
    program, sharded over several devices, debug without compilation."""
    task_options: TaskOptions = dataclasses.field(default_factory=TaskOptions)
    engine_options: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=Hyperparameters)
    privacy: PrivacyOptions = dataclasses.field(default_factory=PrivacyOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    recording: StorageOptions = dataclasses.field(default_factory=StorageOptions)

    def __post_init__(self) -> None:
        """Match names (mimelite: mime-lite); `resolve` refuses unknown ones."""
        self._spell("task", tasks())
        self._spell("method", METHODS)
        if self.engine != "local":
            from fedpa.engines import ENGINES

            self._spell("engine", ENGINES)
        if self.task in tasks():
            self._spell("preset", tasks()[self.task].presets)

    def _spell(self, field: str, known: Collection[str]) -> None:
        name = getattr(self, field)
        if isinstance(name, str):
            object.__setattr__(self, field, match_name(name, known) or name)


def default_config(task: str, method: str, preset: str | None = None) -> RunConfig:
    """Return the preset's settings for a method; default: the task's first preset."""
    name, chosen = preset_named(task, preset)
    method = find_name("method", method, METHODS)
    return RunConfig(
        task,
        method,
        name,
        chosen.rounds,
        chosen.clients_per_round,
        eval_every=chosen.eval_every,
        task_options=chosen.options,
        hyperparameters=METHODS[method].defaults(chosen.hyperparameters),
    )


def resolve(config: RunConfig) -> RunConfig:
    """Check every value and fill in what follows from others; the result is what runs."""
    from fedpa.engines import ENGINES
    from fedpa.engines.machine import choose_devices
    from fedpa.objectives.objective import Objective
    from fedpa.training.loop import check_counts, check_share
    from fedpa.training.run import check_storage

    task = task_named(config.task)
    find_name("method", config.method, METHODS)
    preset_named(config.task, config.preset)
    options = config.task_options
    check_task_options(config.task, options, task.takes)
    if options.data_dir is not None:  # to be found from anywhere, later
        path = str(Path(options.data_dir).expanduser().absolute())
        config = replace_fields(config, data_dir=path)
    check_counts(config.rounds, config.clients_per_round, config.seed)
    check_integer("eval_every", config.eval_every, 1)
    find_name("engine", config.engine, ENGINES)
    check_share("min_success", config.min_success)
    choose_devices(config.engine_options)  # refuses devices that this machine does not have
    check_stopping(config.stopping)
    check_storage(config.recording)
    if config.init is not None:
        path = str(Path(config.init).expanduser().absolute())
        config = dataclasses.replace(config, init=path)
    elif config.init_round != "last":
        raise refuse("init_round", config.init_round, "needs --init")
    method = METHODS[config.method]
    check_own(config.method, config.hyperparameters)
    hyperparameters = method.adjust(config.hyperparameters)
    if not method.samples:
        hyperparameters = unset(hyperparameters, list_sampling_fields(hyperparameters))
    hyperparameters = resolve_hyperparameters(hyperparameters)
    check_switch(hyperparameters, config.rounds, config.eval_every)
    privacy = resolve_privacy(config.privacy)
    if privacy.clip is not None:
        hyperparameters = dataclasses.replace(
            hyperparameters, weighting="uniform" if privacy.weight_cap is None else "examples"
        )
    config = dataclasses.replace(config, hyperparameters=hyperparameters, privacy=privacy)
    # Refuses settings that the method can't use; nothing is compiled.
    built = build_run_method(config)
    if privacy.clip is not None:
        built(Objective(lambda params, batch, key: batch))
    return config


def build_run_method(config: RunConfig) -> "Method":
    """Build the method of a resolved configuration, private if it asks for it."""
    return make_private(build_method(config.method, config.hyperparameters), config.privacy)


def label_run(config: RunConfig) -> str:
    """The label of a run's method: FedPA[5], private FedPA[5]."""
    label = label_method(config.method, config.hyperparameters)
    return label_private(label, config.privacy.clip is not None)


def is_all_burn_in(config: RunConfig) -> bool:
    """Whether the method draws samples, but in none of its rounds."""
    rounds = config.hyperparameters.burn_in_rounds
    return METHODS[config.method].samples and rounds != "auto" and rounds >= config.rounds


def check_stopping(options: StoppingOptions) -> None:
    """Refuse what is out of range or without effect."""
    from fedpa.training.callbacks import early_stopping, stop_at

    if options.patience is not None:
        early_stopping("", options.patience, options.min_improvement)
    elif options.stop_metric is not None:
        raise refuse("stop_metric", options.stop_metric, "needs patience")
    elif options.min_improvement:
        raise refuse("min_improvement", options.min_improvement, "needs patience")
    if options.target is not None:
        stop_at("", options.target, options.target_window)
    elif options.target_metric is not None:
        raise refuse("target_metric", options.target_metric, "needs a target")
    elif options.target_window != WINDOW:
        raise refuse("target_window", options.target_window, "needs a target")


def as_table(config: RunConfig) -> dict[str, Any]:
    """Convert the configuration to the table of `config.toml`, without unset fields."""
    values = {
        name: _drop_unset(value) if isinstance(value, dict) else value
        for name, value in dataclasses.asdict(config).items()
    }
    if config.privacy == PrivacyOptions():
        del values["privacy"]
    return _drop_unset(values)


def _drop_unset(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def write_toml(config: RunConfig) -> str:
    return tomli_w.dumps(as_table(config))


def table_of(field: str, path: Path) -> dict[str, Any]:
    """Read a TOML file; `field` is its name in messages."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FedpaError(f"{field} = {str(path)!r}: can't be read: {explain(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FedpaError(f"{field} = {str(path)!r}: is not valid TOML: {error}") from None


def read_toml(path: Path) -> RunConfig:
    """Read a configuration from a file; unknown fields and wrong types are refused.

    Fields that the file does not set take the task's defaults for its method.
    """
    from fedpa.training.run_directory import ENVIRONMENT

    values = table_of("config", path)
    values.pop(ENVIRONMENT, None)  # the environment of a run is not a setting
    return from_table(values, str(path))


def from_table(values: dict[str, Any], where: str, of_run: bool = True) -> RunConfig:
    """Make a configuration from plain values, as from `as_table`; `where` is their source.

    of_run: they are resolved, with derived values.
    """
    for name in ("task", "method", "preset"):
        if not isinstance(values.get(name, ""), str):
            raise refuse(f"{where}: {name}", values[name], "must be of type str")
    try:
        base = default_config(
            values.get("task", "digits"), values.get("method", "fedpa"), values.get("preset")
        )
    except FedpaError as error:
        raise FedpaError(f"{where}: {error}") from None
    config: RunConfig = _replace(base, values, where)
    # A resolved file has the number of samples even if it follows from the epochs. Then it must
    # not contradict other epochs given in addition to the file.
    h = config.hyperparameters
    if of_run and h.steps_per_sample is None and h.samples == h.epochs - (h.burn_in_epochs or 0):
        config = replace_fields(config, samples=None)
    return config


def _replace(base: Any, values: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(type(base))
    changes = {}
    for name, value in values.items():
        if name not in hints:
            raise FedpaError(f"{where}: unknown field {name}: {suggest(name, hints)}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise refuse(f"{where}: {name}", value, "must be a table of settings")
            changes[name] = _replace(getattr(base, name), value, f"{where} [{name}]")
        else:
            changes[name] = convert_value(hints[name], value, f"{where}: {name}")
    return dataclasses.replace(base, **changes)
