"""The benchmarks' driver: specs, ratios, tables, the check of losses; nothing is timed here."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from benchmarks import compare, ours, posterior_delta, run, systems
from benchmarks.works import WORKS, initial_parameters, write_data, write_spec
from fedpa.errors import FedpaError

TINY = WORKS["logistic-10"]._replace(clients=3, examples=25, peers=("fedjax",))
PARAMETERS = {"cnn": 1_206_590, "lstm": 4_050_748, "bow": 5_000_500, "logistic": 610}


def reported(seconds, loss=1.0):
    return {"seconds": seconds, "warmup": [9.0], "loss": loss, "versions": {"x": "1"}, "wall": 9.0}


@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
def test_models_have_the_parameters_they_should(work, tmp_path):
    small = work._replace(clients=2, examples=3)
    arrays = np.load(write_data(small, tmp_path))
    assert sum(a.size for a in initial_parameters(arrays).values()) == PARAMETERS[work.model]
    assert arrays["x"].shape[:2] == arrays["y"].shape[:2] == (2, 3)


def test_data_are_the_same_bytes_for_all(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (np.load(write_data(TINY, tmp_path / name)) for name in "ab")
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_spec_says_what_the_work_is(tmp_path):
    data = write_data(TINY, tmp_path)
    spec = json.loads(write_spec(TINY, data, quick=False, method="fedpa", rho=0.1).read_text())
    assert spec["data"] == str(data)
    assert (spec["batch_size"], spec["epochs"], spec["rounds"]) == (10, 1, TINY.rounds)
    assert (spec["method"], spec["rho"]) == ("fedpa", 0.1)
    assert TINY.steps == 9


@pytest.mark.parametrize("method", ["fedavg", "fedpa"])
def test_ours_learns_on_a_tiny_spec(method, tmp_path):
    data = write_data(TINY, tmp_path)
    spec = write_spec(TINY, data, quick=True, method=method, rho=0.1, epochs=2)
    report = ours.run(json.loads(spec.read_text()))
    assert len(report["seconds"]) == TINY.quick_rounds
    assert len(report["warmup"]) == 3
    assert report["loss"] < 0.9 * np.log(10)


def test_rows_pair_processes_that_ran_one_after_the_other():
    reports = {
        "ours": [reported([1.0, 1.0]), reported([2.0, 2.0])],
        "fedjax": [reported([3.0, 3.0]), reported([4.0, 4.0])],
    }
    mine, peer = compare.rows(TINY, reports)
    assert mine.ratio is None
    assert mine.seconds == compare.Spread(1.5, 1.0, 2.0)
    assert peer.ratio == compare.Spread(2.5, 2.0, 3.0)
    assert {mine.status, peer.status} == {"ok"}


@pytest.mark.parametrize("loss", [1.5, 0.5, float("nan")])
def test_another_loss_than_ours_is_invalid(loss):
    reports = {"ours": [reported([1.0])], "fedjax": [reported([0.1], loss)]}
    assert compare.rows(TINY, reports)[1].status.startswith("invalid: loss")


def test_failed_processes_are_told():
    reports = {"ours": [{"failed": "not done in 90 s"}], "fedjax": [reported([1.0])]}
    mine, peer = compare.rows(TINY, reports)
    assert mine.status == "failed: not done in 90 s"
    assert (peer.status, peer.ratio) == ("unchecked", None)


def test_tables_and_chart_of_made_up_results(tmp_path):
    work = WORKS["cnn"]
    found = {
        "ours": [reported([2.0, 4.0])],
        "pfl": [reported([6.0, 6.0])],
        "flower": [reported([1.0, 1.0], loss=3.0)],
        "fedjax": [{"failed": "no such package"}],
    }
    run_of = {"empty cache": reported([1.0]), "filled cache": {"failed": "why"}}
    form = {"seconds": 0.1, "error": 1e-7}
    results = {
        "works": {"cnn": found, "logistic-10": {"ours": [reported([1.0])]}},
        "methods": {"cnn": {"fedavg": [reported([1.0])], "fedpa": [reported([1.1])]}},
        "first_rounds": {"cnn": run_of},
        "deltas": {"rows": [{"d": 10, "samples": 2, "recurrence": form, "host": form}]},
        "machine": {
            "cpu": "a processor", "cores": 2, "system": "S", "python": "3", "numpy": "2",
            "peak": 72e6 * 4000 / 3, "others": 0.5,
        },
    }  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO())
    run.report(results, console)
    text = console.export_text()
    assert compare.share_of_peak(work, 3.0, results["machine"]["peak"]) == pytest.approx(1)
    for expected in ("3e+03", "2 (2–2)", "invalid: loss 3", "no such package", "100 %", "1.1 ("):
        assert expected.replace("3e+03", "3,000") in text
    assert "other processes took 50 % of the cores" in text
    run.write(results, tmp_path)
    assert (tmp_path / "results.png").stat().st_size > 1000
    assert json.loads((tmp_path / "results.json").read_text())["works"]["cnn"]


def test_a_process_that_fails_or_hangs_is_a_line_not_a_crash(tmp_path):
    python = str(systems.interpreter("ours"))
    assert (
        "boom" in systems.run_json([python, "-c", "raise SystemExit('boom')"], limit=30)["failed"]
    )
    assert "no report" in systems.run_json([python, "-c", "print('hm')"], limit=30)["failed"]
    slow = systems.run_json([python, "-c", "import time; time.sleep(60)"], limit=0.5)
    assert slow == {"failed": "not done in 0.5 s"}


def test_unknown_works_and_peers_are_refused():
    with pytest.raises(FedpaError, match="'mnist' is not known"):
        run.choose_works(run.Options(works="mnist"))
    with pytest.raises(FedpaError, match="'tff' is not known"):
        run.choose_works(run.Options(peers="tff"))


def test_systems_take_every_variant():
    names = [system.name for system in run.systems_of(WORKS["bow-steps"], ["torch", "pfl"])]
    assert names == ["ours", "torch (sparse)", "torch (dense)"]
    assert [s.name for s in run.systems_of(WORKS["cnn"], ["pfl"])] == ["ours", "pfl"]


def test_the_forms_of_the_posterior_delta_meet_the_reference():
    row = posterior_delta.million(1, [(500, 4)])[0]
    assert row["recurrence"]["error"] < 1e-5
    assert row["host"]["error"] < 1e-6
