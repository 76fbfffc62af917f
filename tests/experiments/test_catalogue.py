"""Data sets by name, from every form they come in."""

import lzma
import os

import h5py
import numpy as np
import pytest

from fedpa.data.readers import cifar
from fedpa.data.readers.hdf5 import write_hdf5
from fedpa.errors import DataError, FedpaError
from fedpa.experiments.catalogue import (
    BASE,
    DATA_SETS,
    count_labels,
    count_sizes,
    find_cifar,
    find_counts,
    find_dataset,
    find_first,
    get_url,
    open_dataset,
)
from tests.data import tiny
from tests.refusals import refused


def sizes(data):
    return count_sizes([data.num_examples(name) for name in data.ids])


REAL = os.environ.get("FEDPA_DATA")
needs_data = pytest.mark.skipif(not REAL, reason="FEDPA_DATA names no directory of real data")


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDPA_DATA", raising=False)
    monkeypatch.delenv("FEDPA_DATA_URL", raising=False)


def check_same(data, make, number):
    assert list(data.ids) == ["c0", "c1"]
    for i, n in enumerate((3, 5)):
        got, expected = data.examples(f"c{i}"), make(n, 10 * number + i)
        assert data.num_examples(f"c{i}") == n
        assert set(got) == set(expected)
        for name, array in expected.items():
            assert got[name].dtype == array.dtype, name
            np.testing.assert_array_equal(got[name], array)


