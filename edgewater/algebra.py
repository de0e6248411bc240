"""What the algebra of a query's synopses forbids, and what it says about late records.

An edge ships a slice in as many partials as it likes, edges know nothing of each other's records, windows are
merges of slices, and the center merges all of it in any order. So a synopsis must merge; and one whose
guarantees rest on the order of its values (`needs_order`) can only be asked where there is one order: at one
edge, in windows of one slice, without late records. All of this is read off `Properties`, so a synopsis
that a user registers is judged as one of ours.

What is *not* asked for: idempotence, since a frame is applied exactly once; commutativity of the state
(KLL and top-k depend on the order, and keep their bounds in any); invertibility, since a late record
goes to its slice and no slice is ever taken out of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from edgewater.errors import InvalidQuery
from edgewater.streams import COLUMN_TYPES
from edgewater.synopses.base import Properties
from edgewater.windows import CountWindow, SlicedWindow, Sliding, Window

if TYPE_CHECKING:
    from edgewater.measure import Measure
    from edgewater.query import QuerySpec

BATCH = "center.batch.build over a DataFrame, or center.slicing over a stream in one process"


class LateRule(StrEnum):
    """What becomes of a record behind the watermark."""

    TAKEN = "taken"
    """It goes to its slice; every answered window over it gets a new revision."""
    MENDED = "mended"
    """Its window takes it and hands on the records that it pushes out: a synopsis that can take out again."""
    FOLLOWS_WATERMARK = "follows the watermark"
    """It is dropped, and counted."""


def needs_order(properties: Properties) -> bool:
    """Do the guarantees rest on the order in which values and parts come?

    FIFO samples and biased reservoirs are ordered by event time, whatever order they are fed in: they
    commute. KLL and top-k do not commute, but hold their bounds in any order, and are not called ordered.
    """
    return properties.ordered and not properties.commutative


def late_rule(each: Sequence[Properties], window: Window) -> LateRule:
    """The rule for a query whose synopses have these properties: that of the strictest."""
    if any(needs_order(p) for p in each):
        return LateRule.FOLLOWS_WATERMARK
    if not isinstance(window, CountWindow):
        return LateRule.TAKEN
    # A late record moves the borders of all later count windows.
    return LateRule.MENDED if all(p.invertible for p in each) else LateRule.FOLLOWS_WATERMARK


def late_rule_of(spec: QuerySpec) -> LateRule:
    """As `late_rule`, of a query. What it drops has the reason ``out-of-order``."""
    return late_rule([properties_of(m) for m in spec.measures], spec.window)


def properties_of(measure: Measure) -> Properties:
    """The properties of the measure's synopsis. They are those of its kind, whatever type it is built for."""
    function = measure.function
    data_type = COLUMN_TYPES[function.types[0]] if function.argument == "required" else None
    return function.make(measure.parameters, data_type).properties


@dataclass(frozen=True, slots=True)
class Rule:
    """A part of a query that a property forbids.

    Attributes:
        clashes: whether a query has that part.
        field: where it stands in the query; None: it is the measure itself.
        value: what stands there.
        accepted: what may stand there.
        reason: why not, as a sentence about the measure's function.
    """

    concerns: Callable[[Properties], bool]
    clashes: Callable[[QuerySpec], bool]
    field: str | None
    value: Callable[[QuerySpec], object]
    accepted: str
    reason: str


RULES = (
    Rule(
        lambda p: not p.mergeable,
        lambda spec: True,
        None,
        lambda spec: None,
        f"a synopsis that merges; this one can be built by {BATCH}",
        "does not merge, and what edges ship is merged by slice",
    ),
    Rule(
        lambda p: not p.reproducible,
        lambda spec: True,
        None,
        lambda spec: None,
        f"a synopsis whose bytes follow from its input; this one can be built by {BATCH}",
        "may give other bytes for the same records, and an edge recovers by building its frames again",
    ),
    Rule(
        needs_order,
        lambda spec: not (isinstance(spec.window, Sliding) and spec.window.is_tumbling),
        "window",
        lambda spec: spec.window.to_mapping(),
        "a tumbling window, which is one slice",
        "depends on the order of its values, and slices that several windows share are merged in any order",
    ),
    Rule(
        needs_order,
        lambda spec: spec.edges is None or len(spec.edges) > 1,
        "edges",
        lambda spec: None if spec.edges is None else list(spec.edges),
        "exactly one edge, such as [jfk]",
        "depends on the order of its values, and records of different edges have none in common",
    ),
    Rule(
        needs_order,
        lambda spec: spec.lateness_ms > 0,
        "lateness",
        lambda spec: spec.to_mapping()["lateness"],
        "no lateness: late records are dropped and counted",
        "depends on the order of its values, so nothing can be put in behind what has been",
    ),
)


def check(spec: QuerySpec) -> None:
    """Raises InvalidQuery for the first part of a query that one of its synopses forbids."""
    for measure in spec.measures:
        properties = properties_of(measure)
        for rule in RULES:
            if rule.concerns(properties) and rule.clashes(spec):
                at = f"measures.{measure.name}"
                field, value = (at, measure.to_text()) if rule.field is None else (rule.field, rule.value(spec))
                about = measure.function.name if rule.field is None else f"{measure.function.name} ({at})"
                raise InvalidQuery(field, value, rule.accepted, f"{about} {rule.reason}")


def sliced(window: Window) -> SlicedWindow:
    """The window, if a query over edges can have it, whatever its synopses. Raises InvalidQuery."""
    if isinstance(window, CountWindow):
        raise InvalidQuery(
            "window.count",
            window.count,
            f"a tumbling, sliding or session window; count windows are made by {BATCH}",
            "records of different edges have no common order to be counted in",
        )
    assert isinstance(window, SlicedWindow)
    return window
