"""The modelled link of `bench.compare`: rate, delay, queue, interruption."""

from __future__ import annotations

import pytest

from bench.compare.shaping import Shaper


def test_packets_wait_for_each_other_and_arrive_after_the_delay() -> None:
    link = Shaper(1000.0, 0.05, 10_000)
    assert [link.offer(500, 0.0) for _ in range(3)] == pytest.approx([0.55, 1.05, 1.55])
    assert link.wait_s(1.0) == pytest.approx(0.5)


def test_an_idle_link_saves_no_capacity() -> None:
    link = Shaper(1000.0, 0.0, 10_000)
    assert link.offer(1000, 5.0) == pytest.approx(6.0)
    assert link.offer(1000, 100.0) == pytest.approx(101.0)


def test_what_does_not_fit_into_the_queue_is_dropped_and_costs_no_time() -> None:
    link = Shaper(1000.0, 0.0, 1500)
    assert [link.offer(1000, 0.0) is None for _ in range(3)] == [False, True, True]
    assert (link.dropped, link.passed_bytes) == (2, 1000)
    assert link.offer(1000, 1.0) == pytest.approx(2.0)


def test_a_link_without_a_rate_only_delays() -> None:
    link = Shaper(None, 0.05, 0)
    assert link.offer(1 << 20, 1.0) == pytest.approx(1.05)


def test_an_interrupted_link_drops_what_is_offered() -> None:
    link = Shaper(1000.0, 0.0, 10_000, is_cut=True)
    assert link.offer(10, 0.0) is None
    link.is_cut = False
    assert link.offer(10, 0.0) == pytest.approx(0.01)
