"""Queries share what they compute of a batch, and each builds the frames that it would build alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, FunctionFailed, Ingested, PullEvent, QueryRefused, SourceEnded
from edge.core.shared_batch import MOST_KEPT, BatchRecords, Reading, Sharing
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.lookups import encode_rows
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.synopses import EncodedKeys, GroupedAggregate
from edgewater.wire import QueryRef
from tests.cores import drained, pulled
from tests.edge.recovery_world import values_of
from tests.edgewater.functions_world import Counting, install_functions

COLUMNS = {"k": pa.string(), "x": pa.float64()}
SECONDS: dict[str, object] = {"tumbling": "1s"}
SLIDING: dict[str, object] = {"sliding": "2s", "every": "500ms", "offset": "200ms"}
SPECS: list[dict[str, object]] = [
    {**where, "group_by": keys, "window": window}
    for where in ({}, {"where": "x > 0"})
    for keys, window in ((["k"], SECONDS), (["k"], SLIDING), (["x", "k"], SECONDS), ([{"k": "upper(k)"}], SECONDS))
]


def lookup(*halls: str) -> dict[str, object]:
    """The key `lookup` of a query, as an edge gets it."""
    rows = encode_rows(pa.table({"k": [f"k{number}" for number in range(len(halls))], "hall": halls}))
    return {"halls": {"key": "k", "columns": {"hall": "string"}, "key_type": "string", "version": 1, "rows": rows}}


SPECS += [
    {"where": "x > 0", "lookup": lookup(*halls), "group_by": ["hall"], "window": SECONDS} for halls in ("AB", "BA")
]


def spec(number: int, **parts: object) -> tuple[QueryRef, QuerySpec]:
    given = {"name": f"q{number}", "from": "s", "measures": {"n": "count()", "s": "sum(x)"}, "window": SECONDS}
    return QueryRef(f"q{number}", 1), QuerySpec.from_mapping({**given, **parts})


def batch(rows: int, seed: int, until_ms: int = 5_000) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    keys = pa.array([f"k{i}" for i in rng.integers(0, 30, rows)], mask=rng.random(rows) < 0.1)
    values = rng.choice([-0.0, 0.0, 1.5, 2.5, np.nan, -1.0], rows)
    return pa.record_batch({"k": keys, "x": values, TIME_COLUMN: rng.integers(until_ms - 1_500, until_ms, rows)})


def frames(queries: Sequence[tuple[QueryRef, QuerySpec]]) -> dict[QueryRef, list[bytes]]:
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 200)}, source=3)
    edge.handle(Configured(tuple(queries)))
    built: dict[QueryRef, list[bytes]] = {ref: [] for ref, _ in queries}
    for number in range(4):
        at_ms = 5_000 + 900 * number
        edge.handle(Ingested("s", "f", batch(400, number, at_ms), at_ms))
        pull = PullEvent(1 << 30, edge.pulls.event_times(at_ms), max_frames=len(queries))
        for frame in pulled(edge, pull):
            built[frame.query].append(frame.body)
    return built


@pytest.mark.slow
def test_what_is_shared_changes_no_frame() -> None:
    queries = [spec(number, **parts) for number, parts in enumerate(SPECS)]
    together = frames(queries)
    assert all(len(bodies) > 1 for bodies in together.values())
    for query in queries:
        assert frames([query])[query[0]] == together[query[0]]


def test_queries_with_versions_of_a_table_share_no_records() -> None:
    """Their conditions and keys are written in the same way."""
    parts: dict[str, object] = {"where": "hall = 'A'", "group_by": ["hall"]}
    queries = [spec(0, lookup=lookup("A", "B"), **parts), spec(1, lookup=lookup("B", "A"), **parts)]
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 200)})
    edge.handle(Configured(tuple(queries)))
    given = pa.record_batch({"k": ["k0", "k0", "k1", "k9", None], "x": [1.0] * 5, TIME_COLUMN: [4_000] * 5})
    edge.handle(Ingested("s", "f", given, 5_000))
    edge.handle(SourceEnded("s", "f"))
    counted = {
        frame.query.name: values_of(GroupedAggregate.from_bytes(partial.synopsis))
        for frame in drained(edge, PullEvent(1 << 30, {}))
        for partial in frame.unpack().partials
    }
    assert {name: {key: values["n"] for key, values in groups.items()} for name, groups in counted.items()} == {
        "q0": {"A": 2},
        "q1": {"A": 1},
    }


def test_a_lookup_without_its_rows_is_refused() -> None:
    (whole,) = spec(0, lookup=lookup("A"), group_by=["hall"])[1].lookups
    specs = [spec(n, lookup={"halls": replace(whole, rows=rows).to_mapping()}) for n, rows in enumerate(("", "eJw="))]
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 200)})
    effects = edge.handle(Configured(tuple(specs)))
    refused = [effect for effect in effects if isinstance(effect, QueryRefused)]
    assert ["lookup.halls.rows" in effect.message for effect in refused] == [True, True]


def records(bound: Sequence[BoundQuery], rows: int = 100) -> tuple[BatchRecords, list[Reading]]:
    readings = [Reading.of(each, number) for number, each in enumerate(bound)]
    given = batch(rows, 1)
    return BatchRecords.numbered(given, 7, Sharing.among(readings, given)), readings


def test_only_what_several_queries_need_is_kept() -> None:
    queries = [
        spec(0, where="x > 0", group_by=["k"]),
        spec(1, where="x > 0", group_by=["k"]),
        spec(2, where="x < 0", group_by=["x"]),
    ]
    first, second, other = bound = [query.bind(COLUMNS) for _, query in queries]
    all_, readings = records(bound)
    matching = all_.matching(first, readings[0])
    assert all_.matching(second, readings[1]) is matching
    assert matching.keys(first, readings[0]) is matching.keys(second, readings[1])
    assert matching.keys(other, readings[2]) is not matching.keys(other, readings[2])
    assert all_.matching(other, readings[2]) is not all_.matching(other, readings[2])
    assert matching.ids.tolist() == (7 + np.flatnonzero(all_.batch.column("x").to_numpy() > 0)).tolist()


def test_what_is_kept_is_bounded_by_the_size_of_the_batch() -> None:
    queries = [spec(2 * i + j, where=f"x > {-10 - i}", group_by=["k"]) for i in range(20) for j in range(2)]
    bound = [query.bind(COLUMNS) for _, query in queries]
    all_, readings = records(bound)
    found = [all_.matching(each, reading) for each, reading in zip(bound, readings, strict=True)]
    kept = {id(each): each for each in found[1::2] if any(each is other for other in found[::2])}
    assert 0 < sum(each.batch.nbytes for each in kept.values()) <= MOST_KEPT * all_.batch.nbytes
    assert [len(each) for each in found[::2]] == [len(each) for each in found[1::2]]


def test_a_condition_that_calls_a_users_function_is_not_shared_as_failures_count_by_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(x: float) -> float:
        raise ValueError("no")

    install_functions(monkeypatch, Counting(fail).named("broken"))
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 200)})
    keys: dict[str, object] = {"group_by": [{"bad": "broken(x) > 0"}]}
    queries = [spec(0, where="broken(x) > 0"), spec(1, where="broken(x) > 0"), spec(2, **keys), spec(3, **keys)]
    edge.handle(Configured(tuple(queries)))
    effects = edge.handle(Ingested("s", "f", batch(10, 1), 5_000))
    failed = [effect.query.name for effect in effects if isinstance(effect, FunctionFailed)]
    assert failed == ["q0", "q1", "q2", "q3"]


def test_a_computed_key_groups_records_by_the_value_of_its_expression() -> None:
    expression = "CASE WHEN x > 0 THEN lower(coalesce(k, 'none')) ELSE 'low' END || hour(event_time_ms)"
    query = spec(0, group_by=[{"k": expression}, "x > 0 OR (x <= 0)"], measures={"n": "count()", "s": "sum(x)"})
    given = batch(300, 4)
    edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 200)})
    edge.handle(Configured((query,)))
    edge.handle(Ingested("s", "f", given, 5_000))
    edge.handle(Ingested("s", "f", batch(1, 5, 9_000), 9_000))
    built = pulled(edge, PullEvent(1 << 30, edge.pulls.event_times(9_000), max_frames=9))
    counted: Counter[str] = Counter()
    for frame in built:
        for partial in frame.unpack().partials:
            groups = GroupedAggregate.from_bytes(partial.synopsis)
            counts = groups.measures["n"].query().value
            for key, count in zip(groups.rows()[0].to_pylist(), counts.tolist(), strict=True):
                counted[key] += count
    truth = Counter(((row["k"] or "none").lower() if row["x"] > 0 else "low") + "0" for row in given.to_pylist())
    assert counted == truth


def test_keys_that_were_encoded_once_are_looked_up_in_any_table() -> None:
    columns = [pa.array(["b", None, "a", "b"]), pa.array([1.0, float("nan"), -0.0, 1.0])]
    keys = EncodedKeys.of(columns, 4)
    assert keys.inverse.tolist() == [0, 1, 2, 0] and keys.counts.tolist() == [2, 1, 1]
    assert keys.distinct[0].to_pylist() == ["b", None, "a"]
