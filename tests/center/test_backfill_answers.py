"""What answers state about windows from before the registration: production's edge core, merge, ledger and API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from edge.core.events import BackfillEnded, BackfillIngested, SourcesOpened
from edgewater.base.timestamps import rfc3339
from tests.center.border_world import MINUTE, SOURCE, STREAM, T0, Border, Site


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


def backfill(site: Site, *times_ms: int) -> None:
    """The edge reads again the records that still exist."""
    (query,) = site.durable.core.queries
    times = pa.array(times_ms, pa.int64())
    batch = pa.RecordBatch.from_arrays([times, times], names=["x", "event_time_ms"])
    site.durable.ingest_backfill(BackfillIngested(query, SOURCE, batch, site.center.now_ms), None, {"row": 1})
    site.durable.handle(BackfillEnded(query, SOURCE))


def before_and_after(center: Border, replayable: bool = True) -> Site:
    """Records of three windows are read before the query is registered, and some of the third and fourth after it."""
    site = center.edge("a")
    site.durable.handle(SourcesOpened(((STREAM, SOURCE),), (SOURCE,) if replayable else ()))
    center.now_ms = T0 + 2 * MINUTE + 30_000
    site.accept(T0 + 1_000, T0 + 2_000, T0 + MINUTE + 1_000, T0 + 2 * MINUTE)
    center.register(since=rfc3339(T0))
    site.accept(T0 + 2 * MINUTE + 5_000)
    center.now_ms = T0 + 4 * MINUTE
    site.accept(T0 + 3 * MINUTE, T0 + 4 * MINUTE)
    return site


def stated(answer: Any) -> tuple[str, int, list[str], bool]:
    estimate = answer["data"][0]["n"]["estimate"] if answer["data"] else 0
    return answer["phase"], estimate, answer["quality"]["completeness"]["missing"], answer["contract"]["met"]


@pytest.mark.slow
def test_windows_before_the_registration_are_complete_once_their_records_have_been_read_again(center: Border) -> None:
    site = before_and_after(center)
    site.ship()
    assert center.fetch(f"/v1/queries/q/windows/{T0}").status_code == 404, "the backfill has not read it yet"
    backfill(site, T0 + 2 * MINUTE, T0 + 1_000, T0 + MINUTE + 1_000, T0 + 2_000)
    site.ship()
    answers = [stated(center.answer(T0 + n * MINUTE)) for n in range(4)]
    assert answers == [("final", n, [], True) for n in (2, 1, 2, 1)]


def test_a_window_whose_records_are_gone_says_so(center: Border) -> None:
    site = before_and_after(center)
    backfill(site, T0 + 1_000, T0 + 2_000, T0 + 2 * MINUTE)
    site.ship()
    assert [stated(center.answer(T0 + n * MINUTE)) for n in (0, 2, 3)] == [("final", n, [], True) for n in (2, 2, 1)]
    lacking = center.answer(T0 + MINUTE)
    assert stated(lacking) == ("final", 0, ["a"], False)
    (loss,) = lacking["quality"]["completeness"]["losses"]
    assert (loss["edge"], loss["source"], loss["reason"], loss["records"]) == ("a", SOURCE, "before-query", 1)


@pytest.mark.slow
def test_windows_of_a_source_that_cannot_be_read_again_say_so(center: Border) -> None:
    site = before_and_after(center, replayable=False)
    assert not site.durable.state.backfills
    site.ship()
    assert [stated(center.answer(T0 + n * MINUTE)) for n in range(4)] == [
        ("final", 0, ["a"], False),
        ("final", 0, ["a"], False),
        ("final", 1, ["a"], False),
        ("final", 1, [], True),
    ]
