"""`KeyTable` and `GroupedAggregate` against a dictionary of lists."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, UnsupportedVersion
from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses import Count, Distinct, GroupedAggregate, Quantile, from_bytes
from edgewater.synopses.encoding import codec
from edgewater.synopses.key_table import KeyTable
from edgewater.synopses.registry import function_named
from tests.examples import examples

pytestmark = pytest.mark.slow

KEY_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["", "a", "b", "ä", "日本", "a\0", "x" * 40]) | st.text(max_size=3),
    "int64": st.integers(-2, 2) | st.sampled_from([-(1 << 63), (1 << 63) - 1, 0]),
    "float64": st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324]),
    "bool": st.booleans(),
}
MEASURES = {"n": ("count", None), "total": ("sum", "int64"), "low": ("min", "float64"), "mean": ("mean", "float64"),
            "kinds": ("distinct", "string"), "q": ("quantiles", "float64")}  # fmt: skip


def bits(value: Any) -> Any:
    """Returns the key in the table's sense of equality: all nulls, all NaNs and all zeros are one key each."""
    if isinstance(value, float):
        return "nan" if value != value else struct.pack("<d", value + 0.0)
    return value


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[str, ...], list[list[tuple[Any, ...]]]]:
    """Generates types of 1 to 4 key columns, and batches of rows with nulls."""
    types = tuple(draw(st.lists(st.sampled_from(sorted(KEY_VALUES)), min_size=1, max_size=4)))
    row = st.tuples(*(KEY_VALUES[t] | st.none() for t in types))
    return types, draw(st.lists(st.lists(row, max_size=25), max_size=4))


def columns(types: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([r[i] for r in rows], COLUMN_TYPES[t]) for i, t in enumerate(types)]


@examples(300)
@given(tables())
def test_equal_rows_get_equal_codes_in_order_of_first_appearance(given: Any) -> None:
    types, batches = given
    table, model = KeyTable(tuple(COLUMN_TYPES[t] for t in types)), {}
    for rows in batches:
        codes = table.encode(columns(types, rows), len(rows))
        expected = [model.setdefault(tuple(map(bits, row)), len(model)) for row in rows]
        # The table may number the new rows of a batch in any order; the partition must be the same.
        assert codes.dtype == np.int64 and len(codes) == len(rows)
        assert len(set(zip(codes.tolist(), expected, strict=True))) == len(set(expected)) == len(set(codes.tolist()))
        assert len(table) == len(model)
        model.update(zip([tuple(map(bits, row)) for row in rows], codes.tolist(), strict=True))
    assert sorted(model.values()) == list(range(len(table)))
    back = list(zip(*(c.to_pylist() for c in table.rows()), strict=True))
    assert [tuple(map(bits, row)) for row in back] == sorted(model, key=model.__getitem__)
    order = np.arange(len(table))[::-1]
    assert [c.to_pylist() for c in map(bits_of, table.rows(order))] == [
        c.to_pylist()[::-1] for c in map(bits_of, table.rows())
    ]


def bits_of(column: pa.Array) -> pa.Array:
    return pa.array([None if v is None else repr(bits(v)) for v in column.to_pylist()])


def test_few_integers_beside_many_groups_get_the_codes_of_a_dictionary() -> None:
    table, model, rng = KeyTable((pa.int64(),)), {}, np.random.default_rng(1)
    limits = np.iinfo(np.int64)
    for number in range(60):
        keys = rng.integers(-3000, 3000, 2000 if number % 20 == 0 else 30)
        keys[:2] = limits.min, limits.max
        column = pa.array([None, *keys.tolist()] if number > 40 else keys)
        codes = table.encode([column], len(column))
        for key, code in zip(column.to_pylist(), codes.tolist(), strict=True):
            assert model.setdefault(key, code) == code
        assert sorted(model.values()) == list(range(len(table)))
    assert table.rows()[0].to_pylist() == sorted(model, key=model.__getitem__)


def test_without_key_columns_there_is_one_group() -> None:
    table = KeyTable(())
    assert table.encode([], 0).tolist() == [] and len(table) == 0
    assert table.encode([], 3).tolist() == [0, 0, 0] and len(table) == 1
    assert table.encode([], 2).tolist() == [0, 0] and len(table) == 1
    assert table.rows() == []


