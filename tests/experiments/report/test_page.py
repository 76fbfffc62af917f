"""`fedpa report` without a browser: what is on the page, and what is refused."""

import csv
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fedpa.errors import FedpaError
from fedpa.experiments.cli.main import main
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.methods import METHODS, reads_setting
from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.curves import make_client_panels
from fedpa.experiments.report.page import MOST_MARKS, dump_json, make_chart, make_page
from fedpa.experiments.report.runs import find_runs, group_runs, list_differences
from fedpa.experiments.report.tables import (
    Results,
    escape_latex,
    format_latex,
    format_markdown,
    make_results,
)
from tests.experiments.cli.test_cli import refused_here
from tests.experiments.report.made_runs import made_comparison, made_run

MEGABYTE = 2**20
SAMPLE = Results(
    ["method", "final accuracy"], [["A_1 & 100%", "0.9 ± 0.1"], ["[B|x]", "–"]], "95% of A_1"
)


def reported(*words, figures=False, out="report.html"):
    """The page of a `fedpa report` in the present directory, and its data."""
    options = [] if figures else ["--no-figures"]
    main(["report", *map(str, words), "--out", out, *options])
    text = Path(out).read_text("utf-8")
    return text, page_data(text)


def page_data(text):
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text)
    return json.loads(found[1])


def without_plotly(text):
    """The page but for the library, which is one long script of its own."""
    scripts = sorted(re.findall(r"<script>.*?</script>", text, re.S), key=len)
    assert len(scripts) == 2
    return text.replace(scripts[1], "")


def shown(text):
    """The page's words."""
    body = without_plotly(text).split("<body>")[1]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<script.*?</script>", "", body)))


def refused(*words, capsys):
    return refused_here("report", *map(str, words), capsys=capsys)


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_comparison_is_one_small_page_that_loads_nothing():
    text, data = reported(made_comparison(Path("cmp")))
    assert len(text.encode()) < 6 * MEGABYTE
    own = without_plotly(text)
    assert "http://" not in own
    assert "https://" not in own
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=", own)
    assert "default-src 'none'" in own
    assert data["methods"] == ["FedAvg[5]", "FedPA[5]", "mean-scaled[5]"]
    names = [chart["name"] for chart in data["charts"]]
    assert names == [
        "curves",
        "train-rho",
        "train-delta_norm",
        "train-correction_norm",
        "train-correction_cosine",
        "train-ess",
    ]
    words = shown(text)
    for word in ("Learning curves", "Results", "Settings that differ", "LaTeX", "Markdown"):
        assert word in words
    assert "No client was rejected" in words
    assert "Unfinished" not in words
    assert "rounds to 0.9" in words


def test_curves_are_those_of_the_paper():
    made_comparison(Path("cmp"))
    part = compare_groups(group_runs(find_runs([Path("cmp")])))[0]
    assert part.curves.switches == (16,)
    assert part.curves.targets == part.scale.targets
    chart = make_chart(part.curves, ["FedAvg[5]", "FedPA[5]", "mean-scaled[5]"], 100)
    roles = [(t["meta"]["method"], t["meta"]["role"]) for t in chart["data"]]
    assert roles == [(k, r) for k in range(3) for r in ("band", "marks", "marks", "line")]
    marks = [t for t in chart["data"] if t["meta"]["role"] == "marks"]
    assert all(len(t["x"]) == 30 for t in marks)
    line = next(t for t in chart["data"] if t["meta"]["role"] == "line")
    assert line["x"] == list(range(1, 31))
    band = chart["data"][0]
    for t in (1, 4, 10, 25):
        means = [np.mean(own["y"][max(t - 10, 0) : t]) for own in marks[:2]]
        assert line["y"][t - 1] == pytest.approx(np.mean(means), abs=1e-4)
        assert band["y"][t - 1] == pytest.approx(max(means), abs=1e-4)
        assert band["y"][-t] == pytest.approx(min(means), abs=1e-4)
    assert (chart["targets"], chart["switches"]) == (part.scale.targets, (16,))


