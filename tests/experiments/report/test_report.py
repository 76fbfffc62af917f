import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.bootstrap import interval_of_mean
from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.conclusions import conclude
from fedpa.experiments.report.curves import (
    Curve,
    Scale,
    align_curves,
    compute_finals,
    compute_running_average,
    find_first_sampling,
    find_rounds_to,
    find_split,
    read_curve,
)
from fedpa.experiments.report.figures import draw_curves, render_figure
from fedpa.experiments.report.looks import assign_looks, choose_look, choose_looks
from fedpa.experiments.report.runs import Group, Run
from fedpa.experiments.report.tables import (
    PUBLISHED,
    format_csv,
    format_difference,
    format_test,
    make_results,
    make_table,
)
from fedpa.training.history import History


def history(values, switch=None):
    return [
        {
            "round": t,
            "phase": "sampling" if switch and t >= switch else "burn-in",
            "seconds": 0.5,
            "eval/accuracy": value,
        }
        for t, value in enumerate(values, start=1)
    ]


def group(method, histories, seeds=None, rounds=20, **settings):
    """Runs that were to have so many rounds."""
    own = {"rounds": rounds, "method": method, **settings}
    runs = [
        Run(Path(), Path(), own | {"seed": seed}, {}, History(run), True)
        for seed, run in zip(seeds or range(len(histories)), histories, strict=True)
    ]
    return Group("digits", method, runs)


def compared(groups, targets=(), last=5, reference=None):
    scale = Scale("accuracy", tuple(targets), last)
    return compare_groups(groups, reference, scale)[0]


def of(rounds=20, **runs):
    return [group(method, own, rounds=rounds) for method, own in runs.items()]


def as_printed(comparison, width=120, published=()):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(make_table(comparison, published))
    return console.export_text()


def as_table(comparison):
    return list(csv.DictReader(io.StringIO(format_csv(comparison))))


def test_final_is_the_mean_of_the_last_rounds():
    c = read_curve(history([0.0, 0.2, 0.4, 0.6]), "eval/accuracy")
    assert compute_finals([c], 2)[0] == pytest.approx(0.5)
    assert compute_finals([c], 100)[0] == pytest.approx(0.3)


def test_rounds_to_uses_the_ten_round_average():
    c = read_curve(history([0.0] * 10 + [1.0] * 10), "eval/accuracy")
    assert find_rounds_to(c, 0.5) == 15
    assert find_rounds_to(c, 1.0) == 20
    assert find_rounds_to(c, 1.1) is None


def test_before_round_ten_the_average_is_of_the_rounds_so_far():
    c = read_curve(history([0.0, 0.5, 1.0, 1.0]), "eval/accuracy")
    smooth = compute_running_average(c)
    assert smooth.rounds.tolist() == [1, 2, 3, 4]
    assert smooth.values == pytest.approx([0, 0.25, 0.5, 0.625])
    assert find_rounds_to(c, 0.5) == 3
    assert find_rounds_to(c, 0.1, lower=True) == 1
    assert find_rounds_to(c, 0.7) is None
    # From round 10 on nothing of the first rounds is left but what the window has.
    full = compute_running_average(read_curve(history([1.0, *[0.0] * 10]), "eval/accuracy"))
    assert full.values[8:] == pytest.approx([1 / 9, 0.1, 0])


def test_rounds_without_an_evaluation_are_left_out():
    records = history([0.1, 0.2, 0.3])
    del records[1]["eval/accuracy"]
    records[2]["eval/accuracy"] = None
    c = read_curve(records, "eval/accuracy")
    assert c.rounds.tolist() == [1, 3]
    assert np.isnan(c.values[1])


def test_the_switch_is_found():
    assert find_first_sampling(history([0.0] * 5, switch=3)) == 3
    assert find_first_sampling(history([0.0] * 5)) is None


