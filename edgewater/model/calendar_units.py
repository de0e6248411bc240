"""The units of calendars. Configurations import this module, so it imports neither NumPy nor Arrow."""

from __future__ import annotations

from dataclasses import dataclass

UTC = "UTC"
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class CalendarUnit:
    """Lengths of a calendar unit, in ms.

    Attributes:
        usual_ms: the usual length.
        longest_ms: the greatest length.
        into_next_ms: a time after the start of a unit that is always in the next unit.
    """

    name: str
    usual_ms: int
    longest_ms: int
    into_next_ms: int


CALENDAR_UNITS = {
    name: CalendarUnit(name, usual * _HOUR_MS, longest * _HOUR_MS, into_next * _HOUR_MS)
    for name, usual, longest, into_next in (
        ("day", 24, 25, 36),
        ("week", 168, 169, 8 * 24),
        ("month", 30 * 24, 31 * 24 + 1, 32 * 24),
        ("quarter", 91 * 24, 92 * 24 + 1, 93 * 24),
        ("year", 365 * 24, 366 * 24 + 1, 367 * 24),
    )
}
