"""Commands that are killed while they write: the same words again clean up and complete."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedpa.experiments.staged_files import MOVED, publish, remove_leftovers, stage_files
from tests.experiments.report.made_runs import made_run

# Runs a command in processes of its own, the first killed at its first step that touches a file,
# the second at its second, and so on until one comes to its end, or finds that the last one did.
# Pictures are not drawn: what is killed is the writing.
KILLED_AT_EVERY_STEP = """
import json, os, pathlib, signal, sys, tempfile, warnings
import fedpa.experiments.cli.main, fedpa.training.run_directory
from fedpa.experiments.cli.commands import data, model, partition, report

partition._figure = lambda *_: None
partition.render_figure = lambda figure, kind: b"picture"
report.make_page = lambda *_: "page"
report.draw_figures = lambda found: {"curves.png": b"png", "curves.pdf": b"pdf"}
warnings.simplefilter("ignore")  # JAX on forking: the children don't use it
words, steps = json.loads(sys.argv[1]), 0

def count(owner, name, last):
    function = getattr(owner, name)
    def counted(*args, **options):
        global steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    setattr(owner, name, counted)

for last in range(1, 1000):
    child = os.fork()
    if child == 0:
        for name in ("replace", "fsync", "unlink", "rmdir"):
            count(os, name, last)
        count(pathlib.Path, "write_bytes", last)
        count(tempfile, "mkdtemp", last)
        fedpa.experiments.cli.main.main(words)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    there = sorted(path.name for path in pathlib.Path("out").iterdir())
    print(json.dumps([code, there]), flush=True)
    if code != -signal.SIGKILL:
        break
"""


def killed_at_every_step(cwd, *words, files):
    """What is in `out` after each attempt; in the end all of `files`, and nothing else."""
    (cwd / "out").mkdir()
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, json.dumps([str(w) for w in words])]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    attempts = [json.loads(line) for line in lines]
    # One that was killed after its last step has written all of it.
    assert attempts[-1][0] == 0 or files <= set(attempts[-2][1]), done.stderr
    assert set(attempts[-1][1]) == files
    return [set(there) for _, there in attempts]


@pytest.mark.long
def test_a_partition(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.normal(size=(40, 2)), y=rng.integers(0, 3, 40))
    words = ["data", "partition", "mine.npz", "--scheme", "dirichlet", "--clients", "4"]
    files = {"mine_train.h5", "mine_test.h5", "clients-by-labels.png", "clients-by-labels.pdf"}
    left = killed_at_every_step(tmp_path, *words, "--out", "out", files=files)
    assert len(left) > 15
    assert any(files & there and files - there for there in left)  # between two of the files, too
    assert all(files <= there for there in left if "mine_train.h5" in there)


@pytest.mark.long
def test_a_report(tmp_path):
    made_run(tmp_path / "a-run", rounds=3)
    beside = ("curves.png", "curves.pdf", "table.csv", "table.tex")
    files = {"report.html", *(f"report-{name}" for name in beside)}
    left = killed_at_every_step(
        tmp_path, "report", "a-run", "--out", "out/report.html", files=files
    )
    assert len(left) > 10
    assert any(files & there and files - there for there in left)
    assert all(files <= there for there in left if "report.html" in there)


def test_an_export(tmp_path):
    run = made_run(tmp_path / "a-run", rounds=3)
    np.savez(run / "params.npz", weight=np.ones(3))
    left = killed_at_every_step(tmp_path, "export", "a-run", "out/model.npz", files={"model.npz"})
    assert len(left) == 3  # before it is synced, before it has its name, not at all


def test_what_others_wrote_since_stays(tmp_path):
    staged = tmp_path / ".report.html.abc.part"
    staged.mkdir()
    (staged / MOVED).write_text("report-curves.png")
    (tmp_path / "report-curves.png").write_text("of a person")
    (tmp_path / ".other.html.abc.part").mkdir()
    remove_leftovers(tmp_path / "report.html")
    assert {path.name for path in tmp_path.iterdir()} == {
        "report-curves.png",
        ".other.html.abc.part",
    }


def test_what_a_living_process_holds_stays(tmp_path):
    with stage_files(tmp_path / "a") as staged:
        (staged / "a").touch()
        remove_leftovers(tmp_path / "a")
        publish(staged, ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_between_two_files_leaves_none(tmp_path):
    (tmp_path / "b").mkdir()  # a file can't take its place

    def write():
        with stage_files(tmp_path / "a") as staged:
            for name in ("a", "b"):
                (staged / name).touch()
            publish(staged, ["a", "b"])

    with pytest.raises(OSError, match="b"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