def test_table_in_both_forms():
    runs = of(A=[history([0.5] * 20), history([0.7] * 20)], B=[history([0.1] * 20)])
    table = compared(runs, [0.6])
    parsed = as_table(table)
    assert float(parsed[0]["accuracy"]) == pytest.approx(0.6)
    wide = interval_of_mean([0.5, 0.7])
    assert float(parsed[0]["accuracy_low"]) == pytest.approx(wide.low, abs=1e-6)
    assert float(parsed[0]["accuracy_high"]) == pytest.approx(wide.high, abs=1e-6)
    assert parsed[0]["rounds_to_0.6"] == ""  # not every seed got there
    assert parsed[0]["rounds_to_0.6_by_seed"] == "–;1"
    assert parsed[1]["accuracy_low"] == ""
    text = as_printed(table)
    assert "very wide for two seeds" in " ".join(text.split())
    assert "at round" not in text
    assert f"± {wide.half:.4f}" in text
    assert [row[5].split() for row in make_results(table).rows] == [
        ["1", "(1", "of", "2", "seeds)"],
        ["–"],
    ]
    assert "–" in text


def test_differences_are_paired_by_seed():
    """Seeds differ a lot, the methods little: the difference has a narrow interval all the same."""
    base = [0.2, 0.5, 0.8]
    runs = of(
        A=[history([value] * 20) for value in base],
        B=[history([value + 0.01] * 20) for value in base],
    )
    table = compared(runs, reference="A")
    one, other = table.rows
    assert one.difference is None
    assert other.difference.mean == pytest.approx(0.01)
    assert other.difference.interval.half < 1e-9
    assert other.interval.half > 0.1
    published = PUBLISHED["emnist"]
    text = as_printed(table, width=80, published=published)
    assert "+0.0100" in text
    assert text.count("(published)") == len(published)
    assert max(map(len, text.splitlines())) <= 80


def shifted(*by):
    """Runs of three seeds that differ from FedAvg's by these numbers."""
    return [history([x + own] * 20) for x, own in zip((0.2, 0.5, 0.8), by, strict=True)]


FEDAVG = shifted(0, 0, 0)
NOISE = (0.01, -0.01, 0.001)


def test_sentences_say_which_methods_differ():
    runs = {
        "fedavg": FEDAVG,
        "fedpa": shifted(0.02, 0.021, 0.022),
        "scaffold": shifted(-0.02, -0.021, -0.022),
        "fedprox": shifted(*NOISE),
    }
    chance, about = conclude(compared(of(**runs)))
    # Of three intervals of 95 %, by the union bound.
    assert chance.startswith("3 differences are judged")
    assert "15%" in chance
    assert "Compared with fedavg over 3 seeds" in about
    better, worse, same = (
        about.index(f"{word} with") for word in ("better", "worse", "within seed noise")
    )
    assert (
        better < about.index("fedpa (+0.0210 ± ") < worse < about.index("scaffold (-0.0210") < same
    )
    assert same < about.index("fedprox (+0.0003 ± ")
    # One interval needs no correction; one method or other cohorts, no sentence.
    (alone,) = conclude(compared(of(fedavg=FEDAVG, fedprox=runs["fedprox"])))
    assert alone.startswith("Compared with fedavg")
    assert conclude(compared(of(fedavg=FEDAVG))) == []
    other = group("fedpa", FEDAVG, clients_per_round=7)
    assert conclude(compared([group("fedavg", FEDAVG), other])) == []


