"""The rules for queries and for late records that follow from the algebraic properties of synopses.

An edge ships a slice in any number of partials, and no edge has another edge's records. Windows are merges of slices,
and the center merges partials in any order. So a synopsis must be mergeable.

The guarantees of some synopses depend on the order of their values (`needs_order`). A query may use such a synopsis
only if the order is unique: at one edge, in windows of one slice, without late records. All rules are functions of
`Properties`, so they apply to plugins and to built-in synopses in the same way.

The rules do not require these properties:

- Idempotence, because a frame is applied exactly once.
- Commutativity of the state. KLL and top-k depend on the order, but keep their bounds in any order.
- Invertibility, because a late record is merged into its slice, and no slice is ever removed from a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from edgewater.model.errors import InvalidQuery
from edgewater.model.streams import COLUMN_TYPES
from edgewater.model.windows import CountWindow, SlicedWindow, TimeWindow, Window
from edgewater.synopses import Properties

if TYPE_CHECKING:
    from edgewater.model.measure import Measure
    from edgewater.model.query import QuerySpec

BATCH = "center.batch.build on a DataFrame"


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


def late_record_policy_of(spec: QuerySpec) -> LateRecordPolicy:
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


@dataclass(frozen=True, slots=True)
class AlgebraRule:
    """A restriction of queries for synopses with certain properties.

    Attributes:
        applies_to: returns whether the rule restricts a synopsis with these properties.
        is_violated: returns whether a query violates the rule.
        field: the field of the query that violates the rule; None for the measure itself.
        value: returns the field's value in a query.
        accepted: the accepted values, as a phrase.
        reason: the predicate of a sentence whose subject is the measure's function.
    """

    applies_to: Callable[[Properties], bool]
    is_violated: Callable[[QuerySpec], bool]
    field: str | None
    value: Callable[[QuerySpec], object]
    accepted: str
    reason: str


RULES = (
    AlgebraRule(
        lambda p: not p.mergeable,
        lambda spec: True,
        None,
        lambda spec: None,
        f"a mergeable synopsis; this synopsis can be built by {BATCH}",
        "is not mergeable, but the center merges the synopses that edges ship",
    ),
    AlgebraRule(
        lambda p: not p.reproducible,
        lambda spec: True,
        None,
        lambda spec: None,
        f"a reproducible synopsis, with the same bytes for the same records; it can be built by {BATCH}",
        "is not reproducible, but an edge that recovers builds its frames again",
    ),
    AlgebraRule(
        needs_order,
        lambda spec: not (isinstance(spec.window, TimeWindow) and spec.window.is_tumbling),
        "window",
        lambda spec: spec.window.to_mapping(),
        "a tumbling window, which is one slice",
        "depends on the order of its values, and slices are merged in any order",
    ),
    AlgebraRule(
        needs_order,
        lambda spec: spec.edges is None or len(spec.edges) > 1,
        "edges",
        lambda spec: None if spec.edges is None else list(spec.edges),
        "exactly one edge, such as [jfk]",
        "depends on the order of its values, and records of different edges have no common order",
    ),
    AlgebraRule(
        needs_order,
        lambda spec: spec.lateness_ms > 0,
        "lateness",
        lambda spec: spec.to_mapping()["lateness"],
        "no lateness: late records are dropped and counted",
        "depends on the order of its values, so late records cannot be inserted",
    ),
    AlgebraRule(
        needs_order,
        lambda spec: spec.since_ms is not None,
        "since",
        lambda spec: spec.to_mapping()["since"],
        "no since: the query begins with the records that are read after its registration",
        "depends on the order of its values, but edges read earlier records beside the live records",
    ),
)


def check_algebra(spec: QuerySpec) -> None:
    """Raises InvalidQuery for the first rule that a query violates."""
    for measure in spec.measures:
        properties = properties_of(measure)
        for rule in RULES:
            if rule.applies_to(properties) and rule.is_violated(spec):
                at = f"measures.{measure.name}"
                field, value = (at, measure.to_text()) if rule.field is None else (rule.field, rule.value(spec))
                about = measure.function.name if rule.field is None else f"{measure.function.name} ({at})"
                raise InvalidQuery(field, value, rule.accepted, f"{about} {rule.reason}")


def require_sliced(window: Window) -> SlicedWindow:
    """Returns the window if queries over edges support it. Raises InvalidQuery for a count window."""
    if isinstance(window, CountWindow):
        raise InvalidQuery(
            "window.count",
            window.count,
            f"a tumbling, sliding or session window; count windows are supported by {BATCH}",
            "records of different edges have no common order",
        )
    assert isinstance(window, SlicedWindow)
    return window
