"""A slice is ranked once and many pulls draw from its queue; each draws exactly the groups that may be sent."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.cache import policy
from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits
from edge.cache.history import GroupHistory
from edge.cache.send_queue import MAX_QUEUED, RERANK_FRACTION, SendQueue
from edge.cache.sizing import SendSlots, pure_pess
from edgewater.model.caching import CacheSpec
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


def test_each_group_is_drawn_once() -> None:
    held = entries_of(10)
    queue = SendQueue.for_open_slice(-np.arange(10.0), np.arange(10), held.newest_batch, 0)
    first = queue.draw(held, 4)
    assert (first.groups.tolist(), first.drained) == ([6, 7, 8, 9], False), "the lowest ranks, in group order"
    held.send(held.shipment(first.groups))
    rest = queue.draw(held, 99)
    assert (rest.groups.tolist(), rest.drained) == ([0, 1, 2, 3, 4, 5], True)


def test_groups_updated_or_sent_since_the_ranking_are_skipped() -> None:
    held = entries_of(6)
    queue = SendQueue.for_open_slice(np.arange(6.0), np.arange(6), held.newest_batch, 0)
    touch_all(held, np.array([1]), 2)
    held.send(held.shipment(np.array([0])))
    assert queue.draw(held, 2).groups.tolist() == [2, 3]


def test_an_open_slice_is_ranked_again_after_a_fraction_of_its_remaining_time() -> None:
    held = entries_of(3)
    assert SendQueue().expired_open(0, 1000), "never ranked"
    queue = SendQueue.for_open_slice(np.zeros(3), np.arange(3), held.newest_batch, 0)
    assert not queue.expired_open(int(1000 * RERANK_FRACTION) - 1, 1000)
    assert queue.expired_open(int(1000 * RERANK_FRACTION) + 1, 1000)


def test_a_truncated_queue_is_ranked_again_once_it_is_empty() -> None:
    held = entries_of(MAX_QUEUED + 5)
    queue = SendQueue.for_open_slice(np.zeros(MAX_QUEUED + 5), np.arange(MAX_QUEUED + 5), held.newest_batch, 0)
    drawn = queue.draw(held, MAX_QUEUED + 5)
    assert (len(drawn.groups), drawn.drained) == (MAX_QUEUED, False)
    assert queue.expired_open(0, 1000)


def test_a_late_record_of_a_closed_slice_causes_a_new_ranking() -> None:
    held = entries_of(4)
    limits = ErrorLimits({"v": 2.5})
    queue = policy.rank_closed(held, limits)
    drawn = queue.draw(held, 9)
    assert (drawn.groups.tolist(), drawn.drained) == ([2, 3], True)
    held.send(held.shipment(drawn.groups))
    assert not queue.expired_closed(held)
    touch_all(held, np.array([1]), 2)
    assert queue.expired_closed(held)
    assert policy.rank_closed(held, limits).draw(held, 9).groups.tolist() == [1]


def test_after_the_close_the_largest_errors_are_sent_first() -> None:
    held = entries_of(8)
    queue = policy.rank_closed_by_deadline(held, GroupHistory(("v",)))
    assert queue.draw(held, 3).groups.tolist() == [5, 6, 7]


@pytest.mark.parametrize("sizing", ["target", "linear"])
def test_an_empty_history_allows_a_ranking(sizing: str) -> None:
    held = entries_of(8)
    moment = policy.RankingContext(500, 0.5)
    queue = policy.rank_open_by_deadline(
        held, CacheSpec(sizing=sizing), GroupHistory(("v",)), moment, SendSlots(100.0, 100.0)
    )
    assert set(queue.draw(held, 99).groups.tolist()) <= set(range(8))


@pytest.mark.parametrize("eviction", ["gain", "lru"])
def test_without_a_primary_cache_pure_pess_sends_by_error_the_largest_first(eviction: str) -> None:
    """TR 16-003, section 5.3: with few sends left, every entry may have to make room for groups to come."""
    held = entries_of(8)
    moment, spec = policy.RankingContext(500, 0.5), CacheSpec(eviction, "pure_pess")
    slots = SendSlots(1.0, 100.0)
    assert pure_pess(held, GroupHistory(("v",)), 0.5, slots) < 1.0
    queue = policy.rank_open_by_deadline(held, spec, GroupHistory(("v",)), moment, slots)
    assert queue.draw(held, 3).groups.tolist() == [5, 6, 7]
    assert queue.draw(held, 9).groups.tolist() == [0, 1, 2, 3, 4]


def test_errors_of_selected_groups_equal_those_of_all_groups_at_their_positions() -> None:
    held = entries_of(6)
    held.send(held.shipment(np.array([1, 4])))
    touch_all(held, np.array([4, 5]), 2)
    some = np.array([5, 1, 4])
    assert held.accumulated_error("v", some).tolist() == held.accumulated_error("v")[some].tolist()
    assert held.total("v", some).tolist() == held.total("v")[some].tolist()


def test_a_closed_slice_is_sent_in_the_order_of_keys() -> None:
    held = entries_of(12)
    order = policy.rank_closed(held, ErrorLimits({})).groups
    keys = [tuple(column[i].as_py() for column in held.pending.rows()) for i in order.tolist()]
    assert len(keys) == 12
    assert keys == sorted(keys)