@pytest.mark.parametrize(
    ("fedpa", "control", "says"),
    [
        # It differs from FedAvg, and not from its control, which differs from FedAvg, too.
        (
            (0.02, 0.021, 0.022),
            (0.02, 0.022, 0.021),
            "the longer step, which both have, explains its gain, not the covariance.",
        ),
        (
            (-0.02, -0.021, -0.022),
            (-0.02, -0.022, -0.021),
            "the longer step, which both have, explains its loss, not the covariance.",
        ),
        # It differs from neither.
        (NOISE, NOISE, "(+0.0000 ± 0.0000) and of fedavg: there is nothing to explain."),
        ((0.0, 0.001, -0.001), NOISE, "and of fedavg: there is nothing to explain."),
        # It differs from its control, whether from FedAvg or not.
        (
            (0.02, 0.021, 0.022),
            (0.01, 0.011, 0.012),
            "fedpa is better than its control mean-scaled (+0.0100 ± 0.0000), an effect of the "
            "covariance.",
        ),
        (NOISE, (0.02, 0.0, 0.011), "fedpa is worse than its control mean-scaled (-0.0100 ± "),
        # The control is between the two.
        (
            (0.02, 0.021, 0.022),
            (0.0, 0.021, 0.03),
            "more seeds must tell whether the longer step or the covariance explains its gain.",
        ),
    ],
)
def test_a_control_explains_its_method(fedpa, control, says):
    runs = {"fedavg": FEDAVG, "fedpa": shifted(*fedpa), "mean-scaled": shifted(*control)}
    chance, about = conclude(compared(of(**runs)))
    # FedPA and its control against FedAvg, and FedPA against its control.
    assert chance.startswith("3 differences are judged")
    assert about.count(". ") == 0
    assert says in about.split("; ", 1)[1]


def test_lower_can_be_better_and_the_reference_another():
    runs = {
        "fedavg": FEDAVG,
        "fedpa": shifted(0.02, 0.021, 0.022),
        "mean-scaled": shifted(0.01, 0.011, 0.012),
        "fedprox": FEDAVG,
    }
    lower = compare_groups(of(**runs), None, Scale("accuracy", (), 5, lower=True))[0]
    assert "; fedpa is worse than its control" in conclude(lower)[-1]
    # A difference from the reference that is also one from the control is counted once.
    chance, about = conclude(compared(of(**runs), reference="mean-scaled"))
    assert chance.startswith("3 differences")
    assert "; fedpa is better than its control mean-scaled" in about
    # What a control shares with its method is said of FedAvg alone.
    runs["mean-scaled"] = runs["fedpa"]
    _, about = conclude(compared(of(**runs), reference="fedprox"))
    assert about.endswith("no effect of the covariance is visible.")


def test_one_seed_decides_nothing():
    runs = {"fedavg": FEDAVG, "fedpa": shifted(*NOISE), "mean-scaled": FEDAVG}
    (about,) = conclude(compared(of(**{name: own[:1] for name, own in runs.items()})))
    assert "undecided (one seed) with fedpa" in about
    assert "whether fedpa differs from its control mean-scaled (+0.0100) needs more seeds" in about
    assert "±" not in about


def test_every_control_says_what_a_difference_shows():
    for method in METHODS.values():
        assert bool(method.control_of) == bool(method.isolates) == bool(method.shares)


def test_one_seed_has_no_interval_and_the_table_says_so():
    table = compared(of(A=[history([0.5] * 20)]))
    assert table.rows[0].interval is None
    assert "one seed: no interval" in " ".join(as_printed(table).split())


def test_seeds_of_unequal_length_are_averaged_at_the_rounds_all_have():
    climbing = list(np.linspace(0, 1, 12))
    table = compared(of(A=[history(climbing), history(climbing[:8])], rounds=12), last=2)
    (row,) = table.rows
    assert row.round == 8
    assert row.final == pytest.approx(np.mean(climbing[6:8]))
    assert row.interval.half == pytest.approx(0)
    assert row.seconds == 8 * 0.5
    text = " ".join(as_printed(table).split())
    assert make_results(table).rows[0][0].split("\n") == ["A", "(at round 8", "of 12)"]
    assert "(at round 8" in text
    assert "the last that all seeds have" in text
    assert as_table(table)[0]["round"] == "8"


def test_a_seed_without_a_round_leaves_nothing_to_average():
    table = compared(of(A=[history([0.5] * 12), []], rounds=12), [0.4], last=2)
    (row,) = table.rows
    assert np.isnan(row.final)
    assert row.round == 0
    assert "nan" not in as_printed(table)


