"""Explains one value of an answer: the causes of its error, with their amounts, and each edge's statements. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from center.results import AnswerRecord
from center.serving.measures import MeasureQuestions
from center.serving.render import AnswerRows, answer_rows, group_cells, statement_of
from center.serving.widening import Lacking
from center.serving.withheld import with_withheld_amounts
from edgewater.answers import Cause, WithheldBound, finite
from edgewater.answers.cells import CellColumn, intervals, part_shape
from edgewater.answers.own_error import OwnError
from edgewater.base.errors import NotFound
from edgewater.base.timestamps import rfc3339
from edgewater.model.computed import ComputedValue
from edgewater.model.json_types import Group, IntervalCell
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.replies import EdgeStatement, ErrorCause, ErrorPart, ExplainedValue, Sides
from edgewater.synopses import Estimates

NO_BOUND = "no bound is known"
_NO_VALUE: IntervalCell = {"estimate": None, "lower": None, "upper": None}


@dataclass(slots=True)
class NotedError(OwnError):
    """An `OwnError` that also stores the values as the synopsis states them."""

    noted: list[Estimates] = field(default_factory=list)

    def note(self, estimates: Estimates) -> None:
        OwnError.note(self, estimates)
        self.noted.append(estimates)


def _part(cause: ErrorCause, above: float | None, below: float | None, says: str) -> ErrorPart:
    """Returns the part of an interval that one cause makes; None: unknown."""
    known = above is not None and below is not None
    return {"cause": cause, "above": above, "below": below, "known": known, "says": says}


NOTHING_STATED: EdgeStatement = {"closed": None, "closed_until": None, "late": None, "withheld": None}


def explain_value(
    record: AnswerRecord, spec: QuerySpec, measure: Measure | ComputedValue, asked: MeasureQuestions
) -> ExplainedValue:
    """Explains the value of a measure that `asked` selects.

    Of several groups, the group with the widest interval is chosen.

    Raises:
        NotFound: the answer has no such group.
    """
    questions = replace(asked, measures=(measure.name,))
    errors: list[NotedError] = []

    def new_error(is_sample: bool) -> NotedError:
        errors.append(NotedError(is_sample))
        return errors[-1]

    rows = answer_rows(record, spec, questions, new_error)
    if not rows.length:
        raise NotFound(f"query {spec.name}: the answer at {rfc3339(record.window_start_ms)} has no such group")
    values = rows.values[0]
    name, cells = _main_value(values, rows.length)
    at = max(range(rows.length), key=lambda i: _width(cells[i]))
    cell = cells[at]
    stated = statement_of(record, spec, rows, questions)
    parts: tuple[ErrorPart, ...]
    if isinstance(measure, ComputedValue):
        parts = (_derived_part(spec, measure, cell),)
    else:
        own = errors[0]
        before = own.noted[0] if own.noted and cell is not _NO_VALUE else None
        parts = (
            _own_part(own, before, at, measure),
            _withheld_part(rows, measure, before, at, cell),
            *_predicted_parts(record, spec, measure, before, at, cell),
            *_missing_part(record, measure, rows, before, at, cell),
        )
    coverage = None if stated.accuracy is None else stated.accuracy.get("coverage")
    return {
        "value": name,
        "group": group_cells(rows.groups, rows.length)[at],
        "groups": rows.length,
        **cell,
        "confidence": values.confidence,
        "shapes": [part_shape(part, measure.name) for part in values.parts],
        "parts": list(parts),
        "contract": stated.contract.to_json(),
        "coverage": coverage,
    }


def value_of_group(
    record: AnswerRecord, spec: QuerySpec, measure: Measure | ComputedValue, asked: MeasureQuestions, group: Group
) -> IntervalCell:
    """Returns the same value in another revision; unknown if the revision has no such group."""
    rows: AnswerRows = answer_rows(record, spec, replace(asked, measures=(measure.name,)))
    _, cells = _main_value(rows.values[0], rows.length)
    found = (cell for cell, key in zip(cells, group_cells(rows.groups, rows.length), strict=True) if key == group)
    return next(found, _NO_VALUE)


def edge_statements(record: AnswerRecord, measure: Measure | ComputedValue) -> dict[str, EdgeStatement]:
    """Returns what each edge had stated about the window when the answer was given."""
    stated = record.facts.edges
    until, held, late = stated.closed_until_ms or {}, stated.withheld, stated.late
    having, lacking = frozenset(stated.closed or ()), frozenset(record.facts.lacking)
    result = dict[str, EdgeStatement]()
    for edge in sorted({*having, *lacking, *(held or ()), *(late or ())}):
        has_closed = True if edge in having else False if edge in lacking else None
        result[edge] = {
            "closed": has_closed,
            "closed_until": rfc3339(until[edge]) if edge in until else None,
            "late": None if late is None else late.get(edge, 0 if has_closed else None),
            "withheld": None if held is None else _withheld_at_edge(held.get(edge), measure, bool(has_closed)),
        }
    return result


def _withheld_at_edge(
    bounds: Mapping[str, WithheldBound] | None, measure: Measure | ComputedValue, closed: bool
) -> Sides | None:
    if isinstance(measure, ComputedValue):  # edges state it of the measures that they ship
        return None
    if bounds is None or (measure.name not in bounds and measure.function.error is not None):
        return {"above": 0, "below": 0} if closed else None
    bound = bounds.get(measure.name)
    return None if bound is None else {"above": finite(bound.above), "below": finite(bound.below)}


def _main_value(values: CellColumn, rows: int) -> tuple[str, list[IntervalCell]]:
    """Returns the name of the first interval of a measure, and its members in each row. Lists have none."""
    if not values.intervals:
        return "", [_NO_VALUE] * rows
    first = values.intervals[0]
    return first.name, intervals(first.estimates, first.whole)


def _width(value: IntervalCell) -> float:
    if value["lower"] is None or value["upper"] is None:
        return math.inf
    return float(value["upper"]) - float(value["lower"])


def _derived_part(spec: QuerySpec, value: ComputedValue, cell: IntervalCell) -> ErrorPart:
    """Returns the whole interval of a derived measure. The measures that it reads have causes of their own."""
    read = [m.to_text() if m.part_of else m.name for m in spec.measures if m.name in value.reads()]
    estimate, lower, upper = cell["estimate"], cell["lower"], cell["upper"]
    above = None if estimate is None or upper is None else upper - estimate
    below = None if estimate is None or lower is None else estimate - lower
    return _part("measures", above, below, f"it follows from the intervals of {', '.join(read)}")


def _own_part(own: NotedError, before: Estimates | None, row: int, measure: Measure) -> ErrorPart:
    """Returns the synopsis' own error, from the bounds before they are widened by the answer's missing records."""
    cause: ErrorCause = "sampling" if own.is_sample else "sketch"
    if before is None:
        width = finite(own.half_width)
        return _part(cause, width, width, f"the largest error of any value of {measure.function.name}")
    value, lower, upper = (float(getattr(before, name)[row]) for name in ("value", "lower", "upper"))
    above, below = finite(upper - value), finite(value - lower)
    if above == 0 and below == 0:
        return _part(cause, 0, 0, f"{measure.function.name} is exact for the records that have arrived")
    what = "a sample of the records" if own.is_sample else f"the synopsis of {measure.function.name}"
    return _part(cause, above, below, f"the error of {what}")


def _withheld_part(
    rows: AnswerRows, measure: Measure, before: Estimates | None, row: int, cell: IntervalCell
) -> ErrorPart:
    """Returns the part of the interval in `cell` that results from withheld values."""
    edges, is_bounded = rows.withheld.edges_of(row), measure.function.error is not None
    bound = edges.bounds.get(measure.name)
    if not edges.bounds or (bound is None and is_bounded):
        return _part("withheld", 0, 0, "the edges that have closed the window withhold nothing")
    above = below = None
    if before is not None:
        lower, upper = float(before.lower[row]), float(before.upper[row])
        if bound is not None and is_bounded:
            bounds, whole = (np.array([lower]), np.array([upper])), before.integers is not None
            (low,), (high,) = with_withheld_amounts(*bounds, bound, whole=whole)
            above, below = finite(float(high) - upper), finite(lower - float(low))
        else:
            above, below = _widened(before, row, cell)
    return _part("withheld", above, below, "what edges withhold of a group, at most, under the error budget")


def _widened(before: Estimates, row: int, cell: IntervalCell) -> tuple[float | None, float | None]:
    """Returns by how much the interval in `cell` is wider than the synopsis' own; None: it has no bound."""
    lower, upper = float(before.lower[row]), float(before.upper[row])
    above = None if cell["upper"] is None else max(cell["upper"] - upper, 0)
    return above, None if cell["lower"] is None else max(lower - cell["lower"], 0)


