"""Admission: how far each query advances in the next micro-batch. Pure.

A micro-batch is one Spark job for all queries, so a query with a long backlog would delay all others. So admission is
bounded, and queries are admitted frame by frame, round robin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgewater.frame_work import BYTES_PER_UNIT, MAX_FRAME_WORK

FrameSizes = Callable[[str, int, int], Sequence[tuple[int, int]]]
"""(query key, after, through) -> (position, bytes) of the frames between, ascending; a frame that makes more work than
bytes of its number do counts as more (`edgewater.frame_work`)."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one micro-batch: per query, and in total. By default a batch takes 0.9 s, and a query's part 0.3 s.

    The first frame of a batch is admitted whatever its size; otherwise a frame beyond the limit would block its query
    for ever.
    """

    frames_per_query: int = 512
    bytes_per_query: int = 8 << 20
    frames: int = 4096
    bytes: int = MAX_FRAME_WORK * BYTES_PER_UNIT


class Admission(Protocol):
    """A policy of admission; `RoundRobin` is the built-in one."""

    def admit(
        self, start: Mapping[str, int], last: Mapping[str, int], sizes: FrameSizes, limits: BatchLimits
    ) -> dict[str, int]:
        """The new end position of each query that advances: above its `start` (0 if it has none), at most its `last`.

        Empty only if no query has pending frames.
        """


class RoundRobin:
    """Admits one frame per query in turn until none is left or a limit is reached.

    The first query changes with each batch, so that no query is preferred under tight limits.
    """

    def __init__(self) -> None:
        self._last_first = ""

    def admit(
        self, start: Mapping[str, int], last: Mapping[str, int], sizes: FrameSizes, limits: BatchLimits
    ) -> dict[str, int]:
        pending = self._in_turn(sorted(key for key, position in last.items() if position > start.get(key, 0)))
        pending = pending[: limits.frames]
        if not pending:
            return {}
        # A query's frames beyond its even share are not fetched: they could hardly be admitted.
        share = max(1, min(limits.frames_per_query, limits.frames // len(pending)))
        ends: dict[str, int] = {}
        queues: dict[str, deque[tuple[int, int]]] = {}
        for key in pending:
            after = start.get(key, 0)
            through = min(last[key], after + share)
            queues[key] = deque(sizes(key, after, through))
            if not queues[key]:
                ends[key] = through  # retention has dropped them, so they were applied
        return ends | _take_in_turn(queues, limits)

    def _in_turn(self, keys: list[str]) -> list[str]:
        first = bisect_right(keys, self._last_first)
        rotated = keys[first:] + keys[:first]
        if rotated:
            self._last_first = rotated[0]
        return rotated


def _take_in_turn(queues: Mapping[str, deque[tuple[int, int]]], limits: BatchLimits) -> dict[str, int]:
    ends: dict[str, int] = {}
    taken = dict.fromkeys(queues, 0)
    frames_left, bytes_left = limits.frames, limits.bytes
    active = deque(key for key, queue in queues.items() if queue)
    while active and frames_left:
        key = active.popleft()
        position, size = queues[key][0]
        above_share = taken[key] > 0 and taken[key] + size > limits.bytes_per_query
        if ends and (size > bytes_left or above_share):
            continue  # the rest of this query is left for the next batch
        queues[key].popleft()
        ends[key] = position
        taken[key] += size
        bytes_left -= size
        frames_left -= 1
        if queues[key]:
            active.append(key)
    return ends
