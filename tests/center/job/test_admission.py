from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from center.job.admission import FLOOR_MS, BatchLimits, LeastSlack, PendingFrames
from center.storage.frame_log import FrameEntry
from edgewater.base.streams import EdgeId
from edgewater.wire import QueryRef

MB = 1 << 20
SECOND = 1_000


def frame_of(position: int, size: int, received_at_ms: int = 0, edge: str = "", through_ms: int = 0) -> FrameEntry:
    query = QueryRef("q", 1)
    return FrameEntry(
        query, position, EdgeId(edge), "i", position, 0, "s", 0, 0, 0, received_at_ms, size, through_ms=through_ms
    )


def sizes_of(frames: dict[str, list[int]]) -> PendingFrames:
    def sizes(key: str, after: int, through: int) -> Sequence[FrameEntry]:
        return [frame_of(position, frames[key][position - 1]) for position in range(after + 1, through + 1)]

    return sizes


class Log:
    """Frames of queries with windows of a second, and the time that batches take."""

    def __init__(self) -> None:
        self.frames: dict[str, list[FrameEntry]] = {}
        self.start: dict[str, int] = {}
        self.admission = LeastSlack(lambda key: None if key == "unknown@1" else (SECOND, 0))

    def add(
        self, key: str, received_at_ms: int, size: int = MB, edge: str = "a", through_ms: int | None = None
    ) -> None:
        """Adds a frame that answers up to when it was received, if nothing else is given."""
        queue = self.frames.setdefault(key, [])
        through_ms = received_at_ms if through_ms is None else through_ms
        queue.append(frame_of(len(queue) + 1, size, received_at_ms, edge, through_ms))

    def pending(self, key: str, after: int, through: int) -> Sequence[FrameEntry]:
        return self.frames[key][after:through]

    def batch(self, limits: BatchLimits, took_s: float | None = 0.5) -> dict[str, int]:
        """Admits a batch, which can be applied after `took_s`; None: it is not applied. Returns the number of frames by
        query."""
        last = {key: len(queue) for key, queue in self.frames.items()}
        ends = self.admission.admit(self.start, last, self.pending, limits)
        admitted = {key: end - self.start.get(key, 0) for key, end in ends.items()}
        self.start |= ends
        if took_s is not None:
            self.admission.done(ends, took_s)
        return admitted


def in_order() -> LeastSlack:
    return LeastSlack(lambda key: (10, 0))


def last_of(frames: dict[str, list[int]]) -> dict[str, int]:
    return {key: len(sizes) for key, sizes in frames.items()}


def test_all_that_waits_is_admitted_where_the_limits_allow_it() -> None:
    frames = {"a@1": [100] * 3, "b@1": [100] * 5}

    ends = in_order().admit({"a@1": 1}, last_of(frames), sizes_of(frames), BatchLimits())

    assert ends == {"a@1": 3, "b@1": 5}


def test_nothing_is_admitted_where_nothing_waits() -> None:
    frames = {"a@1": [100]}

    assert in_order().admit({"a@1": 1}, last_of(frames), sizes_of(frames), BatchLimits()) == {}


def test_no_query_takes_more_than_its_own_limits() -> None:
    frames = {"small@1": [1] * 100, "large@1": [MB] * 100}
    limits = BatchLimits(frames_per_query=7, bytes_per_query=3 * MB)

    ends = in_order().admit({}, last_of(frames), sizes_of(frames), limits)

    assert ends == {"small@1": 7, "large@1": 3}


def test_a_frame_beyond_every_limit_passes_alone() -> None:
    frames = {"a@1": [50 * MB, 1]}
    limits = BatchLimits(bytes_per_query=MB, bytes=MB)

    assert in_order().admit({}, last_of(frames), sizes_of(frames), limits) == {"a@1": 1}


def test_positions_that_retention_has_dropped_are_passed() -> None:
    assert in_order().admit({}, {"a@1": 5}, lambda *_: [], BatchLimits()) == {"a@1": 5}


@given(
    frames=st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(1, 300), max_size=30)),
    limits=st.builds(
        BatchLimits,
        frames_per_query=st.integers(1, 20),
        bytes_per_query=st.integers(0, 500),
        frames=st.integers(1, 30),
        bytes=st.integers(0, 1000),
    ),
)
def test_batches_stay_within_the_limits_and_reach_the_end(frames: dict[str, list[int]], limits: BatchLimits) -> None:
    admission, last, start = in_order(), last_of(frames), dict[str, int]()
    while any(last[key] > start.get(key, 0) for key in last):
        ends = admission.admit(start, last, sizes_of(frames), limits)

        assert ends, "something waits, so something must be admitted"
        taken = {key: frames[key][start.get(key, 0) : end] for key, end in ends.items()}
        assert all(taken.values()), "a query in the batch must advance"
        assert sum(map(len, taken.values())) <= limits.frames
        assert sum(map(sum, taken.values())) <= limits.bytes or sum(map(len, taken.values())) == 1
        for sizes in taken.values():
            assert len(sizes) <= limits.frames_per_query
            assert len(sizes) == 1 or sum(sizes) <= limits.bytes_per_query
        start |= ends
    assert start == {key: position for key, position in last.items() if position}


