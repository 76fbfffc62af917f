import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from fedpa.experiments.studies.ess import (
    BATCH,
    CHAINS,
    SAMPLES,
    STUDY,
    Point,
    Sizes,
    exact_samples,
    find_direction,
    iasg_averages,
    measure_sizes,
    problem,
    qualities,
    samples_of,
    takeaways,
    whitened,
)
from fedpa.experiments.studies.study import Settings, as_csv, read_csv, where
from fedpa.objectives import Objective, client_data, least_squares
from fedpa.samplers import Steps, draw_chains, iasg, kish_ess

SMALL = Sizes(
    dims=(10,),
    burn_ins=(0, 100),
    steps_per_sample=(10, 50),
    learning_rates={10: (0.0003, 0.1, 1.5)},
    grains=(10,),
)
REPEATS = 3


@pytest.fixture(scope="module", name="rows")
def _rows(tmp_path_factory):
    """As they are drawn: through the file."""
    told = []
    settings = Settings(True, 0, REPEATS, lambda fraction, text: told.append(fraction))
    text = as_csv(STUDY, measure_sizes(settings, SMALL), seed=0, quick=True)
    assert told == sorted(told)
    assert 0 <= told[0] < told[-1] <= 1
    path = tmp_path_factory.mktemp("ess") / "ess.csv"
    path.write_text(text)
    return read_csv(path)


@pytest.mark.long
def test_every_setting_has_its_measures_or_a_divergence(rows):
    for dim in SMALL.dims:
        settings = len(SMALL.burn_ins) + len(SMALL.steps_per_sample)
        settings += len(SMALL.learning_rates[dim])
        told = where(rows, dim=dim, quantity="diverged")
        assert len(told) == settings * REPEATS
        for row in told:
            identity = {name: row[name] for name in STUDY.columns}
            values = {r["quantity"]: r["value"] for r in where(rows, **identity)}
            if row["value"]:
                assert set(values) == {"diverged"}
                continue
            assert 1 <= values["kish"] <= SAMPLES
            assert 0 < values["autocorrelation_min"] <= values["autocorrelation_median"]
            assert values["spread"] > 0


@pytest.mark.long
def test_a_divergence_is_recorded_as_one(rows):
    diverged = where(rows, quantity="diverged", value=1)
    assert {(row["dim"], row["learning_rate"]) for row in diverged} == {(10, 1.5)}
    assert len(diverged) == REPEATS


def test_a_chain_that_grows_has_diverged_even_if_it_is_finite():
    one = problem(0, 10, 0)
    starts = np.zeros((CHAINS, 10))
    growing = np.broadcast_to(1.1 ** np.arange(SAMPLES)[None, :, None], (CHAINS, SAMPLES, 10))
    assert qualities(one, starts, 1e3 * growing) == {"diverged": 1}
    assert qualities(one, starts, np.where(growing > 1e3, np.inf, 0)) == {"diverged": 1}


def test_samples_that_sit_at_the_mode_have_the_best_kish():
    one = problem(0, 10, 0)
    mode = np.linalg.lstsq(np.asarray(one.x, float), np.asarray(one.y, float), rcond=None)[0]
    noise = np.random.default_rng(0).standard_normal((CHAINS, SAMPLES, 10))
    found = qualities(one, np.zeros((CHAINS, 10)), mode + 1e-4 * noise)
    assert found["kish"] == pytest.approx(SAMPLES, rel=1e-3)
    assert found["spread"] < 1e-4
    assert found["autocorrelation_median"] > 80


@pytest.mark.long
def test_exact_samples_get_little_of_kishs(rows):
    values = [row["value"] for row in where(rows, dim=10, quantity="kish_exact")]
    z = np.random.default_rng(0).standard_normal((2_000, SAMPLES, 10))
    expected = kish_ess(-0.5 * np.sum(z**2, axis=-1))  # (3/4)⁵ ℓ, and a little more at finite ℓ
    assert expected.mean() == pytest.approx(0.2373 * SAMPLES, rel=0.15)
    error = expected.std() / np.sqrt(REPEATS * CHAINS)
    assert abs(np.mean(values) - expected.mean()) < 4 * error
    assert error < 0.1 * SAMPLES * 0.24, "too few to tell"


