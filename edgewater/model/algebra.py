"""The rules for queries and for late records that follow from the algebraic properties of synopses.

An edge ships a slice in any number of partials, and no edge has another edge's records. Windows are merges of slices,
and the center merges partials in any order. So a synopsis must be mergeable.

The guarantees of some synopses depend on the order of their values (`needs_order`). A query may use such a synopsis
only if the order is unique: at one edge, in windows of one slice, without late records. All rules are functions of
`Properties`, so they apply to plugins and to built-in synopses in the same way.

The rules do not require these properties:

- Idempotence, because a frame is applied exactly once.
- Commutativity of the state. KLL and top-k depend on the order, but keep their bounds in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import COLUMN_TYPES
from edgewater.model.windows import CountWindow, SlicedWindow, TimeWindow, Window
from edgewater.synopses import Properties

if TYPE_CHECKING:
    from edgewater.model.measure import Measure

BATCH = "center.batch.build on a DataFrame"


class RuledQuery(Protocol):
    """What the rules read of a `QuerySpec`."""

    @property
    def measures(self) -> tuple[Measure, ...]: ...
    @property
    def window(self) -> Window: ...
    @property
    def edges(self) -> tuple[str, ...] | None: ...
    @property
    def lateness_ms(self) -> int: ...
    @property
    def since_ms(self) -> int | None: ...
    def to_mapping(self) -> dict[str, object]: ...


class LateRecordPolicy(StrEnum):
    """How a query treats records whose event time is before the watermark."""

    MERGED = "merged"
    """The record is merged into its slice. Every answered window that contains it gets a new revision."""
    DROPPED = "dropped"
    """The record is dropped and counted."""


def needs_order(properties: Properties) -> bool:
    """Returns whether the guarantees depend on the order in which values and partials arrive.

    FIFO samples and biased reservoirs sort their records by event time, so they commute. KLL and top-k do not commute,
    but keep their bounds in any order, so their `ordered` is False.
    """
    return properties.ordered and not properties.commutative


def late_record_policy_of(spec: RuledQuery) -> LateRecordPolicy:
    """Returns the policy for a query. The strictest policy of all its synopses applies.

    Dropped records are counted with the reason ``out-of-order``.
    """
    ordered = any(needs_order(properties_of(m)) for m in spec.measures)
    return LateRecordPolicy.DROPPED if ordered else LateRecordPolicy.MERGED


def properties_of(measure: Measure) -> Properties:
    """Returns the properties of the measure's synopsis. They do not depend on the type of its argument."""
    function = measure.function
    data_type = COLUMN_TYPES[function.types[0]] if function.argument == "required" else None
    return measure.stack(data_type).properties


def check_algebra(spec: RuledQuery) -> None:
    """Raises InvalidQuery for the first rule that a query violates."""
    for measure in spec.measures:
        properties = properties_of(measure)
        name, at = measure.function.name, f"measures.{measure.part_of or measure.name}"
        for accepted, reason in _rules_of_measures(properties):
            raise InvalidQuery(at, measure.to_text(), accepted, f"{name} {reason}")
        for field, accepted, reason in _rules_of_order(spec) if needs_order(properties) else ():
            raise InvalidQuery(field, spec.to_mapping().get(field), accepted, f"{name} ({at}) {reason}")


def _rules_of_measures(properties: Properties) -> Iterator[tuple[str, str]]:
    """Yields what no query accepts: what is accepted instead, and a predicate of the measure's function."""
    if not properties.mergeable:
        accepted = f"a mergeable synopsis; this synopsis can be built by {BATCH}"
        yield accepted, "is not mergeable, but the center merges the synopses that edges ship"
    if not properties.reproducible:
        accepted = f"a reproducible synopsis, with the same bytes for the same records; it can be built by {BATCH}"
        yield accepted, "is not reproducible, but an edge that recovers builds its frames again"


def _rules_of_order(spec: RuledQuery) -> Iterator[tuple[str, str, str]]:
    """Yields the fields that a query with an ordered synopsis must not have, as in `_rules_of_measures`."""
    if not (isinstance(spec.window, TimeWindow) and spec.window.is_tumbling):
        reason = "depends on the order of its values, and slices are merged in any order"
        yield "window", "a tumbling window, which is one slice", reason
    if spec.edges is None or len(spec.edges) > 1:
        reason = "depends on the order of its values, and records of different edges have no common order"
        yield "edges", "exactly one edge, such as [jfk]", reason
    if spec.lateness_ms > 0:
        reason = "depends on the order of its values, so late records cannot be inserted"
        yield "lateness", "no lateness: late records are dropped and counted", reason
    if spec.since_ms is not None:
        accepted = "no since: the query begins with the records that are read after its registration"
        reason = "depends on the order of its values, but edges read earlier records beside the live records"
        yield "since", accepted, reason


def require_sliced(window: Window) -> SlicedWindow:
    """Returns the window if queries over edges support it. Raises InvalidQuery for a count window."""
    if isinstance(window, CountWindow):
        accepted = f"a tumbling, sliding or session window; count windows are supported by {BATCH}"
        reason = "records of different edges have no common order"
        raise InvalidQuery("window.count", window.count, accepted, reason)
    assert isinstance(window, SlicedWindow)
    return window
