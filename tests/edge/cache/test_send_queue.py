"""A ranking is made once and drawn from by many pulls; what leaves is never more, nor other, than it should be."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.cache import ErrorLimits, GroupHistory, SendQueue, SendSlots, SliceEntries, policy
from edge.cache.send_queue import MAX_QUEUED, RERANK_FRACTION
from edgewater.caching import CacheSpec
from edgewater.synopses import GroupedAggregate, IntArray, function_named


def entries_of(groups: int, batch_number: int = 1) -> SliceEntries:
    made = function_named("sum")
    assert made is not None
    held = SliceEntries(GroupedAggregate({"key": pa.int64()}, {"v": made.make((), pa.float64())}), ("v",))
    touch_all(held, np.arange(groups), batch_number)
    return held


def touch_all(held: SliceEntries, keys: IntArray, batch_number: int) -> None:
    values = {"v": pa.array(1.0 + keys.astype(np.float64))}
    held.update([pa.array(keys)], values, len(keys), np.zeros(len(keys), np.int64), batch_number)


def test_pulls_draw_one_after_another_and_each_group_once() -> None:
    held = entries_of(10)
    ranking = SendQueue.for_open_slice(-np.arange(10.0), np.arange(10), held.newest_batch, 0)
    first = ranking.draw(held, 4)
    assert (first.groups.tolist(), first.drained) == ([6, 7, 8, 9], False), "the lowest ranks, in group order"
    held.send(first.groups)
    rest = ranking.draw(held, 99)
    assert (rest.groups.tolist(), rest.drained) == ([0, 1, 2, 3, 4, 5], True)


def test_what_was_touched_or_sent_since_the_ranking_is_passed_over() -> None:
    held = entries_of(6)
    ranking = SendQueue.for_open_slice(np.arange(6.0), np.arange(6), held.newest_batch, 0)
    touch_all(held, np.array([1]), 2)
    held.send(np.array([0]))
    assert ranking.draw(held, 2).groups.tolist() == [2, 3]


def test_an_open_slice_is_ranked_again_after_a_small_part_of_its_time_left() -> None:
    held = entries_of(3)
    assert SendQueue().expired_open(0, 1000), "never ranked"
    ranking = SendQueue.for_open_slice(np.zeros(3), np.arange(3), held.newest_batch, 0)
    assert not ranking.expired_open(int(1000 * RERANK_FRACTION) - 1, 1000)
    assert ranking.expired_open(int(1000 * RERANK_FRACTION) + 1, 1000)


def test_a_list_that_was_cut_short_is_made_again_when_it_has_left() -> None:
    held = entries_of(MAX_QUEUED + 5)
    ranking = SendQueue.for_open_slice(np.zeros(MAX_QUEUED + 5), np.arange(MAX_QUEUED + 5), held.newest_batch, 0)
    drawn = ranking.draw(held, MAX_QUEUED + 5)
    assert (len(drawn.groups), drawn.drained) == (MAX_QUEUED, False)
    assert ranking.expired_open(0, 1000)


def test_a_late_record_of_a_closed_slice_is_not_overlooked() -> None:
    held = entries_of(4)
    limits = ErrorLimits({"v": 2.5})
    ranking = policy.rank_closed(held, limits)
    drawn = ranking.draw(held, 9)
    assert (drawn.groups.tolist(), drawn.drained) == ([2, 3], True)
    held.send(drawn.groups)
    assert not ranking.expired_closed(held)
    touch_all(held, np.array([1]), 2)
    assert ranking.expired_closed(held)
    assert policy.rank_closed(held, limits).draw(held, 9).groups.tolist() == [1]


def test_at_the_deadline_the_largest_errors_leave_first() -> None:
    held = entries_of(8)
    ranking = policy.rank_closed_by_deadline(held, GroupHistory(("v",)))
    assert ranking.draw(held, 3).groups.tolist() == [5, 6, 7]


@pytest.mark.parametrize("sizing", ["target", "linear"])
def test_a_history_that_knows_nothing_yet_decides_all_the_same(sizing: str) -> None:
    held = entries_of(8)
    moment = policy.RankingContext(500, 0.5, 1.0)
    ranking = policy.rank_open_by_deadline(
        held, CacheSpec(sizing=sizing), GroupHistory(("v",)), moment, SendSlots(100.0, 100.0)
    )
    assert set(ranking.draw(held, 99).groups.tolist()) <= set(range(8))


def test_what_is_put_away_goes_on_with_what_was_not_drawn() -> None:
    held = entries_of(5)
    ranking = SendQueue.for_open_slice(np.arange(5.0), np.arange(5), held.newest_batch, 7)
    ranking.draw(held, 2)
    again = SendQueue.from_state(ranking.to_state())
    assert again.draw(held, 9).groups.tolist() == [2, 3, 4]
    assert (again.newest_batch, again.ranked_ms, again.complete, again.closed) == (1, 7, True, False)


def test_errors_of_some_groups_are_those_of_all_at_their_places() -> None:
    held = entries_of(6)
    held.send(np.array([1, 4]))
    touch_all(held, np.array([4, 5]), 2)
    some = np.array([5, 1, 4])
    assert held.accumulated_error("v", some).tolist() == held.accumulated_error("v")[some].tolist()
    assert held.total("v", some).tolist() == held.total("v")[some].tolist()
