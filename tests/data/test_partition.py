import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data.partition import by_column, by_quantity, dirichlet_label_skew, pachinko
from tests.refusals import refused
from tests.strategies import label_sequences


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@given(label_sequences(12, 60).map(lambda labels: labels - 3))
def test_by_column_is_a_client_for_each_value(column):
    dealt = by_column(column)
    assert sorted(np.concatenate(dealt)) == list(range(len(column)))
    for value, rows in zip(np.unique(column), dealt, strict=True):
        assert (column[rows] == value).all()
        assert (np.diff(rows) > 0).all()  # in the order of the table


def test_by_column_takes_text():
    dealt = by_column(np.array(["b", "a", "b"]))
    assert [rows.tolist() for rows in dealt] == [[1], [0, 2]]


@given(
    counts=st.lists(st.integers(1, 300), min_size=2, max_size=2).map(sorted),
    concentration=st.one_of(st.none(), st.floats(0.01, 100)),
    seed=st.integers(0, 99),
)
def test_by_quantity_deals_everything_once_and_something_to_everybody(counts, concentration, seed):
    num_clients, num_examples = counts
    dealt = by_quantity(num_examples, num_clients, concentration, seed=seed)
    assert len(dealt) == num_clients
    assert min(map(len, dealt)) >= 1
    assert sorted(np.concatenate(dealt)) == list(range(num_examples))
    assert same(dealt, by_quantity(num_examples, num_clients, concentration, seed=seed))


def test_sigma_is_the_standard_deviation_of_log_sizes():
    sizes = np.array([len(rows) for rows in by_quantity(10**6, 2000, sigma=0.7, seed=3)])
    assert np.log(sizes).std() == pytest.approx(0.7, abs=4 * 0.7 / np.sqrt(2 * 2000))
    assert {len(rows) for rows in by_quantity(1000, 10, sigma=0.0)} == {100}


def test_dirichlet_sizes_have_the_dirichlets_variance():
    """Shares of Dirichlet(c, …, c) over m clients: variance (m − 1)/(m²(mc + 1))."""
    m, c, n = 2000, 0.5, 10**7
    sizes = np.array([len(rows) for rows in by_quantity(n, m, concentration=c, seed=4)])
    expected = np.sqrt((m - 1) / (m * c + 1)) / m
    assert (sizes / n).std() == pytest.approx(expected, rel=0.15)  # heavy tails: kurtosis 15


def tree(num_coarse, fine_each, examples_each, seed=0):
    fine = np.repeat(np.arange(num_coarse * fine_each), examples_each)
    np.random.default_rng(seed).shuffle(fine)
    return fine // fine_each, fine


@given(
    fine=label_sequences(12, 60),
    fine_each=st.integers(1, 4),
    alpha=st.floats(1e-3, 10),
    beta=st.floats(1e-3, 100),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_pachinko_deals_nothing_twice(fine, fine_each, alpha, beta, seed, data):
    coarse = fine // fine_each
    num_clients = data.draw(st.integers(1, len(fine)), label="num_clients")
    each = len(fine) // num_clients
    dealt = pachinko(coarse, fine, num_clients, each, alpha, beta, seed)
    assert [len(rows) for rows in dealt] == [each] * num_clients
    rows = np.concatenate(dealt)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < len(fine)
    assert same(dealt, pachinko(coarse, fine, num_clients, each, alpha, beta, seed))


def test_pachinko_to_the_last_example_and_other_seeds_differ():
    coarse, fine = tree(20, 5, 100)
    one, other = (pachinko(coarse, fine, 100, 100, seed=seed) for seed in (0, 1))
    assert sorted(np.concatenate(one)) == list(range(len(fine)))
    assert not same(one, other)


def test_pachinko_skews_coarse_labels_and_hardly_the_fine_ones_below():
    """Σ p² of a Dirichlet(a) over k labels is (1 + a)/(1 + ka) on average.

    Counted without bias from pairs of different examples, from the few clients that come first,
    when no label has run out.
    """
    coarse, fine = tree(20, 5, 250)

    def alike(labels):
        counts = np.unique(labels, return_counts=True)[1]
        n = len(labels)
        return (counts * (counts - 1)).sum() / (n * (n - 1))

    upper, lower = [], []
    for seed in range(150):
        (rows,) = pachinko(coarse, fine, 1, 200, seed=seed)
        upper.append(alike(coarse[rows]))
        most = np.bincount(coarse[rows]).argmax()
        lower.append(alike(fine[rows][coarse[rows] == most]))
    for got, expected in ((upper, 1.1 / 3), (lower, 11 / 51)):
        error = np.std(got) / np.sqrt(len(got))
        assert np.mean(got) == pytest.approx(expected, abs=4 * error)
        assert 4 * error < 0.2 * expected


def test_pachinko_prefers_no_label():
    """Over many first clients every fine label comes up equally often."""
    coarse, fine = tree(4, 2, 100)
    totals = sum(
        np.bincount(fine[pachinko(coarse, fine, 1, 20, seed=seed)[0]], minlength=8) / 20
        for seed in range(600)
    )
    # A share p·q, p of Dirichlet(0.1) over 4, q of Dirichlet(10) over 2, and 20 draws: std < 0.21.
    assert np.abs(totals / 600 - 1 / 8).max() < 4 * 0.21 / np.sqrt(600)


@pytest.mark.parametrize(
    ("call", "anchor"),
    [
        (lambda: by_column(np.zeros((2, 2))), "values = [2, 2]"),
        (lambda: by_column(np.array([1.0, np.nan])), "values = 'nan': row 1"),
        (lambda: by_quantity(5, 6), "num_clients = 6"),
        (lambda: by_quantity(5, 2, concentration=0.0), "concentration = 0.0"),
        (lambda: by_quantity(5, 2, sigma=-1.0), "sigma = -1.0"),
        (lambda: by_quantity(5, 2, 1.0, 1.0), "sigma = 1.0"),
        (lambda: pachinko(*tree(2, 2, 2), 3, 3), "examples_per_client = 3"),
        (lambda: pachinko(*tree(2, 2, 2), 0, 3), "num_clients = 0"),
        (lambda: pachinko(*tree(2, 2, 2), 1, 3, alpha=0.0), "alpha = 0.0"),
        (lambda: pachinko(*tree(2, 2, 2), 1, 3, beta=np.inf), "beta = inf"),
        (lambda: pachinko(np.zeros(3, int), np.zeros(4, int), 1, 1), "fine ="),
        (lambda: pachinko(np.arange(4), np.zeros(4, int), 1, 1), "fine label 0"),
    ],
)
def test_bad_partitions_are_refused(call, anchor):
    with refused(anchor):
        call()


@pytest.mark.parametrize(
    ("values", "missing"),
    [(np.array([0.0, 1.0, np.nan, 1.0]), "nan"), (np.array(["a", "b", None, "b"], object), "None")],
    ids=["NaN", "None"],
)
@pytest.mark.parametrize(
    ("deal", "field"),
    [
        (by_column, "values"),
        (lambda values: dirichlet_label_skew(values, 2, 1.0, 0), "labels"),
        (lambda values: pachinko(values, np.arange(4), 2, 2), "coarse"),
        (lambda values: pachinko(np.zeros(4), values, 2, 2), "fine"),
    ],
    ids=["column", "dirichlet", "coarse", "fine"],
)
def test_examples_without_a_label_are_refused(deal, field, values, missing):
    with refused(f"{field} = '{missing}'", "row 2"):
        deal(values)
