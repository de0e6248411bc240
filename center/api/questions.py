"""What a reader asks of an answer: which groups and measures, which quantiles, what confidence.

Read from the query string, checked against the query's spec (`QuestionParams.asked`), and hashable, so
that what was rendered for one reader serves the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from center.answers import DEFAULT_QUANTILES, Questions
from edgewater.errors import InvalidRequest
from edgewater.query import QuerySpec
from edgewater.synopses.base import Quantile

MAX_VALUES = 100


class QuestionParams(BaseModel):
    """The question parameters of every endpoint that gives answers."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[
        list[str],
        Field(
            max_length=MAX_VALUES,
            description="`column:value`, such as `carrier:UA`. Only groups with this value; repeated for one column:"
            " any of the values; for several columns: all must hold. `null` stands for a missing value.",
            examples=[["carrier:UA"]],
        ),
    ] = []
    measure: Annotated[
        list[str],
        Field(max_length=MAX_VALUES, description="Only these measures.", examples=[["flights"]]),
    ] = []
    quantile: Annotated[
        list[float],
        Field(
            max_length=MAX_VALUES,
            description="Ranks in [0, 1], for measures that answer quantiles and none else; 0.5, 0.9, 0.95 and 0.99"
            " if none is given.",
            examples=[[0.5, 0.99]],
        ),
    ] = []
    confidence: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="Of intervals of measures that estimate with a probability. Exact measures hold at any.",
            examples=[0.95],
        ),
    ] = None

    def asked(self, spec: QuerySpec) -> Asked:
        """The parameters checked against a query. Raises InvalidRequest."""
        if self.confidence is not None:
            _require_exact(self.confidence, spec)
        return Asked(_groups(self.group, spec), _measures(self.measure, spec), _quantiles(self.quantile, spec))


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions that a query can answer. Empty means: no restriction, the defaults.

    Attributes:
        groups: column and accepted texts, sorted by column.
        measures: in the spec's order.
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    measures: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = ()

    @property
    def questions(self) -> Questions:
        """What is asked of the synopses."""
        return Questions(self.quantiles or DEFAULT_QUANTILES, self.groups)

    def of_rendered(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A rendered answer, with only the measures asked for."""
        if not self.measures:
            return answer
        keep = ("group", *self.measures)
        return {**answer, "data": [{k: r[k] for k in keep if k in r} for r in answer["data"]]}

    def of_table(self, table: pa.Table, spec: QuerySpec) -> pa.Table:
        """An answer's table, with only the measures asked for."""
        if self.measures:
            # A measure's columns are its name and that name with a suffix behind `_`; the longest name
            # that fits owns a column, so that `delay` does not take the columns of `delay_max`.
            names = [m.name for m in spec.measures]
            owners = {c: _owner(c, names) for c in table.column_names if c not in spec.group_by}
            table = table.drop_columns([c for c, owner in owners.items() if owner and owner not in self.measures])
        return table


PLAIN = Asked()


def _owner(column: str, measures: list[str]) -> str | None:
    fitting = [m for m in measures if column == m or column.startswith(f"{m}_")]
    return max(fitting, key=len, default=None)


def _groups(given: list[str], spec: QuerySpec) -> tuple[tuple[str, tuple[str, ...]], ...]:
    wanted: dict[str, list[str]] = {}
    for text in given:
        column, colon, value = text.partition(":")
        if not colon or column not in spec.group_by:
            columns = ", ".join(spec.group_by) or f"(none: {spec.name} is not grouped)"
            raise InvalidRequest("group", text, f"column:value with one of the columns {columns}")
        wanted.setdefault(column, []).append(value)
    return tuple((column, tuple(dict.fromkeys(values))) for column, values in sorted(wanted.items()))


def _measures(given: list[str], spec: QuerySpec) -> tuple[str, ...]:
    names = [m.name for m in spec.measures]
    for name in given:
        if name not in names:
            raise InvalidRequest("measure", name, f"one of {', '.join(names)}")
    return tuple(name for name in names if name in given)


def _quantiles(given: list[float], spec: QuerySpec) -> tuple[float, ...]:
    for q in given:
        if math.isnan(q) or not 0 <= q <= 1:
            raise InvalidRequest("quantile", q, "a rank from 0 to 1, such as 0.99")
    asked_of = any(Quantile in kinds for kinds in _answered(spec).values())
    return tuple(dict.fromkeys(given)) if asked_of else ()


def _require_exact(confidence: float, spec: QuerySpec) -> None:
    """Exact measures hold at any confidence; `center/answers.py` gives the others at one of their own."""
    for measure in spec.measures:
        given = measure.function.make(measure.parameters, None).query().confidence
        if given < 1 and confidence != given:
            raise InvalidRequest("confidence", confidence, f"{given}, or none", f"{measure.name} is given at {given}")


def _answered(spec: QuerySpec) -> Mapping[str, tuple[type, ...]]:
    """Per measure the kinds of question that its synopsis answers."""
    return {m.name: m.function.make(m.parameters, None).questions for m in spec.measures}
