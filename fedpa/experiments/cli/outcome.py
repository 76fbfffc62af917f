"""What a run's command says at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpa.experiments.cli.arguments import shown
from fedpa.experiments.cli.resumable import how_to_go_on
from fedpa.experiments.config import RunConfig
from fedpa.experiments.report.summary import at_the_end, curve, final
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.metrics.streaming import PERCENTILES
from fedpa.training import run_directory
from fedpa.training.loop import Fit


def tell(console: Console, config: RunConfig, out: Path, result: Fit, quiet: bool = False) -> None:
    """The numbers, why it ended, and where everything is; `quiet`: the directory alone."""
    if quiet:
        _say(console, shown(out))
        return
    rounds = len(result.history)
    if result.stopped is not None:
        _say(console, f"ended after round {rounds}: {result.stopped}")
    if not result.finished:
        _say(console, f"{rounds} of {config.rounds} rounds are done: {how_to_go_on(out)}")
        return
    metric, last = task_named(config.task).metric, preset_named(config.task, config.preset)[1].last
    value = final(curve(result.history, f"eval/{metric}"), last)
    _say(console, f"{metric} {value:.4f} (mean of the last {min(last, rounds)} rounds)")
    _say(console, _tested(result.history, metric))
    target = config.stopping.target
    if target is not None and result.stopped is None:
        _say(console, f"the target {target:g} was not reached")
    best = (run_directory.read_summary(out) or {}).get("best")
    if best and best["round"] != rounds:
        _say(
            console,
            f"best {best['metric']} {best['value']:.4f} in round {best['round']}: "
            f"`fedpa eval {shown(out)} --params best` tests it",
        )
    _say(console, f"written to {shown(out)}")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _tested(history: Sequence[Mapping[str, Any]], metric: str) -> str:
    """The model at the end on the whole test split, and who is left behind."""
    said = f"test {metric} {at_the_end(history, f'test/{metric}'):.4f}"
    lower, middle, upper = (at_the_end(history, f"test/{metric}_p{p}") for p in PERCENTILES)
    if middle == middle:
        said += f" (clients: 10 % at most {lower:.3f}, half {middle:.3f}, 90 % {upper:.3f})"
    return said