def test_differences_are_of_the_same_rounds():
    """Climbing alike: cut, the one is no worse than the other."""
    climbing = list(np.linspace(0, 1, 12))
    runs = of(A=[history(climbing)] * 3, B=[history(climbing), *[history(climbing[:8])] * 2])
    row = compared(runs, last=2, reference="A").rows[1]
    assert row.difference.mean == pytest.approx(0)
    assert (row.round, row.difference.round) == (8, 8)
    # The row says already that it is at round 8.
    assert format_difference(row).startswith("+0.0000\n± ")
    table = compared(runs, last=2, reference="B")
    assert format_difference(table.rows[0]).endswith("(at round 8)")
    assert table.rows[0].final > table.rows[1].final
    assert [row["difference_round"] for row in as_table(table)] == ["8", ""]


def test_rounds_that_only_one_evaluated_do_not_count():
    often, seldom = history(np.linspace(0, 1, 12)), history(np.linspace(0, 1, 12))
    for record in seldom:
        if record["round"] % 5:
            del record["eval/accuracy"]
    _, row = compared(of(A=[often], B=[seldom]), last=6, reference="A").rows
    assert row.difference.mean == pytest.approx(0)
    assert (row.round, row.difference.round) == (10, 10)


def test_what_can_not_be_paired_is_not():
    runs = [history([0.5] * 12)] * 2
    table = compared(
        [
            group("A", runs, [0, 1], clients_per_round=10),
            group("B", runs, [0, 2], clients_per_round=10),
            group("C", runs, [0, 1], clients_per_round=20),
            group("D", [[], []], [0, 1], clients_per_round=10),
        ],
        reference="A",
    )
    assert [format_difference(row) for row in table.rows] == ["", "–", "–", "–"]
    text = " ".join(as_printed(table).split())
    assert "no difference from A: B has other seeds" in text
    assert "no difference from A: C differs in clients_per_round" in text
    assert "no difference from A: D has no evaluated round in common" in text


def test_the_test_split_says_of_which_rounds_it_is():
    ends = [history([0.5] * n) for n in (8, 12)]
    for run in ends:
        run[-1]["test/accuracy"] = 0.6
    (row,) = compared(of(A=ends)).rows
    assert format_test(row) == "0.6000\n(rounds 8\nto 12)"


def test_published_rows_are_empty_where_the_paper_says_nothing():
    table = compared(of(A=[history([0.5] * 20)]), [0.25, 0.86])
    shown = make_table(table, PUBLISHED["emnist"])
    unknown, known = ([*column.cells] for column in shown.columns[3:5])
    assert unknown[1:] == [""] * 5
    assert known[1:] == ["1291", "–", "1360", "–", "92"]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_an_interval_is_symmetric_about_the_mean_and_the_same_every_time(values):
    interval = interval_of_mean(values)
    low, high = interval
    assert (low + high) / 2 == pytest.approx(np.mean(values), abs=1e-12)
    assert interval.half == pytest.approx(high - np.mean(values), abs=1e-12)  # what ± says
    assert interval_of_mean(values) == interval
    shifted = interval_of_mean([value + 1 for value in values])
    assert shifted.low == pytest.approx(low + 1)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_an_interval_covers_as_often_as_it_says(n):
    """Means of normal numbers; of two the bootstrap knows too little, however it is widened."""
    rng = np.random.default_rng(0)
    trials = 400
    covered = 0
    for _ in range(trials):
        low, high = interval_of_mean(rng.normal(size=n).tolist())
        covered += low <= 0 <= high
    assert (0.9 if n == 2 else 0.93) <= covered / trials <= 0.985


def test_seeds_of_unequal_length_have_a_mean_where_all_are():
    short, long = (
        Curve(np.array([1, 2]), np.array([0.0, 1.0])),
        Curve(np.array([1, 2, 3]), np.array([1.0, 2.0, 5.0])),
    )
    rounds, values = align_curves([short, long])
    assert rounds.tolist() == [1, 2]
    assert values.tolist() == [[0.0, 1.0], [1.0, 2.0]]


