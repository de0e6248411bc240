from __future__ import annotations

import heapq
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.durability import QuotaFile
from edge.uplink import MIN_FRAME_BYTES, DailyQuota
from edge.uplink.flow_control import (
    DAY_MS,
    IN_FLIGHT_GAIN,
    MIN_IN_FLIGHT_BYTES,
    LinkEstimator,
    WindowedExtreme,
)

CREDIT = 64 << 20
FRAME = 32 << 10


class Pipe:
    """A link of a fixed rate and delay, driven by a sender that uses all the room that the estimator allows."""

    def __init__(self, link: LinkEstimator, rate_bytes_s: float, rtt_s: float) -> None:
        self.link, self.rate, self.rtt = link, rate_bytes_s, rtt_s
        self.now, self.busy_until, self.seq = 0.0, 0.0, 0
        self.acks: list[tuple[float, int]] = []
        self.queued_most_s = 0.0

    def run(self, until_s: float) -> None:
        while self.now < until_s:
            while (room := self.link.room_bytes(1 << 20)) > 0 and self.link.delay_s(self.now) == 0:
                self._send(min(room, FRAME))
            paced = self.now + self.link.delay_s(self.now) if room else float("inf")
            if self.acks and self.acks[0][0] <= paced:
                self.now, seq = heapq.heappop(self.acks)
                self.link.on_acknowledged(seq, self.now)
            else:
                self.now = paced

    def _send(self, size: int) -> None:
        self.link.on_sent(self.seq, size, self.now)
        self.queued_most_s = max(self.queued_most_s, self.busy_until - self.now)
        self.busy_until = max(self.busy_until, self.now) + size / self.rate
        heapq.heappush(self.acks, (self.busy_until + self.rtt, self.seq))
        self.seq += 1


def begun(credit: int = CREDIT) -> LinkEstimator:
    link = LinkEstimator()
    link.begin_session(credit)
    return link


@pytest.mark.parametrize("rate", [50e3, 1e6, 20e6])
@pytest.mark.parametrize("rtt", [0.002, 0.05, 0.3])
def test_the_estimates_find_a_links_rate_and_round_trip(rate: float, rtt: float) -> None:
    pipe = Pipe(begun(), rate, rtt)
    pipe.run(30)
    assert pipe.link.bandwidth_bytes_s == pytest.approx(rate, rel=0.1)
    assert rtt <= pipe.link.rtt_ms / 1000 <= 1.05 * rtt + MIN_FRAME_BYTES / rate


@pytest.mark.parametrize("rate", [1e6, 20e6])
def test_the_queue_stays_in_the_cache_and_not_in_the_link(rate: float) -> None:
    rtt = 0.1
    pipe = Pipe(begun(), rate, rtt)
    pipe.run(20)
    pipe.queued_most_s = 0.0
    pipe.run(120)
    # A round trip as seen from acknowledgements includes the time that frames take to pass.
    bound = (IN_FLIGHT_GAIN * 1.1 - 1) * rtt + (FRAME + IN_FLIGHT_GAIN * MIN_IN_FLIGHT_BYTES) / rate
    assert pipe.queued_most_s <= bound


def test_a_drop_in_bandwidth_is_detected_once_the_window_expires() -> None:
    pipe = Pipe(begun(), 10e6, 0.05)
    pipe.run(20)
    pipe.rate = 1e6
    pipe.run(60)
    assert pipe.link.bandwidth_bytes_s == pytest.approx(1e6, rel=0.2)


def test_a_longer_round_trip_is_detected_once_the_minimum_expires() -> None:
    pipe = Pipe(begun(), 10e6, 0.05)
    pipe.run(20)
    pipe.rtt = 0.2
    pipe.run(60)
    assert pipe.link.rtt_ms == pytest.approx(200, rel=0.1)
    assert pipe.link.bandwidth_bytes_s == pytest.approx(10e6, rel=0.1)


@pytest.mark.slow
def test_draining_the_link_for_a_new_measurement_costs_little() -> None:
    pipe = Pipe(begun(), 10e6, 0.1)
    pipe.run(10)
    sent = pipe.seq
    pipe.run(110)
    assert (pipe.seq - sent) * FRAME >= 0.95 * 10e6 * 100