def test_a_hundred_thousand_groups_of_three_columns() -> None:
    rng = np.random.default_rng(1)
    table, seen = KeyTable((pa.string(), pa.int64(), pa.float64())), {}
    for _ in range(3):
        raw = rng.integers(0, 60, (60_000, 3))
        keys = [pa.array(raw[:, 0].astype(str)), pa.array(raw[:, 1]), pa.array(raw[:, 2] / 8)]
        for key, code in zip(map(tuple, raw.tolist()), table.encode(keys, len(raw)).tolist(), strict=True):
            assert seen.setdefault(key, code) == code
    assert len(table) == len(seen) == len(set(seen.values()))
    assert table.nbytes < 40 * len(table)


def empty(types: tuple[str, ...], names: tuple[str, ...] = tuple(MEASURES)) -> GroupedAggregate:
    stacks = {}
    for name in names:
        function = function_named(MEASURES[name][0])
        assert function is not None
        argument = MEASURES[name][1]
        stacks[name] = function.make(
            function.read_parameters([], {}, name), COLUMN_TYPES[argument] if argument else None
        )
    return GroupedAggregate({f"k{i}": COLUMN_TYPES[t] for i, t in enumerate(types)}, stacks)


values = st.tuples(
    st.none() | st.integers(-(1 << 40), 1 << 40),
    st.none() | st.floats(-1e6, 1e6),
    st.none() | st.sampled_from(["x", "y", "zz"]),
)


@st.composite
def records(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[list[Any], list[Any]]]]:
    types, batches = draw(tables())
    return types, [(rows, draw(st.lists(values, min_size=len(rows), max_size=len(rows)))) for rows in batches]


def update(aggregate: GroupedAggregate, types: tuple[str, ...], rows: list[Any], given: list[Any]) -> np.ndarray:
    integer, real, text = (
        pa.array([v[i] for v in given], t) for i, t in enumerate((pa.int64(), pa.float64(), pa.string()))
    )
    arguments = {"n": None, "total": integer, "low": real, "mean": real, "kinds": text, "q": real}
    return aggregate.update(columns(types, rows), arguments, len(rows))


def check(aggregate: GroupedAggregate, model: dict[Any, list[Any]]) -> None:
    keys = [tuple(map(bits, row)) for row in zip(*(c.to_pylist() for c in aggregate.rows()), strict=True)]
    assert sorted(map(repr, keys)) == sorted(map(repr, model))
    answers = {name: aggregate.query(name) for name in MEASURES}
    extremes = aggregate.query("q", Quantile(1.0))
    for group, key in enumerate(keys):
        integers, reals, texts = ([v for v in column if v is not None] for column in zip(*model[key], strict=True))
        assert answers["n"][group].value == len(model[key])
        assert answers["total"].value[group] == sum(integers) if integers else math.isnan(answers["total"].value[group])
        assert round(answers["kinds"].value[group]) == len(set(texts))
        if reals:
            assert answers["low"].value[group] == min(reals) and extremes.value[group] == max(reals)
            assert answers["mean"].value[group] == pytest.approx(sum(reals) / len(reals), rel=1e-9, abs=1e-6)
        else:
            assert all(math.isnan(answers[m].value[group]) for m in ("low", "mean", "q"))


@pytest.mark.nightly
@examples(150)
@given(records(), st.integers(0, 4))
def test_groups_equal_a_dictionary_of_lists(given: Any, cut: int) -> None:
    types, batches = given
    model: dict[Any, list[Any]] = {}
    whole, left, right = empty(types), empty(types), empty(types)
    for i, (rows, data) in enumerate(batches):
        codes = update(whole, types, rows, data)
        assert codes.shape == (len(rows),)
        update(left if i < cut else right, types, rows, data)
        for row, value in zip(rows, data, strict=True):
            model.setdefault(tuple(map(bits, row)), []).append(value)
    check(whole, model)
    assert whole.records == sum(len(rows) for rows, _ in batches)
    both = left.merge_many([right])
    check(both, model)
    assert both.records == whole.records
    again = GroupedAggregate.from_bytes(both.to_bytes())
    check(again, model)
    assert again.to_bytes() == both.to_bytes() and again.records == both.records
    backwards = np.arange(len(whole))[::-1]
    check(whole.take(backwards), model)


def small() -> GroupedAggregate:
    aggregate = empty(("string", "int64"))
    rows = [("a", 1), ("b", None), (None, 1), ("a", 1)]
    update(aggregate, ("string", "int64"), rows, [(1, 0.5, "x"), (None, None, None), (5, -2.0, "y"), (2, 1.5, "x")])
    return aggregate


def test_a_null_argument_does_not_change_the_measure_but_counts_the_record() -> None:
    aggregate = small()
    assert aggregate.query("n").value.tolist() == [2, 1, 1]
    np.testing.assert_array_equal(aggregate.query("total").value, [3, np.nan, 5])
    assert aggregate.query("kinds", Distinct(0.9)).confidence == 0.9


