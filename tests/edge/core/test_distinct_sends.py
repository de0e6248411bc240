"""Values that were counted before are not sent again, whenever the edge sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from tests.cores import drained, open_core
from tests.query_specs import query_spec

COLUMNS = {"country": pa.string(), "client": pa.int64()}


def new_core(measures: dict[str, str]) -> EdgeCore:
    spec = query_spec(group_by="country", window={"tumbling": "1h"}, measures=measures, cache={"eviction": "lru"})
    return open_core(StreamSpec(COLUMNS), (QueryRef("q", 1), spec))


def ingest(core: EdgeCore, countries: Sequence[str], clients: Sequence[int], at_ms: int) -> None:
    times = np.full(len(clients), at_ms)
    columns = {"country": pa.array(countries, pa.string()), "client": pa.array(clients, pa.int64())}
    core.handle(Ingested("s", "file", pa.record_batch({**columns, TIME_COLUMN: times}), 1 << 40))


def sent(core: EdgeCore, now_ms: int) -> list[bytes]:
    """Returns the partials that the core sends now, of its open slice too."""
    return [p.synopsis for frame in drained(core, PullEvent(1 << 20, {"s": now_ms})) for p in frame.unpack().partials]


def counts(partials: list[bytes]) -> dict[str, float]:
    merged = GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes(partials))
    return dict(zip(merged.rows()[0].to_pylist(), merged.query("d").value.tolist(), strict=True))


@pytest.mark.parametrize("precision", [4, 14])
def test_known_values_are_not_sent_again(precision: int) -> None:
    core = new_core({"d": f"distinct(client, precision={precision})"})
    countries, clients = ["US"] * 40 + ["DE"] * 3, [*range(40), 1, 2, 3]
    ingest(core, countries, clients, 1_000)
    first = sent(core, 1_800_000)
    assert [len(GroupedAggregate.from_bytes(one)) for one in first] == [2]

    ingest(core, countries, clients, 2_000)
    assert sent(core, 2_800_000) == []

    restored = new_core({"d": f"distinct(client, precision={precision})"})
    restored.restore(core.to_state())
    for each in (core, restored):
        ingest(each, ["US", "DE", "US"], [5, 4_711, 6], 3_000)
        (second,) = sent(each, 3_500_000)
        added = GroupedAggregate.from_bytes(second)
        assert added.rows()[0].to_pylist() == ["DE"]
        ingest(each, ["FR"], [1], 4_000)
        each.handle(SourceEnded("s", "file"))
        last = sent(each, 3_600_000)

        whole = new_core({"d": f"distinct(client, precision={precision})"})
        ingest(whole, [*countries, "US", "DE", "US", "FR"], [*clients, 5, 4_711, 6, 1], 1_000)
        whole.handle(SourceEnded("s", "file"))
        assert counts([*first, second, *last]) == counts(sent(whole, 3_600_000))


def test_a_count_beside_distinct_values_is_sent_without_the_known_values() -> None:
    core = new_core({"d": "distinct(client)", "n": "count()"})
    clients = list(range(2_000))
    ingest(core, ["US"] * 2_000, clients, 1_000)
    (first,) = sent(core, 1_800_000)
    ingest(core, ["US"] * 2_000, clients, 2_000)
    (second,) = sent(core, 3_500_000)
    assert len(second) < len(first) / 5
    merged = GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes([first, second]))
    assert merged.query("n").value.tolist() == [4_000]
    assert merged.query("d").value.tolist() == GroupedAggregate.from_bytes(first).query("d").value.tolist()
