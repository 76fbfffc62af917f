"""`fedpa posterior`: the table with its controls, its files, the report's section, refusals."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.experiments.cli.main import main
from fedpa.experiments.posterior import (
    Data,
    Row,
    check_ood,
    describe_choice,
    draw_reliability,
    fit_batch_size,
    make_table,
    write_files,
)
from fedpa.experiments.report.posteriors import read_predictions
from fedpa.objectives import Likelihood
from fedpa.posterior import PredictionSettings, measure_curvature
from fedpa.posterior.laplace import PRECISIONS, TEMPERATURES
from tests.refusals import refused

RUN = ["run", "digits", "--method", "fedavg", "--rounds", "2", "--iterate-averaging", "swag:0:3"]


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory):
    """A run with its posterior."""
    out = tmp_path_factory.mktemp("runs") / "a"
    main([*RUN, "--quiet", "--out", str(out)])
    same = shutil.copytree(out, out.parent / "same")
    words = ["--structure", "diagonal", "--draws", "3", "--ensemble", str(same)]
    main(["posterior", str(out), *words])
    return out


def test_the_table_has_the_controls(run):
    table = json.loads((run / "posterior.json").read_bytes())
    names = [row["name"] for row in table["rows"]]
    # Without validation clients nothing is chosen by them: no temperature, no tuned control.
    assert names == ["point", "isotropic", "laplace", "swag", "ensemble"]
    assert {row["trials"] for row in table["rows"]} == {0}
    for row in table["rows"]:
        assert {"nll", "brier", "ece", "accuracy"} <= set(row["values"])
    point, ensemble = table["rows"][0]["values"], table["rows"][-1]["values"]
    assert ensemble["nll"] == pytest.approx(point["nll"])  # of two runs that are the same
    evaluated = fedpa.load(run).metrics[-1]["test/accuracy"]
    assert point["accuracy"] == pytest.approx(evaluated)


def test_the_posterior_is_loaded_again(run):
    model = fedpa.load(run).params
    posterior = fedpa.load_posterior(run / "posterior.safetensors", model)
    for mean, own in zip(jax.tree.leaves(posterior.mean), jax.tree.leaves(model), strict=True):
        if isinstance(own, jax.Array):
            np.testing.assert_allclose(mean, own, rtol=1e-6)


def test_the_report_shows_it(run, tmp_path):
    main(["report", str(run), "--no-figures", "--out", str(tmp_path / "r.html")])
    page = (tmp_path / "r.html").read_text()
    assert 'id="posteriors"' in page
    assert "Reliability diagram" in page
    assert "data:image/png;base64," in page


def test_a_damaged_table_is_left_out(run, tmp_path):
    for text in ("{", "[]", '{"rows": []}', '{"rows": [1]}', '{"rows": [{"name": "a"}]}'):
        (tmp_path / "posterior.json").write_text(text)
        with pytest.warns(UserWarning, match=r"posterior\.json"):
            assert read_predictions(tmp_path) is None
    assert read_predictions(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("words", "anchors"),
    [
        ([], ["--overwrite"]),
        (["--overwrite", "--structure", "last-layer", "--layer", "x"], ["layer = 'x'"]),
        (["--overwrite", "--ood", "wide.npz"], ["ood = 'x[9]'"]),
        (["--overwrite", "--ood", "other.npz"], ["ood = 'z'"]),
        (["--overwrite", "--ood", "none.npz"], ["ood = 'none.npz'"]),
        (["--overwrite", "--draws", "0"], ["draws = 0"]),
        (["--overwrite", "--rank", "0"], ["rank = 0"]),
        (["--overwrite", "--ensemble", "nowhere"], ["nowhere"]),
        (["--overwrite", "--ood", "digit"], ["task = 'digit'"]),
        (["--overwrite", "--ood", "images.png"], ["ood = 'images.png'"]),
        (["--overwrite", "--ood", "integers.npz"], ["ood = 'x: uint8'"]),
        (["--overwrite", "--structure", "diagonal", "--rank", "-1"], ["rank = -1"]),
    ],
)
def test_what_does_not_fit_is_refused(run, tmp_path, monkeypatch, capsys, words, anchors):
    monkeypatch.chdir(tmp_path)
    np.savez("wide.npz", x=np.zeros((2, 9), np.float32))
    np.savez("integers.npz", x=np.zeros((2, 64), np.uint8))
    np.savez("other.npz", z=np.zeros((2, 64), np.float32))
    before = (run / "posterior.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["posterior", str(run), *words])
    said = capsys.readouterr().err
    assert all(anchor in said for anchor in anchors), said
    assert (run / "posterior.json").read_bytes() == before


def test_other_examples_are_told_apart(run, tmp_path):
    """The test split itself is not; images of one colour are alike."""
    data = fedpa.load(run).problem.test
    x = np.concatenate([data.examples(name)["x"] for name in data.ids])
    found = {}
    for name, images in (("same", x), ("flat", np.full((40, 64), 9.0, np.float32))):
        copy = shutil.copytree(run, tmp_path / name)
        np.savez(tmp_path / f"{name}.npz", x=images)
        words = ["--structure", "diagonal", "--draws", "4", "--ood", str(tmp_path / f"{name}.npz")]
        main(["posterior", str(copy), "--overwrite", *words])
        rows = json.loads((copy / "posterior.json").read_bytes())["rows"]
        found[name] = {row["name"]: row for row in rows}
    for row in found["same"].values():
        assert row["values"]["ood_entropy"] == pytest.approx(0.5, abs=1e-3)
        assert row["values"]["ood_mutual"] == pytest.approx(0.5, abs=1e-3)
    point, laplace = found["flat"]["point"], found["flat"]["laplace"]
    assert abs(point["values"]["ood_entropy"] - 0.5) > 0.1
    assert point["values"]["ood_mutual"] == 0.5  # one model has none
    low, middle, high = laplace["by_client"]["nll"]
    assert low <= middle <= high


def sentences(labels, shift=0):
    """Word ids of two sentences, padded with 0."""
    words = np.array([[1, 2, 0, 0], [3, 1, 2, 0]], np.int32) + shift
    return fedpa.data.from_mapping({"a": {"x": words, "y": np.asarray(labels)}})


def test_padding_of_other_examples_does_not_count():
    likelihood = Likelihood(lambda p, batch: p[batch["x"]], ignored=0)
    own = sentences(np.array([[2, 1, 0, 0], [1, 2, 3, 0]], np.int32))
    other = check_ood(likelihood, sentences(np.array([[7, 0, 0, 0], [7, 7, 7, 0]], np.int64)), own)
    found = other.examples("a")
    assert found["y"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert (found["x"].dtype, found["y"].dtype) == (np.int32, np.int32)
    bare = fedpa.data.from_mapping({"a": {"x": own.examples("a")["x"]}})
    with refused("ood = 'x'", "'y'"):
        check_ood(likelihood, bare, own)


@pytest.mark.parametrize(
    ("own", "other"),
    [(np.uint8, np.float32), (np.float32, np.uint8), (np.int32, np.bool_)],
)
def test_other_kinds_of_numbers_are_refused(own, other):
    likelihood = Likelihood(lambda p, batch: batch["x"] @ p)
    one, two = (
        fedpa.data.from_mapping({"a": {"x": np.ones((2, 3), kind), "y": np.zeros(2, np.int32)}})
        for kind in (own, other)
    )
    with refused(f"ood = 'x: {np.dtype(other)}'", str(np.dtype(own))):
        check_ood(likelihood, two, one)


def test_integers_that_do_not_fit_are_refused():
    likelihood = Likelihood(lambda p, batch: batch["x"] @ p)
    one, two = (
        fedpa.data.from_mapping({"a": {"x": np.array([[value]], kind), "y": np.zeros(1, np.int32)}})
        for value, kind in ((1, np.uint8), (300, np.int32))
    )
    with refused("ood = 'x: 300 to 300'"):
        check_ood(likelihood, two, one).examples("a")


def test_the_isotropic_control_has_the_posteriors_mean_variance(run):
    rows = {row["name"]: row for row in json.loads((run / "posterior.json").read_bytes())["rows"]}
    posterior = fedpa.load_posterior(run / "posterior.safetensors", fedpa.load(run).params)
    variances = np.concatenate(
        [np.ravel(sd) ** 2 for sd in jax.tree.leaves(eqx.filter(posterior.sd, eqx.is_array))]
    )
    precision = rows["isotropic"]["settings"]["precision"]
    assert 1 / precision == pytest.approx(variances.mean(), rel=1e-4)


def test_draws_of_long_outputs_are_predicted_in_small_batches():
    likelihood = Likelihood(lambda p, batch: jnp.zeros((len(batch["x"]), 21, 10_004)))
    data = sentences(np.zeros((2, 4), np.int32))
    size = fit_batch_size(likelihood, np.zeros(1), data, draws=30)
    assert size * 30 * 21 * 10_004 <= 2**26 < (size + 1) * 30 * 21 * 10_004


def test_an_ensemble_is_of_different_runs(run, capsys):
    for named in (str(run), f"{run.parent / 'same'},{run.parent / 'same'}"):
        with pytest.raises(SystemExit):
            main(["posterior", str(run), "--overwrite", "--ensemble", named])
        assert "ensemble = " in capsys.readouterr().err


def test_a_run_whose_data_has_changed_is_refused(run, tmp_path, capsys):
    copy = tmp_path / "b"
    copy.mkdir()
    for path in run.iterdir():
        if path.is_file() and not path.name.startswith("posterior"):
            (copy / path.name).write_bytes(path.read_bytes())
    config = (copy / "config.toml").read_text()
    line = next(line for line in config.splitlines() if line.startswith("data = "))
    (copy / "config.toml").write_text(config.replace(line, 'data = "0123"'))
    with pytest.raises(SystemExit):
        main(["posterior", str(copy)])
    assert str(copy) in capsys.readouterr().err
    assert not (copy / "posterior.json").exists()


def test_a_run_of_ones_own_model_is_refused(tmp_path, capsys):
    method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
    fedpa.fit(
        lambda p, z, key: (p["w"] - z) ** 2,
        {"w": np.zeros(())},
        {"a": np.ones(8)},
        method,
        rounds=1,
        clients_per_round=1,
        out=tmp_path / "own",
        progress=False,
    )
    with pytest.raises(SystemExit):
        main(["posterior", str(tmp_path / "own")])
    assert "laplace_posterior" in capsys.readouterr().err


def test_all_that_is_tuned_has_the_same_budget(tmp_path):
    """A linear classifier with clients for validation: every chosen row has 21 trials."""
    rng = np.random.default_rng(0)

    def make(n):
        x = rng.normal(size=(n, 2)).astype(np.float32)
        y = (x[:, 0] + 0.5 * rng.normal(size=n) > 0).astype(np.int32)
        return fedpa.data.from_mapping({"a": {"x": x, "y": y}})

    likelihood = Likelihood(lambda w, batch: batch["x"] @ w)
    train, validation, test = make(30), make(60), make(80)
    model = jnp.array([[-8.0, 8.0], [1.0, -1.0]])  # too sure of itself
    curvature = measure_curvature(model, likelihood, train, structure="diagonal", progress=False)
    settings = PredictionSettings(draws=20, batch_size=50)
    far = fedpa.data.from_mapping({"far": {"x": np.full((40, 2), 9.0), "y": np.zeros(40, int)}})
    posterior, rows = make_table(
        curvature, likelihood, Data(test, validation, far), settings, choosing=settings
    )
    budgets = {row.name: row.trials for row in rows}
    assert budgets == {
        "point": 0,
        "temperature": 21,
        "isotropic": 21,
        "isotropic-tuned": 21,
        "laplace": 21,
    }
    values = {row.name: row.values for row in rows}
    for name in ("temperature", "isotropic-tuned", "laplace"):
        assert values[name]["nll"] < values["point"]["nll"]
    assert all(0 <= row.values["ood_entropy"] <= 1 for row in rows)
    paths = write_files(tmp_path, posterior, rows, {"round": 1})
    assert [path.name for path in paths] == [
        "posterior.safetensors",
        "posterior.png",
        "posterior.json",
    ]
    assert len(draw_reliability(rows).axes) == 2


@pytest.mark.parametrize(
    ("prior", "temperature", "trials", "nll", "sentences"),
    [
        (1.0, 1.0, 21, 0.5, 1),
        (PRECISIONS[-1], 1.0, 21, 1.0, 3),
        (PRECISIONS[0], 1.0, 21, 0.5, 2),
        (1.0, min(TEMPERATURES), 21, 0.5, 2),
        (1.0, max(TEMPERATURES), 21, 0.5, 3),
        (1.0, 1.0, 0, 1.5, 2),
    ],
)
def test_the_choice_is_explained_where_it_is_an_end_of_the_grid(
    prior, temperature, trials, nll, sentences
):
    point = Row("point", 0, {"nll": 1.0}, {}, {})
    laplace = point._replace(
        name="laplace",
        trials=trials,
        values={"nll": nll},
        settings={"prior_precision": prior, "temperature": temperature},
    )
    said = describe_choice([point, laplace])
    assert len(said) == sentences
    assert f"{prior:.3g}" in said[0]
