from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from center.job.admission import BatchLimits, FrameSizes, RoundRobin

MB = 1 << 20


def sizes_of(frames: dict[str, list[int]]) -> FrameSizes:
    def sizes(key: str, after: int, through: int) -> Sequence[tuple[int, int]]:
        return [(position, frames[key][position - 1]) for position in range(after + 1, through + 1)]

    return sizes


def last_of(frames: dict[str, list[int]]) -> dict[str, int]:
    return {key: len(sizes) for key, sizes in frames.items()}


def test_all_that_waits_is_admitted_where_the_limits_allow_it() -> None:
    frames = {"a@1": [100] * 3, "b@1": [100] * 5}

    ends = RoundRobin().admit({"a@1": 1}, last_of(frames), sizes_of(frames), BatchLimits())

    assert ends == {"a@1": 3, "b@1": 5}


def test_nothing_is_admitted_where_nothing_waits() -> None:
    frames = {"a@1": [100]}

    assert RoundRobin().admit({"a@1": 1}, last_of(frames), sizes_of(frames), BatchLimits()) == {}


def test_a_long_backlog_leaves_room_for_a_short_one() -> None:
    frames = {"long@1": [MB] * 1000, "short@1": [MB] * 2}

    ends = RoundRobin().admit({}, last_of(frames), sizes_of(frames), BatchLimits(bytes=10 * MB))

    assert ends == {"long@1": 8, "short@1": 2}


def test_no_query_takes_more_than_its_own_limits() -> None:
    frames = {"small@1": [1] * 100, "large@1": [MB] * 100}
    limits = BatchLimits(frames_per_query=7, bytes_per_query=3 * MB)

    ends = RoundRobin().admit({}, last_of(frames), sizes_of(frames), limits)

    assert ends == {"small@1": 7, "large@1": 3}


def test_a_frame_beyond_every_limit_passes_alone() -> None:
    frames = {"a@1": [50 * MB, 1]}
    limits = BatchLimits(bytes_per_query=MB, bytes=MB)

    assert RoundRobin().admit({}, last_of(frames), sizes_of(frames), limits) == {"a@1": 1}


def test_the_turn_moves_on_so_that_each_query_is_first_once() -> None:
    frames = {f"q{i}@1": [MB] * 10 for i in range(4)}
    admission = RoundRobin()

    first = [admission.admit({}, last_of(frames), sizes_of(frames), BatchLimits(frames=1)) for _ in range(4)]

    assert sorted(key for ends in first for key in ends) == sorted(frames)


def test_positions_that_retention_has_dropped_are_passed() -> None:
    assert RoundRobin().admit({}, {"a@1": 5}, lambda *_: [], BatchLimits()) == {"a@1": 5}


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
    admission, last, start = RoundRobin(), last_of(frames), dict[str, int]()
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