def test_one_seed_has_no_band_and_the_page_says_so():
    text, data = reported(made_run(Path("a-run")))
    assert "One seed per method" in shown(text)
    assert all(t["meta"]["role"] != "band" for c in data["charts"] for t in c["data"])
    assert "±" not in shown(text)


def test_a_run_in_progress_is_read_up_to_its_torn_line():
    made_run(Path("cmp/fedpa-0"), seed=0)
    run = made_run(Path("cmp/fedpa-1"), seed=1, done=12)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 13, "phase": "burn')
    made_run(Path("cmp/fedpa-2"), seed=2, done=0)
    (Path("cmp/fedpa-2") / "metrics.jsonl").unlink()  # nothing but its settings so far
    text, _ = reported("cmp")
    words = shown(text)
    assert "Unfinished: fedpa-1 (12 of 30 rounds), fedpa-2 (0 of 30 rounds)" in words
    assert "FedPA[5] (at round 0 of 30, 2 unfinished) 3 – –" in words
    assert "nan" not in words.lower()


def test_seeds_of_unequal_length_go_on_as_thin_lines():
    made_run(Path("cmp/fedpa-0"), seed=0, rounds=40)
    made_run(Path("cmp/fedpa-1"), seed=1, rounds=20)
    text, data = reported("cmp")
    line = next(t for t in data["charts"][0]["data"] if t["meta"]["role"] == "line")
    rest = [t for t in data["charts"][0]["data"] if t["meta"]["role"] == "rest"]
    assert line["x"][-1] == 20
    assert [t["name"] for t in rest] == ["FedPA[5], seed 0"]
    assert (rest[0]["x"][0], rest[0]["x"][-1]) == (20, 40)
    assert "Seeds of unequal length" in shown(text)
    assert "40, 20" in shown(text)  # the setting in which they differ


def test_a_seed_without_points_leaves_no_mean_of_the_others():
    for seed, done in ((0, None), (1, None), (2, 4), (3, 0)):
        spread = {f"eval/accuracy_p{p}": p / 100 for p in (10, 50, 90)}
        made_run(Path(f"cmp/fedpa-{seed}"), seed=seed, done=done, more=spread if done else None)
    _, data = reported("cmp")
    for chart in (data["charts"][0], data["charts"][-1]):
        line = next(t for t in chart["data"] if t["meta"]["role"] == "line")
        assert line["x"] == []
        assert all(t["x"] == [] for t in chart["data"] if t["meta"]["role"] == "band")
    rest = [t["name"] for t in data["charts"][0]["data"] if t["meta"]["role"] == "rest"]
    assert rest == ["FedPA[5], seed 0", "FedPA[5], seed 1", "FedPA[5], seed 2"]
    rest = [t["name"] for t in data["charts"][-1]["data"] if t["meta"]["role"] == "rest"]
    assert rest == ["FedPA[5], seed 2"]


def cut_comparison():
    """FedPA's second seed was cut after 8 of 12 rounds; FedAvg's were not."""
    for method in ("fedavg", "fedpa"):
        for seed in (0, 1):
            done = 8 if (method, seed) == ("fedpa", 1) else None
            made_run(Path(f"cmp/{method}-{seed}"), method, seed, rounds=12, done=done)
    return Path("cmp")


def test_a_cut_run_is_compared_at_the_rounds_all_have():
    text, _ = reported(cut_comparison())
    part = compare_groups(group_runs(find_runs([Path("cmp")])))[0]
    fedavg, fedpa = make_results(part).rows
    assert fedavg[0] == "FedAvg[5]"
    assert fedpa[0].split() == ["FedPA[5]", "(at", "round", "8", "of", "12,", "1", "unfinished)"]
    # Made with the same noise: at the same rounds they are the same.
    assert fedpa[3] == "+0.0000\n± 0.0000"
    assert float(fedpa[2].split()[0]) < float(fedavg[2].split()[0])
    for written in (format_latex(make_results(part)), format_markdown(make_results(part))):
        assert "FedPA[5] (at round 8 of 12, 1 unfinished)" in written
        assert "the last that all seeds have" in written
        assert "very wide for two seeds" in written
    words = shown(text)
    assert "Methods of unequal length (digits)" in words
    assert "8 rounds: FedPA[5]; 12 rounds: FedAvg[5]." in words


