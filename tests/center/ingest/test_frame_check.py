"""The check of frames before the ack: what cannot be right costs itself, and the frame says what it lacks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from center.ingest import frame_check
from center.ingest.frame_check import MAX_COUNT, MAX_LOSSES, OPEN_WINDOWS, CheckedFrame, FrameCheck
from center.ingest.open_windows import OpenWindows
from edgewater.arrivals import SubstreamStatistics, encode_report, lag_groups, read_report
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.guard.frame_work import MAX_FRAME_WORK, PER_CLOSE
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding import codec
from edgewater.wire import (
    Arrivals,
    DroppedRecords,
    DropReason,
    Encoding,
    Frame,
    FrameBody,
    InputLoss,
    Partial,
    Rest,
    SliceClose,
    Withheld,
)
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import MAX_MESSAGES, arrivals_to_wire, body_to_wire
from tests.center.gateway_world import JFK, MILES, RawEdge, center, eventually, spec, synopsis
from tests.center.kept_frames import kept_body, read_frame, stored_body
from tests.insides import reading

NOW_MS = 10_000_000
INF, NAN = float("inf"), float("nan")
IMPOSSIBLE = (
    *(Withheld("miles", *(bad if n == at else 1.0 for n in range(2)), 1) for at in range(2) for bad in (-1, NAN, -INF)),
    Withheld("miles", 1, 1, 0),
    Withheld("miles", 0, 0, 1, 5.0),
    Withheld("farthest", 0, 0, 1, NAN),
)
HONEST = Partial(60_000, synopsis(b"ua"))
CLOSE = SliceClose(60_000, 5, 1)
BODY = FrameBody(120_000, (HONEST,), (CLOSE,), losses=(InputLoss("file", "restart", 1, NOW_MS + 1),))
LOST = InputLoss("frames", "partial-refused", 60_000, 60_001)


def checked(body: FrameBody, spec: QuerySpec = spec(), latest_ms: int = NOW_MS) -> CheckedFrame:  # noqa: B008
    return FrameCheck(spec).check(Frame.pack(3, MILES, body), latest_ms)


LATE = DroppedRecords(
    60_000, DropReason.TOO_LATE, 2, None, (Withheld("miles", INF, 0.0, 1), Withheld("farthest", 0.0, 0.0, 1, 7.0))
)


def altered(change: Callable[[codec.SynopsisMessage], object]) -> bytes:
    message = codec.unseal(HONEST.synopsis)
    change(message)
    return codec.seal(message)


def test_what_an_edge_ships_is_kept_byte_for_byte() -> None:
    budgets = SliceClose(0, 5, 5, (Withheld("miles", INF, -0.0, 2), Withheld("farthest", 0.0, 0.0, 0, INF)))
    for body in (
        BODY,
        FrameBody(MAX_TIME_MS, (), (budgets,), since_ms=MIN_TIME_MS),
        FrameBody(MIN_TIME_MS, dropped=(DroppedRecords(MIN_TIME_MS, DropReason.TOO_LATE, 7),)),
        FrameBody(120_000, (HONEST,), (CLOSE,), dropped=(LATE,), late=(replace(LATE, reason=DropReason.COUNTED),)),
    ):
        frame = Frame.pack(3, MILES, body)
        result = FrameCheck(spec()).check(frame, NOW_MS)
        assert (kept_body(result), result.reason, result.through_ms) == (body, None, body.through_ms)
        assert result.checking <= result.work, "an honest frame is charged the job's work"


@pytest.mark.parametrize(
    ("window", "slices", "work"),
    [
        ({"tumbling": "60s"}, 100, 100 * PER_CLOSE),
        ({"session": "60s"}, 100, 100 * PER_CLOSE),
        ({"sliding": "6000s", "every": "60s"}, 1, PER_CLOSE + 100),
        ({"sliding": "6000s", "every": "60s"}, 100, 100 * PER_CLOSE + 199),
    ],
)
def test_the_work_of_a_frame_is_its_slices_and_the_windows_that_they_belong_to(
    window: dict[str, str], slices: int, work: int
) -> None:
    closes = tuple(SliceClose(60_000 * n, 1, 0) for n in range(slices))
    found = checked(FrameBody(0, (), closes), spec(window=window))
    assert found.reason is None and found.work == work


def close_with(measure: str, *rest: Any, observed: int = 9, lowest: float = 0.0) -> SliceClose:
    return SliceClose(60_000, observed, 0, (Withheld(measure, 1.0, lowest, 1, rest=Rest(*rest)),))


KINDS = {"n": "count()", "s": "sum(distance)", "f": "sum(delay)", "lo": "min(delay)", "hi": "max(distance)",
         "a": "mean(delay)", "v": "var(delay)", "d": "distinct(distance)"}  # fmt: skip
COLUMNS = {"carrier": pa.string(), "distance": pa.int64(), "delay": pa.float64()}


def fault_of(close: SliceClose, **query: object) -> str:
    """What the check of a close of the query `KINDS` says; empty: it is accepted."""
    budgeted = spec(**{"measures": KINDS, "budget": {"error": {"n": 9}}, **query})
    frame = Frame.pack(3, MILES, FrameBody(120_000, (), (close,)))
    return FrameCheck(budgeted, COLUMNS).check(frame, NOW_MS).message


@pytest.mark.parametrize(
    "close",
    [
        close_with("n", 9), close_with("s", 9, (2.0**70, -1.0)), close_with("s", 0, (64.0,)),
        close_with("f", 2, (NAN,)),
        close_with("f", 2, (0.5, 1e-18)), close_with("lo", 1, (-INF,)), close_with("hi", 1, (2.0**63, -1.0)),
        close_with("a", 3, (1.5,)), close_with("v", 3, (1.5,), 0.5), close_with("v", 1, (INF,), NAN),
        close_with("d", 4),
    ],
)  # fmt: skip
def test_rests_that_an_edge_may_have_are_accepted(close: SliceClose) -> None:
    assert fault_of(close) == ""


@pytest.mark.parametrize(
    "close",
    [
        close_with("n", 10), close_with("n", 1, (1.0,)), close_with("s", 1, (0.5,)), close_with("s", 1, (NAN,)),
        close_with("s", 1, (INF,)), close_with("s", 1, (1.0,), 2.0), close_with("f", 1, (1.0,) * 9),
        close_with("lo", 1), close_with("lo", 0, (1.0,)), close_with("lo", 2, (1.0,)), close_with("lo", 1, (1.0, 0.5)),
        close_with("hi", 1, (2.0**63,)), close_with("hi", 1, (NAN,)), close_with("v", 2, (1.0,), -1.0),
        close_with("a", 2, (1.0,), NAN), close_with("d", 2, (1.0,)),
    ],
)  # fmt: skip
def test_a_rest_that_cannot_be_right_costs_its_edge_the_slice(close: SliceClose) -> None:
    measure = close.withheld[0].measure
    assert f"slice 60000: the rest of {measure}" in fault_of(close)


def test_an_edge_of_a_query_without_a_budget_has_no_rest() -> None:
    assert "no budget" in fault_of(close_with("n", 1), budget=None)


WITHHELD = Withheld("miles", 1.0, 0.0, 1)
FARTHEST = Withheld("farthest", 1.0, 0.0, 1)
LARGE: dict[str, tuple[dict[str, str], Callable[[int], Partial | SliceClose], int]] = {
    "partials": ({"tumbling": "60s"}, lambda n: Partial(60_000 * n, HONEST.synopsis), 900),
    "partials of one slice": ({"tumbling": "60s"}, lambda n: Partial(60_000 * (n // 100), HONEST.synopsis), 900),
    "closes": ({"tumbling": "60s"}, lambda n: SliceClose(60_000 * n, 1, 0), 6_000),
    "withheld": ({"tumbling": "60s"}, lambda n: SliceClose(60_000 * n, 1, 0, (WITHHELD, FARTHEST)), 4_000),
    "windows": ({"sliding": "50000s", "every": "100s"}, lambda n: SliceClose(50_000_000 * n, 1, 0), 200),
    "sessions": ({"session": "60s"}, lambda n: SliceClose(120_000 * n, 1, 0), 6_000),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_frame_is_cut_to_the_work_for_which_all_queries_may_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut is stated as lost; the first slices count."""
    most = MAX_FRAME_WORK // 10
    monkeypatch.setattr(frame_check, "MAX_FRAME_WORK", most)
    window, part, count = LARGE[kind]
    parts = [part(n) for n in range(count)]
    body = FrameBody(
        0, tuple(p for p in parts if isinstance(p, Partial)), tuple(c for c in parts if isinstance(c, SliceClose))
    )
    result = checked(body, spec(window=window), 1 << 41)
    kept = kept_body(result)
    assert result.reason == "partial-refused" and f"at most {most} in a frame" in result.message
    assert most * 0.8 < result.work <= most
    slices = [p.slice_start_ms for p in (*kept.partials, *kept.closes)]
    assert slices == [p.slice_start_ms for p in parts[: len(slices)]]
    lost = kept.losses
    assert (lost[0].from_ms, lost[-1].to_ms) == (parts[len(slices)].slice_start_ms, parts[-1].slice_start_ms + 1)
    assert checked(kept, spec(window=window), 1 << 41).work == result.work