MAKERS = {
    "fed_emnist": tiny.emnist,
    "fed_emnist_digitsonly": lambda n=3, seed=0: tiny.emnist(n, seed, classes=10),
    "fed_cifar100": tiny.cifar,
    "stackoverflow": tiny.posts,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("form", ["loose", "in a folder", "archive", "sqlite", "sqlite.lzma"])
def test_every_form_gives_the_same_arrays(tmp_path, name, form):
    where, make = tmp_path / "data", MAKERS[name]
    where.mkdir()
    splits = list(DATA_SETS[name].files)
    if form.startswith("sqlite"):
        file, names = DATA_SETS[name].sqlite
        tiny.sqlite(where / file, [names[split] for split in splits], make)
        if form == "sqlite.lzma":
            packed = lzma.compress((where / file).read_bytes(), lzma.FORMAT_ALONE)
            (where / f"{file}.lzma").write_bytes(packed)
            (where / file).unlink()
    else:
        home = {"loose": where, "in a folder": where / name, "archive": tmp_path / "made"}[form]
        tiny.hdf5(home, name, make, splits)
        if form == "archive":
            tiny.archive(where / f"{name}.tar.bz2", *home.glob("*.h5"))
    path = find_dataset(name, where)
    assert path is not None
    assert path.is_relative_to(where)
    assert not (tmp_path / "cache").exists()  # nothing was unpacked to look
    opened = open_dataset(name, where)
    check_same(opened.train, make, splits.index("train"))
    check_same(opened.test, make, splits.index("test"))
    if "held_out" in splits:
        check_same(opened.validation, make, splits.index("held_out"))
    else:
        assert opened.validation is None
    last = list(DATA_SETS[name].features)[-1]
    assert set(open_dataset(name, where, features=[last]).test.examples("c0")) == {last}


@pytest.mark.parametrize("folder", ["femnist", "leaf", "femnist/data"])
def test_leafs_json(tmp_path, folder):
    tiny.leaf(tmp_path / folder)
    assert find_dataset("fed_emnist", tmp_path) == tmp_path / folder
    opened = open_dataset("fed_emnist", tmp_path)
    check_same(opened.train, tiny.emnist, 0)
    check_same(opened.test, tiny.emnist, 1)


def test_places_are_looked_at_in_turn(tmp_path, monkeypatch):
    own, named, given = tmp_path / "home" / "fedpa", tmp_path / "named", tmp_path / "given"
    for number, where in enumerate((own, named, given)):
        tiny.hdf5(where, "fed_emnist", tiny.emnist, sizes=(1 + number,))
    assert open_dataset("fed_emnist").train.num_examples("c0") == 1
    monkeypatch.setenv("FEDPA_DATA", str(named))
    assert open_dataset("fed_emnist").train.num_examples("c0") == 2
    assert open_dataset("fed_emnist", given).train.num_examples("c0") == 3
    assert find_dataset("fed_emnist") == named / "fed_emnist_train.h5"


def test_missing_ones_say_where_and_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPA_DATA", str(tmp_path / "nowhere"))
    for name in ("fed_emnist", "fed_cifar100", "stackoverflow"):
        with pytest.raises(FedpaError) as caught:
            open_dataset(name)
        for words in (f"fedpa data get {name}", str(tmp_path / "nowhere"), str(tmp_path / "home")):
            assert words in str(caught.value)
        assert find_dataset(name) is None
    with refused("stackoverflow.word_count", "fedpa data get stackoverflow"):
        find_counts()


@pytest.mark.parametrize(
    ("call", "anchor"),
    [
        (lambda: open_dataset("femnist"), "data set = 'femnist'"),
        (lambda: open_dataset("cifar-100-binary"), "fed_cifar100"),
        (lambda: open_dataset("fed_emnist", seed=-1), "seed = -1"),
        (lambda: open_dataset("fed_emnist", features=["x"]), "pixels, label"),
        (lambda: open_dataset("fed_emnist", "/nowhere"), "data_dir = '/nowhere'"),
        (lambda: find_cifar(), "fedpa data get cifar-100-binary"),
    ],
)
def test_bad_requests_are_refused(call, anchor):
    with refused(anchor):
        call()


@pytest.mark.parametrize(
    ("make", "has"),
    [
        (tiny.cifar, "image uint8"),
        (
            lambda n, seed: {**tiny.emnist(n, seed), "pixels": np.zeros((n, 784), "f4")},
            "float32[784]",
        ),
        (lambda n, seed: {**tiny.emnist(n, seed), "label": np.zeros(n, "f4")}, "label float32"),
    ],
)
def test_files_of_another_data_set_are_refused(tmp_path, make, has):
    tiny.hdf5(tmp_path / "d", "fed_emnist", make)
    needed = "pixels float32[28, 28], label int32"
    with refused("fed_emnist", "client 'c0'", has, needed, kind=DataError):
        open_dataset("fed_emnist", tmp_path / "d")


def one_bad(good, **wrong):
    """Clients of which the last one has something else; only it is named."""

    def make(n, seed):
        return {**good(n, seed), **({key: of(n) for key, of in wrong.items()} if n == 5 else {})}

    return make


BAD = {
    "shape": (
        {"pixels": lambda n: np.zeros((n, 14, 14), "f4")},
        "pixels float32[28, 28]",
    ),
    "kind": ({"label": lambda n: np.zeros(n, "f4")}, "label float32"),
    "text": ({"label": lambda n: np.array(["a"] * n, object)}, "label text"),
    "NaN label": ({"label": lambda n: np.full(n, np.nan, "f4")}, "label float32"),
    "label": ({"label": lambda n: np.arange(58, 58 + n, dtype="i4")}, "label 62"),
    "less": (
        {"label": lambda n: np.arange(-1, n - 1, dtype="i4")},
        "label -1",
    ),
    "bytes": ({"pixels": lambda n: np.full((n, 28, 28), 255, "f4")}, "pixels 255.0"),
    "negative": (
        {"pixels": lambda n: np.full((n, 28, 28), -0.5, "f4")},
        "pixels -0.5",
    ),
    "NaN": ({"pixels": lambda n: np.full((n, 28, 28), np.nan, "f4")}, "pixels nan"),
}


@pytest.mark.parametrize(("wrong", "value"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("form", ["hdf5", "sqlite"])
def test_every_client_is_checked_when_it_is_read(tmp_path, form, wrong, value):
    make = one_bad(tiny.emnist, **wrong)
    if form == "hdf5":
        tiny.hdf5(tmp_path, "fed_emnist", make)
        file = "fed_emnist_train.h5"
    else:
        file = "emnist_all.sqlite"
        tiny.sqlite(tmp_path / file, ["all_train", "all_test"], make)
    data = open_dataset("fed_emnist", tmp_path).train
    assert len(data.examples("c0")["label"]) == 3
    with refused(str(tmp_path / file), "client 'c1'", value, kind=DataError):
        data.examples("c1")


def test_numbers_that_are_too_large_do_not_become_others(tmp_path):
    wrong = {"label": lambda n: np.full(n, 2**32 + 3)}
    names = ["all_train", "all_test"]
    tiny.sqlite(tmp_path / "emnist_all.sqlite", names, one_bad(tiny.emnist, **wrong))
    with refused("client 'c1'", "label 4294967299", kind=DataError):
        open_dataset("fed_emnist", tmp_path).train.examples("c1")
    wrong = {"image": lambda n: np.full((n, 32, 32, 3), 300)}
    names = ["train", "test"]
    tiny.sqlite(tmp_path / "cifar100.sqlite", names, one_bad(tiny.cifar, **wrong))
    with refused("client 'c1'", "image 300", kind=DataError):
        open_dataset("fed_cifar100", tmp_path).train.examples("c1")


def test_only_the_features_asked_for_are_checked(tmp_path):
    tiny.hdf5(tmp_path, "fed_emnist", one_bad(tiny.emnist, **BAD["bytes"][0]))
    data = open_dataset("fed_emnist", tmp_path, features=["label"]).train
    assert list(data.examples("c1")) == ["label"]


def test_clients_without_examples_are_empty_in_the_data_sets_form(tmp_path):
    nothing = {"pixels": np.zeros(0), "label": np.zeros(0)}
    for split in ("train", "test"):
        clients = [("a", nothing), ("b", tiny.emnist()), ("c", {})]
        write_hdf5(tmp_path / f"fed_emnist_{split}.h5", clients)
    data = open_dataset("fed_emnist", tmp_path).train
    for name in "ac":
        assert data.examples(name)["pixels"].shape == (0, 28, 28)
        assert data.examples(name)["label"].dtype == np.int32


def test_sqlite_of_another_data_set_is_refused(tmp_path):
    tiny.sqlite(tmp_path / "emnist_all.sqlite", ["all_train", "all_test"], tiny.cifar)
    with refused("fed_emnist", "client 'c0'", kind=DataError):
        open_dataset("fed_emnist", tmp_path)


def test_half_a_data_set_is_told(tmp_path):
    tiny.hdf5(tmp_path / "d", "fed_emnist", tiny.emnist)
    (tmp_path / "d" / "fed_emnist_test.h5").unlink()
    with refused("fed_emnist_test.h5", kind=DataError):
        open_dataset("fed_emnist", tmp_path / "d")


def test_what_is_found_can_be_opened_and_the_reverse(tmp_path):
    """Train in the data set's own folder, test beside it."""
    tiny.hdf5(tmp_path / "d" / "fed_emnist", "fed_emnist", tiny.emnist)
    own = tmp_path / "d" / "fed_emnist"
    (own / "fed_emnist_test.h5").rename(tmp_path / "d" / "fed_emnist_test.h5")
    check_same(open_dataset("fed_emnist", tmp_path / "d").train, tiny.emnist, 0)
    assert find_dataset("fed_emnist", tmp_path / "d") == own / "fed_emnist_train.h5"
    assert find_first(["fed_emnist"], tmp_path / "d") == "fed_emnist"


@pytest.fixture(name="small_deal")
def _small_deal(monkeypatch):
    """CIFAR-100 has 60,000 images; 900 are enough here."""
    monkeypatch.setattr(cifar, "CLIENTS", {"train": 6, "test": 3})


def test_cifar_is_dealt_once_for_each_seed_and_then_read_lazily(tmp_path, small_deal, monkeypatch):
    tiny.cifar_records(tmp_path / "d" / "cifar-100-binary")
    assert find_dataset("fed_cifar100", tmp_path / "d") == find_dataset(
        "cifar-100-binary", tmp_path / "d"
    )
    opened = open_dataset("fed_cifar100", tmp_path / "d")
    assert sizes(opened.train)[:4] == (6, 600, 100.0, 0.0)
    assert sizes(opened.test)[:4] == (3, 300, 100.0, 0.0)
    assert count_labels(opened.train, "label") == 100
    client = opened.train.examples(opened.train.ids[3])
    assert client["image"].dtype == np.uint8
    assert (client["coarse_label"] == client["label"] // 5).all()
    kept = list((tmp_path / "cache").rglob("fed_cifar100_*.h5"))
    assert len(kept) == 2
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "write_pachinko", None)  # not dealt again
        again = open_dataset("fed_cifar100", tmp_path / "d").train
    np.testing.assert_array_equal(again.examples(again.ids[3])["image"], client["image"])
    other = open_dataset("fed_cifar100", tmp_path / "d", seed=1).train
    assert not np.array_equal(other.examples(other.ids[3])["label"], client["label"])
    assert len(list((tmp_path / "cache").rglob("fed_cifar100_*.h5"))) == 4


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_deal_that_lost_a_file_is_made_again(tmp_path, small_deal, split):
    tiny.cifar_records(tmp_path / "d")
    before = open_dataset("fed_cifar100", tmp_path / "d").test.examples("1")["label"]
    (lost,) = (tmp_path / "cache").rglob(f"fed_cifar100_{split}.h5")
    lost.unlink()
    again = open_dataset("fed_cifar100", tmp_path / "d").test.examples("1")["label"]
    np.testing.assert_array_equal(again, before)
    assert {path.name for path in lost.parent.glob("*.h5")} == set(
        DATA_SETS["fed_cifar100"].files.values()
    )
    assert len(list(lost.parent.parent.iterdir())) == 1


def test_a_deal_on_a_full_disk_is_told_and_leaves_nothing(tmp_path, small_deal):
    tiny.cifar_records(tmp_path / "d")
    with tiny.small_disk(), refused("File too large"):
        open_dataset("fed_cifar100", tmp_path / "d")
    assert not list((tmp_path / "cache").rglob("*.h5"))


def test_the_original_partition_is_preferred_to_a_deal_of_ours(tmp_path, monkeypatch):
    tiny.cifar_records(tmp_path / "d" / "cifar-100-binary")
    monkeypatch.setenv("FEDPA_DATA", str(tmp_path / "d"))
    tiny.hdf5(tmp_path / "home" / "fedpa", "fed_cifar100", tiny.cifar)
    assert list(open_dataset("fed_cifar100").train.ids) == ["c0", "c1"]


def test_a_deal_that_fails_leaves_nothing(tmp_path, small_deal):
    tiny.cifar_records(tmp_path / "d", per_label=(6, 1))  # too few to test
    with refused("300 examples", "100"):
        open_dataset("fed_cifar100", tmp_path / "d")
    assert not list((tmp_path / "cache").rglob("*.h5"))


def test_urls(monkeypatch):
    (emnist,) = DATA_SETS["fed_emnist"].archives
    (records,) = DATA_SETS["cifar-100-binary"].archives
    assert get_url(emnist) == BASE + "fed_emnist.tar.bz2"
    assert get_url(records) == "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
    monkeypatch.setenv("FEDPA_DATA_URL", "https://mirror.example/a")
    assert get_url(records) == "https://mirror.example/a/cifar-100-binary.tar.gz"
    assert get_url(emnist, "http://other/") == "http://other/fed_emnist.tar.bz2"
    monkeypatch.setenv("FEDPA_DATA_URL", "here")
    with refused("FEDPA_DATA_URL = 'here'"):
        get_url(emnist)


def test_every_archive_has_a_checksum():
    for dataset in DATA_SETS.values():
        for archive in dataset.archives:
            kind, value = archive.checksum.split(":")
            assert len(value) == {"sha256": 64, "md5": 32}[kind]
            assert int(value, 16)


@needs_data
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fed_emnist_digitsonly", [(836, 61_597), (836, 8_403)]),
        ("stackoverflow", [(3_413, 116_047), (439, 19_513), (676, 28_200)]),
        ("fed_cifar100", [(500, 50_000), (100, 10_000)]),
    ],
)
def test_real_data(name, expected):
    opened = open_dataset(name, REAL)
    assert [sizes(data)[:2] for data in opened if data is not None] == expected
    for data in (opened.train, opened.test):
        for client in (data.ids[0], data.ids[-1]):
            assert len(next(iter(data.examples(client).values()))) == data.num_examples(client)


@needs_data
def test_real_counts():
    words, tags = find_counts(REAL)
    assert words.read_text().splitlines()[1].split()[0] == "the"
    assert tags.read_text().startswith("{")


def test_files_are_in_tffs_layout(tmp_path):
    tiny.hdf5(tmp_path / "d", "fed_emnist", tiny.emnist)
    with h5py.File(tmp_path / "d" / "fed_emnist_train.h5") as file:
        assert file["examples/c1/pixels"].shape == (5, 28, 28)