def test_what_met_other_cohorts_has_no_difference():
    made_run(Path("cmp/a"), "fedavg")
    made_run(Path("cmp/b"), "fedpa", settings={"clients_per_round": 5})
    made_run(Path("cmp/c"), "mean", seed=1)
    made_run(
        Path("cmp/d"),
        "mean-scaled",
        settings={"task_options": {"data_dir": "/moved", "metrics": "ece"}},
    )
    made_run(Path("cmp/e"), "mb-sgd", settings={"task_options": {"eval_examples": 5}})
    part = compare_groups(group_runs(find_runs([Path("cmp")])))[0]
    assert [row[3] for row in make_results(part).rows] == ["", "–", "–", "+0.0000", "–"]
    caption = make_results(part).caption
    assert "no difference from FedAvg[5]: FedPA[5] differs in clients_per_round" in caption
    assert "mean[5] has other seeds" in caption
    assert "differs in task_options.eval_examples" in caption


def test_runs_that_begin_to_sample_in_different_rounds_are_warned_of(tmp_path):
    """A control without the burn-in of FedPA is none."""
    directories = [made_run(tmp_path / "fedavg", "fedavg"), made_run(tmp_path / "fedpa", "fedpa")]
    (part,) = compare_groups(group_runs(find_runs(directories)))
    assert "start sampling" not in make_results(part).caption
    directories.append(made_run(tmp_path / "mean", "mean", more={"phase": "sampling"}))
    with pytest.warns(UserWarning, match=r"round 1: mean\[5\]; round 16: FedPA\[5\]"):
        (part,) = compare_groups(group_runs(find_runs(directories)))
    assert "start sampling in different rounds" in make_results(part).caption


def test_the_reference_can_be_chosen(capsys):
    made_comparison(Path("cmp"))
    assert "Δ vs FedAvg[5]" in shown(reported("cmp", out="0.html")[0])
    for number, name in enumerate(("fedpa", "FedPA[5]"), start=1):
        words = shown(reported("cmp", "--reference", name, out=f"{number}.html")[0])
        assert "Δ vs FedPA[5]" in words
        assert "Δ vs FedAvg[5]" not in words
    error = refused("cmp", "--reference", "sgd", capsys=capsys)
    assert "reference = 'sgd'" in error
    assert "choose from FedAvg[5], FedPA[5], mean-scaled[5]" in error
    made_run(Path("cmp/other"), "fedpa", settings={"hyperparameters": {"rho": 0.5}})
    error = refused("cmp", "--reference", "fedpa", capsys=capsys)
    assert "reference = 'fedpa'" in error
    assert "choose from FedAvg[5], FedPA[5] (rho=" in error


def test_a_run_of_a_few_rounds_has_a_line_and_one_of_none_says_so():
    text, data = reported(made_run(Path("a-run"), rounds=5), figures=True)
    assert "there is no line" not in shown(text)
    assert [len(t["x"]) for t in data["charts"][0]["data"]] == [5, 5]
    assert Path("report-curves.png").exists()
    text, data = reported(made_run(Path("begun"), done=0), out="begun.html")
    assert "there is no line" in shown(text)
    assert [len(t["x"]) for t in data["charts"][0]["data"]] == [0, 0]


def test_text_of_files_is_never_markup():
    nasty = "</script><script>alert(1)</script><b>&"
    made_run(Path("a") / "x'\"><img src=x>", settings={"method": nasty})
    text, data = reported("a")
    assert data["methods"][0] == nasty
    assert "<script>alert" not in text
    assert "<img" not in without_plotly(text)
    assert "&lt;b&gt;&amp;" in text
    assert "\\textless{}script" in text
    assert "<" not in data["charts"][0]["data"][0]["name"]  # plotly would take it for its own tags
    assert "<" not in dump_json({"a": "</script><!--"})


def test_the_same_method_with_other_settings_is_another():
    for rho in (0.1, 1.0):
        for seed in (0, 1):
            settings = {"hyperparameters": {"rho": rho}}
            made_run(Path(f"cmp/{rho}-{seed}"), seed=seed, settings=settings)
    groups = group_runs(find_runs([Path("cmp")]))
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("FedPA[5] (rho=0.1)", 2),
        ("FedPA[5] (rho=1)", 2),
    ]
    text, _ = reported("cmp")
    assert '<th scope="row">hyperparameters.rho</th><td>0.1</td><td>1</td>' in text


