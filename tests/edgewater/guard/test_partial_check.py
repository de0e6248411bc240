"""What edges ship passes; what differs from the query is refused with the field, what it is and what is expected."""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, SynopsisError, UnsupportedVersion
from edgewater.base.streams import COLUMN_TYPES
from edgewater.guard.partial_check import PartialCheck, StackHeader
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding import codec
from edgewater.synopses.testing import Subject
from edgewater.synopses.testing.subject import GROUPS
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage
from tests.edgewater.synopses.battery import subjects

COLUMNS = {"word": pa.string(), "number": pa.int64(), "amount": pa.float64(), "flag": pa.bool_()}
KEYS = {
    "string": pa.array(["a", "", "日本", None, "x" * 300]),
    "int64": pa.array([1, -5, 1 << 60, None, 0]),
    "float64": pa.array([0.5, float("nan"), 1e300, None, 0.0]),
}


def shipped(subject: Subject, values: object, key: str = "string") -> bytes:
    """What an edge ships of a stack's groups."""
    aggregate = GroupedAggregate({"key": COLUMN_TYPES[key]}, {"m": subject.whole(values)})
    aggregate.table.encode([KEYS[key]], GROUPS)
    return aggregate.take(np.arange(GROUPS)).to_bytes()


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_whatever_a_stack_ships_passes(subject: Subject) -> None:
    check = PartialCheck({"key": None}, {"m": [StackHeader.of(subject.make())]})
    for key, values in zip(KEYS, (subject.few(), *reversed(subject.zoo().values())), strict=False):
        payload = shipped(subject, values, key)
        facts = check.check(payload)
        assert (facts.groups, facts.plain_bytes) == (GROUPS, len(payload))


def partial(spec: QuerySpec, rows: int = 200) -> bytes:
    bound = spec.bind(COLUMNS)
    rng = np.random.default_rng(3)
    batch = pa.record_batch(
        {
            "word": [f"w{i}" for i in rng.integers(0, 9, rows)],
            "number": rng.integers(-5, 50, rows),
            "amount": rng.normal(5, 2, rows),
            "flag": rng.random(rows) < 0.5,
            "event_time_ms": np.arange(rows),
        }
    )
    stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
    aggregate = GroupedAggregate(dict(zip(spec.group_by, bound.group_types, strict=True)), stacks)
    values = {m.measure.name: m.argument.array(batch) if m.argument else None for m in bound.measures}
    aggregate.update([batch.column(name) for name in spec.group_by], values, rows, times=np.arange(rows))
    return aggregate.take(np.arange(len(aggregate))).to_bytes()


SPEC = QuerySpec.from_mapping(
    {
        "name": "q", "from": "s", "group_by": ["word", "flag"], "window": {"tumbling": "1s"},
        "measures": {
            "n": "count()", "total": "sum(number)", "spread": "var(amount)", "most": "max(amount)",
            "users": "distinct(word, precision=8)", "latency": "quantiles(amount)", "ranks": "kll(amount, k=50)",
            "top": "top_k(word, 5)", "hits": "count_min(word, width=64, depth=3)", "seen": "bloom(word, bits=1024)",
            "cells": "cuckoo(number, buckets=16)", "sampled": "reservoir(word, 20)",
            "bins": "equi_width(amount, 0, 10)", "rows": "kmeans(number, amount, 3)",
        },
    }
)  # fmt: skip
HONEST = partial(SPEC)


@pytest.mark.parametrize("columns", [None, COLUMNS], ids=["types unknown", "types known"])
def test_what_a_query_s_functions_ship_passes(columns: dict[str, pa.DataType] | None) -> None:
    facts = PartialCheck.of(SPEC, columns).check(HONEST)
    assert facts.groups == len(GroupedAggregate.from_bytes(HONEST))
    assert facts.records == 0


def test_a_query_without_groups_has_one() -> None:
    spec = QuerySpec.from_mapping(
        {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}}
    )
    check = PartialCheck.of(spec)
    assert check.check(partial(spec)).groups == 1
    message = codec.unseal(partial(spec))
    numbers(message.arrays[0], [2])
    numbers(message.parts[0].arrays[0], [1, 1])
    with pytest.raises(CorruptSynopsis):
        check.check(codec.seal(message))


def changed(payload: bytes, change: Callable[[SynopsisMessage], object]) -> bytes:
    message = codec.unseal(payload)
    change(message)
    return codec.seal(message)


def numbers(array: object, values: list[int]) -> None:
    array.CopyFrom(codec.encode(np.array(values, np.int64)))  # type: ignore[attr-defined]


def part(message: SynopsisMessage, name: str) -> SynopsisMessage:
    return message.parts[[m.name for m in SPEC.measures].index(name)]


