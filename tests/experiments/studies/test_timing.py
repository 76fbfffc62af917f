"""The study of times, at a tiny size: that everything is measured, not how long it takes."""

import pytest
from rich.console import Console

from fedpa.experiments.report.figures import render_figure
from fedpa.experiments.studies import timing
from fedpa.experiments.studies.study import Settings, as_csv, read_csv, where

DIMS = (20, 50)
REPEATS = 2
SIZE = timing.Size(DIMS, dense_up_to=20, seconds=0.0, least=1, steps=3)


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def rows(tmp_path_factory, told):
    """As they are read back from the file."""
    settings = Settings(True, 0, REPEATS, lambda fraction, text: told.append((fraction, text)))
    path = tmp_path_factory.mktemp("timing") / "timing.csv"
    path.write_text(as_csv(timing.STUDY, timing.measure_sizes(settings, SIZE), 0, True))
    return read_csv(path)


def measured_forms(dim):
    return [form for form in timing.FORMS if form != "dense" or dim <= SIZE.dense_up_to]


@pytest.mark.long
@pytest.mark.parametrize("dim", DIMS)
def test_every_method_is_timed_in_every_repeat(rows, dim):
    expected = {("fedavg", None, "milliseconds"), ("mean", None, "milliseconds")}
    expected |= {("mean", None, "sampling_percent")}
    expected |= {
        ("fedpa", form, quantity)
        for form in measured_forms(dim)
        for quantity in ("milliseconds", "overhead_percent", "delta_milliseconds", "delta_percent")
    }
    found = [row for row in where(rows, dim=dim) if "repeat" in row]
    assert {(row["method"], row.get("form"), row["quantity"]) for row in found} == expected
    for method, form, quantity in expected:
        of_one = where(found, method=method, form=form, quantity=quantity)
        assert [row["repeat"] for row in of_one] == list(range(REPEATS))
    assert all(row["value"] > 0 for row in found if row["quantity"].endswith("milliseconds"))


@pytest.mark.long
@pytest.mark.parametrize("dim", DIMS)
def test_all_forms_give_one_delta(rows, dim):
    errors = where(rows, dim=dim, quantity="delta_error")
    assert [row["form"] for row in errors] == measured_forms(dim)
    assert all(row["value"] < 1e-5 for row in errors)


@pytest.mark.long
@pytest.mark.parametrize("dim", DIMS)
def test_samples_cost_memory(rows, dim):
    memory = {
        (row["method"], row.get("form")): row["value"]
        for row in where(rows, dim=dim, quantity="memory_mib")
    }
    methods = [("fedavg", None), ("mean", None)]
    assert list(memory) == methods + [("fedpa", form) for form in measured_forms(dim)]
    assert memory["fedpa", "gram"] > memory["fedavg", None] > 0


def test_large_clients_have_fewer_examples():
    assert 4 * timing.EXAMPLES * 100_000 <= timing.EXAMPLES_FIT < 4 * timing.EXAMPLES * 1_000_000


@pytest.mark.long
@pytest.mark.parametrize("dim", DIMS)
def test_all_make_the_same_steps_and_none_diverges(rows, dim):
    losses = [row["value"] for row in where(rows, dim=dim, quantity="loss")]
    assert losses == pytest.approx([losses[0]] * (2 + len(measured_forms(dim))), rel=1e-4)
    assert 0 < losses[0] < 2  # at θ₀ = 0 it is about 1, half of it noise


def test_turns_are_taken():
    order = []
    calls = {name: lambda n=name: order.append(n) for name in "abc"}
    taken = timing.interleave(calls, repeats=2, seconds=0.0, least=2)
    assert {name: values.shape for name, values in taken.items()} == dict.fromkeys("abc", (2, 2))
    assert "".join(order) == "abcabc" + "abcbcacababc"


def printed(rows):
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        for finding in timing.findings(rows):
            console.print(finding, highlight=False)
    return captured.get()


@pytest.mark.long
def test_the_file_is_enough_to_draw_and_to_report(rows):
    assert render_figure(timing.draw(rows), "png").startswith(b"\x89PNG")
    text = printed(rows)
    assert "…" not in text.replace(" … ", "")  # no cell is cut at 80 columns
    for said in ("FedAvg", "recurrence", "Gram", "dense", "sampling"):
        assert said in text
    assert "nan" not in text


@pytest.mark.long
def test_published_times_stand_beside_the_measured(rows):
    renamed = [row | {"dim": {20: 10_000, 50: 1_000_000}[row["dim"]]} for row in rows]
    long = {"milliseconds": 9_876.5, "overhead_percent": 12_345.6}
    for row in where(renamed, form="dense"):
        row["value"] = long.get(row["quantity"], row["value"])
    text = printed(renamed)
    assert "9,876 (+12,346 %)" in text
    assert "…" not in text.replace(" … ", "")
    assert "published" in text
    assert "93 (+16 %)" in text
    assert render_figure(timing.draw(renamed), "png") != render_figure(timing.draw(rows), "png")


@pytest.mark.long
def test_progress_is_told(rows, told):
    assert [fraction for fraction, _ in told] == sorted(fraction for fraction, _ in told)
    assert {text.split(":")[0] for _, text in told} == {"d = 20", "d = 50"}
