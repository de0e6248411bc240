"""Calendar windows from edges' records to the ledger's answers."""

from __future__ import annotations

import datetime
import zoneinfo
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from edge.core.events import Ingested, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.streams import TIME_COLUMN, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import GroupedAggregate
from tests.center.answer_world import REF
from tests.center.ledger.test_ledger import Center, close, edge_record
from tests.cores import drained, open_core

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
HOUR = 3_600_000


def midnight(month: int, day: int) -> int:
    return int((datetime.datetime(2026, month, 1, tzinfo=BERLIN) + datetime.timedelta(day - 1)).timestamp() * 1000)


def daily(**parts: Any) -> QuerySpec:
    return QuerySpec.from_mapping(
        {
            "name": "q", "from": "events", "measures": {"n": "count()", "total": "sum(value)"},
            "window": {"tumbling": "1 day", "zone": "Europe/Berlin"}, **parts,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("month", "day"), [(3, 27), (10, 23)])
@pytest.mark.parametrize("edges", [1, 2])
def test_days_of_23_and_25_hours_are_answered_with_the_records_of_the_day(month: int, day: int, edges: int) -> None:
    spec, rng = daily(), np.random.default_rng(month)
    begin, end = midnight(month, day), midnight(month, day + 5)
    truth: defaultdict[str, int] = defaultdict(int)
    ledger, position, answers = Ledger(AnswerMargin(0)), 0, []
    partials: defaultdict[int, list[bytes]] = defaultdict(list)
    ledger.handle(EdgesChanged(tuple(edge_record(f"e{n}") for n in range(edges))))
    ledger.handle(QueryRegistered(RegisteredQuery(REF, spec, begin, None)))
    for number in range(edges):
        core = open_core(
            StreamSpec({"value": pa.int64()}, disorder_ms=HOUR), (REF, spec), stream="events", number=number
        )
        times = np.sort(rng.integers(begin, end, 400))
        for chunk in np.array_split(times, 20):
            values = rng.integers(0, 100, len(chunk))
            for time, value in zip(chunk.tolist(), values.tolist(), strict=True):
                truth[str(datetime.datetime.fromtimestamp(time / 1000, BERLIN).date())] += value
            batch = pa.record_batch({"value": pa.array(values), TIME_COLUMN: pa.array(chunk)})
            core.handle(Ingested("events", "file", batch, int(chunk[-1])))
        core.handle(SourceEnded("events", "file"))
        for body in (frame.unpack() for frame in drained(core)):
            position += 1
            touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
            for partial in body.partials:
                partials[partial.slice_start_ms].append(partial.synopsis)
            summary = FrameSummary(
                REF, position, EdgeId(f"e{number}"), body.through_ms, body.closes, touched, 1, 0, "i1"
            )
            answers += ledger.handle(FramesMerged((summary,), end))
    found = {}
    for answer in answers:
        start = answer.window_start_ms
        merged = GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes(partials[start]))
        date = datetime.datetime.fromtimestamp(start / 1000, BERLIN)
        assert (date.hour, date.minute) == (0, 0) and answer.phase is Phase.FINAL
        found[str(date.date())] = int(merged.query("total").value[0])
    assert found == truth
    hours = sorted(int((spec.window.slice_end(a.window_start_ms) - a.window_start_ms) / HOUR) for a in answers)
    assert set(hours) == ({23, 24} if month == 3 else {24, 25})


def test_a_day_without_data_is_due_after_its_last_hour() -> None:
    center = Center("a", registered_at_ms=midnight(10, 25) + 1, window={"tumbling": "1 day", "zone": "Europe/Berlin"},
                    budget={"staleness": "1m"})  # fmt: skip
    center.says("a", midnight(10, 25), now_ms=midnight(10, 25) + 2)
    due = center.ledger.next_deadline()
    assert due is not None and midnight(10, 26) < due <= midnight(10, 26) + 60_000
    (answer,) = center.tick(midnight(10, 26) + 60_000)
    assert answer.window_start_ms == midnight(10, 25)
    following = center.ledger.next_deadline()
    assert following is not None and midnight(10, 27) < following <= midnight(10, 27) + 60_000


def test_a_month_is_answered_once_its_edges_have_closed_it() -> None:
    center = Center("a", window={"tumbling": "1 month", "zone": "Europe/Berlin"})
    assert center.says("a", midnight(3, 31), touched=(midnight(3, 1),)) == []
    (answer,) = center.says("a", midnight(4, 1), close(midnight(3, 1), 3))
    assert answer.window_start_ms == midnight(3, 1)
    assert center.ledger.handle(TimeAdvanced(midnight(4, 2))) == []
