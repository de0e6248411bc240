"""Versions of queries in the catalog: borders, ends, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from center.catalog import Catalog, Change, query_rows
from center.catalog.query_borders import BORDER_MARGIN_MS
from edgewater.base.errors import Conflict, InvalidQuery, InvalidRequest, PreconditionFailed
from edgewater.model.edge_records import HeartbeatRecord
from edgewater.model.window_range import WindowRange
from tests.center.catalog_world import JFK, hello, spec
from tests.refusals import refused

MINUTE = 60_000
NOW = 1_000 * MINUTE


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    yield catalog
    catalog.close()


def has_read(catalog: Catalog, through_ms: int) -> None:
    hello(catalog, now_ms=NOW)
    beat = HeartbeatRecord(JFK, {"flights": through_ms}, {"flights": 1}, {}, 0, 0.0, 0.0, 0.0, NOW)
    catalog.edges.record_heartbeats([beat])


def windows(catalog: Catalog) -> list[tuple[int, WindowRange]]:
    return [(q.ref.version, q.windows) for q in catalog.queries.versions("miles")]


def test_a_change_makes_a_version_of_the_windows_from_the_border_on(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    border = NOW + 5 * MINUTE
    changed, is_new = catalog.queries.register(spec(lateness="5s"), NOW, change=Change(border))
    assert (is_new, changed.ref.version, changed.windows) == (True, 2, WindowRange(border))
    assert windows(catalog) == [(1, WindowRange(until_ms=border)), (2, WindowRange(border))]
    assert catalog.queries.get("miles") == changed
    assert [q.ref.version for q in catalog.queries.newest()] == [2]


def test_without_a_border_it_is_the_next_window_of_which_all_edges_hear_in_time(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    changed, _ = catalog.queries.register(spec(lateness="5s"), NOW + 1, change=Change())
    assert changed.windows.from_ms == NOW + MINUTE
    late, _ = catalog.queries.register(spec(lateness="9s"), NOW + 2 * MINUTE - BORDER_MARGIN_MS + 1, change=Change())
    assert late.windows.from_ms == NOW + 3 * MINUTE


def test_a_border_moves_to_the_next_start_of_a_window(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    changed, _ = catalog.queries.register(spec(window={"tumbling": "5m"}), NOW, change=Change(NOW + 1))
    assert changed.windows.from_ms == NOW + 5 * MINUTE


def test_the_same_query_makes_no_version(catalog: Catalog) -> None:
    first, _ = catalog.queries.register(spec(), NOW, seed=7)
    version = catalog.version()
    assert catalog.queries.register(spec(), NOW, seed=9, change=Change(NOW + MINUTE)) == (first, False)
    assert catalog.version() == version


def test_a_border_in_the_past_is_refused_with_what_has_been_read(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    with refused(InvalidRequest, "at"):
        catalog.queries.register(spec(lateness="5s"), NOW, change=Change(NOW - 1))
    has_read(catalog, NOW - MINUTE)
    with refused(InvalidRequest, "at"):
        catalog.queries.register(spec(lateness="5s"), NOW, change=Change(NOW - MINUTE))
    with refused(InvalidRequest, "at"):
        change = Change(NOW + MINUTE, answered_ms=NOW + 2 * MINUTE)
        catalog.queries.register(spec(lateness="5s"), NOW, change=change)
    assert windows(catalog) == [(1, WindowRange())]


def test_a_second_change_before_the_border_begins_no_earlier(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    catalog.queries.register(spec(lateness="5s"), NOW, change=Change(NOW + 9 * MINUTE))
    with refused(InvalidRequest, "at"):
        catalog.queries.register(spec(lateness="9s"), NOW, change=Change(NOW + MINUTE))
    catalog.queries.register(spec(lateness="9s"), NOW, change=Change())
    border = NOW + 9 * MINUTE
    assert windows(catalog)[1:] == [(2, WindowRange(border, border)), (3, WindowRange(border))]


def test_a_change_of_another_version_than_the_newest_is_refused(catalog: Catalog) -> None:
    with pytest.raises(PreconditionFailed):
        catalog.queries.register(spec(), NOW, change=Change(expected=1))
    catalog.queries.register(spec(), NOW, change=Change(expected=0))
    catalog.queries.register(spec(lateness="5s"), NOW, change=Change(expected=1))
    with pytest.raises(PreconditionFailed):
        catalog.queries.register(spec(lateness="9s"), NOW, change=Change(expected=1))


def test_sessions_are_cut_between_slices_and_other_offsets_are_refused(catalog: Catalog) -> None:
    catalog.queries.register(spec(window={"session": "7s"}), NOW)
    changed, _ = catalog.queries.register(spec(), NOW, change=Change(NOW + 1))
    assert changed.windows.from_ms % (7 * MINUTE) == 0
    catalog.queries.register(spec("odd", window={"session": "10s"}), NOW)
    with refused(InvalidRequest, "window"):
        odd = spec("odd", window={"tumbling": "60s", "offset": "1s"})
        catalog.queries.register(odd, NOW, change=Change(NOW + 1))


def test_an_ended_version_keeps_its_answers_until_it_expires(catalog: Catalog) -> None:
    first, _ = catalog.queries.register(spec(), NOW)
    second, _ = catalog.queries.register(spec(lateness="5s"), NOW, change=Change())
    catalog.queries.register(spec(lateness="9s"), NOW, change=Change())
    before = catalog.version()
    catalog.queries.end(second.ref, NOW + 1)
    catalog.queries.end(second.ref, NOW + 2)
    assert catalog.version() == before + 1
    assert [q.ended_at_ms for q in catalog.queries.versions("miles")] == [None, NOW + 1, None]
    catalog.queries.expire(NOW + 9, NOW + 10)
    assert len(windows(catalog)) == 3, "version 1 has not ended, and versions are deleted in order"
    catalog.queries.end(first.ref, NOW + 20)
    catalog.queries.expire(NOW + 9, NOW + 20)
    assert len(windows(catalog)) == 3
    catalog.queries.expire(NOW + 21, NOW + 30)
    assert [version for version, _ in windows(catalog)] == [3]


def test_a_query_for_a_time_ends_by_itself_and_the_next_one_follows_its_end(catalog: Catalog) -> None:
    first, _ = catalog.queries.register(spec(), NOW, lasts_ms=60 * MINUTE)
    assert first.windows == WindowRange(until_ms=NOW + 60 * MINUTE)
    assert catalog.queries.register(spec(), NOW + 1, lasts_ms=60 * MINUTE) == (first, False)
    with pytest.raises(Conflict):
        catalog.queries.register(spec(), NOW + 1)
    catalog.queries.end(first.ref, NOW + 61 * MINUTE)
    again, is_new = catalog.queries.register(spec(), NOW + 61 * MINUTE)
    assert (is_new, again.windows) == (True, WindowRange(NOW + 60 * MINUTE))


def test_the_end_of_a_query_is_in_its_spec_or_beside_it(catalog: Catalog) -> None:
    asked = spec(until=NOW + MINUTE)
    made, _ = catalog.queries.register(asked, NOW, seed=7)
    assert (made.spec.until_ms, made.windows.until_ms) == (None, NOW + MINUTE)
    assert made.asked == asked.with_seed(7)
    assert catalog.queries.register(asked, NOW) == (made, False)


def test_an_end_before_the_first_window_is_refused(catalog: Catalog) -> None:
    """Before an edge has connected, the stream may be a replay, whose event times nobody knows yet."""
    made, _ = catalog.queries.register(spec("replay", until=NOW - 60 * MINUTE), NOW)
    assert made.windows.until_ms == NOW - 60 * MINUTE
    hello(catalog, now_ms=NOW)
    past, _ = catalog.queries.register(spec("past", since=NOW - 9 * MINUTE, until=NOW - MINUTE), NOW)
    assert past.windows.until_ms == NOW - MINUTE
    for fields in ({"until": NOW}, {"since": NOW - MINUTE, "until": NOW - MINUTE}):
        with pytest.raises(InvalidQuery) as refused:
            catalog.queries.register(spec("other", **fields), NOW)
        assert refused.value.field == "until"


def test_the_versions_of_a_query_have_a_limit(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_rows, "MAX_VERSIONS", 3)
    catalog.queries.register(spec(), NOW)
    for seconds in (1, 2):
        catalog.queries.register(spec(lateness=f"{seconds}s"), NOW, change=Change())
    with pytest.raises(Conflict):
        catalog.queries.register(spec(lateness="9s"), NOW, change=Change())
    catalog.queries.register(spec("other"), NOW)


def test_a_deletion_ends_all_versions(catalog: Catalog) -> None:
    catalog.queries.register(spec(), NOW)
    catalog.queries.register(spec(lateness="5s"), NOW, change=Change())
    catalog.queries.delete("miles", NOW)
    assert catalog.queries.all() == []
    made, _ = catalog.queries.register(spec(), NOW)
    assert (made.ref.version, made.windows) == (3, WindowRange())


def test_a_catalog_of_0_3_0_gets_the_columns_and_the_index_of_versions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.db"
    first = Catalog(url)
    first.queries.register(spec(), NOW)
    first.close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX one_open_query_per_name"))
        for column in ("from_ms", "until_ms", "ended_at_ms"):
            connection.execute(text(f"ALTER TABLE queries DROP COLUMN {column}"))
        index = "CREATE UNIQUE INDEX one_live_query_per_name ON queries (name) WHERE deleted_at_ms IS NULL"
        connection.execute(text(index))
    engine.dispose()
    catalog = Catalog(url)
    catalog.queries.register(spec(lateness="5s"), NOW, change=Change())
    assert [version for version, _ in windows(catalog)] == [1, 2]
    catalog.close()
