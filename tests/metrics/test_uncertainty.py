"""Uncertainty is what scikit-learn and NumPy say, in any batches, of one model and of draws."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_softmax, logsumexp, softmax, xlogy
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from fedpa.data import from_mapping
from fedpa.metrics import auroc, classifier, join_metrics, make_evaluator, reliability, uncertainty
from fedpa.metrics.uncertainty import BINS, HISTOGRAM
from fedpa.objectives import Likelihood
from tests.metrics.summing import measured, owners, parts, sums, values
from tests.refusals import refused
from tests.strategies import arrays, labels

B, T, K, M = 6, 3, 4, 5
PAD = 0
LINKS = {
    "classes": Likelihood(lambda params, batch: batch["f"]),
    "places": Likelihood(lambda params, batch: batch["f"], ignored=PAD),
    "tags": Likelihood(lambda params, batch: batch["f"], link="sigmoid"),
    "numbers": Likelihood(lambda params, batch: batch["f"], link="normal", noise=0.5),
}
ONE = {kind: uncertainty(likelihood) for kind, likelihood in LINKS.items()}
DRAWS = {
    kind: uncertainty(likelihood, lambda params, batch: batch["f"].swapaxes(0, 1))
    for kind, likelihood in LINKS.items()
}
"""f of draws has the shape (b, S, …), so that a batch can be split."""


@st.composite
def cases(draw, kind, draws=()):
    """Outputs without ties between classes, and labels."""
    shape = {"classes": (B, K), "places": (B, T, K), "tags": (B, M), "numbers": (B, 2)}[kind]
    f = draw(arrays(shape[0], *draws, *shape[1:], dtype=np.float32))
    if kind in ("classes", "places"):
        return {
            "f": f + np.arange(K, dtype=np.float32) / 100,
            "y": draw(labels(K, *shape[:-1])),
        }
    y = draw(arrays(*shape, dtype=np.float32))
    return {"f": f, "y": (y > 0).astype(np.uint8) if kind == "tags" else y}


def calibration_error(p, right):
    """The sums of p − right in each bin, by a loop."""
    gaps = np.zeros(15)
    for one, hit in zip(p, right, strict=True):
        gaps[min(int(15 * one + 1e-5), 14)] += one - hit
    return np.abs(gaps).sum() / len(p)


def entropy(p):
    return -xlogy(p, p).sum(axis=-1)


def expected_of_classes(p, y):
    """Of the draws' probabilities, (S, n, k)."""
    mean = p.mean(axis=0)
    top = mean.argmax(axis=1)
    return {
        "nll": log_loss(y, mean, labels=range(K)),
        "brier": ((mean - np.eye(K)[y]) ** 2).sum(axis=1).mean(),
        "accuracy": accuracy_score(y, top),
        "ece": calibration_error(mean.max(axis=1), top == y),
        "entropy": entropy(mean).mean(),
        "mutual_information": (entropy(mean) - entropy(p).mean(axis=0)).mean(),
    }


def close(expected):
    return pytest.approx(expected, rel=1e-4, abs=2e-6, nan_ok=True)


@given(cases("classes"))
def test_values_of_a_classifier_are_those_of_scikit_learn(batch):
    f = batch["f"].astype(float)
    found = values(ONE["classes"], None, [batch])
    assert found == close(expected_of_classes(softmax(f, axis=-1)[None], batch["y"]))
    assert found["mutual_information"] == 0


@given(cases("classes", (3,)))
def test_draws_are_averaged_as_probabilities(batch):
    p = softmax(batch["f"].astype(float), axis=-1).swapaxes(0, 1)
    assert values(DRAWS["classes"], None, [batch]) == close(expected_of_classes(p, batch["y"]))


