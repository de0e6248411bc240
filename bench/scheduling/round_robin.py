"""Admission in turn: what `center.job.admission` is compared with."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping

from center.job.admission import BatchLimits, LeastSlack, PendingFrames
from center.storage.frame_log import FrameEntry


class RoundRobin(LeastSlack):
    """Admits one frame per query in turn, until no frame remains or a limit is reached.

    The first query changes with each batch, so that no query is preferred under tight limits.
    """

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self._last_first = ""

    def admit(
        self, start: Mapping[str, int], last: Mapping[str, int], frames: PendingFrames, limits: BatchLimits
    ) -> dict[str, int]:
        pending = self._in_turn(sorted(key for key, position in last.items() if position > start.get(key, 0)))
        pending = pending[: limits.frames]
        if not pending:
            return {}
        # Frames beyond a query's even share are not fetched, because they can hardly be admitted.
        share = max(1, min(limits.frames_per_query, limits.frames // len(pending)))
        ends: dict[str, int] = {}
        queues: dict[str, deque[FrameEntry]] = {}
        for key in pending:
            after = start.get(key, 0)
            through = min(last[key], after + share)
            queues[key] = deque(frames(key, after, through))
            if not queues[key]:
                ends[key] = through  # retention has dropped these frames, so they were applied
        return ends | _take_in_turn(queues, limits)

    def done(self, ends: Mapping[str, int], took_s: float) -> None:
        pass

    def _in_turn(self, keys: list[str]) -> list[str]:
        first = bisect_right(keys, self._last_first)
        rotated = keys[first:] + keys[:first]
        if rotated:
            self._last_first = rotated[0]
        return rotated


def _take_in_turn(queues: Mapping[str, deque[FrameEntry]], limits: BatchLimits) -> dict[str, int]:
    ends: dict[str, int] = {}
    taken = dict.fromkeys(queues, 0)
    frames_left, bytes_left = limits.frames, limits.bytes
    active = deque(key for key, queue in queues.items() if queue)
    while active and frames_left:
        key = active.popleft()
        position, size = queues[key][0].position, queues[key][0].size
        above_share = taken[key] > 0 and taken[key] + size > limits.bytes_per_query
        if ends and (size > bytes_left or above_share):
            continue  # the next batch takes this query's remaining frames
        queues[key].popleft()
        ends[key] = position
        taken[key] += size
        bytes_left -= size
        frames_left -= 1
        if queues[key]:
            active.append(key)
    return ends