def drawn(target=0.5, **runs):
    comparison = compared(of(**runs), [target])
    return imread(io.BytesIO(render_figure(draw_curves([comparison]), "png")))


def test_curves_are_drawn():
    image = drawn(A=[history(np.linspace(0, 1, 30), switch=9)], B=[history([0.3] * 30)])
    assert image.shape[1] > 900
    colours = {tuple(np.round(c[:3] * 255).astype(int)) for c in image.reshape(-1, image.shape[2])}
    assert (0, 114, 178) in colours  # both lines are there
    assert (213, 94, 0) in colours


def test_the_names_of_the_methods_stand_below_the_curves():
    """Among the curves, a dozen would cover them."""
    low = [history([0.3] * 30)]
    few, many = drawn(0.9, FedAvg=low), drawn(0.9, **{f"method {k}": low for k in range(12)})
    assert many.shape[0] > few.shape[0] + 80
    above_the_line = many[100:500, 700:1000, :3]
    assert (above_the_line > 0.99).all()


def test_the_curve_says_whose_examples_it_is_of():
    plain = history([0.1, 0.2])
    same = [r | {"valid/accuracy": r["eval/accuracy"]} for r in plain]
    other = [r | {"valid/accuracy": 0.7} for r in plain]
    splits = [find_split([group("A", [[], run])], "accuracy") for run in (plain, same, other)]
    assert splits == ["test", "validation", "test"]


def test_the_table_has_the_test_split_of_the_last_round():
    first, last = history([0.1, 0.2])
    table = compared(of(A=[[first, last | {"test/accuracy": 0.75}]]), last=1)
    assert table.rows[0].test == 0.75
    assert as_table(table)[0]["test_accuracy"] == "0.750000"
    assert np.isnan(compared(of(A=[[first, last]]), last=1).rows[0].test)


def test_no_two_of_many_methods_look_alike():
    looks = [choose_look(place) for place in range(49)]
    assert len({(look.colour, look.dash) for look in looks}) == 49
    assert len({(look.colour, look.marker) for look in looks}) == 49


def test_a_method_looks_the_same_whatever_it_is_compared_with():
    low = [history([0.3] * 3)]
    many = assign_looks([group(name, low) for name in METHODS])
    assert len(set(many.values())) == len(METHODS)
    few = assign_looks([group(name, low) for name in ("mine", "mean", "fedpa", "theirs")])
    assert {name: few[name] for name in ("mean", "fedpa")} == {
        name: many[name] for name in ("mean", "fedpa")
    }
    assert len(set(few.values())) == 4
    one, other = group("fedpa", low), group("fedpa", low)._replace(label="fedpa (rho=1)")
    own = assign_looks([one, other])
    assert own["fedpa"] == many["fedpa"]
    assert own["fedpa (rho=1)"].colour == own["fedpa"].colour
    assert own["fedpa (rho=1)"].dash != own["fedpa"].dash
    # Another setting of FedAvg does not take the look of a method that is compared, too.
    looks = choose_looks({"fedavg": "fedavg", "fedavg (epochs=2)": "fedavg", "afo": "afo"})
    assert looks["afo"] == many["afo"]


@pytest.mark.parametrize(
    ("switch", "falls", "places"),
    [(15, False, [0.16]), (15, True, [0.4]), (5, False, []), (None, False, [])],
)
def test_after_a_long_burn_in_its_end_is_drawn_larger(switch, falls, places):
    values = np.linspace(0, 1, 20)[:: -1 if falls else 1]
    runs = {"fedavg": [history(values)], "fedpa": [history(values, switch)]}
    figure = draw_curves([compared(of(**runs))])
    figure.canvas.draw()
    (axes,) = figure.axes
    panel, insets = axes.get_position(), axes.child_axes
    found = [(inset.get_position().y0 - panel.y0) / panel.height for inset in insets]
    assert found == pytest.approx(places)
    for inset in insets:
        assert [line.get_xdata().tolist() for line in inset.lines] == [list(range(15, 21))] * 2
        assert inset.lines[0].get_color() == axes.lines[1].get_color()
