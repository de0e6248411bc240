"""The `accuracy` of a query: what a user may ask, and the clockwork that edges and center share for it.

Both sides read the same clockwork off the same spec, so that what edges tell fits together: the grid of slots and
sub-streams, and the *points* at which an edge says what has arrived. All edges tell up to the same points, so the
center compares like with like however late each of them says it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgewater.arrivals.grid import Grid
from edgewater.arrivals.target import (
    MEASURES,
    SCOPES,
    GroupScope,
    MeasureKind,
    Target,
    check_confidence,
    check_error,
    check_measure,
)
from edgewater.errors import InvalidQuery
from edgewater.quantities import duration_ms, format_duration, fraction, require_keys
from edgewater.windows import Sliding, Window

if TYPE_CHECKING:
    from edgewater.measure import Measure

DEFAULT_SUBSTREAM_MS = 600
SUBSTREAMS_SHORT, SUBSTREAMS_LONG, SHORT_MS = 5, 20, 12_000
"""Sub-streams of a slice: of one up to 12 s, and of a longer one."""
HORIZON_WINDOWS = 2.56
MAX_DEFAULT_LAGS = 512
POINTS_AFTER_END = (2, 5, 10, 20)
"""Slots after a window's end at which an edge tells of stragglers, besides the ends of sub-streams."""
MAX_GROUPS = 256
"""Groups at a time for which an answer is given early. Each has a watermark of its own at the center."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """P(|estimate - truth| ≤ error·|truth|) ≥ confidence, for the early answer to each window.

    Attributes:
        of: name of the measure that it is about.
        kind: that measure's function; None: a function of a sample, which is answered when the window is complete.
        substream_ms: length f of a sub-stream, if the user has said; it divides the window's slices.
        scope: of a query with groups, whether the promise holds for each of them or for all at once; else None.
    """

    error: float
    confidence: float
    of: str
    kind: MeasureKind | None
    substream_ms: int | None = None
    scope: GroupScope | None = None

    @classmethod
    def parse(
        cls, given: object, measures: Sequence[Measure], window: Window, group_by: Sequence[str]
    ) -> Accuracy | None:
        """Reads a query's `accuracy`; None where there is none.

        Raises:
            InvalidQuery: names the field, the value and what is accepted.
        """
        if given is None:
            return None
        keys = {"error": True, "confidence": False, "of": False, "substream": False, "scope": False}
        a = require_keys(given, "accuracy", keys, InvalidQuery)
        of = _measure(a.get("of"), measures)
        sampled = of.function.sample is not None
        if not isinstance(window, Sliding) and not sampled:
            raise InvalidQuery("accuracy", given, "a tumbling or sliding window, or no accuracy",
                               "the end of a session is known only when it is over")  # fmt: skip
        error = check_error(_probability(a["error"], "accuracy.error", "5%"), "accuracy.error")
        confidence = _probability(a.get("confidence", "95%"), "accuracy.confidence", "95%")
        substream = a.get("substream")
        if sampled and substream is not None:
            raise InvalidQuery("accuracy.substream", substream, "no substream",
                               f"{of.function.name} has no early answers")  # fmt: skip
        result = cls(
            error,
            check_confidence(confidence, "accuracy.confidence"),
            of.name,
            None if sampled else check_measure(of.function.name, "accuracy.of"),
            None if substream is None else duration_ms(substream, "accuracy.substream", InvalidQuery, minimum_ms=1),
            _scope(a.get("scope"), group_by),
        )
        clockwork(window, result, 0)
        return result

    def to_mapping(self) -> dict[str, object]:
        """The canonical form that `parse` reads back."""
        result: dict[str, object] = {
            "error": f"{100 * self.error:.12g}%", "confidence": f"{100 * self.confidence:.12g}%", "of": self.of,
        }  # fmt: skip
        if self.substream_ms is not None:
            result["substream"] = format_duration(self.substream_ms)
        if self.scope is not None:
            result["scope"] = self.scope
        return result

    @property
    def early_kind(self) -> MeasureKind:
        """The kind, of an accuracy with early answers."""
        assert self.kind is not None
        return self.kind

    @property
    def target(self) -> Target:
        return Target(self.error, self.confidence)


def _probability(value: object, field: str, example: str) -> object:
    """0.05 for "5%"; what is no percentage is left to the checks, but a bare number is not taken for one."""
    share = fraction(value)
    if share is None:
        raise InvalidQuery(field, value, f"a percentage between 0% and 100%, such as {example}")
    return share


def _scope(given: object, group_by: Sequence[str]) -> GroupScope | None:
    if not group_by:
        if given is not None:
            raise InvalidQuery(
                "accuracy.scope", given, "group_by with the columns of the groups, or no scope",
                "without groups the promise is about the window's one answer",
            )  # fmt: skip
        return None
    if given is None:
        return "each"
    for known in SCOPES:
        if given == known:
            return known
    raise InvalidQuery(
        "accuracy.scope", given, "each (the promise holds for every single group; the default) or all (for all of them "
        "at once)",
    )  # fmt: skip


def _measure(name: object, measures: Sequence[Measure]) -> Measure:
    names = ", ".join(m.name for m in measures)
    if name is None:
        able = [m for m in measures if m.function.name in MEASURES or m.function.sample is not None]
        if len(measures) > 1:
            raise InvalidQuery("accuracy.of", None, f"one of the measures {names}", "there are several")
        return able[0] if able else measures[0]
    found = next((m for m in measures if m.name == name), None)
    if found is None:
        raise InvalidQuery("accuracy.of", name, f"one of the measures {names}", "unknown measure")
    return found


@dataclass(frozen=True, slots=True)
class Clockwork:
    """Slots of a query's stream, counted from a border of its slices, and the points at which edges tell.

    Attributes:
        origin_ms: event time of slot 0.
        window_slots, every_slots: length and step of the windows.
    """

    grid: Grid
    origin_ms: int
    window_slots: int
    every_slots: int

    @classmethod
    def of(cls, window: Sliding, accuracy: Accuracy, lateness_ms: int) -> Clockwork:
        """Raises InvalidQuery for a sub-stream that does not divide the window's slices."""
        slice_ms = window.slice_ms
        substream = accuracy.substream_ms or _default_substream(slice_ms)
        if slice_ms % substream:
            raise InvalidQuery(
                "accuracy.substream", format_duration(substream),
                f"a divisor of {format_duration(slice_ms)}, the slices of the window",
            )  # fmt: skip
        widest = MAX_DEFAULT_LAGS * max(1, substream // 30)
        horizon = min(max(int(HORIZON_WINDOWS * slice_ms), lateness_ms), widest)
        grid = Grid.of(slice_ms, substream, horizon)
        every = window.every_ms // grid.slot_ms
        return cls(grid, window.origin_ms, window.size_ms // grid.slot_ms, every)

    def slot_at(self, event_ms: int) -> int:
        """The slot that an event time lies in."""
        return (event_ms - self.origin_ms) // self.grid.slot_ms

    def starts_at(self, slot: int) -> int:
        """The event time at which a slot begins."""
        return slot * self.grid.slot_ms + self.origin_ms

    def point_before(self, slot: int) -> int:
        """The last point at or before a slot."""
        end = self._last_end(slot)
        after = [end + offset for offset in POINTS_AFTER_END if end + offset <= slot]
        return max([slot // self.grid.substream_slots * self.grid.substream_slots, end, *after])

    def point_after(self, slot: int) -> int:
        """The first point behind a slot."""
        end = self._last_end(slot)
        after = [end + offset for offset in POINTS_AFTER_END if end + offset > slot]
        return min([(slot // self.grid.substream_slots + 1) * self.grid.substream_slots, *after])

    def _last_end(self, slot: int) -> int:
        return (slot - self.window_slots) // self.every_slots * self.every_slots + self.window_slots


def _default_substream(slice_ms: int) -> int:
    """The longest divisor of the slice up to a length that leaves enough of them to learn from."""
    longest = (
        min(DEFAULT_SUBSTREAM_MS, max(1, slice_ms // SUBSTREAMS_SHORT))
        if slice_ms <= SHORT_MS
        else slice_ms // SUBSTREAMS_LONG
    )
    return next(slice_ms // parts for parts in range(-(-slice_ms // longest), slice_ms + 1) if slice_ms % parts == 0)


def clockwork(window: object, accuracy: Accuracy | None, lateness_ms: int) -> Clockwork | None:
    """A query's clockwork; None without an accuracy, or with one that gives no early answers."""
    if accuracy is None or accuracy.kind is None or not isinstance(window, Sliding):
        return None
    return Clockwork.of(window, accuracy, lateness_ms)


def requested(accuracy: Accuracy) -> Mapping[str, object]:
    """What the answer's contract repeats."""
    result: dict[str, object] = {"error": accuracy.error, "confidence": accuracy.confidence, "of": accuracy.of}
    return result if accuracy.scope is None else {**result, "scope": accuracy.scope}


def group_key(values: Sequence[object]) -> str:
    """One text per group, from the plain values of its key columns: the same at edges, center and readers."""
    return json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def group_values(key: str) -> list[object]:
    """What `group_key` was given."""
    return list(json.loads(key))