def test_settings_that_differ_beyond_six_digits_are_told_apart():
    for name, rho in (("a", 0.1), ("b", 0.10000001)):
        made_run(Path(f"cmp/{name}"), settings={"hyperparameters": {"rho": rho}})
    made_run(Path("cmp/c"), settings={"method": "FedPA[5] (rho=0.1)"})  # what a label looks like
    text, data = reported("cmp", figures=True)
    labels = ["FedPA[5] (rho=0.1)", "FedPA[5] (rho=0.10000001)", "FedPA[5] (rho=0.1) #2"]
    assert data["methods"] == labels
    assert re.search(r"hyperparameters.rho</th><td>0.1</td><td>0.10000001</td>", text)


def test_seeds_are_in_order_however_they_were_named():
    for seed in (0, 1, 10):
        made_run(Path(f"fedavg-{seed}"), "fedavg", seed)
        made_run(Path(f"fedpa-{seed}"), "fedpa", seed)
    names = ["fedpa-10", "fedavg-0", "fedpa-0", "fedavg-10", "fedavg-1", "fedpa-1"]
    groups = group_runs(find_runs([Path(name) for name in names]))
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1, 10], [0, 1, 10]]
    assert "Δ vs FedAvg[5]" in shown(reported(*names)[0])


def test_a_seed_that_comes_twice_is_not_two_seeds():
    made_run(Path("before/fedpa-0"))
    made_run(Path("after/fedpa-0"))
    groups = group_runs(find_runs([Path("before"), Path("after"), Path("before/fedpa-0")]))
    assert [g.label for g in groups] == ["FedPA[5] (before)", "FedPA[5] (after)"]


def test_percentiles_over_clients():
    spread = {"eval/accuracy_p10": 0.2, "eval/accuracy_p50": 0.5, "eval/accuracy_p90": 0.8}
    at_end = {"test/accuracy_p10": 0.25, "test/accuracy_p50": 0.55, "test/accuracy_p90": 0.85}
    made_run(Path("cmp/fedpa-0"), more=spread | at_end)
    panel = make_client_panels(group_runs(find_runs([Path("cmp")])))[0]
    assert set(panel.series[0].line.values) == {0.5}
    assert [set(end.values) for end in panel.series[0].band] == [{0.2}, {0.8}]
    text, data = reported("cmp")
    assert data["charts"][-1]["name"] == "clients-accuracy"
    assert "0.2500 0.5500 0.8500" in shown(text)


def test_rejected_clients_and_samplers_numbers_have_charts():
    more = {"train/rejected": 2, "train/rejected_clients": ["a", "b"], "train/ess": 3.0}
    made_run(Path("a-run"), more=more | {"train/acceptance": float("nan")})
    text, data = reported("a-run")
    names = [chart["name"] for chart in data["charts"]]
    assert names[-3:] == ["train-ess", "train-rejected", "train-acceptance"]
    assert "No client was rejected" not in shown(text)
    assert re.search(r"<td>60</td></tr>", text)  # in all
    assert data["charts"][names.index("train-rejected")]["data"][-1]["y"][:3] == [2, 4, 6]


def test_a_run_of_a_model_of_ones_own():
    run = made_run(Path("mine"))
    run_toml = "rounds = 30\nseed = 3\n[environment]\nsource = 'abc'\n"
    (run / "config.toml").write_text(run_toml)
    text, data = reported("mine")
    assert data["methods"][0] == "mine"
    assert "final accuracy" in shown(text)


def own_run(directory, seed, text=""):
    """A run by `fedpa.fit`."""
    run = made_run(Path(directory), seed=seed)
    toml = f"rounds = 30\nseed = {seed}\n{text}\n[environment]\nsource = 'abc'\n"
    (run / "config.toml").write_text(toml)


def labels(*directories):
    return [(g.label, len(g.runs)) for g in group_runs(find_runs([Path(d) for d in directories]))]