def _predicted_parts(
    record: AnswerRecord, spec: QuerySpec, measure: Measure, before: Estimates | None, row: int, cell: IntervalCell
) -> tuple[ErrorPart, ...]:
    """Returns the errors of an estimate that stands for records which have not arrived."""
    facts = record.facts
    if (predicted := facts.predicted) is None:
        return ()
    error = {} if facts.accuracy is None else dict(facts.accuracy.error)
    if any(facts.late_counts):
        error["missing"] = None
    parts = []
    causes: tuple[tuple[ErrorCause, str], ...] = (
        ("sampling", "records that edges did not process"),
        ("straggler", "records that have not arrived yet"),
        ("missing", "records of edges that have stopped reporting"),
    )
    for cause, what in causes:
        if measure.name not in predicted.measures:
            parts.append(_part(cause, None, None, f"{what}: {NO_BOUND} for a measure that is not estimated"))
            continue
        width = error.get(cause)
        if predicted.of_records:
            if cause == "straggler":
                above, below = (None, None) if before is None else _widened(before, row, cell)
                parts.append(_part(cause, above, below, f"{what}: they are bounded, and their values may be any"))
            continue
        whose = " of the group with the widest interval" if spec.group_by else ""
        says = what + (f", as estimated{whose}" if width is not None else f": {NO_BOUND}")
        parts.append(_part(cause, width, width, says))
    return tuple(parts)


