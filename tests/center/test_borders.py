"""What an answer says at the border of what the center can know: states lost, records that come too late."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from center.catalog import SessionStart
from center.results.late_records import MAX_RANGES
from center.serving.stored_windows import StoredWindows
from center.serving.synopsis_cache import SynopsisCache
from edge.codecs.formats import TextFormat
from edge.codecs.schema import EventTime, RecordSchema
from edge.core.events import Ingested
from edge.records import Chunk, RejectedRecords
from edgewater.base.errors import OutdatedState
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import HeartbeatRecord, StateDigest, StreamRecord
from edgewater.wire import DroppedRecords, DropReason, FrameBody, SliceClose
from tests.center.border_world import COLUMNS, MINUTE, SOURCE, STREAM, T0, Border
from tests.center.results_world import answers_after


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


# An edge that has lost its state


def test_a_window_over_which_an_edge_lost_its_state_is_not_complete(center: Border) -> None:
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)"})
    center.now_ms = T0 + 10_000
    edge.accept(*[T0 + 5_000] * 100)
    # kill -9, and the state directory is gone.
    center.now_ms = T0 + 20_000
    again = center.edge("a", "i2")
    center.now_ms = T0 + 2 * MINUTE + 1
    again.deliver(*[T0 + 30_000] * 50, T0 + MINUTE + 10, T0 + 2 * MINUTE)
    answer = center.answer()
    assert (answer["phase"], answer["data"][0]["n"]["estimate"]) == ("final", 50)
    assert answer["quality"]["completeness"] == {
        "ratio": 0.0, "expected": 1, "reported": 0, "missing": ["a"], "lost_state": ["a"],
    }  # fmt: skip
    assert answer["quality"]["records"]["expected"] is None
    assert answer["contract"]["met"] is False
    assert [v["code"] for v in answer["contract"]["violations"]] == ["missing-edges", "lost-state"]
    for measure in ("n", "s"):
        cell = answer["data"][0][measure]
        assert (cell["lower"], cell["upper"]) == (None, None), "records may be missing, or counted twice"
    (alarm,) = center.get("/v1/alarms")["alarms"]
    assert (alarm["kind"], alarm["edge"]) == ("state-lost", "a")
    later = center.answer(T0 + MINUTE)
    assert later["quality"]["completeness"]["missing"] == [], "the window began after the loss"
    assert later["contract"]["met"] is True
    assert later["data"][0]["n"]["upper"] == 1


def test_the_loss_is_known_after_a_restart_of_the_job(center: Border) -> None:
    edge = center.edge_with_query("a")
    edge.accept(T0)
    center.edge("a", "i2")
    center.open_job()
    center.now_ms = T0 + MINUTE
    center.edges["a"].accept(T0 + 30_000, T0 + MINUTE)
    center.edges["a"].ship()
    assert center.answer()["quality"]["completeness"]["lost_state"] == ["a"]


def test_an_edge_that_restarts_with_its_state_loses_nothing(center: Border) -> None:
    edge = center.edge_with_query("a")
    edge.accept(T0 + 5_000, T0 + 6_000)
    edge.durable.close()
    again = center.edge("a")
    center.now_ms = T0 + MINUTE
    again.deliver(T0 + MINUTE)
    answer = center.answer()
    assert (answer["data"][0]["n"]["upper"], answer["contract"]["met"]) == (2, True)
    assert "lost_state" not in answer["quality"]["completeness"]
    assert center.get("/v1/alarms")["alarms"] == []


def test_an_edge_on_an_older_copy_of_its_state_lacks_records_and_its_windows_say_so(center: Border) -> None:
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)"})
    center.now_ms = T0 + 10_000
    edge.accept(*[T0 + 5_000] * 30)
    edge.durable.close()
    shutil.copytree(edge.directory, center.path / "copy")
    later = center.edge("a")
    later.accept(*[T0 + 6_000] * 50)  # accepted, and in no frame
    later.durable.close()
    shutil.rmtree(later.directory)
    shutil.copytree(center.path / "copy", later.directory)
    center.now_ms = T0 + 20_000
    restored = center.edge("a")
    center.now_ms = T0 + 2 * MINUTE + 1
    restored.deliver(*[T0 + 30_000] * 7, T0 + MINUTE + 10, T0 + 2 * MINUTE)
    answer, after = center.answer(), center.answer(T0 + MINUTE)
    assert answer["quality"]["completeness"]["lost_state"] == ["a"]
    assert (answer["contract"]["met"], answer["data"][0]["n"]["estimate"]) == (False, 7)
    assert all((cell["lower"], cell["upper"]) == (None, None) for cell in (answer["data"][0][m] for m in "ns"))
    assert {"id-in-use-twice", "state-lost"} <= {a["kind"] for a in center.get("/v1/alarms")["alarms"]}
    assert (after["contract"]["met"], after["data"][0]["n"]["upper"]) == (True, 1)


def test_windows_say_so_when_an_agent_on_a_copy_of_a_state_was_refused_and_never_came_back(center: Border) -> None:
    edge = center.edge_with_query("a")
    edge.durable.close()
    shutil.copytree(edge.directory, center.path / "copy")
    center.edge("a")
    known = center.catalog.edges.get(EdgeId("a"))
    twin = StateDigest((1, 99), {})  # of the copy, and of no process that the center knows
    hello = SessionStart(
        EdgeId("a"), known.incarnation, {}, known.streams, oldest_seq=1, next_seq=1, now_ms=center.now_ms, state=twin
    )
    (outcome,) = center.catalog.edges.begin_sessions([hello])
    assert isinstance(outcome, OutdatedState)
    center.now_ms = T0 + MINUTE
    center.writer.advance()
    center.edges["a"].accept(T0 + 30_000, T0 + MINUTE)
    center.edges["a"].ship()
    assert center.answer()["quality"]["completeness"]["lost_state"] == ["a"]


# Records that come for final windows


@pytest.mark.slow
def test_records_of_an_edge_that_joins_after_windows_are_final_are_said_for_good(center: Border) -> None:
    first = center.edge_with_query("a")
    center.now_ms = T0 + 2 * MINUTE
    first.deliver(T0 + 1_000, T0 + MINUTE + 1_000, T0 + 2 * MINUTE)
    before = center.answer()
    assert (before["phase"], before["contract"]["met"], before["data"][0]["n"]["upper"]) == ("final", True, 1)
    etag = center.fetch(f"/v1/queries/q/windows/{T0}").headers["etag"]
    live = center.results.last_answer_id()

    late = center.edge("b")
    late.deliver(*[T0 + 2_000] * 7, *[T0 + MINUTE + 5] * 3, T0 + 2 * MINUTE)
    center.open_job()
    for start, records in ((T0, 7), (T0 + MINUTE, 3)):
        answer = center.answer(start)
        assert (answer["phase"], answer["revision"], answer["data_of"]) == ("final", 2, 1)
        assert answer["quality"]["records"] == {
            "observed": 1, "expected": 1 + records, "sampled": 1, "late": 0, "after_final": records, "rejected": 0,
        }  # fmt: skip
        completeness = answer["quality"]["completeness"]
        assert (completeness["ratio"], completeness["after_final"]) == (1 / (1 + records), records)
        assert answer["quality"]["error"]["missing"] == {"n": None}
        assert answer["contract"]["met"] is False
        assert [v["code"] for v in answer["contract"]["violations"]] == ["after-final"]
        cell = answer["data"][0]["n"]
        assert (cell["estimate"], cell["lower"], cell["upper"]) == (1, 1, 1 + records)
    assert center.fetch(f"/v1/queries/q/windows/{T0}").headers["etag"] != etag
    assert [record.revision for record in answers_after(center.results, live, 9)] == [2, 2]
    (rollup,) = center.get("/v1/queries/q/rollup?every=1h")["answers"]
    assert (rollup["quality"]["records"]["after_final"], rollup.get("data_of")) == (10, None)
    for number, stated in ((1, before), (2, center.answer())):
        revision = center.fetch(f"/v1/queries/q/windows/{T0}?revision={number}")
        assert revision.json() == stated and "immutable" in revision.headers["cache-control"]
    page = center.get("/v1/queries/q")
    assert page["after_final"] == 10
    assert {e["edge"]: e["after_final"] for e in page["edges"]} == {"a": {}, "b": {"after-final": 10}}
    alarms = [a for a in center.get("/v1/alarms")["alarms"] if a["kind"] == "records-after-final"]
    assert [a["edge"] for a in alarms] == ["b"]
    metrics = center.fetch("/metrics").text
    assert 'edgewater_after_final_records_total{edge="b",query="q",reason="after-final"} 10.0' in metrics


def test_answers_that_are_due_come_before_corrections(center: Border, monkeypatch: pytest.MonkeyPatch) -> None:
    first = center.edge("a")
    query, urgent = center.register(), center.register(name="urgent", budget={"staleness": "2s"})
    center.now_ms = T0 + MINUTE
    first.deliver(T0 + 1_000, T0 + MINUTE)
    late = center.edge("b")
    late.accept(T0 + 2_000, T0 + MINUTE)
    with monkeypatch.context() as patched:
        patched.setattr(center.writer, "advance", lambda: None)
        late.ship()
    center.now_ms = T0 + 2 * MINUTE + 2_000
    assert {e.query for e in center.writer.advance()} == {urgent}
    assert center.results.revisions(query, T0) == [1]
    assert center.writer.advance() == []
    assert center.results.revisions(query, T0) == [1, 2]


def test_records_that_an_edge_drops_as_too_late_are_counted_on_their_window(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 2 * MINUTE
    edge.deliver(T0 + 1_000, T0 + 2 * MINUTE)
    edge.accept(T0 + 5_000, T0 + 6_000, T0 + MINUTE + 5_000)
    assert edge.ship() == 0, "a frame for each of them would be many"
    center.now_ms += 1_000
    assert edge.ship() == 1
    assert edge.ship() == 0
    answer = center.answer()
    assert (answer["quality"]["records"]["observed"], answer["quality"]["records"]["after_final"]) == (1, 2)
    assert answer["contract"]["met"] is False
    page = center.get("/v1/queries/q")
    assert (page["after_final"], page["edges"][0]["after_final"]) == (3, {"too-late": 3})


def test_too_late_records_are_counted_once_through_kill_and_replay(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 2 * MINUTE
    edge.deliver(T0 + 1_000, T0 + 2 * MINUTE)
    edge.accept(T0 + 5_000)
    again = center.edge("a")  # kill -9 before the report
    center.now_ms += 1_000
    again.ship()
    assert center.edge("a").ship() == 0, "the report is in the journal"
    again = center.edge("a")
    again.durable.checkpoint()
    again.accept(T0 + 6_000)
    again.durable.checkpoint()
    again = center.edge("a")
    center.now_ms += 1_000
    assert again.ship() == 1
    center.now_ms += MINUTE
    center.writer.advance()
    assert center.answer()["quality"]["records"]["after_final"] == 2


@pytest.mark.parametrize("after_final", [False, True])
def test_counts_beyond_any_bound_cost_only_the_edge_that_states_them(center: Border, after_final: bool) -> None:
    """They overflowed a column, and the next frame with a late record was set aside with its partial."""
    evil, honest = center.edge("evil"), center.edge("honest")
    query = center.register()
    center.now_ms = T0 + 2 * MINUTE
    for edge in (evil, honest):
        edge.deliver(T0 + 1_000, T0 + 2 * MINUTE)

    def spoil(body: FrameBody) -> FrameBody:
        most = 1 << 53
        many = tuple(DroppedRecords(T0, DropReason.TOO_LATE, most) for _ in range(2_048))
        return replace(body, closes=(SliceClose(T0, most, 0), *body.closes), dropped=() if after_final else many)

    center.now_ms += MINUTE
    for count in range(2):
        evil.accept(T0 + 2 * MINUTE + 1 + count)
        evil.accept(center.now_ms)
        evil.ship(spoil)
        honest.deliver(T0 + 5_000 + count, T0 + 2 * MINUTE + 1 + count, center.now_ms)
        center.now_ms += MINUTE
    assert center.catalog.quarantine.frames() == []
    assert center.answer()["quality"]["records"]["after_final"] >= 1 << 53
    assert center.answer(T0 + 2 * MINUTE)["data"][0]["n"]["estimate"] == 4
    stated = {(edge, reason): n for (_, edge, reason), n in center.results.late_records(query).items()}
    assert stated.pop(("honest", "too-late")) == 3
    assert all(n <= 1 << 53 for n in stated.values())


def test_a_sliding_window_lacks_only_what_came_after_it_was_final(center: Border) -> None:
    first = center.edge_with_query("a", window={"sliding": "2m", "every": "1m"})
    center.now_ms = T0 + 2 * MINUTE
    first.deliver(T0 + 1_000, T0 + MINUTE + 1_000, T0 + 2 * MINUTE)
    late = center.edge("b")
    late.deliver(*[T0 + MINUTE + 2_000] * 4, T0 + 2 * MINUTE)
    center.now_ms = T0 + 3 * MINUTE
    first.accept(T0 + 3 * MINUTE)
    late.accept(T0 + 3 * MINUTE)
    first.ship()
    late.ship()
    records = {start: center.answer(start)["quality"]["records"] for start in (T0, T0 + MINUTE)}
    assert [(r["observed"], r["after_final"]) for r in records.values()] == [(2, 4), (7, 0)]
    assert center.get("/v1/queries/q")["after_final"] == 4


def test_records_before_the_first_window_that_is_kept_are_counted_on_the_query(center: Border) -> None:
    first = center.edge_with_query("a")
    center.now_ms = T0 + 10 * MINUTE
    first.deliver(T0 + 1_000, T0 + 9 * MINUTE)
    center.now_ms += 1_000
    center.results.trim(center.now_ms)
    late = center.edge("b")
    late.deliver(*[T0 + 2_000] * 7, T0 + 9 * MINUTE)
    page = center.get("/v1/queries/q")
    assert page["after_final"] == 7


def test_an_evaluated_question_states_records_after_final(center: Border) -> None:
    first = center.edge("a")
    query = center.register()
    center.now_ms = T0 + MINUTE
    first.deliver(T0 + 1_000, T0 + MINUTE)

    def windows() -> StoredWindows:
        found = center.catalog.queries.get
        return StoredWindows(center.results, found(query.name), SynopsisCache(1 << 20), found)

    (window,) = windows().latest(1)
    assert window.facts.late_counts == (0, 0, 0)
    late = center.edge("b")
    late.deliver(*[T0 + 2_000] * 7, T0 + MINUTE)
    (window,) = windows().latest(1)
    assert window.facts.late_counts == (7, 0, 0)


def test_a_final_session_states_the_records_that_came_for_it(center: Border) -> None:
    first = center.edge_with_query("a", window={"session": "30s"})
    center.now_ms = T0 + 3 * MINUTE
    first.deliver(T0 + 1_000, T0 + 2_000, T0 + 3 * MINUTE)
    assert center.answer(T0 + 1_000)["phase"] == "final"
    late = center.edge("b")
    late.deliver(*[T0 + 5_000] * 4, T0 + 3 * MINUTE)
    answer = center.answer(T0 + 1_000)
    assert (answer["quality"]["records"]["after_final"], answer["contract"]["met"]) == (4, False)


# Records that sources reject


def wrong_type(records: int, *times_ms: int) -> RejectedRecords:
    first, end = (times_ms[0], times_ms[-1] + 1) if times_ms else (None, None)
    return RejectedRecords("wrong-type" if times_ms else "malformed", records, first, end, is_timed=bool(times_ms))


@pytest.mark.parametrize("ships_before", [False, True])
def test_a_window_says_how_many_of_its_records_were_rejected(center: Border, ships_before: bool) -> None:
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)"}, lateness="2m")
    center.now_ms = T0 + MINUTE
    edge.reject(wrong_type(3, T0 + 2_000, T0 + 5_000), wrong_type(4, T0 + MINUTE), times_ms=[T0 + 1_000])
    if ships_before:
        center.now_ms += 1_000
        edge.ship()
    center.now_ms += MINUTE
    edge.deliver(T0 + 2 * MINUTE)
    for start, observed, rejected in ((T0, 1, 3), (T0 + MINUTE, 0, 4)):
        answer = center.answer(start)
        assert answer["phase"] == "complete" and answer["revision"] == 1
        records, completeness = answer["quality"]["records"], answer["quality"]["completeness"]
        assert (records["observed"], records["rejected"], records["expected"]) == (observed, rejected, None)
        assert (completeness["ratio"], completeness["rejected"]) == (observed / (observed + rejected), rejected)
        assert completeness["missing"] == []
        assert [v["code"] for v in answer["contract"]["violations"]] == ["rejected"]
        assert answer["quality"]["error"]["missing"] == {"n": None, "s": None}
        cells = answer["data"][0]
        assert (cells["n"]["lower"], cells["n"]["upper"], cells["s"]["lower"]) == (observed, None, None)
    assert center.fetch(f"/v1/queries/q/windows/{T0}?require=complete").status_code == 409
    center.now_ms += 3 * MINUTE
    edge.deliver(T0 + 5 * MINUTE)
    final = center.answer()
    assert (final["phase"], final["quality"]["records"]["rejected"], final["contract"]["met"]) == ("final", 3, False)
    page = center.get("/v1/queries/q")
    assert (page["rejected"], page["after_final"]) == (7, 0)
    assert page["edges"][0]["rejected"] == {"wrong-type": 7}
    metrics = center.fetch("/metrics").text
    assert 'edgewater_rejected_records_total{edge="a",query="q",reason="wrong-type"} 7.0' in metrics
    assert "edgewater_after_final_records_total{" not in metrics
    assert center.get("/v1/alarms")["alarms"] == []
    explained = center.get(f"/v1/queries/q/windows/{T0}/explain")
    assert "rejected" in str(explained)


BY_DEVICE = RecordSchema({"x": pa.int64(), "temp": pa.float64()}, EventTime("t"), rejects_by="x")


def device_lines(*readings: tuple[object, object], at_ms: int = T0 + 1_000) -> str:
    return "".join(json.dumps({"t": at_ms, "x": x, "temp": temp}) + "\n" for x, temp in readings)


def test_a_rejected_record_of_a_known_device_widens_only_its_group(center: Border) -> None:
    edge = center.edge_with_query("a", group_by=["x"])
    center.register(name="all")
    center.register(name="computed", group_by=[{"x": "x % 2"}])
    text = device_lines((7, 1.5), (8, 2.5), (7, "warm"), (9, "cold"))
    decoded = TextFormat("ndjson", BY_DEVICE).decoder(None, "x").decode(text.encode(), T0 + 1_000)
    batch = decoded.batch.select(["x", "event_time_ms"])
    rejected = Chunk(SOURCE, batch, None, None, decoded.rejected, 0).rejected_records
    center.now_ms = T0 + 2 * MINUTE
    edge.durable.ingest_payload(Ingested(STREAM, SOURCE, batch, center.now_ms, rejected=rejected))
    edge.deliver(T0 + 2 * MINUTE)

    def uppers(query: str) -> dict[object, object]:
        answer = center.get(f"/v1/queries/{query}/windows/{T0}")
        assert answer["quality"]["records"]["rejected"] == 2 and not answer["contract"]["met"]
        return {row.get("group", {}).get("x"): row["n"]["upper"] for row in answer["data"]}

    assert uppers("q") == {7: None, 8: 1}
    assert uppers("all") == {None: None}
    assert uppers("computed") == {1: None, 0: None}, "the key x of the query is not the column x"
    page = center.get("/v1/queries/q")
    assert page["edges"][0]["rejected"] == {"wrong-type": 2}


def test_more_devices_than_a_slice_tells_apart_widen_all_groups(center: Border) -> None:
    edge = center.edge_with_query("a", group_by=["x"])
    center.now_ms = T0 + 2 * MINUTE
    parts = [replace(wrong_type(1, T0 + 2_000), only=f'{{"x":{n}}}') for n in range(MAX_RANGES + 1)]
    edge.reject(*parts, times_ms=[T0 + 1_000])
    edge.deliver(T0 + 2 * MINUTE)
    answer = center.answer()
    assert answer["quality"]["records"]["rejected"] == MAX_RANGES + 1
    assert [row["n"]["upper"] for row in answer["data"]] == [None]


@pytest.mark.parametrize("only", ["{", "[1]", '{"x":"a"}', '{"x":{}}', '{"x":' + "9" * 30 + "}"])
def test_an_unreadable_device_widens_all_groups(center: Border, only: str) -> None:
    edge = center.edge_with_query("a", group_by=["x"])
    center.now_ms = T0 + 2 * MINUTE
    edge.accept(T0 + 1_000, T0 + 2 * MINUTE)
    dropped = DroppedRecords(T0, DropReason.WRONG_TYPE, 1, T0 + MINUTE, only=only)
    edge.ship(lambda body: replace(body, dropped=(dropped,)))
    assert [row["n"]["upper"] for row in center.answer()["data"]] == [None]


def test_a_complete_window_is_answered_again_when_a_late_record_of_it_is_rejected(center: Border) -> None:
    edge = center.edge_with_query("a", lateness="10m")
    center.now_ms = T0 + 2 * MINUTE
    edge.deliver(T0 + 1_000, T0 + MINUTE + 1_000, T0 + 2 * MINUTE)
    first = center.answer()
    assert (first["revision"], first["contract"]["met"]) == (1, True)
    edge.reject(wrong_type(2, T0 + 3_000))
    center.now_ms += 1_000
    edge.ship()
    second = center.answer()
    assert (second["phase"], second["revision"]) == ("complete", 2)
    assert (second["quality"]["records"]["rejected"], second["contract"]["met"]) == (2, False)
    assert center.get(f"/v1/queries/q/windows/{T0}?revision=1")["contract"]["met"] is True
    assert center.answer(T0 + MINUTE)["revision"] == 1, "it lacks none"


def test_a_final_window_counts_the_records_of_it_that_are_rejected_later(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 2 * MINUTE
    edge.deliver(T0 + 1_000, T0 + 2 * MINUTE)
    etag = center.fetch(f"/v1/queries/q/windows/{T0}").headers["etag"]
    edge.reject(wrong_type(2, T0 + 3_000))
    center.now_ms += 1_000
    edge.ship()
    answer = center.answer()
    assert (answer["phase"], answer["revision"], answer["quality"]["records"]["rejected"]) == ("final", 2, 2)
    assert center.fetch(f"/v1/queries/q/windows/{T0}").headers["etag"] != etag


def test_records_without_a_readable_time_may_be_of_each_window_that_was_open(center: Border) -> None:
    edge = center.edge_with_query("a", lateness="1m")
    center.now_ms = T0 + 30_000
    edge.accept(T0 + 30_000)
    center.now_ms = T0 + 70_000
    edge.reject(wrong_type(5))  # nothing valid beside them: between the watermark and now
    edge.accept(T0 + 70_000)
    center.now_ms = T0 + 3 * MINUTE
    edge.deliver(T0 + 2 * MINUTE, T0 + 3 * MINUTE)
    found = {n: center.answer(T0 + n * MINUTE)["quality"]["records"]["rejected"] for n in range(3)}
    assert found == {0: 5, 1: 5, 2: 0}
    assert center.get("/v1/queries/q")["rejected"] == 5


def test_rejected_records_are_stated_once_through_kill_and_replay_of_edge_and_job(center: Border) -> None:
    edge = center.edge_with_query("a", lateness="10m")
    center.now_ms = T0 + MINUTE
    edge.reject(wrong_type(3, T0 + 2_000), times_ms=[T0 + 1_000])
    again = center.edge("a")  # kill -9 before the report
    assert again.durable.core.streams["events"].rejected == {"http": {"wrong-type": 3}}
    again.durable.checkpoint()
    again = center.edge("a")
    again.reject(wrong_type(2, T0 + 4_000))
    center.now_ms += 1_000
    again.ship()
    center.open_job()
    again = center.edge("a")
    assert again.ship() == 0, "the report is in the journal"
    center.now_ms = T0 + 2 * MINUTE
    again.deliver(T0 + 2 * MINUTE)
    center.open_job()
    assert center.answer()["quality"]["records"]["rejected"] == 5
    assert again.durable.core.streams["events"].rejected == {"http": {"wrong-type": 5}}


def test_a_session_says_how_many_of_its_records_were_rejected(center: Border) -> None:
    edge = center.edge_with_query("a", window={"session": "30s"})
    center.now_ms = T0 + 10_000
    edge.accept(T0 + 1_000, T0 + 10_000)
    edge.reject(wrong_type(4, T0 + 5_000))
    center.now_ms = T0 + 3 * MINUTE
    edge.deliver(T0 + 3 * MINUTE)
    answer = center.answer(T0 + 1_000)
    assert (answer["quality"]["records"]["rejected"], answer["contract"]["met"]) == (4, False)


# Records that were read before the query was registered


def test_windows_of_records_ahead_of_the_clock_read_before_registration_are_not_complete(center: Border) -> None:
    edge = center.edge("a")
    center.now_ms = T0 + 10_000
    edge.accept(T0 + 5_000, *[T0 + 2 * MINUTE + 5_000] * 3)  # three of them two minutes ahead of the clock
    edge.durable.checkpoint()
    edge = center.edge("a")  # a restart keeps it in mind
    center.register()
    center.now_ms = T0 + 4 * MINUTE
    edge.deliver(T0 + MINUTE + 1_000, *[T0 + 2 * MINUTE + 6_000] * 2, T0 + 3 * MINUTE + 1_000, T0 + 4 * MINUTE)
    answers = [center.answer(T0 + n * MINUTE) for n in (1, 2, 3)]
    assert [a["data"][0]["n"]["estimate"] for a in answers] == [1, 2, 1], "records that came later count"
    assert [a["quality"]["completeness"]["missing"] for a in answers] == [[], ["a"], []]
    (loss,) = answers[1]["quality"]["completeness"]["losses"]
    assert (loss["edge"], loss["reason"], loss["records"]) == ("a", "before-query", 3)
    assert [a["contract"]["met"] for a in answers] == [True, False, True]
    assert (answers[1]["data"][0]["n"]["lower"], answers[1]["data"][0]["n"]["upper"]) == (2, None)


# An edge that is retired


def test_a_window_that_a_retired_edge_had_not_closed_says_so(center: Border) -> None:
    first, gone = center.edge("a"), center.edge("b")
    center.register()
    center.now_ms = T0 + 10_000
    gone.accept(*[T0 + 5_000] * 100)  # in its journal, for ever
    center.catalog.edges.end_sessions({EdgeId("b"): ("", center.now_ms)})
    center.catalog.edges.retire(EdgeId("b"))
    center.writer.advance()
    center.open_job()
    center.now_ms = T0 + 2 * MINUTE
    first.deliver(T0 + 5_000, T0 + MINUTE + 5_000, T0 + 2 * MINUTE)
    answer, later = center.answer(), center.answer(T0 + MINUTE)
    assert (answer["phase"], answer["data"][0]["n"]["estimate"]) == ("final", 1), "nobody waits for it"
    assert answer["quality"]["completeness"] == {
        "ratio": 0.5, "expected": 1, "reported": 1, "missing": [], "left": ["b"],
    }  # fmt: skip
    assert answer["quality"]["records"]["expected"] is None
    assert [v["code"] for v in answer["contract"]["violations"]] == ["left"]
    assert (answer["data"][0]["n"]["lower"], answer["data"][0]["n"]["upper"]) == (1, None)
    assert (later["quality"]["completeness"]["ratio"], later["contract"]["met"]) == (1.0, True)


def test_an_edge_that_was_heard_after_its_last_written_heartbeat_has_left_the_windows_until_then(
    center: Border,
) -> None:
    first, gone = center.edge("a"), center.edge("b")
    center.register()
    streams = [StreamRecord(STREAM, COLUMNS, LIVE)]
    hello = SessionStart(
        EdgeId("b"), gone.durable.incarnation, {}, streams, 1, 1, T0, "s1", gateway="g1",
        state=StateDigest(tuple(gone.durable.state.runs)),
    )  # fmt: skip
    assert center.catalog.edges.begin_sessions([hello]) == [None]
    center.now_ms = T0 + MINUTE + 10_000
    gone.accept(T0 + MINUTE + 5_000)  # in its journal, for ever
    center.catalog.edges.record_silence("g1", {}, silence_ms=25_000, now_ms=center.now_ms)
    center.catalog.edges.retire(EdgeId("b"))
    center.writer.advance()
    center.now_ms = T0 + 3 * MINUTE
    first.deliver(T0 + 5_000, T0 + MINUTE + 5_000, T0 + 2 * MINUTE + 5_000, T0 + 3 * MINUTE)
    answers = [center.answer(T0 + n * MINUTE) for n in range(3)]
    assert [a["quality"]["completeness"].get("left") for a in answers] == [["b"], ["b"], None]
    assert [a["contract"]["met"] for a in answers] == [False, False, True]


def test_a_retired_edge_that_had_closed_a_window_leaves_it_complete(center: Border) -> None:
    first, gone = center.edge("a"), center.edge("b")
    center.register(lateness="5m")
    center.now_ms = T0 + MINUTE
    gone.deliver(*[T0 + 5_000] * 100, T0 + MINUTE)
    center.catalog.edges.end_sessions({EdgeId("b"): ("", center.now_ms)})
    center.catalog.edges.retire(EdgeId("b"))
    center.writer.advance()
    first.deliver(T0 + 5_000, T0 + MINUTE)
    answer = center.answer()
    assert (answer["phase"], answer["data"][0]["n"]["upper"], answer["contract"]["met"]) == ("complete", 101, True)


# Frames that the center cannot use


def poisoned(body: FrameBody) -> FrameBody:
    return replace(body, partials=tuple(replace(p, synopsis=b"rubbish") for p in body.partials))


@pytest.mark.parametrize("spoil", [lambda body: None, poisoned], ids=["damaged", "refused"])
def test_a_window_that_lacks_a_frame_or_a_partial_is_not_complete(center: Border, spoil: Any) -> None:
    edge, other = center.edge("a"), center.edge("b")
    center.register(edges=["a", "b"])
    center.now_ms = T0 + MINUTE
    edge.accept(*[T0 + 5_000] * 100, T0 + MINUTE)
    edge.ship(spoil)
    other.deliver(*[T0 + 5_000] * 10, T0 + MINUTE)
    center.now_ms = T0 + 4 * MINUTE
    for site in (edge, other):
        site.deliver(T0 + 3 * MINUTE, T0 + 4 * MINUTE)
    answer = center.answer()
    assert answer["data"][0]["n"] == {"estimate": 10, "lower": 10, "upper": None}
    assert answer["phase"] == "final"
    assert answer["quality"]["completeness"]["missing"] == ["a"]
    (loss,) = answer["quality"]["completeness"]["losses"]
    assert (loss["edge"], loss["source"]) == ("a", "frames")
    assert answer["contract"]["met"] is False
    later = center.answer(T0 + 3 * MINUTE)
    assert (later["quality"]["completeness"]["missing"], later["contract"]["met"]) == ([], True)


def test_a_window_of_which_nothing_came_but_may_have_been_accepted_has_an_answer(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 10_000
    edge.accept(*[T0 + 5_000] * 100)
    center.now_ms = T0 + 20_000
    again = center.edge("a", "i2")
    center.open_job()
    center.now_ms = T0 + 3 * MINUTE
    again.deliver(T0 + 2 * MINUTE + 1, T0 + 3 * MINUTE)
    assert center.answer()["quality"]["completeness"]["lost_state"] == ["a"]
    starts = [a["window"]["start"] for a in center.get("/v1/queries/q/windows")["answers"]]
    assert starts == ["2013-01-01T00:00:00Z", "2013-01-01T00:02:00Z"], "the one between is known to be empty"


def test_a_loss_covers_what_a_clock_that_is_ahead_may_have_accepted(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 50_000
    beat = HeartbeatRecord(EdgeId("a"), {}, {}, {}, 0, 0.0, 0.0, 30_000.0, center.now_ms)
    center.catalog.edges.record_heartbeats([beat])
    edge.accept(T0 + 75_000)
    again = center.edge("a", "i2")
    center.now_ms = T0 + 3 * MINUTE
    again.deliver(T0 + 80_000, T0 + 3 * MINUTE)
    assert center.answer(T0 + MINUTE)["quality"]["completeness"]["lost_state"] == ["a"]


# Records that edges count, or leave out, on a guess


def on_a_guess(reason: DropReason, records: int, first_ms: int, end_ms: int | None = None) -> RejectedRecords:
    return RejectedRecords(reason.label, records, first_ms, first_ms + 1 if end_ms is None else end_ms, is_timed=True)


@pytest.mark.parametrize("reason", [reason for reason in DropReason if reason.is_guess])
def test_a_window_with_a_guess_is_not_certain(center: Border, reason: DropReason) -> None:
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)", "top": "max(x)"}, lateness="1m")
    center.now_ms = T0 + MINUTE
    edge.reject(on_a_guess(reason, 3, T0 + 2_000), times_ms=[T0 + 1_000, T0 + MINUTE])
    center.now_ms += MINUTE
    edge.deliver(T0 + 2 * MINUTE)
    answer = center.answer(T0)
    records, completeness = answer["quality"]["records"], answer["quality"]["completeness"]
    assert (records["observed"], records["guessed"], records["expected"]) == (1, 3, None)
    assert (completeness["guessed"], completeness["ratio"]) == ({reason.label: 3}, 0.25 if reason.may_lack else 1.0)
    assert [v["code"] for v in answer["contract"]["violations"]] == ["guessed"]
    assert not answer["contract"]["met"] and set(answer["quality"]["error"]["missing"].values()) == {None}
    bounds = {name: (answer["data"][0][name]["lower"], answer["data"][0][name]["upper"]) for name in ("n", "s", "top")}
    unknown = (None, None)
    assert bounds["s"] == unknown
    assert (bounds["n"], bounds["top"]) == ((unknown, unknown) if reason.adds else ((1, None), (T0 + 1_000, None)))
    assert center.answer(T0 + MINUTE)["contract"]["met"], "the next window has no guess"
    page = center.get("/v1/queries/q")
    assert (page["guessed"], page["rejected"], page["after_final"]) == (3, 0, 0)
    assert page["edges"][0]["guessed"] == {reason.label: 3}
    metrics = center.fetch("/metrics").text
    assert f'edgewater_guessed_records_total{{edge="a",query="q",reason="{reason.label}"}} 3.0' in metrics
    assert center.fetch(f"/v1/queries/q/windows/{T0}?require=complete").status_code == (409 if reason.may_lack else 200)
    assert "guess" in str(center.get(f"/v1/queries/q/windows/{T0}/explain"))
    center.now_ms += 2 * MINUTE
    edge.reject(on_a_guess(reason, 2, T0 + 2_000), times_ms=[T0 + 4 * MINUTE])
    edge.ship()
    final = center.answer(T0)
    assert (final["phase"], final["quality"]["records"]["guessed"]) == ("final", 5)


def test_a_guess_without_times_concerns_every_window_over_its_range(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + MINUTE
    edge.reject(on_a_guess(DropReason.ASSUMED_COPY, 9, T0, T0 + 2 * MINUTE), times_ms=[T0 + 1_000, T0 + MINUTE])
    center.now_ms += 2 * MINUTE
    edge.deliver(T0 + 2 * MINUTE, T0 + 3 * MINUTE)
    assert [center.answer(T0 + n * MINUTE)["contract"]["met"] for n in range(3)] == [False, False, True]


def test_records_of_too_many_series_are_stated_by_window(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + MINUTE
    edge.reject(RejectedRecords("too-many-series", 4, T0 + 1, T0 + 2, is_timed=True), times_ms=[T0, T0 + MINUTE])
    center.now_ms += MINUTE
    edge.deliver(T0 + 2 * MINUTE)
    assert center.answer(T0)["quality"]["records"]["rejected"] == 4