CHANGES: dict[str, tuple[Callable[[SynopsisMessage], object], type[SynopsisError]]] = {
    "kind": (lambda m: setattr(m, "kind", "count"), IncompatibleSynopses),
    "version": (lambda m: setattr(m, "version", 2), UnsupportedVersion),
    "records": (lambda m: setattr(m, "records", (1 << 64) - 1), CorruptSynopsis),
    "measures": (lambda m: m.parts.pop(), IncompatibleSynopses),
    "keys": (lambda m: setattr(m, "parameters", "{}"), IncompatibleSynopses),
    "depth": (lambda m: setattr(m, "parameters", "[" * 100_000), IncompatibleSynopses),
    "type of key": (
        lambda m: m.arrays[0].CopyFrom(codec.encode(np.arange(len(GroupedAggregate.from_bytes(HONEST))))),
        IncompatibleSynopses,
    ),
    "rank of key": (lambda m: m.arrays[1].shape.append(1), CorruptSynopsis),
    "kind of measure": (lambda m: setattr(part(m, "n"), "kind", "mean"), IncompatibleSynopses),
    "seed": (lambda m: setattr(part(m, "users"), "seed", 5), IncompatibleSynopses),
    "precision": (
        lambda m: setattr(part(m, "users"), "parameters", '{"precision":18}'), IncompatibleSynopses,
    ),
    "nested": (lambda m: part(m, "n").parts.add(), CorruptSynopsis),
    "groups": (lambda m: numbers(m.arrays[-1], [3]), CorruptSynopsis),
    "no groups": (lambda m: m.arrays[-1].Clear(), CorruptSynopsis),
    "negative count": (lambda m: numbers(part(m, "n").arrays[0], [-1] * 18), CorruptSynopsis),
    "large count": (lambda m: numbers(part(m, "n").arrays[0], [1 << 60] * 18), CorruptSynopsis),
    "a length beside a 0": (
        lambda m: (part(m, "n").arrays[0].shape.__setitem__(slice(None), [1 << 62, 0]),
                   setattr(part(m, "n").arrays[0], "data", b"")), CorruptSynopsis,
    ),
    "rows": (lambda m: numbers(part(m, "ranks").arrays[7], [1 << 29] * 18), CorruptSynopsis),
    "cells": (lambda m: numbers(part(m, "hits").arrays[2], [1 << 62] * 18), CorruptSynopsis),
    "variance": (
        lambda m: part(m, "ranks").arrays[2].CopyFrom(codec.encode(np.full(18, np.nan))), CorruptSynopsis,
    ),
    "text": (
        lambda m: setattr(m.arrays[0], "data", bytes(max(byte, 0xC3) for byte in m.arrays[0].data)),
        CorruptSynopsis,
    ),
    "bool": (lambda m: setattr(m.arrays[1], "data", b"\2" * 18), CorruptSynopsis),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_query_does_not_expect_is_refused(case: str) -> None:
    change, error = CHANGES[case]
    with pytest.raises(error):
        PartialCheck.of(SPEC, COLUMNS).check(changed(HONEST, change))


def test_types_of_arguments_are_those_of_the_stream_if_they_are_known() -> None:
    spec, of_floats = (
        QuerySpec.from_mapping({**SPEC.to_mapping(), "measures": {"total": f"sum({argument})"}})
        for argument in ("number", "amount")
    )
    PartialCheck.of(spec).check(partial(of_floats))
    with pytest.raises(IncompatibleSynopses):
        PartialCheck.of(spec, COLUMNS).check(partial(of_floats))


def test_states_of_a_fixed_size_are_bounded() -> None:
    """A sparse count-min of a few bytes per group takes its whole width in memory."""
    spec = QuerySpec.from_mapping(
        {"name": "q", "from": "s", "group_by": ["number"], "measures": {"m": "count_min(word)"},
         "window": {"tumbling": "1s"}}
    )  # fmt: skip
    message = codec.unseal(partial(spec, rows=1))
    groups = 144
    message.arrays[0].CopyFrom(codec.encode(np.arange(groups)))
    numbers(message.arrays[1], [groups])
    for at in (1, 2):
        numbers(message.parts[0].arrays[at], [0] * groups)
    for at in (3, 4, 5):
        numbers(message.parts[0].arrays[at], [])
    payload = codec.seal(message)
    assert len(payload) < 800
    with pytest.raises(CorruptSynopsis):
        PartialCheck.of(spec).check(payload)


def test_many_empty_messages_are_refused_before_they_are_parsed() -> None:
    body = codec.unseal(HONEST).SerializeToString() + b"\x3a\x00" * (1 << 16)
    with pytest.raises(CorruptSynopsis):
        PartialCheck.of(SPEC).check(resealed(body))


def resealed(body: bytes) -> bytes:
    return b"EWS1" + google_crc32c.value(body).to_bytes(4, "little") + body