def test_a_slice_that_is_too_much_work_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_check, "MAX_FRAME_WORK", 100)
    crowded = (Partial(60_000, HONEST.synopsis),) * 20
    before, after = Partial(0, HONEST.synopsis), Partial(120_000, HONEST.synopsis)
    kept = kept_body(checked(FrameBody(0, (*crowded, after, before))))
    assert kept == FrameBody(0, (after, before), losses=(LOST,))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Partial(60_000, b"synopsis"), "corrupt-synopsis"),
        (Partial(60_000, altered(lambda m: setattr(m, "records", (1 << 64) - 1))), "records: 18446744073709551615"),
        (Partial(60_000, altered(lambda m: setattr(m, "parameters", "[" * 100_000))), "parameters"),
        (Partial(60_000, altered(lambda m: setattr(m.parts[0], "seed", 9))), "measures.miles"),
        (Partial(60_000, GroupedAggregate({}, {}).to_bytes()), "expected 2 arrays"),
        (SliceClose(60_000, 3, 4), "3 records observed, 4 late"),
        (SliceClose(60_000, MAX_COUNT + 1, 0), "records observed"),
        (SliceClose(60_000, 3, 0, first_ms=60_000, last_ms=59_999), "last_ms 59999"),
        (SliceClose(60_000, 3, 0, first_ms=0, last_ms=60_001), "first_ms 0"),
        (SliceClose(60_000, 3, 0, (Withheld("other", 1, 1, 1),)), "withheld of other"),
        *((SliceClose(60_000, 3, 0, (impossible,)), "withheld of ") for impossible in IMPOSSIBLE),
        (SliceClose(60_000, 3, 0, (Withheld("miles", 1, 1, 1),) * 2), "twice"),
    ],
)
def test_a_partial_or_a_close_that_cannot_be_right_is_a_stated_loss_and_the_rest_counts(
    bad: Partial | SliceClose, why: str
) -> None:
    other = Partial(120_000, HONEST.synopsis)
    body = (
        FrameBody(180_000, (bad, other), (CLOSE,))
        if isinstance(bad, Partial)
        else FrameBody(180_000, (other,), (bad, SliceClose(120_000, 1, 0)))
    )
    result = checked(body)
    assert result.reason == "partial-refused"
    assert "slice 60000: " in result.message and why in result.message and len(result.message) < 600
    kept = kept_body(result)
    assert kept.partials == (other,)
    assert kept.closes == tuple(c for c in body.closes if c is not bad)
    assert (kept.through_ms, kept.losses) == (180_000, (LOST,))


