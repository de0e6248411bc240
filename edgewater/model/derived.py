"""Derived measures: arithmetic over the measures of a query, such as ``rate: errors / requests``. Pure.

Edges ship the measures that the arithmetic reads. The center derives the value from them for each group of an answer,
for its total, and for a roll-up. So the rate of a day is the quotient of the day's counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import count

from sqlglot import exp

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.model.computed import OPERATORS, ComputedValue, operands
from edgewater.model.measure import NAME, NAME_ACCEPTED, Measure
from edgewater.model.syntax import parse_sql
from edgewater.synopses.shapes import ShownInterval, shown

NO_BUDGET = "it is derived from other measures, and edges withhold values of these"
NO_ACCURACY = "it is derived from other measures, and edges sample for a measure that they ship"
_ACCEPTED = "+, -, *, / and parentheses over measures, functions and numbers, such as errors / requests"
_KEYWORDS = re.compile(r"\b(distinct|quantile)(\s*\()", re.IGNORECASE)
_RENAMED = re.compile(r"\b(distinct|quantile)_of(\s*\()", re.IGNORECASE)


def arithmetic(text: object) -> exp.Expression | None:
    """Returns the tree of a measure that is derived; None: the text is a function, or is not SQL."""
    if not isinstance(text, str) or not any(sign in text for sign in "+-*/"):
        return None
    for written in (text, _KEYWORDS.sub(r"\1_of\2", text)):  # keywords of SQL, or other functions there
        try:
            tree = parse_sql(written, "")
        except InvalidQuery:
            continue
        return tree if isinstance(tree.unnest(), (*OPERATORS, exp.Neg)) else None
    return None


def read_measures(
    texts: Mapping[str, object], group_by: Collection[str]
) -> tuple[tuple[Measure, ...], tuple[ComputedValue, ...]]:
    """Returns the measures that edges ship, and the derived ones.

    A function within the arithmetic, as in ``sum(bytes) / count()``, is an equal measure of the query, or a measure
    that answers do not show (`Measure.part_of`).

    Raises:
        InvalidQuery: names the measure, its text and what is accepted.
    """
    trees = {name: tree for name, text in texts.items() if (tree := arithmetic(text)) is not None}
    measures = [Measure.parse(name, text) for name, text in texts.items() if name not in trees]
    taken = {*texts, *group_by}
    numbered = map("part_{}".format, count(1))
    free = (part for part in numbered if taken.isdisjoint((part, f"{part}_lower", f"{part}_upper")))
    derived = []
    for name, tree in trees.items():
        at, text = f"measures.{name}", texts[name]
        if not NAME.fullmatch(name):
            raise InvalidQuery(at, name, NAME_ACCEPTED, "invalid name of a measure")
        read = list(operands(tree))
        if not read:
            raise InvalidQuery(at, text, _ACCEPTED, "it reads no measure")
        for leaf in read:
            if isinstance(leaf, exp.Column) and not leaf.table:
                measure = _named(leaf.name, measures, trees, at, text)
            elif isinstance(leaf, exp.Func | exp.Filter):
                measure = _part(name, _RENAMED.sub(r"\1\2", leaf.sql(comments=False)), measures, free)
            else:
                raise InvalidQuery(at, text, _ACCEPTED, f"{leaf.sql()} is not supported")
            _require_number(measure, at, text)
            leaf.replace(exp.column(measure.name, quoted=isinstance(leaf, exp.Column) and leaf.this.quoted))
        derived.append(ComputedValue(name, tree.sql(comments=False)))
    return tuple(measures), tuple(derived)


def derived_text(value: ComputedValue, measures: Collection[Measure]) -> str:
    """Returns the canonical text, which `read_measures` accepts."""
    parts = {measure.name: measure.to_text() for measure in measures if measure.part_of}
    return re.sub(r"\bpart_\d+\b", lambda name: parts.get(name[0], name[0]), value.text)


def _named(name: str, measures: Collection[Measure], derived: Collection[str], at: str, text: object) -> Measure:
    found = next((measure for measure in measures if measure.name == name and not measure.part_of), None)
    if found is None:
        known = [measure.name for measure in measures if not measure.part_of]
        reason = f"unknown measure {name}{did_you_mean(name, known)}"
        if name in derived:
            reason = f"{name} is derived itself; write its expression in parentheses"
        accepted = f"one of the measures {', '.join(known)}" if known else "functions, such as sum(bytes) / count()"
        raise InvalidQuery(at, text, accepted, reason)
    return found


def _part(name: str, text: str, measures: list[Measure], free: Iterator[str]) -> Measure:
    """Returns the measure of a function within a derived measure. Adds it if the query has no equal one."""
    measure = Measure.parse(name, text)
    measure.require_no_condition()
    for known in measures:
        if replace(known, name=name, part_of="") == measure:
            return known
    measures.append(replace(measure, name=next(free), part_of=name))
    return measures[-1]


def _require_number(measure: Measure, at: str, text: object) -> None:
    """Raises InvalidQuery if the value of a measure is not one number with an interval."""
    if measure.function.sample is None:
        shapes = shown(measure.stack(None), measure.question)
        if any(isinstance(shape, ShownInterval) and not shape.name for shape in shapes):
            return
    accepted = "measures with one number, such as count(), sum(bytes), distinct(user) or quantile(latency, 0.99)"
    raise InvalidQuery(at, text, accepted, f"{measure.to_text()} has no single number with an interval")
