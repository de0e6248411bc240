from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout
from edgewater.synopses.sparse_cells import SparseCells, cell_fields, cell_keys, cells_of, groups_of

batches = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, (1 << 32) - 1) | st.integers(0, 5), st.integers(1, 9))),
    max_size=6,
)


def added(given: list[list[tuple[int, int, int]]], combine: np.ufunc) -> tuple[SparseCells, dict[tuple[int, int], int]]:
    cells, model = SparseCells(combine, np.int64), defaultdict(list)
    for batch in given:
        columns = np.array(batch, np.int64).reshape(-1, 3).T
        cells.add(cell_keys(columns[0], columns[1]), columns[2])
        for group, cell, value in batch:
            model[group, cell].append(value)
    return cells, {k: int(combine.reduce(v)) for k, v in model.items()}


def shown(keys: np.ndarray, values: np.ndarray) -> dict[tuple[int, int], int]:
    return dict(zip(zip(groups_of(keys).tolist(), cells_of(keys).tolist(), strict=True), values.tolist(), strict=True))


@given(batches, st.sampled_from([np.add, np.maximum]))
def test_cells_behave_as_a_dictionary(given: list, combine: np.ufunc) -> None:
    cells, model = added(given, combine)
    keys, values = cells.consolidated()
    assert (np.diff(keys) > 0).all() and shown(keys, values) == model
    assert cells.counts(5).tolist() == [sum(g == k for g, _ in model) for k in range(5)]


@given(batches, st.lists(st.integers(0, 4), max_size=6), st.sets(st.integers(0, 4)))
def test_groups_can_be_selected_in_any_order_and_dropped(given: list, chosen: list[int], gone: set[int]) -> None:
    cells, model = added(given, np.add)
    keys, values = cells.select(np.array(chosen, np.int64), 5)
    expected = {(i, c): v for i, group in enumerate(chosen) for (g, c), v in model.items() if g == group}
    assert shown(keys, values) == expected
    cells.drop(np.isin(np.arange(5), list(gone)))
    assert shown(*cells.consolidated()) == {k: v for k, v in model.items() if k[0] not in gone}


@given(batches)
def test_unpack_restores_packed_cells(given: list) -> None:
    cells, model = added(given, np.add)
    again = SparseCells(np.add, np.int64)
    again.unpack(*cells.pack(5))
    assert shown(*again.consolidated()) == model


def test_invalid_packed_cells_are_refused() -> None:
    good = (np.array([2, 1]), np.array([3, 9]), np.array([0, 4, 0]), np.array([1, 1, 1]))
    layout = Layout.of(*cell_fields("<i8"))
    SparseCells(np.add, np.int64).unpack(*layout.decode("cells", [codec.encode(array) for array in good]))
    bad = [
        (np.array([2, 2]), *good[1:]),
        (np.array([2, -1]), *good[1:]),
        (good[0], np.array([3]), *good[2:]),
        (good[0], np.array([3, -9]), *good[2:]),
        (*good[:2], np.array([0, 0, 0]), good[3]),
        (*good[:2], np.array([0, 1 << 40, 0]), good[3]),
        (*good[:3], np.array([1.0, 1.0, 1.0])),
    ]
    for arrays in bad:
        message = [codec.encode(array) for array in arrays]
        with pytest.raises((ValueError, CorruptSynopsis)):
            SparseCells(np.add, np.int64).unpack(*layout.decode("cells", message))


def test_cells_need_consolidation_when_the_runs_outgrow_the_sorted_array() -> None:
    cells = SparseCells(np.add, np.int64)
    while not cells.needs_consolidation:
        cells.add(np.arange(1000), np.ones(1000, np.int64))
    before = cells.nbytes
    assert cells.consolidated()[1].sum() > 10_000
    assert cells.nbytes == 16_000 < before and not cells.needs_consolidation
