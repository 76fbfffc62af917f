"""Progress on files, and the picture of clients by labels."""

import io
import time

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from fedpa.data.cache import progress
from fedpa.experiments.report.figures import draw_partition, render_figure
from fedpa.experiments.report.live import show_file_progress


def test_plain_lines_at_start_and_end():
    out = io.StringIO()
    with show_file_progress(Console(file=out, width=100)):
        with progress("downloading a.tar") as tell:
            tell(500_000, 11_600_000)
            tell(11_600_000, 11_600_000)
        with progress("indexing a.h5") as tell:
            tell(3400, None)
    with progress("nobody listens") as tell:
        tell(1, 2)
    assert out.getvalue().splitlines() == [
        "downloading a.tar",
        "downloading a.tar: done (11.6 MB, 0 s)",
        "indexing a.h5",
        "indexing a.h5: done (3,400, 0 s)",
    ]


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with show_file_progress(console), progress("downloading a.tar") as tell:
        tell(500_000, 11_600_000)
        wait_for(out, "500.0 kB of 11.6 MB")
        with progress("indexing a.h5") as tell_too:
            tell_too(3400, None)
            wait_for(out, "3,400")
    assert "done" not in out.getvalue()


def wait_for(out, words):
    deadline = time.monotonic() + 10
    while words not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert words in out.getvalue()


def texts(figure):
    return {text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))}


@pytest.mark.parametrize(("clients", "labels"), [(1, 1), (10, 10), (25, 40), (500, 100), (3000, 3)])
def test_pictures_of_every_size(tmp_path, clients, labels):
    counts = np.random.default_rng(0).integers(0, 9, (clients, labels)) + 1
    names = [f"c{i}" for i in range(clients)]
    figure = draw_partition(counts, names, [str(i) for i in range(labels)], "title")
    for kind in ("png", "pdf"):
        (tmp_path / f"a.{kind}").write_bytes(render_figure(figure, kind))
    assert imread(tmp_path / "a.png").shape[1] > 500
    assert ("c0" in texts(figure)) == (clients <= 30)
    if clients == 10:
        assert {str(number) for number in counts.ravel()} <= texts(figure)


def test_clients_stand_by_the_label_they_have_most_of():
    counts = np.array([[0, 0, 5], [5, 0, 0], [1, 4, 0]])
    figure = draw_partition(counts, ["a", "b", "c"], ["x", "y", "z"], "title")
    (axes,) = [axes for axes in figure.axes if axes.images]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["b", "c", "a"]
    np.testing.assert_allclose(axes.images[0].get_array()[:, 1], [0.2, 0.8, 0.0])
    assert "title, 5 examples each" in {axes.get_title(loc="left") for axes in figure.axes}


def test_groups_are_named_where_there_are_many_labels():
    counts = np.ones((40, 60), int)
    groups = ["even"] * 30 + ["odd"] * 30
    figure = draw_partition(counts, [str(i) for i in range(40)], ["l"] * 60, "title", groups)
    (axes,) = [axes for axes in figure.axes if axes.images]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["even", "odd"]


def test_sizes_alone_where_there_are_no_labels():
    figure = draw_partition(np.array([[3], [9], [1]]), ["a", "b", "c"], None, "title")
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["b", "a", "c"]