def _missing_part(
    record: AnswerRecord, measure: Measure, rows: AnswerRows, before: Estimates | None, row: int, cell: IntervalCell
) -> tuple[ErrorPart, ...]:
    """Returns how far missing records may move the value, if no estimate stands for them."""
    facts, name = record.facts, measure.function.name
    if facts.may_count_twice:
        edges = ", ".join(facts.edges_by(Cause.LOST_STATE))
        guesses = ", ".join(sorted(facts.records_by(Cause.GUESSED)))
        cause = f"{edges} lost its state" if edges else f"edges guessed ({guesses})"
        return (_part("missing", None, None, f"{cause}: records may be missing or counted twice"),)
    if facts.predicted is not None:
        return ()
    if not facts.lacks_records:
        return (_part("missing", 0, 0, "every expected edge has closed the window with all its records"),)
    lacking, edges_lacking = Lacking.of(facts, rows.groups, rows.length), facts.lacking
    if not lacking.is_unknown[row] and not lacking.records[row]:
        return (_part("missing", 0, 0, "edges are missing, and none of them has records of this group"),)
    says = f"records of {', '.join(edges_lacking[:3])}{', …' if len(edges_lacking) > 3 else ''} may be missing"
    if not edges_lacking:
        says = "; ".join(facts.reasons) or "no edge is expected"
    if not lacking.is_unknown[row] and name == "count":
        return (_part("missing", int(lacking.records[row]), 0, says),)
    is_bounded = measure.function.error is None or measure.name in lacking.amounts
    if not lacking.is_unknown[row] and is_bounded and before is not None:
        says = f"{says}: at most {int(lacking.records[row])} records"
        by_values = measure.name in lacking.amounts
        says += ", with such values as those of recent windows" if by_values else ", of any values"
        if rows.withheld.edges_of(row).bounds:
            says += "; the bounds also include what edges withhold"
        return (_part("missing", *_widened(before, row, cell), says),)
    return (
        _part("missing", 0 if name == "min" else None, 0 if name in ("count", "max") else None, f"{says}: {NO_BOUND}"),
    )
