"""The posterior of a run, beside the controls that every calibration number needs.

| row | what it is | trials on validation clients |
| --- | --- | --- |
| point | the model as it was trained | 0 |
| temperature | its outputs divided by a number | 21 |
| isotropic | a posterior of one sd for all parameters, as large as Laplace's in total | its 21 |
| isotropic-tuned | the same, its sd chosen | 21 |
| laplace | `fedpa.laplace_posterior` | 21 |
| swag | SWAG over the server's iterates, if the run averaged them so | 21 |
| ensemble | several runs' models, equally weighted | 0 |
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.atomic_write import write_atomically
from fedpa.data.federated import FederatedData
from fedpa.errors import FedpaError, refuse
from fedpa.experiments.report.figures import new_figure, render_figure, tidy
from fedpa.experiments.report.looks import COLOURS
from fedpa.experiments.report.posteriors import FIGURE, TABLE
from fedpa.experiments.run import assemble_run
from fedpa.metrics.streaming import Evaluation
from fedpa.metrics.temperature_scaling import TRIALS, fit_temperature, scale_outputs
from fedpa.metrics.uncertainty import auroc, reliability
from fedpa.objectives.likelihood import Likelihood
from fedpa.posterior.density import Ensemble, Normal
from fedpa.posterior.evaluation import PredictionSettings, evaluate_posterior
from fedpa.posterior.files import save_posterior
from fedpa.posterior.laplace import (
    PRECISIONS,
    TEMPERATURES,
    Curvature,
    choose_by_marginal_likelihood,
    choose_by_validation,
    choose_least,
)
from fedpa.posterior.posterior import Posterior, split_model
from fedpa.posterior.training import find_swag, swag_posterior
from fedpa.precision import ravel
from fedpa.precisions import Scalar
from fedpa.server.averaging import SwagState
from fedpa.training.loading import Run, load, load_checkpoint
from fedpa.training.privacy import refuse_private
from fedpa.training.problem import some_examples
from fedpa.training.provenance import data_fingerprint
from fedpa.training.run_directory import read_run
from fedpa.types import Key

POSTERIOR = "posterior.safetensors"
ISOTROPIC = tuple(float(x) for x in np.logspace(-1, 8, TRIALS))
"""Precisions of the tuned isotropic posterior that are tried."""


SCALES = tuple(float(x) for x in np.logspace(-2, 2, TRIALS))
"""Scales of SWAG's covariance that are tried."""


class Data(NamedTuple):
    """What a posterior is measured on."""

    test: FederatedData
    validation: FederatedData | None
    ood: FederatedData | None = None
    """Examples that are not of the model's kind."""


class Row(NamedTuple):
    """A row of the table."""

    name: str
    trials: int
    """Measurements on validation clients with which its settings were chosen."""
    values: Mapping[str, float]
    bins: Mapping[str, Sequence[float]] | None
    """The reliability diagram, of classes and tags."""
    settings: Mapping[str, float] = {}
    by_client: Mapping[str, Sequence[float]] = {}
    """Metric → its 10th, 50th and 90th percentile over the test split's clients."""


def load_for_posterior(directory: Path, which: str | int) -> Run:
    """Load a run whose posterior can be made: of a task with a likelihood, of unchanged data."""
    found = load(directory, which)
    refuse_private(found.metrics, "its posterior")
    problem = found.problem
    if problem is None:
        raise FedpaError(
            f"{str(directory)!r} was made by fedpa.fit: its data and model are in your code. "
            "fedpa.laplace_posterior(fedpa.load(directory, params=model), likelihood, clients) "
            "makes its posterior"
        )
    if problem.likelihood is None:
        raise FedpaError(f"task {found.config.task} has no likelihood: Problem(…, likelihood=…)")
    splits = {"train": problem.clients, "validation": problem.validation, "test": problem.test}
    recorded = read_run(directory).environment.get("data")
    if recorded is not None and recorded != data_fingerprint(splits):
        raise FedpaError(
            f"{str(directory)!r}: the data has changed since this run, and a posterior is of the "
            "data that the model was trained on"
        )
    return found


