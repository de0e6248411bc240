"""Query-string parameters that select and question answers: groups, measures, quantiles, confidence, and others.

They are checked against the query's spec (`QuestionParams.questions`), and hashable for the cache of answers.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from center.api.measure_models import Params
from center.serving.measures import MeasureQuestions, includes, require_possible
from center.serving.row_selection import RowSelection
from edgewater.answers import Phase
from edgewater.base.errors import InvalidRequest
from edgewater.model.computed import MAX_COMPUTED, ComputedValue
from edgewater.model.query import QuerySpec
from edgewater.synopses.named_questions import read_confidence

MAX_VALUES = 100
"""The most values of one parameter: a limit of the work of one answer."""
MAX_TEXT = 2_000
"""Characters of a condition: a limit of the parser's work."""


class QuestionParams(Params):
    """The question parameters of every endpoint that gives answers."""

    group: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["carrier:UA"]])] = []
    """`column:value`, such as `carrier:UA`. Only groups with this value; repeated for one column: any of the values;
    for several columns: all must hold. `null` is the missing value, `"null"` the text, and `""` the empty text."""
    measure: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["flights"]])] = []
    """Only these measures."""
    quantile: Annotated[list[float], Field(max_length=MAX_VALUES, examples=[[0.5, 0.99]])] = []
    """Ranks in [0, 1], for measures that answer quantiles; default of quantile measures: 0.5, 0.9, 0.95 and 0.99."""
    item: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["10.0.0.1"]])] = []
    """Frequency of this item (`count_min`, `top_k`, `fast_agms`, `counting_cuckoo`), or its membership (`bloom`,
    `cuckoo`). Parsed as the type of the measure's argument."""
    contains: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["10.0.0.1"]])] = []
    """Membership of this item, for filters."""
    rank: Annotated[list[float], Field(max_length=MAX_VALUES, examples=[[250.0]])] = []
    """Fraction of values that are at most this one."""
    x: Annotated[list[float], Field(max_length=MAX_VALUES)] = []
    """The same as `rank`."""
    range: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["0:100"]])] = []
    """`lo:hi`: number of values from lo to hi, both inclusive, for histograms and samples. Either end is optional."""
    top: Annotated[int | None, Field(ge=1, examples=[10])] = None
    """Number of items of a `top_k`."""
    compute: Annotated[list[str], Field(max_length=MAX_COMPUTED, examples=[["error_rate: errors / requests"]])] = []
    """`name: expression` over the numbers of a group, with +, -, * and /: another column with the interval that follows
    from theirs."""
    having: Annotated[str, Field(max_length=MAX_TEXT, examples=["errors > 100 AND error_rate_lower > 0.01"])] = ""
    """Only groups for which this SQL condition holds. It reads the columns of the answer as a table: groups, `m`,
    `m_lower`, `m_upper`. `errors_lower > 100`: certainly more than 100."""
    order: Annotated[list[str], Field(max_length=MAX_VALUES, examples=[["-error_rate"]])] = []
    """Column to sort the groups by; `-column`: descending. Repeated: the next ones decide between equal values.
    Default: by group."""
    limit_groups: Annotated[int | None, Field(ge=1, examples=[10])] = None
    """Number of groups at most, the first of the order."""
    values: Annotated[bool, Field(examples=[True])] = False
    """The values in a sample instead of its estimates."""
    confidence: Annotated[float | None, Field(gt=0, lt=1, examples=[0.95])] = None
    """Of the intervals. Refused for a synopsis with a fixed, lower confidence; exact measures accept any."""

    def questions(self, spec: QuerySpec) -> MeasureQuestions:
        """Returns the parameters, checked against a query, without duplicates. Raises InvalidRequest."""
        questions = MeasureQuestions(
            groups=_groups(self.group, spec),
            measures=_measures(self.measure, spec),
            quantiles=tuple(dict.fromkeys(_ranks(self.quantile))) or None,
            ranks=tuple(dict.fromkeys(_numbers("rank", [*self.rank, *self.x]))),
            ranges=tuple(dict.fromkeys(map(_range, self.range))),
            items=tuple(dict.fromkeys(self.item)),
            contains=tuple(dict.fromkeys(self.contains)),
            top=self.top,
            values=self.values,
            confidence=read_confidence(self.confidence),
            computed=_computed(self.compute, spec),
            selection=RowSelection(self.having.strip(), tuple(self.order), self.limit_groups),
        )
        named = [m for m in spec.measures if includes(questions, m)]
        require_possible(questions, {m.name: m.stack(None) for m in named})
        return questions


class AnswerParams(QuestionParams):
    """The parameters of endpoints that return answers."""

    format: Annotated[Literal["json", "csv", "arrow"] | None, Field(examples=["csv"])] = None
    """The form of the response; overrides `Accept`."""
    min_phase: Annotated[Phase, Field(examples=["final"])] = Phase.EARLY
    """Only windows whose newest answer has reached this phase."""
    require: Literal["complete"] | None = None
    """`complete`: if an answer lacks records of an edge, the response is 409."""


def _computed(texts: list[str], spec: QuerySpec) -> tuple[ComputedValue, ...]:
    taken = {*spec.group_by, *spec.shown}
    computed = tuple(ComputedValue.parse(text, taken) for text in dict.fromkeys(texts))
    if len({value.name for value in computed}) < len(computed):
        raise InvalidRequest("compute", texts, "each name once")
    return computed


def _groups(texts: list[str], spec: QuerySpec) -> tuple[tuple[str, tuple[str, ...]], ...]:
    by_column: dict[str, list[str]] = {}
    for text in texts:
        column = max((c for c in spec.group_by if text.startswith(f"{c}:")), key=len, default=None)
        if column is None:
            columns = ", ".join(spec.group_by) or f"(none: {spec.name} is not grouped)"
            raise InvalidRequest("group", text, f"column:value with one of the columns {columns}")
        by_column.setdefault(column, []).append(text[len(column) + 1 :])
    return tuple((column, tuple(dict.fromkeys(values))) for column, values in sorted(by_column.items()))


def _measures(texts: list[str], spec: QuerySpec) -> tuple[str, ...]:
    for name in texts:
        if name not in spec.shown:
            raise InvalidRequest("measure", name, f"one of {', '.join(spec.shown)}")
    return tuple(name for name in spec.shown if name in texts)


def _ranks(texts: list[float]) -> list[float]:
    for q in texts:
        if math.isnan(q) or not 0 <= q <= 1:
            raise InvalidRequest("quantile", q, "a rank from 0 to 1, such as 0.99")
    return texts


def _numbers(field: str, texts: list[float]) -> list[float]:
    for x in texts:
        if math.isnan(x):
            raise InvalidRequest(field, x, "a number")
    return texts


def _range(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        ends = float(low or -math.inf), float(high or math.inf)
    except ValueError:
        ends = math.nan, math.nan
    if not colon or math.isnan(ends[0]) or math.isnan(ends[1]):
        raise InvalidRequest("range", text, "lo:hi, such as 0:100; either end is optional")
    return ends