def test_seeds_of_a_model_of_ones_own_have_one_label():
    for seed in (0, 1):
        own_run(f"cmp/fedavg-{seed}", seed, "program = 'a'")
        own_run(f"cmp/fedpa_seed{seed}", seed, "program = 'b'")
        own_run(f"mean/{seed}", seed, "program = 'c'")
        own_run(f"cmp/v1-{seed}", seed + 10, "program = 'd'")
    assert labels("cmp") == [("fedavg", 2), ("fedpa", 2), ("v1-0", 2)]
    assert labels("mean") == [("mean", 2)]
    assert "fedavg & 2" in reported("cmp")[0].replace("&amp;", "&")  # in LaTeX, too


def test_a_model_of_ones_own_is_labelled_by_what_it_says_of_itself():
    for seed in (0, 1):
        own_run(f"cmp/a-{seed}", seed, "method = 'mime_lite'")
        own_run(f"cmp/b-{seed}", seed, "method = 'fedpa'\n[hyperparameters]\nepochs = 3\nrho = 0.1")
        own_run(f"cmp/c-{seed}", seed, "method = 'fedpa'\n[hyperparameters]\nepochs = 3\nrho = 1.0")
        chosen = "method = 'fedpa'\n[hyperparameters]\nepochs = 3\nrho = 'oas'"
        own_run(f"cmp/c2-{seed}", seed, chosen)
        own_run(f"cmp/d-{seed}", seed, "method = 'fedpa'\nlabel = 'ours'\nprogram = 'a'")
        own_run(f"cmp/e-{seed}", seed, "method = 'fedpa'\nlabel = 'ours'\nprogram = 'b'")
    assert labels("cmp") == [
        ("MimeLite", 2),
        ("FedPA[3] (rho=0.1)", 2),
        ("FedPA[3] (rho=1)", 2),
        ("FedPA[3] (rho=oas)", 2),
        ("ours", 2),
        ("ours #2", 2),
    ]


def test_settings_that_a_method_does_not_use_are_not_listed():
    settings = {"hyperparameters": {"rho": 0.5, "server_tau": 0.5, "proximal": 0.5}}
    made_run(Path("cmp/fedavg"), "fedavg", settings=settings)  # as other versions may have written
    made_run(Path("cmp/fedpa"), "fedpa", settings={"hyperparameters": {"rho": 0.3}})
    made_run(Path("cmp/mean"), "mean")
    found = list_differences(group_runs(find_runs([Path("cmp")])))
    assert found["hyperparameters.rho"] == ["–", "0.3", "–"]
    assert not {"hyperparameters.server_tau", "hyperparameters.proximal"} & set(found)


def test_which_methods_read_a_setting():
    settings = {name: resolve(default_config("digits", name)).hyperparameters for name in METHODS}

    def readers(field, value):
        return {name for name, h in settings.items() if reads_setting(name, h, field, [value])}

    assert readers("epochs", 3) == set(METHODS)
    assert readers("rho", 0.7) == {"fedpa", "mean-scaled"}
    assert readers("proximal", 0.7) == {"fedprox"}
    assert {"fedadam", "fedyogi"} <= readers("server_b1", 0.7)
    assert "fedavg" not in readers("server_b1", 0.7) | readers("burn_in_rounds", 3)


@pytest.mark.long
def test_long_runs_stay_within_the_size():
    spread = {f"eval/accuracy_p{p}": p / 100 for p in (10, 50, 90)}
    for seed in range(4):
        for method in ("fedavg", "fedpa", "mean", "mean-scaled"):
            made_run(Path(f"cmp/{method}-{seed}"), method, seed, rounds=1500, more=spread)
    text, data = reported("cmp")
    assert len(text.encode()) < 6 * MEGABYTE
    marks = [t for t in data["charts"][0]["data"] if t["meta"]["role"] == "marks"]
    assert sum(len(t["x"]) for t in marks) <= MOST_MARKS + len(marks)
    lines = [t for t in data["charts"][0]["data"] if t["meta"]["role"] == "line"]
    assert {t["x"][-1] for t in lines} == {1500}
    assert f"One in {16 * 1500 // MOST_MARKS} evaluations has a ×" in shown(text)