def load_swag(directory: Path, run: Run) -> SwagState | None:
    """SWAG's averages after the parameters' round, if the run and its checkpoints have them."""
    if not run.config.hyperparameters.iterate_averaging.startswith("swag"):
        return None
    assert run.problem is not None
    algorithm, theta, *_ = assemble_run(run.config, run.problem).prepared
    try:
        state = load_checkpoint(directory, run.round, like=algorithm.init(theta)).state
    except FedpaError as error:
        warnings.warn(f"SWAG is left out: {error}", stacklevel=2)
        return None
    found = find_swag(state)
    if found is not None and found.members < 2:
        warnings.warn(
            f"SWAG is left out: it has averaged {found.members} iterates by round {run.round}",
            stacklevel=2,
        )
        return None
    return found


def load_ensemble(directory: Path, others: Sequence[Path], which: str | int) -> list[Any]:
    """Load the models of other runs of the same task, data and model."""
    own = read_run(directory)
    models, seen = [], {directory.resolve()}
    for other in others:
        if other.resolve() in seen:
            raise refuse("ensemble", str(other), "is named twice, or is the run itself")
        seen.add(other.resolve())
        found, recorded = load(other, which), read_run(other)
        if recorded.settings.get("task") != own.settings.get("task"):
            raise refuse("ensemble", str(other), f"is no run of task {own.settings['task']}")
        if recorded.environment.get("data") != own.environment.get("data"):
            raise refuse("ensemble", str(other), "is a run on other data")
        models.append(found.params)
    return models


def check_models(model: Any, others: Sequence[Any], named: Sequence[Path]) -> None:
    """Refuse an ensemble of models of different structure."""
    shapes = [
        [jnp.shape(x) for x in jax.tree.leaves(split_model(one)[0])] for one in (model, *others)
    ]
    for path, other in zip(named, shapes[1:], strict=True):
        if other != shapes[0]:
            raise refuse("ensemble", str(path), "is a run of another model")


def check_ood(likelihood: Likelihood, ood: FederatedData, data: FederatedData) -> FederatedData:
    """The examples, without their labels; refuses those that the model can't read as they are.

    Labels say which places are padding, where the likelihood ignores some; nothing else is read.
    """
    if likelihood.link == "normal":
        raise refuse("ood", ", ".join(ood.ids[:3]), "is for classes and tags, not for a regression")
    own, other = (fed.examples(fed.ids[0]) for fed in (data, ood))
    label, ignored = own[likelihood.field], likelihood.ignored
    needed = [name for name in own if name != likelihood.field or ignored is not None]
    for name in needed:
        array = own[name]
        if name not in other:
            raise refuse("ood", ", ".join(other), f"has no array {name!r}, which the model reads")
        if other[name].shape[1:] != array.shape[1:]:
            raise refuse(
                "ood",
                f"{name}{list(other[name].shape[1:])}",
                f"the task's examples have shape {list(array.shape[1:])}: reshape them",
            )
        if _kind(other[name]) != _kind(array):
            raise refuse(
                "ood",
                f"{name}: {other[name].dtype}",
                f"the task's are {array.dtype}: scale them as the task does, and convert them",
            )
    counted = 1 if ignored == 0 else 0  # a label that is ignored would not count

    def examples(client: str) -> Any:
        raw = ood.examples(client)
        kept = {k: _convert(k, raw[k], own[k].dtype) for k in needed if k != likelihood.field}
        n = len(next(iter(kept.values())))
        labels = np.full((n, *label.shape[1:]), counted, label.dtype)
        if ignored is not None:
            labels = np.where(raw[likelihood.field] == ignored, ignored, labels).astype(label.dtype)
        return kept | {likelihood.field: labels}

    return FederatedData(ood.ids, ood.num_examples, examples)


def _kind(array: np.ndarray) -> str:
    return array.dtype.kind.replace("u", "i")


