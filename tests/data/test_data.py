import time
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data import FederatedData, dirichlet_label_skew, federated, from_mapping
from fedpa.data.federated import check_when_read
from fedpa.experiments.tasks import TaskOptions, task_named
from tests.refusals import refused
from tests.strategies import label_sequences


def client(n=3, value=1.0):
    return {"x": np.full((n, 2), value, np.float32), "y": np.zeros(n, np.int32)}


def test_order_of_the_mapping_does_not_matter():
    one, other = (
        from_mapping({"b": client(1), "a": client(2)}),
        from_mapping({"a": client(2), "b": client(1)}),
    )
    assert list(one.ids) == list(other.ids) == ["a", "b"]
    assert one.num_examples("a") == 2


def test_ids_may_be_numbers():
    assert list(from_mapping({1: client(), 10: client()}).ids) == ["1", "10"]


@pytest.mark.parametrize(
    ("clients", "anchors"),
    [
        ({}, ["clients"]),
        ({1: client(), "1": client()}, ["clients", "ids"]),
        ({"a": client(0)}, ["client"]),
        ({"a": client(3), "b": client(3, np.nan)}, ["client 'b'", "x[0, 0] = nan"]),
        ({"a": client(3, np.inf)}, ["client 'a'", "x[0, 0] = inf"]),
        ({"a": {"x": np.ones((3, 2)), "y": np.ones(4)}}, ["client 'a'"]),
        ({"a": {"x": np.ones(3)}, "b": {"x": np.ones((3, 2))}}, ["client 'b'"]),
        ({"a": {"x": np.ones(3)}, "b": {"z": np.ones(3)}}, ["client 'b'"]),
        ({"a": {"x": np.ones(3)}, "b": {"x": np.ones(3, np.int32)}}, ["client 'b'"]),
        ([client()], ["clients", "list"]),
        ({"a": {"x": np.array(["u", object()], object)}}, ["client 'a'", "x", "object"]),
        ({"a": {"x": np.array(["u", "v"])}}, ["client 'a'", "x", "<U1"]),
        ({"a": {"x": [[1.0, 2.0]] * 500}}, ["client 'a'", "x.0.0", "float"]),
        ({"a": {"x": np.full(3, np.nan, ml_dtypes.bfloat16)}}, ["client 'a'", "x[0] = nan"]),
        (
            {"c": client(), "bad": {"x": np.ones((3, 2), np.float32)}, "d": client()},
            ["client 'bad'"],
        ),
        ({"a": {"x": np.array(1.0)}}, ["client 'a'"]),
        ({"a": {}}, ["client 'a'"]),
        (
            {"a": {"y": np.arange(3)}, "b": {"y": np.array([0, 2**40 + 7])}},
            ["client 'b'", "y[1] = 1099511627783", "-2147483648", "2147483647"],
        ),
        ({"a": {"y": np.array([2**32], np.uint64)}}, ["client 'a'", "y[0] = 4294967296"]),
        ({"a": {"y": np.array([1.0, 1e300])}}, ["client 'a'", "y[1] = 1e+300"]),
        ({"a": {"y": np.ones(2, np.complex64)}}, ["client 'a'", "y", "complex64"]),
        ({"a": {"y": np.ones(2, "m8[s]")}}, ["client 'a'", "y", "timedelta64"]),
        ({"a": {"y": np.ones(2, "M8[s]")}}, ["client 'a'", "y", "datetime64"]),
        ({"a": {"y": np.ones(2, np.longdouble)}}, ["client 'a'", "y", "float128"]),
        ({"a": {"y": np.ma.masked_equal([1.0, 2.0], 2.0)}}, ["client 'a'", "y"]),
        ({"a": {"y": jax.random.split(jax.random.key(0), 2)}}, ["client 'a'", "y", "key"]),
        (pd.DataFrame({"who": ["a"], "x": [1.0]}), ["DataFrame", "open_table(df, column)"]),
        ("clients.csv", ["str", "open_table(path, column)"]),
    ],
)
def test_bad_clients_are_refused(clients, anchors):
    with refused(*anchors):
        from_mapping(clients)