@given(
    frames=st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5_000)), max_size=20)
    ),
    limits=st.builds(
        BatchLimits,
        frames_per_query=st.integers(1, 40),
        bytes_per_query=st.integers(0, 8_000),
        frames=st.integers(1, 150),
        bytes=st.integers(0, 20_000),
    ),
)
def test_what_fits_is_admitted(frames: dict[str, list[tuple[int, int]]], limits: BatchLimits) -> None:
    """A center that is not short of CPU has the same batches, to the byte."""
    log = Log()
    for key, queue in frames.items():
        for size, received_at_ms in queue:
            log.add(key, received_at_ms, size)
    last = {key: len(queue) for key, queue in log.frames.items()}
    ends = log.admission.admit({}, last, log.pending, limits)
    sizes = {key: sum(size for size, _ in queue) for key, queue in frames.items()}
    longest = max((len(queue) for queue in frames.values()), default=0)
    share = min(limits.frames_per_query, limits.frames // max(1, sum(map(bool, frames.values()))))
    if (
        longest <= share
        and max(sizes.values(), default=0) <= limits.bytes_per_query
        and sum(sizes.values()) <= limits.bytes
    ):
        assert ends == {key: position for key, position in last.items() if position}
    else:
        assert ends, "something waits"


def test_the_query_whose_window_has_ended_comes_first() -> None:
    log, tight = Log(), BatchLimits(bytes=2 * MB)
    for key in ("idle@1", "due@1"):
        for received_at_ms in (100, 200, 300):
            log.add(key, received_at_ms)
    while log.batch(tight):
        pass
    for key, received_at_ms in (("idle@1", 700), ("idle@1", 800), ("idle@1", 900), ("due@1", 950), ("due@1", 1_010)):
        log.add(key, received_at_ms)
    assert log.batch(tight) == {"due@1": 2}, "with all that is in front of the frame that closes the window"
    assert log.batch(tight) == {"idle@1": 2}


def test_each_edge_closes_its_windows_itself() -> None:
    log, tight = Log(), BatchLimits(bytes=MB)
    for edge in ("a", "b"):
        log.add("q@1", 100, edge=edge)
        log.add("other@1", 100, edge=edge)
    while log.batch(tight):
        pass
    log.add("q@1", 1_010, edge="a")
    log.add("other@1", 990, edge="b")
    assert log.batch(tight) == {"q@1": 1}
    log.add("q@1", 1_030, edge="b")
    assert log.batch(tight) == {"q@1": 1}, "the window of q has been closed by one edge, and needs the other"
    assert log.batch(tight) == {"other@1": 1}


def test_a_frame_of_the_next_window_does_not_close_the_one_before() -> None:
    log, tight = Log(), BatchLimits(bytes=2 * MB)
    for key in ("other@1", "q@1"):
        for received_at_ms in (100, 200, 300):
            log.add(key, received_at_ms)
    while log.batch(tight):
        pass
    for key, received_at_ms, through_ms in (("other@1", 1_005, 900), ("q@1", 1_006, 900), ("q@1", 1_080, 1_000)):
        log.add(key, received_at_ms, through_ms=through_ms)
    assert log.batch(tight) == {"q@1": 2}, "what closes a window, with all before it"
    assert log.batch(tight) == {"other@1": 1}


def test_no_query_waits_for_ever() -> None:
    log, tight = Log(), BatchLimits(bytes=4 * MB)
    for key in ("greedy@1", "patient@1"):
        log.add(key, 0)
    log.batch(tight)
    log.add("patient@1", 500)
    served_at_ms = None
    for now_ms in range(1_000, 60_000, 1_000):
        for _ in range(4):
            log.add("greedy@1", now_ms)
        log.add("patient@1", now_ms - 400)
        if log.batch(tight).get("patient@1"):
            served_at_ms = now_ms
            break
    assert served_at_ms is not None and served_at_ms <= 500 + FLOOR_MS + 2 * SECOND


def test_a_batch_is_as_large_as_a_slow_machine_applies_in_its_time() -> None:
    log, limits = Log(), BatchLimits(bytes=16 * MB, bytes_per_query=MB)
    for key in range(100):
        for _ in range(4):
            log.add(f"q{key}@1", 100)
    assert sum(log.batch(limits, took_s=7.8).values()) == 16
    assert sum(log.batch(limits, took_s=1.95).values()) == 4, "16 MB took four times as long as a batch may"
    assert sum(log.batch(limits, took_s=0.05).values()) <= 4
    for _ in range(20):
        admitted = sum(log.batch(limits, took_s=0.1).values())
    assert admitted == 16, "never more than configured"


def test_the_next_batch_may_be_admitted_before_the_one_before_can_be_applied() -> None:
    log, limits = Log(), BatchLimits(bytes=16 * MB, bytes_per_query=MB)
    for number in range(100):
        log.add(f"q{number}@1", 100)
    first = log.admission.admit({}, dict.fromkeys(log.frames, 1), log.pending, limits)
    log.start = dict(first)
    assert sum(log.batch(limits, took_s=None).values()) == 16
    log.admission.done(first, 7.8)
    assert sum(log.batch(limits).values()) == 4, "16 MB took four times as long as a batch may"


def test_a_batch_that_was_not_applied_measures_nothing() -> None:
    log, limits = Log(), BatchLimits(bytes=16 * MB)
    for number in range(60):
        log.add(f"q{number}@1", 100)
    log.batch(limits, took_s=None)
    log.start = {}
    assert sum(log.batch(limits).values()) == 16


def test_queries_without_known_windows_are_admitted_in_the_order_of_arrival() -> None:
    log, tight = Log(), BatchLimits(bytes=MB)
    log.add("unknown@1", 50)
    log.add("known@1", 40)
    assert [*log.batch(tight), *log.batch(tight)] == ["known@1", "unknown@1"]
