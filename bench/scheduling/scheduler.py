"""The scheduler: which query a worker runs next, for how long, and which batches fit into the queues. Pure.

One scheduler serves one worker. The worker asks for a `WorkerTurn`, and processes the head of that query's queue item
by item until the turn's time is used or the queue is empty. A decision takes a few
microseconds whatever the number of queries. Keys are stored in an array. A key is renewed when its query changes and,
if it depends on the time, once a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bench.scheduling.memory import MemoryManager, QueueLimits
from bench.scheduling.policies import Policy, room_key
from bench.scheduling.queries import Item, QueryProfile, ScheduledQuery

DEFAULT_CYCLE_MS = 120.0


@dataclass(slots=True)  # frozen dataclasses take three times as long to make
class WorkerTurn:
    """A query's time on the worker.

    Attributes:
        through: number of operators to run. Items that have passed them stay in the queue.
        limit_ms: after this time the worker asks again.
    """

    query: ScheduledQuery
    through: int
    limit_ms: float

    def items(self) -> Iterator[Item]:
        """Yields the head of the queue as long as this turn may process it. `Scheduler.complete` removes it."""
        queue = self.query.queue
        whole = self.through >= len(self.query.profile.operators)
        if whole:
            while queue:
                yield queue[0]
        else:
            # A watermark cannot overtake records: it is not processed before they have left the pipeline.
            yield from [item for item in queue if item.end_ms is None and item.stage < self.through]


class Scheduler:
    """Queues and order of the queries of one worker.

    Args:
        policy: orders the queries.
        cycle_ms: the thesis' r: after this time another query may run.
        memory: None: unbounded queues.
        manage_memory: whether slack decides which source gets room at the cap (`by_room`). If false, only the cap
            holds.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        cycle_ms: float = DEFAULT_CYCLE_MS,
        memory: QueueLimits | None = None,
        manage_memory: bool = True,
    ) -> None:
        self._policy = policy
        self._cycle_ms = cycle_ms
        self.memory = MemoryManager(memory, manages=manage_memory)
        self._states: list[ScheduledQuery] = []
        self._keys = np.empty(0)
        self._now_ms = self._renewed_ms = -math.inf
        self._turns = 0
        self._current: tuple[ScheduledQuery, int] | None = None

    def add(self, profile: QueryProfile, now_ms: float) -> ScheduledQuery:
        """Registers a query."""
        state = ScheduledQuery.of(profile, len(self._states), self._at(now_ms))
        self._states.append(state)
        self._keys = np.append(self._keys, np.inf)
        return state

    def offer(self, query: ScheduledQuery, records: float, now_ms: float) -> bool:
        """Queues a batch of records. Returns false if it would exceed the cap; its source has to keep it for now.

        A batch that alone is larger than the cap is always refused: sources divide batches.
        """
        if not self.memory.has_room(records):
            return False
        self.memory.add(records)
        item = Item(records, self._at(now_ms), cost_ms=records * query.costs.remaining_ms[0])
        query.records += records
        query.by_stage[0] += records
        self._append(query, item)
        return True

    def by_room(self, held_since_ms: Mapping[ScheduledQuery, float], now_ms: float) -> list[ScheduledQuery]:
        """Returns the order in which waiting sources get room: the least slack first.

        The first source that does not fit ends the round. Otherwise small batches would take the room that it waits
        for.

        Args:
            held_since_ms: the queries whose sources wait, and since when. Without management the order is by this time.
        """
        if self.memory.manages:
            now_ms = self._at(now_ms)
            return sorted(held_since_ms, key=lambda query: room_key(query, now_ms))
        return sorted(held_since_ms, key=held_since_ms.__getitem__)

    def watermark(
        self, query: ScheduledQuery, watermark_ms: float, now_ms: float, number: int = 0, arrived_ms: float = math.inf
    ) -> bool:
        """Advances the watermark of an input.

        Returns whether it sweeps windows; it is then queued after the records.

        It is never refused: without it the windows could not fire and free their memory.

        Args:
            arrived_ms: when it arrived at a source that had to wait; the answer is due since then.
        """
        now_ms = self._at(now_ms)
        arrived_ms = min(arrived_ms, now_ms)
        if not (firings := query.advance(number, watermark_ms, arrived_ms)):
            if query.queue:
                self._renew(query)
            return False
        end_ms = query.end_ms - query.profile.period_ms
        query.sweeps.append((end_ms, arrived_ms))
        self._append(query, Item(0.0, now_ms, end_ms=end_ms, firings=firings, cost_ms=firings * query.costs.firing_ms))
        return True

    def next(self, now_ms: float) -> WorkerTurn | None:
        """Returns the next turn; None only if nothing is queued, so the worker is never idle needlessly."""
        now_ms = self._at(now_ms)
        if now_ms - self._renewed_ms >= self._cycle_ms:
            self._renewed_ms = now_ms
            if self._policy.timed:
                for state in self._states:
                    if state.queue and not state.sweeps:
                        self._renew(state)
        if self.memory.is_active(self._states, now_ms):
            chosen = self.memory.choose(self._states, self._cycle_ms, now_ms)
            if chosen is not None:
                return self._begin(*chosen)
        if self._current is not None:
            state, swept = self._current
            if state.queue and state.swept == swept:
                return self._begin(state, len(state.profile.operators))
            self._current = None
        if not len(self._keys):
            return None
        index = int(self._keys.argmin())
        if self._keys[index] == np.inf:
            return None
        first = self._states[index]
        if self._policy.sticky:
            self._current = (first, first.swept)
        return self._begin(first, len(first.profile.operators))

    def complete(self, query: ScheduledQuery, item: Item, through: int | None = None) -> None:
        """Records that the worker has processed an item of its turn, through all operators or as many as the turn has.

        An item that has left the pipeline leaves the queue. Otherwise it stays with fewer records.
        """
        if through is None or through >= len(query.profile.operators):
            taken = query.queue.popleft()
            assert taken is item, "items are processed in the order of the queue"
            if item.end_ms is None:
                query.records -= item.records
                query.by_stage[item.stage] -= item.records
                self.memory.add(-item.records)
            else:
                query.sweeps.popleft()
                query.swept += 1
            query.queued_ms -= item.cost_ms
            return
        costs = query.costs
        records = item.records * costs.kept[through] / max(costs.kept[item.stage], 1e-12)
        records = min(records, item.records)
        cost_ms = records * costs.remaining_ms[through]
        query.records += records - item.records
        query.by_stage[item.stage] -= item.records
        query.by_stage[through] += records
        self.memory.add(records - item.records)
        query.queued_ms += cost_ms - item.cost_ms
        item.records, item.stage, item.cost_ms = records, through, cost_ms

    def ran(self, turn: WorkerTurn, now_ms: float) -> None:
        """Records the end of a turn."""
        self._at(now_ms)
        self._renew(turn.query)

    def _begin(self, query: ScheduledQuery, through: int) -> WorkerTurn:
        self._turns += 1
        query.turn = self._turns
        return WorkerTurn(query, through, self._cycle_ms)

    def _append(self, query: ScheduledQuery, item: Item) -> None:
        query.queue.append(item)
        query.queued_ms += item.cost_ms
        self._renew(query)

    def _renew(self, query: ScheduledQuery) -> None:
        if not query.queue:
            query.queued_ms = query.records = 0.0  # removes the remainders of rounding
            query.by_stage = [0.0] * len(query.by_stage)
            self._keys[query.index] = np.inf
            return
        self._keys[query.index] = self._policy.key(query, self._now_ms)

    def _at(self, now_ms: float) -> float:
        assert now_ms >= self._now_ms, "the simulator's clock does not go back"
        self._now_ms = now_ms
        return now_ms
