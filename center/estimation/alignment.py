"""To which point time may go on at the center, from what edges have told. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgewater.arrivals import ReportSchedule


def next_point(
    clock: ReportSchedule,
    told: Mapping[str, Collection[int]],
    behind: Mapping[str, int],
    slot: int | None,
    now_ms: int,
    patience_ms: int,
    *,
    force: bool,
) -> tuple[int | None, list[str]]:
    """The slot to advance to (None: stay), and the edges that have told of it.

    Args:
        told: by edge the points that it has told and that are not behind what was applied of it, its last one included.
        behind: by edge the slots that it has missed; absent or 0: none.
        slot: where the center stands; None: nowhere yet.
        force: edges that have not told of the latest point are not waited for.
    """
    # A point that lies further ahead is of a clock that cannot be believed.
    believed = clock.slot_at(now_ms + patience_ms)
    points = {e: frozenset(p for p in each if p <= believed) for e, each in told.items()}
    last = {e: max(p) for e, p in points.items() if p}
    if not last:
        return None, []
    patient = clock.slot_at(now_ms - patience_ms)
    heard = [e for e, point in last.items() if point > patient]
    if force:
        latest = max(last.values())
        heard = [e for e in heard if last[e] >= latest] or heard
    since = slot if slot is not None else -(1 << 62)
    if not heard:
        # Nobody can be heard: time goes on without anybody, for as long as anything is known.
        target = min(clock.slot_at(now_ms), max(last.values()) + clock.grid.lags)
        return (target, [e for e in last if target in points[e]]) if slot is not None and target > slot else (None, [])
    common = frozenset.intersection(*(points[e] for e in heard))
    target = max((p for p in common if p > since), default=since)
    if target > since:
        return target, [e for e in points if target in points[e]]
    late = [e for e in points if behind.get(e) and slot in points[e]]
    return (slot, late) if late else (None, [])