def test_weights_are_the_posteriors():
    one = problem(0, 10, 1)
    x, y = np.asarray(one.x, np.float64), np.asarray(one.y, np.float64)
    mode = np.linalg.lstsq(x, y, rcond=None)[0]
    theta = mode + 0.1 * np.random.default_rng(0).standard_normal((5, 10))
    nf = lambda t: 0.5 * np.sum((x @ t - y) ** 2)  # noqa: E731
    expected = [nf(t) - nf(mode) for t in theta]
    np.testing.assert_allclose(0.5 * np.sum(whitened(one, theta) ** 2, axis=1), expected, rtol=1e-8)


def test_exact_samples_of_a_singular_problem_are_exact_on_the_row_space():
    starts = jax.random.normal(jax.random.key(0), (1, CHAINS, 520))
    (z,) = exact_samples([problem(0, 520, 0)], starts, jax.random.key(1))
    assert z.shape == (CHAINS, SAMPLES, 500)
    number = z.size
    assert abs(z.mean()) < 4 / np.sqrt(number)
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / number)


@pytest.mark.long
def test_samples_read_off_a_shared_run_are_iasgs():
    # Of the shapes that `rows` has compiled already.
    problems = [problem(0, 10, number) for number in range(REPEATS)]
    one, point, key = problems[0], Point(100, 50, 0.1), jax.random.key(5)
    starts = jnp.ones((REPEATS, CHAINS, 10))
    averages = iasg_averages(problems, starts, key, point.learning_rate, 10, 10 + 5 * SAMPLES)
    sampler = iasg(
        Objective(least_squares.loss),
        optax.sgd(point.learning_rate),
        batch_size=BATCH,
        window=Steps(point.steps_per_sample, burn_in=point.burn_in),
        order="replacement",
    )
    data = client_data({"x": np.asarray(one.x), "y": np.asarray(one.y)})
    run = jax.jit(lambda key: draw_chains(sampler, starts[0], data, key, SAMPLES)[0])
    direct = run(jax.random.split(key, REPEATS)[0])
    np.testing.assert_allclose(samples_of(averages[0], 10, point), direct, rtol=1e-4, atol=1e-3)


def with_another_dimension(rows):
    """The same again as of d = 100, where nothing diverges."""
    return rows + [row | {"dim": 100} for row in rows if row.get("learning_rate") != 1.5]


@pytest.mark.long
def test_the_figure_marks_divergence(rows):
    figure = STUDY.draw(with_another_dimension(rows))
    assert len(figure.axes) == 3 * 2
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == [f"{REPEATS}/{REPEATS}"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == len(set(labels))
    assert "number of problems that diverged" in labels


@pytest.mark.long
def test_findings_follow_from_the_rows(rows):
    def holds(rows, claim, measure):
        return {dim: judged.holds for dim, judged in takeaways(rows)[claim][measure].items()}

    rows = with_another_dimension(rows)
    more_steps = "more steps per sample are better", "autocorr."
    assert holds(rows, *more_steps) == {10: True, 100: True}
    assert holds(rows, "too small a learning rate is worse", "autocorr.")[10]
    assert holds(rows, "too large a one diverges", "") == {10: True, 100: False}
    assert holds(rows, "more dimensions are worse", "Kish") == {10: None, 100: False}
    # The other way round, the same rows say the opposite.
    turned = [
        row | {"steps_per_sample": 60 - row["steps_per_sample"]} if row.get("panel") == "b" else row
        for row in rows
    ]
    turned.sort(key=lambda row: row.get("steps_per_sample", 0))
    assert holds(turned, *more_steps) == {10: False, 100: False}


@pytest.mark.long
def test_findings_are_printed(rows):
    console = Console(width=200)
    with console.capture() as capture:
        for finding in STUDY.findings(with_another_dimension(rows)):
            console.print(finding)
    text = capture.get()
    for words in ("more burn-in is better", "label noise", "By Kish's ESS", "from 1.5 on"):
        assert words in text
    assert "nan" not in text


def test_three_problems_that_agree_are_no_direction_yet():
    """A plain percentile interval of three log-ratios, 0.1 to 0.9, would say that it rises."""
    before = dict.fromkeys(range(3), 1.0)
    after = {k: float(np.exp(ratio)) for k, ratio in enumerate([0.1, 0.5, 0.9])}
    assert find_direction(before, after) == "≈"
    assert (
        find_direction(before, {k: float(np.exp(0.5 + ratio)) for k, ratio in after.items()}) == "↑"
    )