def _convert(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert to a type of the same kind; refuses integers that it does not have."""
    if dtype.kind in "iu" and array.size:
        low, high = array.min(), array.max()
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise refuse("ood", f"{name}: {low} to {high}", f"the task's are {dtype}: convert them")
    return array.astype(dtype)


NUMBERS = 2**26
"""Outputs of all draws that are held at once: 256 MB."""


def fit_batch_size(likelihood: Likelihood, model: Any, data: FederatedData, draws: int) -> int:
    """How many examples are predicted at once, so that all draws' outputs fit."""
    one = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), some_examples(data)
    )
    f = eqx.filter_eval_shape(likelihood.outputs, model, one)
    return max(1, NUMBERS // (int(f.size) * max(draws, 1)))


def make_table(
    curvature: Curvature,
    likelihood: Likelihood,
    data: Data,
    settings: PredictionSettings,
    *,
    choosing: PredictionSettings,
    ensemble: Sequence[Any] = (),
    swag: SwagState | None = None,
    seed: int = 0,
) -> tuple[Posterior, list[Row]]:
    """Choose λ and T, and measure the posterior and its controls with the same draws and budget.

    Everything that is chosen takes 21 trials on the same validation examples (`choosing.most`).
    """
    key, rows = jax.random.key(seed), list[Row]()
    once = settings._replace(draws=1, linearized=False)

    def add(
        name: str,
        budget: int,
        posterior: Posterior,
        how: PredictionSettings = settings,
        of: Likelihood = likelihood,
        **chosen: float,
    ) -> None:
        found = evaluate_posterior(of, data.test, how)(posterior, key)
        ood = None if data.ood is None else evaluate_posterior(of, data.ood, how)(posterior, key)
        rows.append(_make_row(name, budget, found, ood, chosen))

    def choose(
        judge: Callable[[Posterior, Key], Evaluation],
        values: Sequence[float],
        make: Callable[[float], Posterior],
    ) -> float:
        """The value whose posterior has the least NLL on validation clients."""
        return choose_least(values, lambda x: judge(make(x), key).values["nll"])

    add("point", 0, _stack([curvature.model]), once)
    judge = None
    if data.validation is None:
        prior_precision, temperature, budget = choose_by_marginal_likelihood(curvature), 1.0, 0
    else:
        if likelihood.link != "normal":
            divisor = fit_temperature(
                likelihood,
                curvature.model,
                data.validation,
                batch_size=settings.batch_size,
                most=choosing.most,
            )
            scaled = scale_outputs(likelihood, divisor)
            point = _stack([curvature.model])
            add("temperature", TRIALS, point, once, scaled, temperature=divisor)
        judge = evaluate_posterior(likelihood, data.validation, choosing)
        prior_precision, temperature = choose_by_validation(curvature, judge, seed=seed)
        budget = TRIALS
    laplace = curvature.posterior(prior_precision, temperature)
    equal = float(1 / np.mean(np.asarray(laplace.density.sd, np.float64) ** 2))
    add("isotropic", budget, _isotropic(curvature, equal), precision=equal)
    if judge is not None:
        best = choose(judge, ISOTROPIC, lambda x: _isotropic(curvature, x))
        add("isotropic-tuned", TRIALS, _isotropic(curvature, best), precision=best)
    add("laplace", budget, laplace, prior_precision=prior_precision, temperature=temperature)
    if swag is not None:  # its draws are models, as in its paper
        scale = 1.0
        if data.validation is not None:
            plain = choosing._replace(linearized=False)
            of_draws = evaluate_posterior(likelihood, data.validation, plain)
            scale = choose(of_draws, SCALES, lambda x: swag_posterior(swag, curvature.model, x))
        drawn = settings._replace(linearized=False)
        add("swag", budget, swag_posterior(swag, curvature.model, scale), drawn, scale=scale)
    if ensemble:
        models = [curvature.model, *ensemble]
        whole = once._replace(draws=len(models))
        add("ensemble", 0, _stack(models), whole, models=len(models))
    return laplace, rows


GRIDS: Mapping[tuple[str, str], Sequence[float]] = {
    ("laplace", "prior_precision"): PRECISIONS,
    ("laplace", "temperature"): TEMPERATURES,
    ("isotropic-tuned", "precision"): ISOTROPIC,
    ("swag", "scale"): SCALES,
}
"""(row, setting) → the values that are tried."""


def describe_choice(rows: Sequence[Row]) -> list[str]:
    """Say which λ and T were chosen, and where a choice is the last that was tried."""
    found = {row.name: row for row in rows}
    laplace, point = found["laplace"], found["point"]
    chosen, temperature = (laplace.settings[k] for k in ("prior_precision", "temperature"))
    said = [f"prior precision {chosen:.3g} (sd {chosen**-0.5:.2g}), temperature {temperature:g}"]
    for (name, setting), grid in GRIDS.items():
        value = found[name].settings.get(setting) if name in found else None
        for which, end in (("smallest", min(grid)), ("largest", max(grid))):
            if value == end:
                field = setting.replace("_", " ")
                said.append(f"{name}: {field} {value:.3g} is the {which} that was tried")
    if chosen == PRECISIONS[-1] and laplace.trials:
        said.append(
            "so on validation clients no posterior of this structure predicts better than the "
            "point estimate"
        )
    if temperature == max(TEMPERATURES):
        said.append("so the prior decides nearly alone: this posterior is close to isotropic")
    if laplace.values["nll"] > point.values["nll"] and not laplace.trials:
        said.append(
            "the posterior's NLL is worse than the point estimate's; with validation clients "
            "(--validation-share) the prior precision would be chosen by it"
        )
    return said


def _make_row(
    name: str,
    budget: int,
    found: Evaluation,
    ood: Evaluation | None,
    settings: Mapping[str, float],
) -> Row:
    values = dict(found.values)
    if ood is not None:
        for column, score in (("ood_entropy", "entropy"), ("ood_mutual", "mutual_information")):
            values[column] = auroc(found.vectors[score], ood.vectors[score])
    bins = None
    if "bin_count" in found.vectors:
        diagram = reliability(found)
        bins = {k: [_plain(x) for x in v] for k, v in diagram._asdict().items()}
    by_client: dict[str, list[Any]] = {
        metric: [_plain(x) for x in np.nanpercentile(found.by_client[metric], (10, 50, 90))]
        for metric in ("nll", "brier", "rmse")
        if metric in found.by_client
    }
    return Row(name, budget, values, bins, settings, by_client)


def _plain(x: float) -> Any:
    return float(x) if math.isfinite(x) else None


def _stack(models: Sequence[Any]) -> Posterior:
    """Models as a posterior of equal weights."""
    vectors = [ravel(split_model(model)[0])[0] for model in models]
    return Posterior(Ensemble(jnp.stack(vectors)), models[0])


def _isotropic(curvature: Curvature, precision: float) -> Posterior:
    theta, _ = split_model(curvature.model, curvature.over)
    density = Normal(ravel(theta)[0], Scalar(jnp.float32(precision)))
    return Posterior(density, curvature.model, over=curvature.over)


def write_files(
    directory: Path, posterior: Posterior, rows: Sequence[Row], about: Mapping[str, Any]
) -> list[Path]:
    """Write the posterior, the reliability diagram and the table into the run's directory.

    The table comes last: where it is, the other files are of the same posterior.
    """
    table = [
        row._asdict()
        | {"values": {k: _plain(v) for k, v in row.values.items()}}
        | {"settings": {k: _plain(v) for k, v in row.settings.items()}}
        for row in rows
    ]
    text = json.dumps({**about, "rows": table}, indent=1, allow_nan=False)
    paths = [directory / name for name in (POSTERIOR, FIGURE, TABLE)]
    for path in paths:
        path.unlink(missing_ok=True)
    save_posterior(posterior, paths[0])
    if rows[0].bins is not None:
        write_atomically(paths[1], render_figure(draw_reliability(rows), "png"))
    write_atomically(paths[2], text.encode())
    return [path for path in paths if path.exists()]


ROWS = ("point", "temperature", "isotropic", "isotropic-tuned", "laplace", "swag", "ensemble")
"""All rows, each with a colour of its own."""


def draw_reliability(rows: Sequence[Row]) -> Any:
    """Draw how often predictions come true, by their probability, and how many there are."""
    figure = new_figure(5.0, 5.2)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    above.plot([0, 1], [0, 1], color="0.6", lw=1, ls=":")
    shown = [row for row in rows if row.bins is not None]
    for row in shown:
        assert row.bins is not None
        colour = COLOURS[ROWS.index(row.name)]
        x, y, n = (np.array(row.bins[k], float) for k in ("confidence", "frequency", "counts"))
        label = f"{row.name}, error {row.values['ece']:.3f}"
        above.plot(x, y, label=label, color=colour, marker="o", ms=3, lw=1.2)
        share = np.where(n > 0, n / n.sum(), np.nan)
        below.plot((np.arange(len(n)) + 0.5) / len(n), share, color=colour, marker="o", ms=3, lw=1)
    tidy(above, "Reliability on the test split", "", "share that comes true")
    tidy(below, "", "predicted probability", "share of predictions")
    below.set_yscale("log")
    above.set_xlim(0, 1)
    above.set_ylim(0, 1)
    above.legend(fontsize=7, frameon=False)
    return figure