def test_merging_returns_the_codes_of_the_other_aggregate_and_does_not_change_it() -> None:
    left, right = small(), empty(("string", "int64"))
    update(right, ("string", "int64"), [("new", 7), ("a", 1)], [(1, 1.0, "q"), (1, 1.0, "q")])
    before = right.to_bytes()
    assert left.merge(right).tolist() == [3, 0]
    assert right.to_bytes() == before
    assert left.query("n").value.tolist() == [3, 1, 1, 1] and left.records == 6
    assert left.merge_many([right]).records == 8


def test_reset_groups_keep_their_codes() -> None:
    aggregate = small()
    aggregate.reset(np.array([0]))
    assert len(aggregate) == 3 and aggregate.query("n").value.tolist() == [0, 1, 1]
    codes = update(aggregate, ("string", "int64"), [("a", 1)], [(9, 9.0, "x")])
    assert codes.tolist() == [0] and aggregate.query("total").value[0] == 9


def test_properties_are_those_that_all_measures_have() -> None:
    linear = empty((), ("n", "total")).properties
    assert linear.linear and not linear.idempotent
    assert empty((), ("low", "kinds")).properties.idempotent
    mixed = empty((), ("n", "kinds")).properties
    assert not (mixed.linear or mixed.idempotent) and mixed.mergeable and not mixed.ordered


def test_other_keys_measures_and_functions_do_not_merge_and_both_are_named() -> None:
    with pytest.raises(IncompatibleSynopses):
        empty(("string",)).merge(empty(("int64",)))
    with pytest.raises(IncompatibleSynopses):
        empty((), ("n",)).merge(empty((), ("low",)))
    swapped = GroupedAggregate({}, {"n": empty((), ("low",)).measures["low"]})
    with pytest.raises(IncompatibleSynopses):
        empty((), ("n",)).merge(swapped)


def test_any_truncation_and_any_flipped_bit_is_corrupt() -> None:
    data = small().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            GroupedAggregate.from_bytes(data[:length])
    for at in range(len(data)):
        with pytest.raises(CorruptSynopsis):
            from_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


def test_inconsistent_bytes_are_corrupt() -> None:
    good = small().to_message()

    def broken(change: Any) -> Any:
        message = type(good)()
        message.CopyFrom(good)
        change(message)
        return message

    twice = codec.encode_keys(pa.array(["a", "b", "a"])), codec.encode_keys(pa.array([1, 2, 1]))
    cases = {
        "lack keys or measures": lambda m: setattr(m, "parameters", '{"keys": [["k", "decimal"]], "measures": []}'),
        "states for the measures": lambda m: m.parts.pop(),
        "two groups have the same key": lambda m: [m.arrays[i].CopyFrom(a) for i, a in enumerate(twice)],
        r"keys \(groups=3\)": lambda m: m.arrays[0].CopyFrom(codec.encode_keys(pa.array(["a"]))),
        r"keys \(groups=7\)": lambda m: m.arrays[2].CopyFrom(codec.encode(np.array([7]))),
        "where the key k0 is string": lambda m: m.arrays[0].CopyFrom(codec.encode_keys(pa.array([1, 2, 3]))),
        "number of groups": lambda m: m.arrays[2].CopyFrom(codec.encode(np.zeros(0, np.int64))),
    }
    for change in cases.values():
        with pytest.raises(CorruptSynopsis):
            GroupedAggregate.from_message(broken(change))
    with pytest.raises(UnsupportedVersion):
        GroupedAggregate.from_message(broken(lambda m: setattr(m, "version", 2)))
    with pytest.raises(UnsupportedVersion):
        GroupedAggregate.from_message(broken(lambda m: setattr(m.parts[0], "kind", "haar")))


def test_an_aggregate_round_trips_as_bytes() -> None:
    again = from_bytes(small().to_bytes())
    assert isinstance(again, GroupedAggregate)
    assert again.key_names == ("k0", "k1") and again.query("n", Count()).value.tolist() == [2, 1, 1]
    assert again.nbytes > 0 and again.records == 4


def test_an_aggregate_of_many_sparse_sketches_takes_few_bytes() -> None:
    aggregate = GroupedAggregate({"k": pa.int64()}, {"d": function_named("distinct").make((), None)})  # type: ignore[union-attr]
    keys, users = pa.array(np.arange(20_000) % 5000), pa.array([f"u{i}" for i in range(20_000)])
    aggregate.update([keys], {"d": users}, 20_000)
    assert len(aggregate.to_bytes()) < 5000 * 40