@given(cases("places", (2,)))
def test_ignored_labels_do_not_count(batch):
    counted = batch["y"] != PAD
    p = softmax(batch["f"].astype(float), axis=-1).swapaxes(0, 1)[:, counted]
    found = values(DRAWS["places"], None, [batch])
    if not counted.any():
        assert all(math.isnan(value) for value in found.values())
        return
    assert found == close(expected_of_classes(p, batch["y"][counted]))
    vectors = sums(DRAWS["places"], None, [batch])[1]
    for name in ("bin_count", "entropy", "mutual_information"):
        assert vectors[name].sum() == counted.sum()


@given(cases("tags", (2,)))
def test_every_tag_is_a_label(batch):
    p, y = expit(batch["f"].astype(float)).swapaxes(0, 1), batch["y"].ravel()
    mean = p.mean(axis=0).ravel()
    total, each = (entropy(np.stack([q, 1 - q], axis=-1)) for q in (mean, p.reshape(len(p), -1)))
    expected = {
        "nll": log_loss(y, mean, labels=[0, 1]),
        "brier": brier_score_loss(y, mean, labels=[0, 1]),
        "ece": calibration_error(mean, y),
        "entropy": total.mean(),
        "mutual_information": (total - each.mean(axis=0)).mean(),
    }
    assert values(DRAWS["tags"], None, [batch]) == close(expected)
    assert sums(DRAWS["tags"], None, [batch])[1]["entropy"].sum() == B  # of means over tags


@given(cases("numbers", (3,)))
def test_a_regression_is_a_mixture_of_normals(batch):
    f, y = batch["f"].astype(float).swapaxes(0, 1), batch["y"].astype(float)
    sd = np.sqrt(0.25 + f.var(axis=0))
    found = values(DRAWS["numbers"], None, [batch])
    logs = scipy.special.logsumexp(scipy.stats.norm.logpdf(y, f, 0.5), axis=0) - np.log(3)
    assert found["nll"] == close(-logs.mean())
    assert found["rmse"] == close(math.sqrt(((y - f.mean(axis=0)) ** 2).mean()))
    for level in (50, 90, 95):
        low, high = scipy.stats.norm.interval(level / 100, f.mean(axis=0), sd)
        assert found[f"coverage_{level}"] == close(((low <= y) & (y <= high)).mean())


@pytest.mark.parametrize("kind", LINKS)
@settings(max_examples=4)
@given(data=st.data())
def test_batches_and_clients_change_nothing(kind, data):
    batch, owner = data.draw(cases(kind)), data.draw(owners(B))
    clients = {str(k): part for k, part in enumerate(parts(batch, owner))}
    clients["empty"] = {name: rows[:0] for name, rows in batch.items()}
    found = make_evaluator(ONE[kind], from_mapping(clients), 4)(None)
    assert found.values == close(values(ONE[kind], None, [batch]))
    counts = measured(ONE[kind])(None, batch)
    for place, k in enumerate([*np.unique(owner), None]):  # the last client is empty
        own = {name: by_client[place] for name, by_client in found.by_client.items()}
        total = {name: float(np.asarray(v)[owner == k].sum()) for name, v in counts.each.items()}
        assert own == close(ONE[kind].values(total))
    for name, rows in counts.vectors.items():
        np.testing.assert_allclose(found.vectors[name], np.sum(rows, 0), rtol=1e-5, atol=1e-6)


def test_certain_predictions():
    """Probabilities 0 and 1; an NLL of 1,000 although e^-1000 is 0; equal ones in any rounding."""
    batch = {"f": np.float32([[1000, 0], [1000, 0]]), "y": np.int32([0, 1])}
    found = values(ONE["classes"], None, [batch])
    expected = {"nll": 500.0, "brier": 1.0, "accuracy": 0.5, "ece": 0.5, "entropy": 0.0}
    assert found == {**expected, "mutual_information": 0.0}
    batch = {"f": np.float32([[1000, -1000]]), "y": np.uint8([[0, 0]])}
    found = values(ONE["tags"], None, [batch])
    expected = {"nll": 500.0, "brier": 0.5, "ece": 0.5, "entropy": 0.0}
    assert found == {**expected, "mutual_information": 0.0}
    batch = {"f": np.float32([[0, -np.inf]] * 2), "y": np.int32([0, 1])}
    found = values(ONE["classes"], None, [batch])
    assert found["nll"] == math.inf
    assert (found["brier"], found["entropy"], found["mutual_information"]) == (1.0, 0.0, 0.0)
    batch = {"f": np.zeros((3, 3), np.float32), "y": np.int32([0, 1, 1])}
    assert values(ONE["classes"], None, [batch])["ece"] == pytest.approx(0, abs=1e-6)
    assert sums(ONE["classes"], None, [batch])[1]["bin_count"].tolist() == [0] * 5 + [3] + [0] * 9


