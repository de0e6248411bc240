"""Bytes with a valid checksum that no edge writes are refused by an error of `edgewater.base.errors`, before more
memory than the bytes is taken."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import IncompatibleSynopses, SynopsisError
from edgewater.synopses import CountMin, GroupedAggregate, from_bytes, merge_bytes
from edgewater.synopses.encoding import codec
from edgewater.synopses.registry import function_named
from edgewater.wire.synopsis_pb2 import Array, Synopsis

FUNCTIONS = {
    "distinct": {"precision": 8}, "kll": {"k": 20}, "quantiles": {}, "reservoir": {"size": 8}, "count_min": {},
    "bernoulli": {"rate": 0.5, "limit": 1}, "top_k": {}, "cuckoo": {}, "bloom": {}, "sum": {},
    "equi_width": {"lo": 0, "hi": 9},
}  # fmt: skip


def partial(name: str) -> Synopsis:
    function = function_named(name)
    assert function is not None
    stack = function.make(function.read_parameters([], FUNCTIONS[name], "m"), pa.float64())
    aggregate = GroupedAggregate({"key": pa.int64()}, {"m": stack})
    aggregate.update([pa.array([1, 2, 1])], {"m": pa.array([1.5, 2.5, 3.5])}, 3)
    return codec.unseal(aggregate.take(np.arange(2)).to_bytes())


def refused(message: Synopsis, most_bytes: int = 1 << 20) -> str:
    data = codec.seal(message)
    GroupedAggregate.from_bytes(codec.seal(partial("sum")))  # what is cached is not the message's
    tracemalloc.start()
    try:
        with pytest.raises(SynopsisError) as caught:
            GroupedAggregate.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < most_bytes + 4 * len(data)
    finally:
        tracemalloc.stop()
    return str(caught.value)


def put(array: Array, *values: float, dtype: str = "<i8", shape: tuple[int, ...] | None = None) -> None:
    numbers = np.array(values, dtype)
    array.CopyFrom(codec.encode(numbers if shape is None else numbers.reshape(shape)))


def huge(array: Array, *shape: int) -> None:
    array.shape[:] = shape
    array.data = b""


def m(message: Synopsis) -> Synopsis:
    return message.parts[0]


ATTACKS: dict[str, tuple[str, Callable[[Synopsis], object]]] = {
    "brackets": ("sum", lambda s: setattr(s, "parameters", "[" * 100_000)),
    "few brackets": ("sum", lambda s: setattr(m(s), "parameters", "[" * 5_000)),
    "digits": ("distinct", lambda s: setattr(m(s), "parameters", '{"precision":' + "9" * 5_000 + "}")),
    "NaN": ("bernoulli", lambda s: setattr(m(s), "parameters", '{"rate":NaN,"limit":1}')),
    "type of a key": ("sum", lambda s: setattr(s, "parameters", '{"keys":[["key",["int64"]]],"measures":["m"]}')),
    "a length beside a 0": ("sum", lambda s: huge(m(s).arrays[0], 1 << 62, 0)),
    "a length beside a 0, first": ("distinct", lambda s: huge(m(s).arrays[6], 0, 1 << 62)),
    "key of two axes": ("sum", lambda s: put(s.arrays[0], 1, 2, shape=(2, 1))),
    "number of groups": ("sum", lambda s: put(s.arrays[1], 1 << 62)),
    "no axis": ("sum", lambda s: m(s).arrays[0].shape.pop()),
    "sparse HyperLogLog": ("distinct", lambda s: put(m(s).arrays[3], 1, 2, 3, shape=(3, 1))),
    "cells that wrap": ("distinct", lambda s: put(m(s).arrays[1], (1 << 62) + 3, (1 << 62), dtype="<u8")),
    "cells": ("distinct", lambda s: put(m(s).arrays[1], 1 << 40, 1)),
    "steps": ("distinct", lambda s: put(m(s).arrays[3], 1 << 62, 1 << 62, 0)),
    "values of a group": ("kll", lambda s: put(m(s).arrays[7], 1 << 61, 2)),
    "levels": ("kll", lambda s: put(m(s).arrays[9], 61, 0, 0, dtype="|u1")),
    "k": ("kll", lambda s: setattr(m(s), "parameters", '{"k":1e308}')),
    "NaN as variance": ("kll", lambda s: put(m(s).arrays[2], np.nan, 0, dtype="<f8")),
    "counts that wrap": ("quantiles", lambda s: put(m(s).arrays[10], *[(1 << 62) - 1] * 3)),
    "rows of a group": ("reservoir", lambda s: put(m(s).arrays[2], 1 << 62, 1)),
    "sample of two axes": ("reservoir", lambda s: put(m(s).arrays[4], 1, 2, 3, dtype="<f8", shape=(3, 1))),
    "no level": ("reservoir", lambda s: put(m(s).arrays[0])),
    "tags that no rate excludes": (
        "bernoulli",
        lambda s: (
            put(m(s).arrays[3], 2, 0), put(m(s).arrays[4], 0, 0, dtype="<u8"), put(m(s).arrays[5], 1, 2, dtype="<f8"),
        ),
    ),
    "counters of a group": ("top_k", lambda s: put(m(s).arrays[3], 1 << 62, 1)),
    "parts of a sum": ("sum", lambda s: put(m(s).arrays[1], *[0.5] * 200_000, dtype="<f8", shape=(100_000, 2))),
    "parts of a sum that overlap": (
        "sum", lambda s: put(m(s).arrays[1], *[1.0] * 64, dtype="<f8", shape=(32, 2))
    ),
    "a sum that overflows": ("sum", lambda s: put(m(s).arrays[1], 1.7e308, 1.7e308, dtype="<f8")),
    "a booleans": ("sum", lambda s: s.arrays.__getitem__(0).MergeFrom(Array(stored="|b1", data=b"\5\6"))),
    "width": ("count_min", lambda s: setattr(m(s), "parameters", '{"depth":32,"items":"float64","width":16777216}')),
    "bits": ("bloom", lambda s: setattr(m(s), "parameters", '{"bits":2147483648,"hashes":7,"items":"float64"}')),
    "buckets": ("cuckoo", lambda s: setattr(m(s), "parameters", '{"buckets":16777216,"items":"float64"}')),
    "bins": ("equi_width", lambda s: setattr(m(s), "parameters", '{"bins":1048576,"high":9.0,"low":0.0}')),
    "empty messages": ("sum", lambda s: [s.parts.add() for _ in range(1 << 14)]),
    "empty arrays": ("sum", lambda s: [m(s).arrays.add() for _ in range(1 << 14)]),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_bytes_that_no_edge_writes_are_refused_before_they_take_memory(attack: str) -> None:
    name, change = ATTACKS[attack]
    message = partial(name)
    change(message)
    refused(message)


def test_sparse_states_of_many_groups_are_refused_before_they_become_dense() -> None:
    message = partial("count_min")
    groups = 4_000
    put(message.arrays[0], *range(groups))
    put(message.arrays[1], groups)
    for at in (1, 2):
        put(m(message).arrays[at], *[0] * groups)
    for at in (3, 4, 5):
        put(m(message).arrays[at])
    assert "expected at most" in refused(message)


def test_a_sum_of_records_stops_at_the_largest_number_of_a_message() -> None:
    message = partial("sum")
    message.records = (1 << 64) - 1
    merged = GroupedAggregate.merge_bytes([codec.seal(message)] * 2)
    assert codec.unseal(merged).records == (1 << 64) - 1
    single = codec.unseal(CountMin(16, 1).to_bytes())
    single.records = (1 << 64) - 1
    assert codec.unseal(merge_bytes([codec.seal(single)] * 30)).records == (1 << 64) - 1


def test_many_messages_are_counted_before_they_are_parsed() -> None:
    body = b"\x32\x00" * (1 << 16)
    with pytest.raises(SynopsisError):
        from_bytes(b"EWS1" + google_crc32c.value(body).to_bytes(4, "little") + body)


def test_partials_that_are_large_in_memory_are_merged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [codec.seal(partial("count_min")) for _ in range(9)]
    at_once = GroupedAggregate.merge_bytes(parts)
    monkeypatch.setattr("edgewater.synopses.grouped._MERGE_BYTES", 1 << 23)
    tracemalloc.start()
    assert GroupedAggregate.merge_bytes(parts) == at_once
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * GroupedAggregate.from_bytes(parts[0]).nbytes


LARGEST: dict[str, Callable[[Synopsis], object]] = {
    "sum": lambda s: put(m(s).arrays[0], 1 << 62, 1),
    "kll": lambda s: put(m(s).arrays[1], 1 << 62, 0),
    "quantiles": lambda s: put(m(s).arrays[2], 1 << 62, 0),
    "top_k": lambda s: put(m(s).arrays[1], 1 << 62, 2),
    "equi_width": lambda s: put(m(s).arrays[4], (1 << 62) - 4, 1, 1),
}


@pytest.mark.parametrize("name", LARGEST)
def test_a_sum_that_could_not_be_read_again_is_refused(name: str) -> None:
    """Otherwise one partial would make those of all edges unreadable."""
    message = partial(name)
    LARGEST[name](message)
    largest = codec.seal(message)
    GroupedAggregate.from_bytes(largest)
    with pytest.raises(IncompatibleSynopses):
        GroupedAggregate.merge_bytes([largest] * 2)
    GroupedAggregate.merge_bytes([codec.seal(partial(name))] * 2)


@pytest.mark.parametrize("shape", [(0, 1 << 62), (1 << 40, 0), (1 << 20, 1 << 20, 0), (0,) * 65, (1,) * 65])
def test_an_array_without_numbers_has_a_shape_that_numpy_represents(shape: tuple[int, ...]) -> None:
    with pytest.raises(SynopsisError):
        codec.decode(
            Array(encoding=Array.FIXED, type="<i8", stored="<i8", shape=shape, data=bytes(8 * math.prod(shape)))
        )
    assert codec.decode(Array(encoding=Array.FIXED, type="<i8", stored="<i8", shape=(3, 0))).shape == (3, 0)