@pytest.mark.parametrize("start_ms", [NOW_MS // 60_000 * 60_000 + 60_000, 2_082_758_400_000, -(1 << 62), 60_001])
def test_a_slice_that_the_query_cannot_have_yet_is_refused_and_opens_no_window(start_ms: int) -> None:
    body = FrameBody(120_000, (Partial(start_ms, HONEST.synopsis), HONEST), (SliceClose(start_ms, 1, 0), CLOSE))
    result = checked(body)
    assert f"slice {start_ms}: is " in result.message and ", and 1 more" in result.message
    kept = kept_body(result)
    assert (kept.partials, kept.closes) == ((HONEST,), (CLOSE,))
    assert all(loss.from_ms is not None and loss.from_ms <= NOW_MS for loss in kept.losses)


def test_statements_are_bounded_by_the_clock() -> None:
    ahead = InputLoss("file", "restart", NOW_MS + 1, NOW_MS + 2)
    dropped = DroppedRecords(NOW_MS + 60_000, DropReason.TOO_LATE, 1)
    body = FrameBody(NOW_MS + 1, losses=(ahead, InputLoss("f\0", "x", None, 1 << 61)), dropped=(dropped,))
    kept = kept_body(checked(body))
    assert kept == FrameBody(NOW_MS, losses=(InputLoss("f�", "x", None, NOW_MS + 1),))


@pytest.mark.slow
def test_a_body_that_cannot_be_read_is_stated_as_lost() -> None:
    many = pb.FrameBody(closes=[pb.SliceClose()] * (MAX_MESSAGES + 1)).SerializeToString()
    for plain in (b"\xff" * 20, many, b"\x78\0" * (4 << 20)):
        frame = Frame(3, MILES, plain, Frame.pack(3, MILES, BODY).crc32c, Encoding.PLAIN, len(plain))
        result = FrameCheck(spec()).check(dataclasses_with_checksum(frame), NOW_MS)
        assert result.reason == "frame-damaged"
        assert kept_body(result) == FrameBody(MIN_TIME_MS, losses=(InputLoss("frames", "frame-damaged"),))


def dataclasses_with_checksum(frame: Frame) -> Frame:
    import dataclasses

    import google_crc32c

    return dataclasses.replace(frame, crc32c=google_crc32c.value(frame.body))


def test_more_losses_than_an_edge_has_are_united() -> None:
    """The ledger looks at its windows for each of them."""
    stated = tuple(InputLoss("file", "restart", n * 1_000, n * 1_000 + 1) for n in range(9_000))
    kept = kept_body(checked(FrameBody(NOW_MS, losses=stated))).losses
    assert kept == (*stated[:MAX_LOSSES], InputLoss("file", "restart", MAX_LOSSES * 1_000, 8_999_001))
    refused = tuple(Partial(60_000 * n, b"x") for n in range(MAX_LOSSES + 5))
    kept = kept_body(checked(FrameBody(0, refused), latest_ms=1 << 40)).losses
    assert kept == (InputLoss("frames", "partial-refused", 0, 60_000 * (MAX_LOSSES + 4) + 1),)


def test_arrivals_that_cannot_be_read_are_stated_as_lost() -> None:
    early = spec(accuracy={"measure": "miles", "error": "5%", "confidence": "95%"}, group_by=[])
    arrivals = Arrivals(NOW_MS, (b"\1" * 40,))
    kept = checked(FrameBody(120_000, arrivals=arrivals), early)
    assert "arrivals: corrupt-synopsis" in kept.message
    assert kept_body(kept) == FrameBody(120_000, losses=(InputLoss("frames", "frame-damaged"),))
    assert "not answered early" in checked(FrameBody(120_000, arrivals=arrivals)).message


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (None, "values in 7 lag groups"),
        ([[np.nan], [0.0], [0.0]], "number of sampled values"),
        ([[-1.0], [0.0], [0.0]], "number of sampled values"),
        ([[1.0], [np.inf], [np.inf]], ""),  # values of honest edges may be as large
    ],
)
def test_arrivals_that_the_estimates_of_no_query_can_use_are_stated_as_lost(sums: Any, said: str) -> None:
    """They were found when a window was estimated, with the reports of all edges."""
    early = spec(accuracy={"error": "5%", "measure": "miles"}, group_by=[], window={"tumbling": "1s"}, lateness="1s")
    check = FrameCheck(early)
    assert check.schedule is not None
    statistics = SubstreamStatistics(check.schedule.grid, 10)
    width = int(lag_groups(statistics.grid.lags)[-1]) + 1
    state = statistics.to_state()
    if sums is None:
        state = state[:13] + struct.pack("<I", 7) + state[17:] + bytes(7 * 24)
    else:
        statistics.value_cells, statistics.value_sums = np.arange(width), np.tile(np.array(sums), (1, width))
        state = statistics.to_state()
    body = FrameBody(0, arrivals=Arrivals(NOW_MS, (state,)))
    kept = check.check(Frame.pack(3, MILES, body), NOW_MS)
    assert said in kept.message and (kept.reason is None) == (not said)
    assert (kept_body(kept).arrivals is None) == bool(said)