def test_draws_that_disagree_with_certainty():
    f = np.float32([[[500, 0], [0, 500]]])
    found = values(DRAWS["classes"], None, [{"f": f, "y": np.int32([1])}])
    assert found["nll"] == found["entropy"] == pytest.approx(math.log(2))
    assert found["mutual_information"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_a_diverged_model_has_no_calibration(kind):
    shape, y = ((2, K), np.int32([0, 1])) if kind == "classes" else ((2, M), np.ones((2, M)))
    found = values(ONE[kind], None, [{"f": np.full(shape, np.nan, np.float32), "y": y}])
    names = ("nll", "brier", "ece", "entropy", "mutual_information")
    assert all(math.isnan(found[name]) for name in names)


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_the_reliability_diagram_has_the_calibration_error(kind):
    rng = np.random.default_rng(0)
    f = rng.normal(size=(40, K)).astype(np.float32)
    y = rng.integers(0, K, 40, np.int32) if kind == "classes" else rng.integers(0, 2, (40, K))
    found = make_evaluator(ONE[kind], from_mapping({"a": {"f": f, "y": y}}), 16)(None)
    diagram = reliability(found)
    assert [len(part) for part in diagram] == [BINS] * 3
    assert diagram.counts.sum() == y.size
    assert np.array_equal(np.isnan(diagram.confidence), diagram.counts == 0)
    gaps = np.abs(diagram.confidence - diagram.frequency) * diagram.counts
    assert np.nansum(gaps) / y.size == pytest.approx(found.values["ece"], rel=1e-5)
    inside = diagram.confidence[diagram.counts > 0] * BINS
    assert np.array_equal(np.floor(inside), np.flatnonzero(diagram.counts > 0))


@pytest.mark.parametrize("score", ["entropy", "mutual_information"])
def test_auroc_is_that_of_scikit_learn(score):
    rng = np.random.default_rng(0)
    shapes = {"in": (300, 2, K), "out": (200, 2, K)}
    scales = {"in": 2.0, "out": 1.0}
    clients = {name: scales[name] * rng.normal(size=shape) for name, shape in shapes.items()}
    histograms, scores = {}, {}
    for name, f in clients.items():
        batch = {"f": f.astype(np.float32), "y": np.zeros(len(f), np.int32)}
        metric = DRAWS["classes"]
        histograms[name] = make_evaluator(metric, from_mapping({"a": batch}), 500)(None).vectors
        p = softmax(f, axis=-1)
        total = entropy(p.mean(axis=1))
        scores[name] = total if score == "entropy" else total - entropy(p).mean(axis=1)
    low, high = histograms["in"][score], histograms["out"][score]
    assert low.shape == (HISTOGRAM,)
    found = auroc(low, high)
    truth = roc_auc_score(
        np.repeat([0, 1], [300, 200]), np.concatenate([scores["in"], scores["out"]])
    )
    ties = low @ high / (300 * 200)
    assert abs(found - truth) <= ties / 2 + 1e-6
    assert ties < 0.02
    assert abs(found - 0.5) > 0.05
    binned = [np.repeat(np.arange(HISTOGRAM), counts.astype(int)) for counts in (low, high)]
    of_bins = roc_auc_score(np.repeat([0, 1], [300, 200]), np.concatenate(binned))
    assert found == pytest.approx(of_bins, rel=1e-12)


@pytest.mark.parametrize("spread", [1e-3, 1e-1])
def test_mutual_information_of_a_narrow_posterior_still_ranks(spread):
    """Its mean is as small as 1e-7 nats, and the ranking that of float64."""
    rng = np.random.default_rng(1)
    scores, histograms = [], []
    for more in (1.0, 1.5):
        f = 2 * rng.normal(size=(400, 1, K)) + more * spread * rng.normal(size=(400, 4, K))
        batch = {"f": f.astype(np.float32), "y": np.zeros(400, np.int32)}
        found = make_evaluator(DRAWS["classes"], from_mapping({"a": batch}), 400)(None)
        log_p = log_softmax(batch["f"].astype(np.float64), axis=-1)
        log_mean = logsumexp(log_p, axis=1, keepdims=True) - np.log(4)
        exact = (np.exp(log_p) * (log_p - log_mean)).sum(axis=-1).mean(axis=1)
        assert found.values["mutual_information"] == pytest.approx(exact.mean(), rel=1e-3)
        histograms.append(found.vectors["mutual_information"])
        scores.append(exact)
    truth = roc_auc_score(np.repeat([0, 1], 400), np.concatenate(scores))
    assert truth > 0.7
    assert auroc(*histograms) == pytest.approx(truth, abs=0.005)


def test_entropies_of_a_model_that_is_sure_still_rank():
    """Nearly all are below a thousandth of log k."""
    rng = np.random.default_rng(0)
    scores, histograms = [], []
    for size in (14, 12):
        f = (size * rng.normal(size=(800, K))).astype(np.float32)
        evaluate = make_evaluator(
            ONE["classes"], from_mapping({"a": {"f": f, "y": np.zeros(800, np.int32)}}), 400
        )
        histograms.append(evaluate(None).vectors["entropy"])
        log_p = log_softmax(f.astype(np.float64), axis=-1)
        scores.append(-(np.exp(log_p) * log_p).sum(axis=-1))
    truth = roc_auc_score(np.repeat([0, 1], 800), np.concatenate(scores))
    assert auroc(*histograms) == pytest.approx(truth, abs=0.005)


def test_auroc_of_nothing_is_undefined():
    assert math.isnan(auroc(np.zeros(3), np.ones(3)))
    assert auroc(np.ones(1), np.ones(1)) == 0.5


def test_chosen_metrics_are_measured_alone():
    batch = {"f": np.zeros((2, K), np.float32), "y": np.int32([0, 1])}
    metric = uncertainty(LINKS["classes"], names=["ece", "NLL"])
    each, vectors = sums(metric, None, [batch])
    assert set(metric.values(each)) == {"ece", "nll"}
    assert set(each) == {"labels", "nll", *(f"ece.{place}" for place in range(BINS))}
    assert vectors == {}


def test_joined_metrics_have_the_values_of_each():
    batch = {"f": np.eye(K, dtype=np.float32), "x": np.eye(K, dtype=np.float32)}
    batch["y"] = np.int32([0, 1, 1, 1])
    one = classifier(lambda params, x: x @ params)
    params = jnp.eye(K)
    joined = join_metrics(one, ONE["classes"])
    separate = values(one, params, [batch]) | values(ONE["classes"], params, [batch])
    assert values(joined, params, [batch]) == separate
    found = make_evaluator(joined, from_mapping({"a": batch}), 2)(params)
    assert found.values == close(separate)
    assert list(found.by_client) == list(separate)


def test_what_is_not_there_is_refused():
    with refused("names = 'accuracy'"):
        uncertainty(LINKS["tags"], names=["nll", "accuracy"])
    batch = {"f": np.zeros((2, K), np.float32), "y": np.int32([0, 1])}
    metric = uncertainty(LINKS["classes"], names=["ece"])
    evaluation = make_evaluator(metric, from_mapping({"a": batch}), 2)(None)
    with refused("reliability bins"):
        reliability(evaluation)
    with refused("out_of_distribution", "(3,)", "(4,)"):
        auroc(np.ones(4), np.ones(3))
