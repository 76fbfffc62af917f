"""Blocks: little padding, few shapes, everybody once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.engines.blocks import (
    MOST_CAPACITIES,
    WASTE,
    blocks,
    capacities,
    capacity_for,
    ladder,
)


def computed_padding(sizes, made):
    """The share of the computed examples that is padding."""
    computed = sum(block.lanes * max(sizes[block.members[0]], 1) for block in made)
    return 1 - sum(sizes) / max(computed, 1)


sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=80)


@given(sizes, st.integers(1, 64))
def test_everybody_once_within_capacity_and_waste(sizes, lanes):
    known = capacities(sizes)
    made = blocks(sizes, ladder(lanes), known)
    assert sorted(m for block in made for m in block.members) == list(range(len(sizes)))
    for block in made:
        inside = [sizes[m] for m in block.members]
        assert len(inside) <= block.lanes
        assert block.lanes in ladder(lanes)
        assert block.capacity in known
        assert max(inside) <= block.capacity
        used = sum(max(n, 1) for n in inside)
        assert block.lanes == 1 or used >= (1 - WASTE) * block.lanes * max(*inside, 1)


@given(sizes)
def test_capacities_are_few_and_hold_everybody(sizes):
    known = capacities(sizes)
    assert 1 <= len(known) <= MOST_CAPACITIES
    assert list(known) == sorted(set(known))
    assert max(sizes) <= known[-1] <= max(*sizes, 1) + 7
    assert all(n <= capacity_for(n, known) <= known[-1] for n in sizes)


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("clients", "lanes"), [(20, 10), (100, 50), (1000, 63)])
def test_a_lognormal_federation_computes_little_padding(spread, clients, lanes):
    """At most a quarter, the last, partial batch of every client (of 20) included."""
    rng = np.random.default_rng(0)
    population = np.ceil(rng.lognormal(np.log(150), spread, 20_000)).astype(int)
    known = capacities(population.tolist())
    shapes = set()
    for _ in range(20):
        sizes = rng.choice(population, clients, replace=False).tolist()
        made = blocks(sizes, ladder(lanes), known)
        shapes |= {(block.lanes, block.capacity) for block in made}
        assert computed_padding(sizes, made) <= 0.2
        steps = [-(-max(sizes[m] for m in block.members) // 20) for block in made]
        computed = sum(20 * step * block.lanes for step, block in zip(steps, made, strict=True))
        assert 1 - sum(sizes) / computed <= 0.25
    assert len(shapes) <= MOST_CAPACITIES * 3


def test_capacity_of_a_client_larger_than_announced():
    assert capacity_for(100, (8, 64)) == 104
