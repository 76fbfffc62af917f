"""Views of a federation: mapped, pooled, held out, read ahead."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data import FederatedData, from_mapping, map_examples
from fedpa.data.federated import check_when_read
from fedpa.data.readers.hdf5 import open_hdf5, write_hdf5
from fedpa.data.views import hold_out, pool_clients, read_ahead
from fedpa.errors import DataError
from tests.refusals import refused

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any)


def federation(numbers):
    start = np.cumsum([0, *numbers])
    return from_mapping(
        {f"{i:03d}": {"x": np.arange(start[i], start[i] + n)} for i, n in enumerate(numbers)}
    )


def rows(data):
    return [x for name in data.ids for x in data.examples(name)["x"].tolist()]


@given(sizes, st.integers(1, 5), st.integers(0, 3))
def test_pools_hold_every_example_once(numbers, clients, seed):
    data = federation(numbers)
    pools = pool_clients(data, clients, seed)
    assert sorted(rows(pools)) == sorted(rows(data))
    assert [pools.num_examples(name) for name in pools.ids] == [
        len(pools.examples(name)["x"]) for name in pools.ids
    ]
    assert len(pools.ids) == -(-len(numbers) // clients)
    assert rows(pool_clients(data, clients, seed)) == rows(pools)


@given(sizes, st.floats(0, 0.99))
def test_held_out_clients_are_others(numbers, share):
    data = federation(numbers)
    train, validation = hold_out(data, share)
    kept = [] if validation is None else list(validation.ids)
    assert sorted([*train.ids, *kept]) == list(data.ids)
    some = bool(share) and len(numbers) > 1
    assert len(kept) == (min(max(round(share * len(numbers)), 1), len(numbers) - 1) if some else 0)


def test_mapped_takes_the_first_examples_and_names_the_client():
    data = map_examples(
        federation([3, 1]), lambda name, raw: {"y": raw["x"] * 10, "who": name}, most=2
    )
    assert [data.num_examples(name) for name in data.ids] == [2, 1]
    found = data.examples("000")
    assert found["y"].tolist() == [0, 10]
    assert found["who"] == "000"


def lazy(read):
    """Clients a … e, lazily; `read` is told who is read, and by which thread."""

    def examples(name):
        read.append((name, threading.current_thread().name))
        if name == "e":
            raise OSError("no such luck")
        return {"x": np.ones(2)}

    return FederatedData(list("abcde"), lambda name: 2, examples)


def test_the_next_cohort_is_read_ahead_once_and_then_forgotten():
    read = []
    with read_ahead(lazy(read)) as reading:
        reading.announce(["a", "b"], ["b", "c"])
        for name in "abca":
            assert reading.data.examples(name)["x"].shape == (2,)
        assert [name for name, _ in read] == ["a", "b", "c"]
        assert all("reading" in thread for _, thread in read)
        reading.announce(["b", "c"], ["c"])
        reading.announce(["c"], ["a"])
        assert reading.data.examples("a") is not None
        assert [name for name, _ in read] == ["a", "b", "c", "a"]
    assert not [t for t in threading.enumerate() if "reading" in t.name]


def test_what_can_not_be_read_ahead_fails_when_it_is_used():
    with read_ahead(lazy([])) as reading:
        reading.announce(["a"], ["e"])
        assert reading.data.examples("a") is not None
        with pytest.raises(OSError, match="no such luck"):
            reading.data.examples("e")


def test_nothing_is_read_ahead_for_others():
    read = []
    with read_ahead(lazy(read), whole_cohort=False) as reading:
        reading.announce(["a"], ["b"])
        assert reading.data.examples("a") is not None
    assert [name for name, _ in read] == ["a"]


def test_a_bad_value_is_located_in_its_source(tmp_path):
    """Through views, too: by file and client."""
    path = tmp_path / "data.h5"
    clients = {name: {"x": np.arange(3.0), "y": np.arange(3)} for name in "ab"}
    clients["b"]["y"][2] = 2**33
    write_hdf5(path, clients.items())
    data = open_hdf5(path)
    for view in (data, map_examples(data, lambda name, raw: {"y": raw["y"]})):
        checked = check_when_read(view)
        assert len(checked.examples("a")["y"]) == 3
        with refused("data.h5", "client 'b'", f"y[2] = {2**33}", kind=DataError):
            checked.examples("b")
    with refused("data.h5", "client 'b'", f"= {2**33}", kind=DataError):
        check_when_read(pool_clients(data, 2, seed=0)).examples("pool-0")