def test_a_link_that_is_not_full_does_not_lower_the_bandwidth_estimate() -> None:
    pipe = Pipe(begun(), 10e6, 0.05)
    pipe.run(5)
    link, now, seq = pipe.link, pipe.now, pipe.seq
    for _, left in sorted(pipe.acks):
        link.on_acknowledged(left, now)
    before = link.bandwidth_bytes_s
    for n in range(200):
        link.on_sent(seq + n, 500, now + n * 0.1)
        link.on_acknowledged(seq + n, now + n * 0.1 + 0.05)
    assert link.bandwidth_bytes_s == before


def test_the_in_flight_limit_starts_at_the_minimum_and_never_exceeds_the_credit() -> None:
    assert begun().in_flight_limit_bytes == MIN_IN_FLIGHT_BYTES
    assert begun(1_000).in_flight_limit_bytes == 1_000
    link = begun()
    Pipe(link, 20e6, 0.3).run(30)
    assert link.in_flight_limit_bytes > 4 << 20
    link.set_credit(1 << 20)
    assert link.in_flight_limit_bytes == 1 << 20


def test_an_empty_link_has_room_for_one_frame_and_a_full_one_for_none() -> None:
    link = begun(10_000)
    assert 0 < link.room_bytes(1 << 20) <= MIN_IN_FLIGHT_BYTES, "nothing is known of the link"
    link.on_sent(0, 9_000, 0.0)
    assert link.room_bytes(1 << 20) == 0
    link.on_acknowledged(0, 0.1)
    assert link.room_bytes(1 << 20) > 0
    link.begin_session(0)
    assert 0 < link.room_bytes(1 << 20) <= MIN_FRAME_BYTES, "with no credit at all the session would stall"
    assert link.room_bytes(100) == 100, "the center limits the frame size"


def test_a_frame_is_never_larger_than_what_a_slow_link_delivers_in_a_second() -> None:
    pipe = Pipe(begun(), 20e3, 0.05)
    pipe.run(60)
    pipe.link.begin_session(CREDIT)
    assert pipe.link.room_bytes(1 << 20) <= 22e3


def test_a_new_session_begins_with_an_empty_link_and_the_old_estimates() -> None:
    pipe = Pipe(begun(), 1e6, 0.05)
    pipe.run(10)
    bandwidth = pipe.link.bandwidth_bytes_s
    pipe.link.begin_session(CREDIT)
    assert pipe.link.in_flight_bytes == 0
    assert pipe.link.bandwidth_bytes_s == bandwidth
    pipe.link.on_acknowledged(pipe.seq, 11.0)
    assert pipe.link.in_flight_bytes == 0, "an acknowledgement of what is not in flight changes nothing"


def test_the_round_trip_of_heartbeats_replaces_that_of_frames() -> None:
    link = begun()
    assert link.rtt_ms == 0
    link.on_sent(0, 1_000, 0.0)
    link.on_acknowledged(0, 0.08)
    assert link.rtt_ms == pytest.approx(80)
    link.on_echo(0.03, 1.0)
    assert link.rtt_ms == pytest.approx(30)
    assert link.slowest_ack_s == pytest.approx(0.08)


@given(st.lists(st.integers(1, 100_000), max_size=60), st.data())
def test_bytes_in_flight_are_those_sent_and_not_acknowledged(sizes: list[int], data: st.DataObject) -> None:
    link, sent, acked, now = begun(), [], 0, 0.0
    for seq, size in enumerate(sizes):
        now += data.draw(st.floats(0, 1))
        link.on_sent(seq, size, now)
        sent.append(size)
        if data.draw(st.booleans()):
            acked = data.draw(st.integers(acked, len(sent)))
            link.on_acknowledged(acked - 1, now)
        assert link.in_flight_bytes == sum(sent[acked:])
        assert 0 < link.in_flight_limit_bytes <= CREDIT


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 100)), min_size=1, max_size=50))
def test_a_windowed_extreme_is_that_of_the_samples_in_the_window(steps: list[tuple[float, float]]) -> None:
    largest, smallest = WindowedExtreme("max", 5.0), WindowedExtreme("min", 5.0)
    now, samples = 0.0, []
    for step, value in steps:
        now += step
        samples.append((now, value))
        largest.add(value, now)
        smallest.add(value, now)
        recent = [v for at, v in samples if at >= now - 5.0]
        assert largest.value == max(recent)
        assert smallest.value == min(recent)


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