@pytest.mark.parametrize("is_old", [True, False])
def test_reports_of_this_release_and_of_edges_of_0_3_0_are_in_different_fields(is_old: bool) -> None:
    """A center of 0.3.0 ignores the new field. In the old one it would take no arrivals for arrivals of nothing."""
    early = spec(accuracy={"error": "5%", "measure": "miles"}, group_by=[], window={"tumbling": "1s"}, lateness="1s")
    check = FrameCheck(early)
    assert check.schedule is not None
    grid = check.schedule.grid
    statistics = SubstreamStatistics(grid, 10, cells=np.array([3, 70]), counts=np.array([2, 1]))
    sent = Arrivals(NOW_MS, (statistics.to_state() if is_old else encode_report([statistics]),))
    body = pb.FrameBody(arrivals=arrivals_to_wire(sent)) if is_old else body_to_wire(FrameBody(0, arrivals=sent))
    assert body.HasField("arrivals") == is_old and body.HasField("report") != is_old
    plain = body.SerializeToString(deterministic=True)
    frame = Frame(3, MILES, plain, google_crc32c.value(plain), Encoding.PLAIN, len(plain))
    kept = kept_body(check.check(frame, NOW_MS)).arrivals
    assert kept is not None
    (received,) = read_report(kept.substreams[0], grid)
    assert received.arrivals().tolist() == statistics.arrivals().tolist()


