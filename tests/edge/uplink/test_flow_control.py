"""Limits of bytes in flight, delays with wrong clocks, and the daily quota."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.durability import QuotaFile
from edge.uplink import DailyQuota, LinkForecast
from edge.uplink.flow_control import DAY_MS, LinkFlow
from sim.budgets.link import SimulatedLink
from tests.edge.uplink.link_world import CREDIT, Sender

MOST = 1 << 20
NARROW = SimulatedLink(4_300.0, latency_ms=50, bucket_bytes=1_600.0, jitter_ms=3)


def begun(credit: int = CREDIT, limit_bytes_s: float = math.inf) -> LinkFlow:
    flow = LinkFlow(lambda: 0, limit_bytes_s)
    flow.begin_session(credit)
    return flow


def test_an_empty_link_has_room_for_one_small_frame_and_an_unknown_one_for_little_more() -> None:
    flow = begun()
    assert 0 < flow.room_bytes(MOST, 0.0) <= 4_000, "nothing is known of the link"
    assert flow.room_bytes(100, 0.0) == 100, "the center limits the frame size"
    flow.on_sent(0, 9_000, 0.0)
    assert flow.room_bytes(MOST, 0.0) == 0
    flow.on_acknowledged(0, 0.1)
    assert flow.room_bytes(MOST, 0.1) > 0
    flow.begin_session(0)
    assert flow.room_bytes(MOST, 0.2) > 0, "with no credit at all the session would stall"


@given(st.lists(st.integers(1, 100_000), max_size=40), st.data())
def test_bytes_in_flight_are_those_sent_and_not_acknowledged(sizes: list[int], data: st.DataObject) -> None:
    flow, acked, now = begun(50_000), 0, 0.0
    for seq, size in enumerate(sizes):
        now += data.draw(st.floats(0, 1))
        flow.on_sent(seq, size, now)
        if data.draw(st.booleans()):
            acked = data.draw(st.integers(acked, seq + 1))
            flow.on_acknowledged(acked - 1, now)
        assert (
            sum(sizes[acked : seq + 1]) <= flow.in_flight_bytes <= 1.05 * sum(sizes[acked : seq + 1]) + 80 * (seq + 1)
        )
        if seq + 1 > acked:
            assert flow.room_bytes(MOST, now) <= max(50_000 - flow.in_flight_bytes, 0)
    flow.begin_session(CREDIT)
    assert flow.in_flight_bytes == 0
    flow.on_acknowledged(len(sizes), now)
    assert flow.in_flight_bytes == 0, "an acknowledgement of what is not in flight changes nothing"


def test_what_is_in_flight_leaves_a_known_link_within_half_a_second() -> None:
    sender = Sender(NARROW, lambda _: 60_000).run(3)
    sender.frames.clear()
    sender.run(4)
    waits_s = sorted(f.arrived_s - f.sent_s - 0.05 for f in sender.frames)
    assert waits_s[int(0.9 * len(waits_s))] <= 0.6
    assert sender.use(50.0, 70.0) >= 0.95 * 4_300.0, "and the link is never idle"


def test_a_link_that_is_gone_for_a_minute_gets_no_further_frames() -> None:
    gone = SimulatedLink(4_300.0, latency_ms=50, bucket_bytes=1_600.0, trace=((62_000.0, 0.0), (122_000.0, 1.0)))
    sender = Sender(gone, lambda _: 20_000).run(20)
    assert sum(f.size for f in sender.frames if 62.5 <= f.sent_s < 122.0) < 2_500
    assert sender.calibration(140.0) >= 0.8, "and then the link is as before"


def test_a_frame_is_as_large_as_a_wide_link_permits() -> None:
    sender = Sender(SimulatedLink(1e7, latency_ms=20), lambda _: 2e7).run(2)
    last = [f for f in sender.frames if f.sent_s >= 10.0]
    assert sender.use(10.0, 10.0 + 2e7 / 1e7 + 1.0) >= 0.65e7
    assert sum(f.size for f in last) / len(last) > 16 << 10


def delay_ms(flow: LinkFlow, sender: Sender) -> float:
    """Returns the delay of the next 1,000 bytes by the forecast, from the edge's clock to the center's."""
    link = flow.forecast(sender.now)
    return link.path_delay_ms + 1e6 / link.low_bytes_s


@pytest.mark.parametrize("states_arrivals", [True, False])
@pytest.mark.parametrize("clock_s", [0.0, 1.0, -1.0])
def test_a_forecast_is_by_the_center_s_clock(clock_s: float, states_arrivals: bool) -> None:
    demand = lambda _: 20_000  # noqa: E731
    sender = Sender(NARROW, demand, clock_s=lambda _: clock_s, states_arrivals=states_arrivals).run(6)
    # the bucket is full: the bytes pass at once
    assert delay_ms(sender.flow, sender) == pytest.approx(1000 * clock_s, abs=450)


def test_a_step_of_the_center_s_clock_is_noticed_with_the_next_message() -> None:
    for step_s in (1.0, -1.0):
        sender = Sender(NARROW, lambda _: 20_000, clock_s=lambda t, s=step_s: s * (t > 61.0)).run(7)
        assert delay_ms(sender.flow, sender) == pytest.approx(1000 * step_s, abs=450)
        assert sender.flow.model.rate_bytes_s(0.5) == pytest.approx(4_300.0, rel=0.1)


@pytest.mark.parametrize("limit_bytes_s", [2_000.0, 50_000.0])
def test_a_forecast_never_exceeds_the_configured_limit_or_the_link(limit_bytes_s: float) -> None:
    sender = Sender(NARROW, lambda _: 20_000, limit_bytes_s=limit_bytes_s).run(6)
    link = sender.flow.forecast(sender.now)
    assert max(link.low_bytes_s, link.mid_bytes_s) <= min(limit_bytes_s, 1.05 * 4_300.0)


def test_a_forecast_before_the_first_frame_is_of_a_narrow_link() -> None:
    assert begun().forecast(0.0).mid_bytes_s == LinkForecast().mid_bytes_s == 1_000.0
    assert begun().forecast(0.0).stated_bytes_s == 0.0


def test_the_daily_quota_is_used_up_once_and_restored_at_midnight() -> None:
    quota, noon = DailyQuota(1_000, None, lambda *_: None), 20_000 * DAY_MS + DAY_MS // 2
    assert quota.delay_s(noon) == 0
    quota.consume(999, noon)
    assert quota.delay_s(noon) == 0
    quota.consume(500, noon)
    assert quota.delay_s(noon) == DAY_MS / 2 / 1000
    assert quota.delay_s(noon + DAY_MS // 2) == 0


class DiskRefuses(Exception):
    pass


@given(
    limit=st.integers(1_000, 1_000_000),
    sizes=st.lists(st.integers(1, 50_000), max_size=60),
    trouble=st.lists(st.sampled_from(["", "", "", "crash", "stop", "disk", "midnight"]), min_size=60, max_size=60),
)
def test_the_daily_quota_holds_through_crashes_restarts_and_disk_failures(
    limit: int, sizes: list[int], trouble: list[str]
) -> None:
    kept: list[tuple[int, int]] = []
    broken = False

    def keep(day: int, spent: int) -> None:
        if broken:
            raise DiskRefuses
        kept[:] = [(day, spent)]

    def begin() -> DailyQuota:
        return DailyQuota(limit, kept[0] if kept else None, keep)

    quota, now, sent, restarts = begin(), 20_000 * DAY_MS, 0, 0
    for size, what in zip(sizes, trouble, strict=False):
        broken = what == "disk"
        if what == "stop":
            quota.close()
        if what in ("crash", "stop"):
            quota, restarts = begin(), restarts + (what == "crash")
        if what == "midnight":
            now, sent, restarts = now + DAY_MS, 0, 0
        if quota.delay_s(now) == 0:
            try:
                quota.consume(size, now)
            except DiskRefuses:
                continue
            sent += size
            assert sent - size < limit, "one message over it at most"
        elif not broken:
            assert sent >= limit - restarts * (limit // 100 + 1), "a crash costs a hundredth of it at most"


def test_a_clock_that_is_set_back_does_not_grant_a_day_twice() -> None:
    quota, noon = DailyQuota(1_000, None, lambda *_: None), 20_000 * DAY_MS + DAY_MS // 2
    quota.consume(1_000, noon)
    assert quota.delay_s(noon - DAY_MS) > 0


def test_the_quota_file_is_read_back_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    file = QuotaFile(tmp_path)
    assert file.load() is None
    file.save(20_000, 12)
    assert QuotaFile(tmp_path).load() == (20_000, 12)
    (tmp_path / "quota.json").write_text("{")
    assert file.load() is None
