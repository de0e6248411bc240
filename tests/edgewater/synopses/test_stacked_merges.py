"""Partials that are read as one stack merge to the bytes of merging one after the other."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from bench.hostile.synopses import FUNCTIONS, GROUP_BY, partial
from edgewater.base.errors import CorruptSynopsis
from edgewater.model.query import QuerySpec
from edgewater.synopses import CountStack, DDSketch, GroupedAggregate, HyperLogLog
from edgewater.synopses.encoding import codec
from edgewater.synopses.exact.aggregates import IntegerSumStack
from edgewater.synopses.registry import kind_named

ROWS = (60, 0, 1, 12, 200, 3)


def partials(call: str, group_by: tuple[str, ...]) -> list[bytes]:
    query = {"name": "q", "from": "s", "window": {"tumbling": "1s"}, "measures": {"m": call, "n": "count()"}}
    spec = QuerySpec.from_mapping({**query, "group_by": list(group_by)} if group_by else query)
    return [partial(spec, rows, seed) for seed, rows in enumerate(ROWS)]


@pytest.mark.parametrize("group_by", GROUP_BY)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bytes_are_those_of_merging_one_by_one(function: str, group_by: tuple[str, ...]) -> None:
    for call in FUNCTIONS[function]:
        each = partials(call, group_by)

        assert GroupedAggregate.merge_bytes(each) == GroupedAggregate.merge_one_by_one(each)


def test_a_key_that_is_no_bool_is_refused_in_a_stack_too() -> None:
    each = partials("count()", ("flag",))
    message = codec.unseal(each[0])
    message.arrays[0].data = b"\2" * len(message.arrays[0].data)
    with pytest.raises(CorruptSynopsis):
        GroupedAggregate.merge_bytes([codec.seal(message), *each[1:]])


@pytest.mark.parametrize("values", ["wide", "dense", "huge"])
def test_collapsed_dense_and_huge_states_too(values: str) -> None:
    rng = np.random.default_rng(1)
    each = []
    for seed in range(5):
        rows = 6_000
        of = {
            "wide": 10.0 ** rng.uniform(-300, 300, rows),
            "dense": rng.normal(size=rows),
            "huge": [1e300, -1e300] * 3_000,
        }
        stacks = {
            "q": DDSketch(0.002).stack.take(np.zeros(0, np.int64)),
            "d": HyperLogLog(4).stack.take(np.zeros(0, np.int64)),
        }
        float_sum = kind_named("float_sum")()
        aggregate = GroupedAggregate({"key": pa.int64()}, {**stacks, "s": float_sum})
        column = pa.array(of[values])
        aggregate.update([pa.array(rng.integers(0, 3, rows) + seed % 2)], dict.fromkeys("qds", column), rows)
        each.append(aggregate.to_bytes())

    assert GroupedAggregate.merge_bytes(each) == GroupedAggregate.merge_one_by_one(each)


def of_keys(keys: list[str], amount: int) -> bytes:
    aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack(), "t": IntegerSumStack()})
    values = {"n": None, "t": pa.array([amount] * len(keys), pa.int64())}
    aggregate.update([pa.array(keys, pa.string())], values, len(keys))
    return aggregate.to_bytes()


def test_sums_beyond_int64_carry() -> None:
    each = [of_keys(["a", "b"], amount) for amount in (1 << 62, 1 << 62, -(1 << 63), 1 << 62, 1 << 62, 1 << 62)]

    assert GroupedAggregate.merge_bytes(each) == GroupedAggregate.merge_one_by_one(each)


def test_faults_that_cancel_out_over_partials_are_found() -> None:
    honest = [of_keys(["a", "b"], 5) for _ in range(6)]
    broken = []
    for data, groups in zip(honest[2:4], (1, 3), strict=True):
        message = codec.unseal(data)
        message.arrays[-1].CopyFrom(codec.encode(np.array([groups])))  # 1 + 3 = 2 + 2
        broken.append(codec.seal(message))
    shifted = []
    for data, keys in zip(honest[2:4], ("abc", "d"), strict=True):  # "abc" of lengths 1, 1, and "d" too
        message = codec.unseal(data)
        message.arrays[0].data = keys.encode()
        shifted.append(codec.seal(message))
    twice = codec.unseal(honest[2])
    twice.arrays[0].data = b"aa"

    odd = codec.unseal(honest[2])  # its keys' bytes are those of the others
    odd.arrays[0].repeats.CopyFrom(codec.encode(np.array([1.0, 1.0])))

    for each in ([*honest, *broken], [*honest, *shifted], *([*honest, codec.seal(one)] for one in (twice, odd))):
        with pytest.raises(CorruptSynopsis, match="partial 7 of"):
            GroupedAggregate.merge_bytes(each)