def test_arrivals_open_windows_as_records_do() -> None:
    """The job counts them by edge and sub-stream until the windows are final."""
    early = spec(accuracy={"error": "5%", "measure": "miles"}, group_by=[], window={"tumbling": "1s"}, lateness="1s")
    check, held = FrameCheck(early), OpenWindows(early, 20)
    assert check.schedule is not None
    grid = check.schedule.grid

    def send(seq: int, starts_ms: range, through_ms: int = MIN_TIME_MS) -> CheckedFrame:
        at = [check.schedule.slot_at(s) // grid.substream_slots for s in starts_ms] if check.schedule else []
        states = tuple(SubstreamStatistics(grid, index).to_state() for index in dict.fromkeys(at))
        frame = Frame.pack(seq, MILES, FrameBody(through_ms, arrivals=Arrivals(NOW_MS, states)))
        return check.check(frame, NOW_MS, lambda through, starts: held.refuse("i", seq, through, starts))

    assert send(0, range(0, 10_000, 1_000)).reason is None
    many = send(1, range(100_000, 200_000, 1_000))
    assert many.reason == OPEN_WINDOWS and kept_body(many).arrivals is None
    assert send(2, range(100_000, 105_000, 1_000), through_ms=200_000).reason is None, "of slices that it closes"
    assert held.count <= 20 + 2


async def test_a_bad_partial_is_an_alarm_before_the_ack_and_the_honest_one_beside_it_is_stored(tmp_path: Path) -> None:
    body = FrameBody(120_000, (Partial(0, b"poison"), HONEST), (CLOSE,))
    sent = Frame.pack(0, MILES, body)
    async with center(tmp_path) as c:
        c.clock[0] = NOW_MS
        c.catalog.queries.register(spec(), 1)
        async with RawEdge(c.port, greets=True) as edge:
            await edge.send(sent)
            refused = (await edge.until("refused")).refused
            assert (refused.reason, refused.seq, refused.frames) == ("partial-refused", 0, 1)
            await edge.acked(0)
        (entry,) = c.catalog.frames.entries("miles@1", 0, 9)
        kept = stored_body(c.catalog, c.log, entry)
        assert (kept.partials, kept.closes) == ((HONEST,), (CLOSE,))
        assert kept.losses == (InputLoss("frames", "partial-refused", 0, 1),)
        assert (entry.crc32c, entry.plain_bytes) == (sent.crc32c, max(sent.raw_bytes, sent.wire_bytes))
        await eventually(c.catalog.alarms.latest)
        assert [(a.kind, a.edge) for a in c.catalog.alarms.latest()] == [("frame-refused", JFK)]
        # The same frame again is a re-delivery, although the log has another body.
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=1)
            await edge.send(sent)
            await edge.acked(0)
        assert len(c.entries()) == 1 and len(c.catalog.alarms.latest()) == 1