def test_a_page_that_gets_too_large_has_less_in_it_or_is_refused(monkeypatch):
    found = compare_groups(group_runs(find_runs([made_comparison(Path("cmp"), seeds=1)])))
    monkeypatch.setattr("fedpa.experiments.report.page.MOST_POINTS", 0)

    def within(size):
        monkeypatch.setattr("fedpa.experiments.report.page.MOST_BYTES", size)
        text = make_page(found)
        assert len(text.encode()) <= size
        drawn = page_data(text)["charts"]
        lines = [t["x"] for c in drawn for t in c["data"] if t["meta"]["role"] == "line"]
        return text, max(map(len, lines)), len(drawn)

    text, points, number = within(6 * MEGABYTE)
    assert (points, number) == (30, 6)
    assert "left out" not in shown(text)
    text, points, number = within(len(text.encode()) - 1)
    assert (points, number) == (15, 6)
    text, points, number = within(len(text.encode()) - 1)
    assert (points, number) == (10, 6)
    text, points, number = within(len(text.encode()) - 1)
    assert (points, number) == (30, 1)
    assert "posterior diagnostics are left out" in shown(text)
    with pytest.raises(
        FedpaError, match=r"page of these 3 runs would have 4\.\d* MB, .*fewer runs"
    ):
        within(4_800_000)


def test_figures_are_beside_the_page():
    reported(made_comparison(Path("cmp"), seeds=1), figures=True, out="sub/x.html")
    made = sorted(path.name for path in Path("sub").iterdir())
    assert made == [
        "x-curves.pdf",
        "x-curves.png",
        "x-diagnostics.pdf",
        "x-diagnostics.png",
        "x-table.csv",
        "x-table.tex",
        "x.html",
    ]
    image = imread(Path("sub/x-curves.png"))
    colours = {tuple(np.round(c[:3] * 255).astype(int)) for c in image.reshape(-1, image.shape[2])}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= colours
    assert Path("sub/x-curves.pdf").read_bytes().startswith(b"%PDF")


def test_tasks_may_be_mixed_if_said_so(capsys):
    made_run(Path("a"))
    made_run(Path("b"), task="emnist")
    error = refused("a", "b", capsys=capsys)
    assert "different tasks (digits, emnist)" in error
    text, data = reported("a", "b", "--mixed")
    assert [c["name"] for c in data["charts"]].count("curves") == 2
    assert len({c["id"] for c in data["charts"]}) == len(data["charts"])
    assert len(re.findall('id="latex-', text)) == 4


def test_a_run_whose_configuration_was_cut_is_named():
    for name in ("a", "b"):
        made_run(Path("cmp") / name)
    config = Path("cmp/a/config.toml")
    config.write_text(config.read_text().partition("[environment]")[0])
    with pytest.warns(UserWarning, match=r"cmp/a is left out: .*config.toml is truncated"):
        assert [run.directory.name for run in find_runs([Path("cmp")])] == ["b"]


def test_damaged_runs_among_others_are_left_out_and_named(capsys):
    for name in ("a", "b", "c", "d", "e"):
        made_run(Path("cmp") / name, seed=ord(name))
    Path("cmp/a/config.toml").write_text("task = ")
    Path("cmp/b/config.toml").write_text("rounds = 'x'\n[environment]\nsource = 'abc'\n")
    Path("cmp/c/metrics.jsonl").write_text("[1]\n{}\n")
    Path("cmp/d/summary.json").write_text("[1]")
    with pytest.warns(UserWarning, match="is left out") as said:
        runs = find_runs([Path("cmp")])
    assert [(run.directory.name, run.is_finished) for run in runs] == [("e", True)]
    assert [str(w.message).partition(" is left out")[0] for w in said] == [
        "cmp/a",
        "cmp/b",
        "cmp/c",
        "cmp/d",
    ]
    for name in ("a", "b", "c", "d"):
        assert f"cmp/{name}/" in refused(f"cmp/{name}", capsys=capsys)


def test_a_sweeps_trials_are_found_and_in_order():
    for place in ("sweep/trials/2", "sweep/trials/10", "staged/2-fedpa/trials/0"):
        made_run(Path(place))
    assert [run.directory.name for run in find_runs([Path("sweep")])] == ["2", "10"]
    assert len(find_runs([Path("staged")])) == 1


