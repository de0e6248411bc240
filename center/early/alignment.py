"""Selects the report slot that the center can advance to, given the slots that edges have reported up to."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgewater.arrivals import ReportSchedule


def next_report_slot(
    schedule: ReportSchedule,
    reported: Mapping[str, Collection[int]],
    silent_slots: Mapping[str, int],
    current: int | None,
    now_ms: int,
    timeout_ms: int,
    *,
    force: bool,
) -> tuple[int | None, list[str]]:
    """Returns the slot to advance to (None: stay) and the edges that have reported up to it.

    It is the last slot that all edges have reported which are not silent, so that the counts of all edges are of the
    same moment. If all edges are silent, time goes on without them for one longest lag.

    Args:
        reported: by edge, the report slots that are not before the last one applied, including that one.
        silent_slots: by edge, the slots that it has missed.
        current: the center's slot; None: it has not begun.
        timeout_ms: event time after which an edge that has not reported is silent.
        force: do not wait for edges that have not reported the latest slot.
    """
    # A slot further in the future is from a clock that is wrong.
    limit = schedule.slot_at(now_ms + timeout_ms)
    slots = {edge: frozenset(s for s in each if s <= limit) for edge, each in reported.items()}
    last = {edge: max(each) for edge, each in slots.items() if each}
    if not last:
        return None, []
    silent_before = schedule.slot_at(now_ms - timeout_ms)
    reporting = [edge for edge, slot in last.items() if slot > silent_before]
    if force:
        latest = max(last.values())
        reporting = [edge for edge in reporting if last[edge] >= latest] or reporting
    since = current if current is not None else -(1 << 62)
    if not reporting:
        target = min(schedule.slot_at(now_ms), max(last.values()) + schedule.grid.lags)
        if current is None or target <= current:
            return None, []
        return target, [edge for edge in last if target in slots[edge]]
    common = frozenset.intersection(*(slots[edge] for edge in reporting))
    target = max((slot for slot in common if slot > since), default=since)
    if target > since:
        return target, [edge for edge in slots if target in slots[edge]]
    catching_up = [edge for edge in slots if silent_slots.get(edge) and current in slots[edge]]
    return (current, catching_up) if catching_up else (None, [])