@pytest.mark.slow
async def test_a_small_frame_that_carries_much_is_admitted_by_what_it_carries(tmp_path: Path) -> None:
    large = FrameBody(0, losses=(InputLoss("x" * (8 << 20), "restart"),))
    frames = [Frame.pack(n, MILES, large) for n in range(4)]
    assert frames[0].wire_bytes < 20_000 and frames[0].raw_bytes > 8 << 20
    async with center(tmp_path, max_pending_bytes=10 << 20) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.queries.register(spec(), 1)
        await edge.hello()
        await other.hello("lga")
        c.log.segment_files.refuse_append = True
        await edge.send(*frames)
        await other.send(*frames)
        for _ in range(10):
            await edge.until("throttle", lambda throttle: throttle.retry_after_ms > 0)
        assert reading(c.gateway.metrics.pending) == 2 * frames[0].raw_bytes
        c.log.segment_files.refuse_append = False
        await edge.acked(3)
        await other.acked(3)


async def test_an_edge_that_comes_first_does_not_set_the_types_of_a_query(tmp_path: Path) -> None:
    bound = spec().bind({"carrier": pa.int64(), "distance": pa.float64()})
    stacks = {m.measure.name: m.measure.stack(pa.float64()) for m in bound.measures}
    numbers = GroupedAggregate({"carrier": pa.int64()}, stacks)
    numbers.update([pa.array([7])], {name: pa.array([1.5]) for name in stacks}, 1)
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as evil, RawEdge(c.port) as honest:
        await honest.hello()
        await evil.hello("lga", streams=[pb.Stream(name="flights")])
        await evil.send(Frame.pack(0, MILES, FrameBody(0, (Partial(0, numbers.to_bytes()),))))
        refused = (await evil.until("refused")).refused
        assert refused.reason == "partial-refused" and "keys of type int64; expected string" in refused.message
        await evil.acked(0)
        await honest.send(Frame.pack(0, MILES, BODY))
        await honest.acked(0)
        stored = [read_frame(c.log, e.segment, e.offset, e.length) for e in c.catalog.frames.entries("miles@1", 0, 9)]
        assert [len(s.partials) for s in stored] == [0, 1]


@pytest.mark.parametrize(
    ("stated", "is_kept"),
    [
        (DroppedRecords(0, DropReason.WRONG_TYPE, 7, 60_000), True),
        (DroppedRecords(MIN_TIME_MS, DropReason.MALFORMED, 7, MAX_TIME_MS), True),
        (DroppedRecords(60_000, DropReason.MALFORMED, 7, 60_000), False),
        (DroppedRecords(0, DropReason.MALFORMED, 7, MAX_TIME_MS + 1), False),
        (DroppedRecords(0, DropReason.MALFORMED, MAX_COUNT + 1, 60_000), False),
        (DroppedRecords(NOW_MS + 1, DropReason.MALFORMED, 7, NOW_MS + 2), False),
    ],
)
def test_a_statement_about_rejected_records_that_cannot_be_right_is_left_out(
    stated: DroppedRecords, is_kept: bool
) -> None:
    honest = DroppedRecords(60_000, DropReason.TOO_LATE, 1)
    kept = kept_body(checked(FrameBody(120_000, (HONEST,), (CLOSE,), dropped=(stated, honest))))
    assert (kept.partials, kept.dropped) == ((HONEST,), (stated, honest) if is_kept else (honest,))


@pytest.mark.parametrize("amount", [Withheld("miles", -1.0, 0.0, 1), Withheld("other", 1.0, 0.0, 1)])
def test_amounts_of_late_records_that_cannot_be_right_are_unknown(amount: Withheld) -> None:
    stated, counted = replace(LATE, amounts=(amount,)), replace(LATE, amounts=(amount,), reason=DropReason.COUNTED)
    kept = kept_body(checked(FrameBody(120_000, (HONEST,), (CLOSE,), dropped=(stated,), late=(counted,))))
    assert (kept.dropped, kept.late) == ((replace(stated, amounts=()),), (replace(counted, amounts=()),))