def test_refusals(capsys):
    made_run(Path("a-run"))
    Path("empty").mkdir()
    Path("file").touch()
    Path("other").mkdir()
    Path("other/config.toml").write_text("name = 'of another program'\n")
    assert "no directory given" in refused(capsys=capsys)
    assert "contains no runs" in refused("empty", capsys=capsys)
    assert "contains no runs" in refused("other", capsys=capsys)
    assert "does not exist" in refused("a-rum", capsys=capsys)
    assert "is a file" in refused("file", capsys=capsys)
    assert "contains no runs" in refused("a-run", "empty", capsys=capsys)
    assert "must end in .html" in refused("a-run", "--out", "report.pdf", capsys=capsys)
    assert "is a file" in refused("a-run", "--out", "file/report.html", capsys=capsys)
    Path("report-curves.png").touch()
    assert "report-curves.png exists" in refused("a-run", capsys=capsys)
    Path("report.html").touch()
    assert "give --overwrite" in refused("a-run", "--no-figures", capsys=capsys)
    assert Path("report.html").stat().st_size == 0
    main(["report", "a-run", "--overwrite"])
    assert Path("report.html").stat().st_size > MEGABYTE
    (Path("a-run") / "config.toml").write_text("task = \n")
    assert "not valid TOML" in refused("a-run", "--overwrite", capsys=capsys)


def test_tables_of_chosen_columns_are_beside_the_page(capsys):
    made_comparison(Path("cmp"), seeds=2)
    assert "columns = 'finl': unknown column; did you mean final?" in refused(
        "cmp", "--columns", "method,finl", capsys=capsys
    )
    made_run(Path("one"))  # of one method: no differences
    said = refused("one", "--columns", "difference", capsys=capsys)
    assert "columns = 'difference'" in said
    main(["report", "cmp", "--columns", "method,rejected", "--no-figures"])
    assert Path("report-table.csv").read_text("utf-8").splitlines()[0] == "method,rejected"
    columns = ["--columns", "method,final,difference"]
    main(["report", "cmp", *columns, "--no-figures", "--overwrite"])
    results = Path("report.html").read_text("utf-8").partition('<section id="results"')[2]
    head = re.findall(r'<th scope="col">([^<]*)</th>', results.partition("</table>")[0])
    assert head == ["method", "final\naccuracy", "Δ vs\nFedAvg[5]"]
    records = list(csv.DictReader(Path("report-table.csv").read_text("utf-8").splitlines()))
    assert list(records[0]) == [
        *("method", "accuracy", "accuracy_low", "accuracy_high"),
        *("difference", "difference_low", "difference_high", "difference_round"),
    ]
    latex = Path("report-table.tex").read_text("utf-8")
    assert r"\begin{tabular}{lrr}" in latex
    assert r"$\Delta$ vs FedAvg[5]" in latex
    best = max(float(record["accuracy"]) for record in records)
    bold = re.findall(r"^(\S+).*\\textbf\{([\d.]+)\}", latex, re.MULTILINE)
    assert [number for _, number in bold] == [f"{best:.4f}"] * len(bold)
    assert [name for name, _ in bold] == [
        record["method"] for record in records if float(record["accuracy"]) > best - 5e-5
    ]
    main(["report", "cmp", "--overwrite", "--no-figures"])
    everything = list(csv.DictReader(Path("report-table.csv").read_text("utf-8").splitlines()))
    assert {"seeds", "round", "seconds", "bytes_up"} <= set(everything[0])


def test_the_page_says_what_diagnostics_and_controls_mean():
    for seed in (0, 1):
        made_run(Path(f"cmp/a-{seed}"), "fedavg", seed)
        made_run(Path(f"cmp/b-{seed}"), "fedpa", seed, more={"train/ess": 1.04})
        made_run(Path(f"cmp/c-{seed}"), "mean-scaled", seed, more={"train/ess": 4.5})
    text = html.unescape(reported("cmp")[0])
    assert (
        "FedPA[5]: an effective sample size of 1.0 of 5 samples: the samples are one path" in text
    )
    assert (
        "mean-scaled[5]: an effective sample size of 4.5 of 5 samples: the samples are near" in text
    )
    assert "FedAvg[5]: an effective" not in text
    assert "FedPA[5] is within seed noise of its control" in text  # whose records are the same
    assert "mean-scaled[5]: control of fedpa" in text