@pytest.mark.parametrize("packed", [True, False])
def test_one_bad_client_of_many_is_named(packed, monkeypatch):
    """Also where clients are looked through together, and some are empty."""
    if not packed:
        monkeypatch.setattr(federated, "PACKED_UP_TO", 0)
        monkeypatch.setattr(federated, "CHECKED_AT_ONCE", 100)
    sizes = [3, 0, 1, 0, 0, 4, 2, 0]
    for bad in (2, 5, 6):
        clients = {f"c{place}": client(n) for place, n in enumerate(sizes)}
        good = from_mapping(clients)
        assert (good.packed is not None) == packed
        for name, arrays in clients.items():
            assert good.num_examples(name) == len(arrays["y"])
            np.testing.assert_array_equal(good.examples(name)["x"], arrays["x"])
        clients[f"c{bad}"]["x"][-1, 1] = np.inf
        with refused(f"client 'c{bad}'", f"x[{sizes[bad] - 1}, 1] = inf"):
            from_mapping(clients)


def test_whole_numbers_of_64_bits_are_fine_where_jax_has_them():
    with jax.enable_x64(True):
        data = from_mapping({"a": {"y": np.array([2**40 + 7])}})
        assert data.examples("a")["y"].tolist() == [2**40 + 7]


def test_the_other_byte_order_and_short_types_are_fine():
    for dtype in (">f4", ">i8", "float16", "uint8", ml_dtypes.bfloat16, bool):
        arrays = {"x": np.ones(3, dtype)}
        lazy = FederatedData(["a"], lambda name: 3, {"a": arrays}.__getitem__)
        for data in (from_mapping({"a": arrays}), check_when_read(lazy)):
            assert jnp.asarray(data.examples("a")["x"]).sum() == 3


@pytest.mark.long
def test_a_million_clients_begin_soon():
    """The caller's arrays are not copied one by one."""
    clients = {str(place): {"x": np.ones((2, 3), np.float32)} for place in range(10**6)}
    tracemalloc.start()
    started = time.process_time()
    data = from_mapping(clients)
    seconds = time.process_time() - started
    assert len(data.ids) == 10**6
    assert tracemalloc.get_traced_memory()[1] < 3e8
    assert seconds < 30  # 3 s; much more while memory is traced
    tracemalloc.stop()


def test_widths_of_the_same_number_type_are_one():
    """JAX has float32 for both unless told otherwise."""
    from_mapping({"a": {"x": np.ones(2)}, "b": {"x": np.ones(2, np.float32)}})


@given(label_sequences(5, 60), st.data(), st.floats(0.01, 100), st.integers(0, 99))
def test_every_example_is_dealt_once(labels, data, concentration, seed):
    num = data.draw(st.integers(1, len(labels)), label="num_clients")
    dealt = dirichlet_label_skew(labels, num, concentration, seed)
    assert len(dealt) == num
    assert sorted(np.concatenate(dealt)) == list(range(len(labels)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_concentration_sets_the_skew():
    labels = np.random.default_rng(0).integers(0, 10, 3000)

    def kinds(concentration):
        dealt = dirichlet_label_skew(labels, 100, concentration, 0)
        return np.mean([len(np.unique(labels[rows])) for rows in dealt])

    assert kinds(0.1) < 5 < 9 < kinds(100.0)


@pytest.mark.parametrize(
    ("num", "concentration", "anchor"),
    [
        (0, 1.0, "num_clients = 0"),
        (200, 1.0, "num_clients = 200"),
        (5, 0.0, "concentration = 0.0"),
        (5, np.inf, "concentration = inf"),
    ],
)
def test_bad_partitions_are_refused(num, concentration, anchor):
    with refused(anchor):
        dirichlet_label_skew(np.zeros(100, int), num, concentration, 0)


def test_digits_are_a_skewed_federation_with_a_held_out_split():
    problem = task_named("digits").load(TaskOptions())
    assert len(problem.clients.ids) == 100
    sizes = [problem.clients.num_examples(name) for name in problem.clients.ids]
    assert sum(sizes) == 1437
    labels = [np.unique(problem.clients.examples(name)["y"]) for name in problem.clients.ids]
    assert np.mean([len(kinds) for kinds in labels]) < 4
