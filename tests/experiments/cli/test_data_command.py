"""`fedpa data` as a user meets it: what it prints, what it writes, what it refuses."""

import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from matplotlib.image import imread

from fedpa.data.readers.hdf5 import open_hdf5
from fedpa.experiments import catalogue
from fedpa.experiments.catalogue import DATA_SETS, open_dataset
from fedpa.experiments.cli.main import main
from tests.data import tiny
from tests.experiments.test_download import Answer, serving


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("FEDPA_DATA", raising=False)
    monkeypatch.delenv("FEDPA_DATA_URL", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def run(capsys, *words):
    main(["data", *map(str, words)])
    return capsys.readouterr().out


def refused(capsys, *words):
    """The one line; nothing is left behind."""
    with pytest.raises(SystemExit) as leaving:
        main(["data", *map(str, words)])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    return error


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_explains_the_four(capsys, words):
    out = run(capsys, *words)
    for name in ("list", "get", "info", "partition"):
        assert re.search(rf"^  {name} +[a-z]", out, re.MULTILINE)


@pytest.mark.parametrize("name", ["list", "get", "info", "partition"])
def test_each_has_help(capsys, name):
    with pytest.raises(SystemExit) as leaving:
        main(["data", name, "--help"])
    assert leaving.value.code == 0
    assert "--data-dir" in capsys.readouterr().out


def test_list_says_where_or_how_to_get(capsys, tmp_path):
    tiny.hdf5(tmp_path / "home" / "fedpa", "fed_emnist", tiny.emnist)
    out = run(capsys, "list")
    assert "fedpa data get stackoverflow" in out
    assert "fedpa data get fed_emnist " not in out
    listed = json.loads(run(capsys, "list", "--json"))
    assert [entry["name"] for entry in listed] == list(DATA_SETS)
    assert listed[0]["found"] == str(tmp_path / "home" / "fedpa" / "fed_emnist_train.h5")
    assert listed[-1]["found"] is None


@pytest.mark.parametrize("way", ["iterdir", "is_dir", "is_file"])
@pytest.mark.parametrize(
    "words", [["data", "list"], ["tasks"], ["run", "emnist", "--out", "o"]], ids=" ".join
)
def test_directories_that_cant_be_read_are_told_in_one_line(
    capsys, tmp_path, monkeypatch, words, way
):
    """For root nothing is unreadable: the system's answer is given in its place."""
    locked = tmp_path / "locked"
    (locked / "below").mkdir(parents=True)
    usual = getattr(pathlib.Path, way)

    def denied(path):
        if path.is_relative_to(locked):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setenv("FEDPA_DATA", str(locked))
    monkeypatch.setattr(pathlib.Path, way, denied)
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+locked[^\n]* can't be read: Permission denied\n", error)


def test_info_counts_and_sets_the_papers_figures_beside(capsys, tmp_path):
    tiny.hdf5(tmp_path / "d", "fed_emnist", tiny.emnist, sizes=(3, 5, 10))
    out = run(capsys, "info", "fed_emnist", "--data-dir", tmp_path / "d")
    train, paper = re.findall(r"│ +(?:train|paper) .*", out)[:2]
    for cell in ("3", "18", "6 ± 2.9", "3 / 5 / 10"):
        assert f" {cell} " in train
    for cell in ("3,400", "198 ± 77", "62"):
        assert f" {cell} " in paper
    facts = json.loads(run(capsys, "info", "fed_emnist", "--data-dir", tmp_path / "d", "--json"))
    labels = [tiny.emnist(n, i)["label"] for i, n in enumerate((3, 5, 10))]
    assert facts["splits"]["train"]["classes"] == len(np.unique(np.concatenate(labels)))
    assert facts["splits"]["test"]["paper"] == {"clients": 3400, "mean": 23, "std": 9}


def test_info_of_text_and_of_records(capsys, tmp_path):
    where = tmp_path / "d"
    tiny.hdf5(where, "stackoverflow", tiny.posts, ("train", "held_out", "test"))
    out = run(capsys, "info", "stackoverflow", "--data-dir", where)
    assert "held_out" in out
    assert "stackoverflow.word_count is not in" in out
    (where / "stackoverflow.word_count").write_text("the 5\na 3\n")
    (where / "stackoverflow.tag_count").write_text('{"c": 1}')
    out = run(capsys, "info", "stackoverflow", "--data-dir", where)
    assert "2 words in stackoverflow.word_count, 1 tags in stackoverflow.tag_count" in out
    tiny.cifar_records(where / "cifar-100-binary")
    out = run(capsys, "info", "cifar-100-binary", "--data-dir", where)
    assert "no clients" in out
    assert " 600 " in out


@pytest.fixture(name="small")
def _small(monkeypatch):
    """The archives' originals are not to be had here: ones of the same names stand in."""
    content = b"x" * 400_000
    checksum = "sha256:" + hashlib.sha256(content).hexdigest()
    changed = {
        name: dataset._replace(
            archives=tuple(archive._replace(checksum=checksum) for archive in dataset.archives)
        )
        for name, dataset in DATA_SETS.items()
    }
    monkeypatch.setattr(catalogue, "DATA_SETS", changed)
    return content


def test_get_downloads_resumes_and_keeps(capsys, tmp_path, small, monkeypatch):
    with serving(Answer(content=small)) as (url, asked):
        part = tmp_path / "home" / "fedpa" / "stackoverflow.tar.bz2.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(small[:1000])
        main(["data", "get", "stackoverflow", "--mirror", url])
        told = capsys.readouterr()
        assert told.out.count("400.0 kB, checksum verified") == 3
        assert "downloading stackoverflow.word_count.tar.bz2: done (400.0 kB" in told.err
        assert asked == ["bytes=1000-", None, None]
        monkeypatch.setenv("FEDPA_DATA_URL", url)
        out = run(capsys, "get", "stackoverflow", "fed_emnist")
    assert out.count(": exists") == 3
    assert len(asked) == 4
    names = {path.name for path in part.parent.iterdir()}
    assert names == {
        "stackoverflow.tar.bz2",
        "stackoverflow.word_count.tar.bz2",
        "stackoverflow.tag_count.tar.bz2",
        "fed_emnist.tar.bz2",
    }


def test_get_leaves_nothing_of_what_it_could_not_get(capsys, tmp_path, small):
    with serving(Answer(content=b"another")) as (url, _):
        where = tmp_path / "new" / "data"
        with pytest.raises(SystemExit):
            main(["data", "get", "fed_emnist", "--mirror", url, "--data-dir", str(where)])
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ctrl_c_leaves_a_part_and_says_that_it_resumes(tmp_path):
    """In a process of its own: a server that stops half way, and a signal."""
    content = b"x" * 3_000_000
    with serving(Answer(content=content, stalls_after=1_000_000)) as (url, _):
        # Signals are ignored where tests run in the background: a user's terminal does not.
        words = ["data", "get", "fed_emnist", "--mirror", url]
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            f"from fedpa.experiments.cli.main import main; main({words})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        part = tmp_path / "home" / "fedpa" / "fed_emnist.tar.bz2.part"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if part.exists() and part.stat().st_size >= 500_000:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "the same command resumes" in error
    assert part.stat().st_size >= 500_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lst"], "did you mean list?"),
        (["get"], "fedpa data get needs NAME"),
        (["get", "mnist"], "data set = 'mnist': unknown"),
        (["get", "fed_emnist", "nope"], "data set = 'nope': unknown"),
        (["get", "fed_emnist", "--mirror", "here"], "mirror = 'here': must begin with https://"),
        (["get", "fed_emnist", "--mirror", "http://[x"], "mirror = 'http://[x'"),
        (["get", "fed_emnist", "--mirror", "http://host/ä"], "mirror = 'http://host/ä': must be"),
        (["get", "fed_emnist", "--miror", "here"], "did you mean --mirror?"),
        (["info"], "fedpa data info needs NAME"),
        (["info", "fed_emnist"], "fedpa data get fed_emnist"),
        (["info", "fed_emnist", "--data-dir", "nowhere"], "data_dir = 'nowhere'"),
        (["partition"], "needs SOURCE and --scheme and --out"),
        (["partition", "a.npz"], "fedpa data partition needs SOURCE and --scheme"),
        (
            ["partition", "a.npz", "--scheme", "iid", "--out", "o"],
            "scheme = 'iid': unknown scheme; choose from column",
        ),
        (["partition", "a.npz", "--scheme", "column", "--out", "o"], "column needs --column NAME"),
        (
            ["partition", "a.npz", "--scheme", "quantity", "--out", "o"],
            "quantity needs --clients N",
        ),
        (
            ["partition", "a.npz", "--scheme", "pachinko", "--out", "o"],
            "pachinko needs --clients N",
        ),
        (
            ["partition", "a.npz", "--scheme", "quantity", "--clients", "0", "--out", "o"],
            "clients = 0",
        ),
        (
            ["partition", "a.npz", "--scheme", "quantity", "--clients", "2"],
            "--scheme and --out (see",
        ),
        (
            ["partition", "a.npz", "--scheme", "dirichlet", "--sigma", "1", "--out", "o"],
            "sigma = 1.0: does not apply to dirichlet, only to quantity",
        ),
        (
            ["partition", "a.npz", "--scheme", "column", "--clients", "3", "--out", "o"],
            "clients = 3: does not apply to column",
        ),
        (
            ["partition", "a.npz", "--scheme", "dirichlet", "--test-clients", "3", "--out", "o"],
            "test_clients = 3: applies to cifar-100-binary only",
        ),
        (
            [
                "partition",
                "cifar-100-binary",
                "--scheme",
                "pachinko",
                "--test-share",
                "0.1",
                "--out",
                "o",
            ],
            "test_share = 0.1",
        ),
        (
            ["partition", "a.npz", "--scheme", "dirichlet", "--clients", "3", "--out", "o"],
            "source = 'a.npz': is no file",
        ),
        (
            ["partition", "cifar-100-binary", "--scheme", "pachinko", "--out", "o"],
            "fedpa data get cifar-100-binary",
        ),
        (
            ["partition", "a.txt", "--scheme", "quantity", "--clients", "3", "--out", "o"],
            "must end in one of .npz, .csv",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(capsys, tmp_path, words, expected):
    assert expected in refused(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert not list((tmp_path / "work").iterdir())


@pytest.fixture(name="source")
def _source(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 400)
    arrays = {"x": rng.random((400, 3), np.float32), "y": y, "group": y // 5}
    np.savez(tmp_path / "work" / "mine.npz", **arrays)
    return arrays


@pytest.mark.parametrize(
    ("words", "clients"),
    [
        (["dirichlet", "--clients", "8", "--concentration", "0.3"], 8),
        (["quantity", "--clients", "40"], 40),
        (["quantity", "--clients", "8", "--concentration", "1"], 8),
        (["column", "--column", "group"], 2),
        (["pachinko", "--clients", "4", "--examples-per-client", "50", "--coarse", "group"], 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_partitions_of_a_file(capsys, tmp_path, source, words, clients):
    out = run(capsys, "partition", "mine.npz", "--scheme", *words, "--out", "dealt")
    directory = tmp_path / "work" / "dealt"
    assert "written to dealt: mine_train.h5, mine_test.h5, clients-by-labels.png" in out
    names = ["clients-by-labels.pdf", "clients-by-labels.png", "mine_test.h5", "mine_train.h5"]
    assert sorted(path.name for path in directory.iterdir()) == names
    train, test = (open_hdf5(directory / f"mine_{split}.h5") for split in ("train", "test"))
    assert len(train.ids) == clients
    rows = [
        (*row, int(label))
        for data in (train, test)
        for client in data.ids
        for own in [data.examples(client)]
        for row, label in zip(own["x"].tolist(), own["y"], strict=True)
    ]
    whole = {(*row, int(y)) for row, y in zip(source["x"].tolist(), source["y"], strict=True)}
    assert len(set(rows)) == len(rows)
    assert set(rows) <= whole
    assert len(rows) == (200 if words[0] == "pachinko" else 400)
    assert sum(map(test.num_examples, test.ids)) <= 0.2 * len(rows)
    assert imread(directory / "clients-by-labels.png").shape[1] > 500


def test_the_same_words_give_the_same_files_and_full_directories_are_refused(
    capsys, tmp_path, source
):
    words = ["partition", "mine.npz", "--scheme", "dirichlet", "--clients", "8", "--out"]
    (tmp_path / "work" / "one").mkdir()  # empty ones may be there
    for out, seed in (("one", 0), ("two", 0), ("three", 1)):
        run(capsys, *words, out, "--seed", seed)

    def labels(out):
        data = open_hdf5(tmp_path / "work" / out / "mine_train.h5")
        return [data.examples(client)["y"].tolist() for client in data.ids]

    assert labels("one") == labels("two") != labels("three")
    pictures = [tmp_path / "work" / out / "clients-by-labels.pdf" for out in ("one", "two")]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert "out = 'one': is not empty" in refused(capsys, *words, "one")


def test_a_partition_that_has_no_room_is_told_and_leaves_nothing(capsys, tmp_path, source):
    words = ["partition", "mine.npz", "--scheme", "quantity", "--clients", "40", "--out", "new/o"]
    with tiny.small_disk(), pytest.raises(SystemExit):
        main(["data", *words])
    progress, error = capsys.readouterr().err.splitlines()
    assert progress == "writing mine_train.h5"
    assert error == "error: out = 'new/o': can't be written: File too large"
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.npz"]


def test_partition_of_a_table_by_a_column_of_text(capsys, tmp_path):
    lines = ["who,age,label"] + [f"00{i % 3},{i},{'ab'[i % 2]}" for i in range(30)]
    (tmp_path / "work" / "people.csv").write_text("\n".join(lines) + "\n")
    words = ["--scheme", "column", "--column", "who", "--test-share", "0", "--out", "o"]
    run(capsys, "partition", "people.csv", *words)
    train = open_hdf5(tmp_path / "work" / "o" / "people_train.h5")
    assert list(train.ids) == ["000", "001", "002"]
    client = train.examples("001")
    assert set(client) == {"age", "label"}
    assert client["age"].tolist() == list(range(1, 30, 3))
    assert set(client["label"]) == {"a", "b"}
    assert not (tmp_path / "work" / "o" / "people_test.h5").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dirichlet", "--clients", "500"], "num_clients = 500: must be between 1 and 400"),
        (["dirichlet", "--clients", "5", "--label", "z"], "label = 'z': the source has x, y, g"),
        (["dirichlet", "--clients", "5", "--label", "x"], "has shape [400, 3]: must be one value"),
        (["column", "--column", "z"], "column = 'z': the source has x, y, group"),
        (["pachinko", "--clients", "5"], "coarse = 'coarse_label': the source has"),
        (["pachinko", "--clients", "5", "--coarse", "group"], "5 clients need 500 examples"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_source_does_not_have_is_refused(capsys, tmp_path, source, words, expected):
    error = refused(capsys, "partition", "mine.npz", "--scheme", *words, "--out", "new/o")
    assert expected in error
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.npz"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["dirichlet", "--label", "kind"], "label"),
        (
            ["pachinko", "--label", "age", "--coarse", "kind", "--examples-per-client", "5"],
            "coarse",
        ),
    ],
    ids=["dirichlet", "pachinko"],
)
def test_labels_that_a_table_lacks_are_refused_by_column_and_row(capsys, tmp_path, words, option):
    lines = ["age,kind"] + [f"{i},{'' if i == 7 else i % 3}" for i in range(30)]
    (tmp_path / "work" / "people.csv").write_text("\n".join(lines) + "\n")
    words = ["partition", "people.csv", "--scheme", *words, "--clients", "3", "--out", "o"]
    assert f"{option} = 'kind': row 7 has no value" in refused(capsys, *words)


def test_an_array_that_is_called_npz_is_refused(capsys, tmp_path):
    with (tmp_path / "work" / "mine.npz").open("wb") as file:
        np.save(file, np.arange(10))
    words = ["partition", "mine.npz", "--scheme", "quantity", "--clients", "3", "--out", "o"]
    assert "mine.npz is one array without a name" in refused(capsys, *words)


def test_cifar_by_pachinko_is_what_the_data_set_opens(capsys, tmp_path):
    """Three images of a label suffice: fewer clients than usual, named by the files as usual."""
    tiny.cifar_records(tmp_path / "d" / "cifar-100-binary", per_label=(6, 3))
    words = ["--clients", "12", "--test-clients", "6", "--examples-per-client", "50"]
    source = ["cifar-100-binary", "--data-dir", tmp_path / "d"]
    out = run(capsys, "partition", *source, "--scheme", "pachinko", *words, "--out", "o")
    assert "fed_cifar100_train.h5, fed_cifar100_test.h5" in out
    opened = open_dataset("fed_cifar100", tmp_path / "work" / "o")
    assert (len(opened.train.ids), len(opened.test.ids)) == (12, 6)
    out = run(capsys, "partition", *source, "--scheme", "column", "--column", "label", "--out", "p")
    assert "cifar-100-binary_train.h5" in out