def test_a_link_that_was_never_full_has_no_known_capacity() -> None:
    link = begun()
    link.on_sent(1, 1_000, 0.0)
    link.on_acknowledged(1, 0.05)
    assert link.bandwidth_bytes_s > 0
    assert link.capacity_bytes_s == 0.0
    pipe = Pipe(link, 10e6, 0.05)
    pipe.run(5)
    assert pipe.link.capacity_bytes_s == pipe.link.bandwidth_bytes_s > 5e6


def idle_sender(rate: float, delay: float, size: int, held_s: float, frames: int = 10) -> LinkEstimator:
    """Returns what a sender has learned that sends a frame every 10 s, beside heartbeats of 200 bytes."""
    link, now = begun(), 0.0
    for seq in range(frames):
        link.on_echo(delay + 200 / rate, now + 1, 200)
        link.on_sent(seq, size, now + 2)
        link.on_acknowledged(seq, now + 2 + delay + size / rate + held_s, held_s)
        now += 10
    return link


@pytest.mark.parametrize("rate", [4096.0, 16_384.0])
@pytest.mark.parametrize("held_s", [0.0, 0.3])
def test_a_few_small_frames_show_the_bandwidth_of_a_narrow_link(rate: float, held_s: float) -> None:
    link = idle_sender(rate, 0.1, 2_000, held_s)
    assert link.capacity_bytes_s == pytest.approx(rate, rel=0.05)


def test_small_frames_on_a_wide_link_do_not_show_its_bandwidth() -> None:
    assert idle_sender(10e6, 0.1, 2_000, 0.0).capacity_bytes_s == 0.0


def test_a_wide_link_soon_carries_frames_of_the_usual_size() -> None:
    link = idle_sender(10e6, 0.005, 2_000, 0.02, frames=2)
    assert link.room_bytes(1 << 20) >= MIN_FRAME_BYTES
    assert link.in_flight_limit_bytes >= 16 << 10


def test_a_frame_of_a_few_bytes_does_not_show_that_a_link_is_wide() -> None:
    """On each link it takes hardly longer than a heartbeat."""
    rate, delay = 4096.0, 0.05
    link = begun()
    link.on_echo(2 * delay + 100 / rate, 0.0, 100)
    link.on_sent(0, 118, 1.0)
    link.on_acknowledged(0, 1.0 + 2 * delay + 118 / rate)
    assert link.in_flight_limit_bytes <= MIN_IN_FLIGHT_BYTES


def test_time_at_the_center_does_not_count_as_time_of_the_link() -> None:
    assert idle_sender(10e6, 0.1, 2_000, 1.0).capacity_bytes_s == 0.0


@pytest.mark.parametrize("rate", [4096.0, 16_384.0])
def test_a_full_narrow_link_holds_half_a_second_of_bytes(rate: float) -> None:
    pipe = Pipe(begun(), rate, 0.1)
    pipe.run(20)
    pipe.queued_most_s = 0.0
    pipe.run(60)
    assert pipe.link.capacity_bytes_s == pytest.approx(rate, rel=0.1)
    assert pipe.queued_most_s <= 0.6


def test_a_few_samples_are_kept_however_old_they_are() -> None:
    largest = WindowedExtreme("max", 5.0, least=3)
    for at, value in ((0.0, 9.0), (100.0, 1.0), (200.0, 2.0)):
        largest.add(value, at)
    assert largest.value == 9.0
    largest.add(3.0, 300.0)
    assert largest.value == 3.0


def test_large_frames_of_a_narrow_link_follow_each_other_without_a_pause() -> None:
    """Frames of closed slices are larger than the room that the estimator gives."""
    link = begun()
    pipe = Pipe(link, 4_000.0, 0.14)
    pipe.run(15.0)  # the bandwidth is known
    began_s, first = pipe.now, pipe.seq
    while pipe.now < began_s + 60.0:
        while link.room_bytes(1 << 20) > 0 and link.delay_s(pipe.now) == 0:
            pipe._send(4_000)
        paced = pipe.now + link.delay_s(pipe.now) if link.room_bytes(1 << 20) else float("inf")
        if pipe.acks and pipe.acks[0][0] <= paced:
            pipe.now, seq = heapq.heappop(pipe.acks)
            link.on_acknowledged(seq, pipe.now)
        else:
            pipe.now = paced
    assert 4_000 * (pipe.seq - first) > 0.95 * 4_000.0 * 60.0