def test_the_same_runs_give_the_same_page():
    made_run(Path("a-run"))
    assert reported("a-run", out="1.html")[0] == reported("a-run", out="2.html")[0]


def test_markdown():
    assert format_markdown(SAMPLE) == (
        "| method | final accuracy |\n| --- | ---: |\n| A_1 & 100% | 0.9 ± 0.1 |\n| [B\\|x] | – |\n"
        "\n95% of A_1\n"
    )


def test_the_best_of_a_column_is_bold_in_every_format():
    best = Results(["method", "final"], [["A", "0.9\n± 0.1"], ["B*", "0.8"]], "", best={1: [0]})
    assert "| A | **0.9** ± 0.1 |\n| B\\* | 0.8 |" in format_markdown(best)
    assert r"A & \textbf{0.9} $\pm$ 0.1 \\" in format_latex(best)
    for name, accuracy in [("fedavg", 0.1), ("fedpa", 0.2)]:
        made_run(Path(f"cmp/{name}"), name, more={"eval/accuracy": accuracy})
    text, _ = reported("cmp", "--columns", "method,final")
    assert re.findall(r"<td><strong>([^<]*)</strong></td>", text) == ["0.2000"]


def test_latex():
    lines = format_latex(SAMPLE).splitlines()
    assert lines[1] == r"% 95\% of A\_1"  # a comment that can become a caption
    assert lines[2] == r"\begin{tabular}{lr}"
    assert r"A\_1 \& 100\% & 0.9 $\pm$ 0.1 \\" in lines
    assert r"{}[B|x] & -- \\" in lines
    assert escape_latex("\\{~^#$}Δ") == (
        r"\textbackslash{}\{\textasciitilde{}\textasciicircum{}\#\$\}$\Delta$"
    )


def test_latex_has_as_many_cells_in_every_row():
    made_run(Path("cmp/a"), "fedavg", done=8)
    made_run(Path("cmp/b"), settings={"method": "100%_of & #1\nA\\B{c}", "clients_per_round": 5})
    (part,) = compare_groups(group_runs(find_runs([Path("cmp")])))
    lines = format_latex(make_results(part)).splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith("\\begin"))
    columns = re.fullmatch(r"\\begin\{tabular\}\{(l r*)\}".replace(" ", ""), lines[begin])[1]
    table = [line for line in lines[begin:] if line.endswith("\\\\")]
    assert len(table) == 3
    for line in table:
        assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
        assert not re.search(r"(?<!\\)[%#_]", line)
        assert line.count("{") - line.count("\\{") == line.count("}") - line.count("\\}")
    assert r"100\%\_of \& \#1 A\textbackslash{}B\{c\}" in table[2]
    assert all(line.startswith("%") for line in lines[:begin])


def test_headings_tables_and_controls_have_names():
    text, _ = reported(made_comparison(Path("cmp"), seeds=1))
    own = without_plotly(text)
    assert '<html lang="en"' in own
    assert "<title>digits: 3 methods</title>" in own
    assert own.count("<h1>") == 1
    assert '<main id="main">' in own
    assert all('scope="' in cell for cell in re.findall(r"<th\b[^>]*>", own))
    charts = re.findall(r'<div id="chart-\d+-[^>]*>', own)
    assert charts
    assert all('aria-label="' in chart for chart in charts)
    buttons = re.findall(r"<button[^>]*>", own)
    assert len(buttons) == 3
    assert all('aria-label="' in button for button in buttons)


def test_help_is_there(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["report", "--help"])
    assert leaving.value.code == 0
    assert "--mixed" in capsys.readouterr().out


def test_a_finished_run_whose_records_were_cut_is_refused(capsys):
    run = made_run(Path("a-run"), rounds=5)
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(lines[:-20])
    assert "a-run/metrics.jsonl: line 5" in refused(run, capsys=capsys)
