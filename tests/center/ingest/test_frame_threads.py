"""The thread of large frames leaves half of a core to small ones."""

from __future__ import annotations

import pytest

from center.ingest.frame_validator import SMALL_S, RestingThread


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def take(self, seconds: float) -> None:
        self.now_s += seconds


def resting(clock: Clock) -> RestingThread:
    return RestingThread(lambda: clock.now_s, clock.take)


@pytest.mark.parametrize("small_since_s", [None, 2 * SMALL_S, SMALL_S / 2])
def test_the_thread_rests_as_long_as_it_has_worked_while_small_frames_come(small_since_s: float | None) -> None:
    clock = Clock()
    thread = resting(clock)
    thread.submit(clock.take, 10.0).result()
    if small_since_s is not None:
        thread.note_small()
        clock.take(small_since_s)
    idle_s = small_since_s or 0.0
    thread.submit(clock.take, 3.0).result()
    rests = small_since_s is not None and small_since_s < SMALL_S
    assert clock.now_s == (20.0 if rests else 10.0 + idle_s) + 3.0
    thread.shutdown()


def test_an_error_is_the_callers_and_is_followed_by_a_rest_too() -> None:
    clock = Clock()
    thread = resting(clock)

    def fail() -> None:
        clock.take(2.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread.submit(fail).result()
    thread.note_small()
    thread.submit(clock.take, 1.0).result()
    assert clock.now_s == 5.0
    thread.shutdown()
