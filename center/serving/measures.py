"""`MeasureEvaluator`: a measure's cell in an answer, as parts. Pure.

Without questions, each kind of synopsis shows its main result: a top-k its list, a histogram its buckets, a sample its
estimates. With questions, the cell has the answers that the synopsis can give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from center.serving.computed import ALL_ROWS, ComputedValue, RowSelection
from center.serving.function_values import DEFAULT_CONFIDENCE, FunctionPart
from edgewater.answers.cells import CellPart, IntervalPart, ItemsPart, KeyedPart, ListPart, NumberPart
from edgewater.answers.own_error import OwnError
from edgewater.model.early_synopses import DEFAULT_QUANTILES
from edgewater.model.errors import InvalidRequest
from edgewater.model.measure import Measure
from edgewater.synopses import (
    BloomStack,
    Count,
    CountMinStack,
    CuckooStack,
    EquiDepthStack,
    EquiWidthStack,
    Estimates,
    FalsePositiveRate,
    FloatArray,
    IntArray,
    ItemRanking,
    Quantile,
    Question,
    Range,
    RowSampleStack,
    SampleStack,
    Stack,
    TopItems,
)
from edgewater.synopses.named_questions import (
    answerable_questions,
    default_question,
    evaluate_question,
    parse_question,
    question_kind,
    require_confidence,
    top_items_question,
)

MAX_ASKED = 100
WHOLE = ("count", "integer_sum")


@dataclass(frozen=True, slots=True)
class MeasureQuestions:
    """The questions that a reader asks of an answer; None and (): not asked.

    Attributes:
        quantiles: ranks in [0, 1]; None: `DEFAULT_QUANTILES`, for measures that show quantiles by default.
        ranks: values x, to ask for the fraction of values ≤ x.
        ranges: (lo, hi), both inclusive.
        items: items as text, to ask for their frequency or, of filters, their membership.
        contains: items as text, to ask for their membership.
        top: number of most frequent items.
        values: include the values in samples.
        confidence: of the intervals.
        measures: the measures to include; (): all.
        groups: (column, accepted values as text; `render.denoted_values`). Only groups that match all these columns are
            rendered.
        computed: values to compute from measures.
        selection: the rows to include, after `groups`.
    """

    quantiles: tuple[float, ...] | None = None
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ranks: tuple[float, ...] = ()
    ranges: tuple[tuple[float, float], ...] = ()
    items: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    top: int | None = None
    values: bool = False
    confidence: float | None = None
    measures: tuple[str, ...] = ()
    computed: tuple[ComputedValue, ...] = ()
    selection: RowSelection = ALL_ROWS

    def __post_init__(self) -> None:
        if self.quantiles is not None:
            accepted = f"1 to {MAX_ASKED} numbers from 0 to 1"
            if not 1 <= len(self.quantiles) <= MAX_ASKED or not all(0.0 <= q <= 1.0 for q in self.quantiles):
                raise InvalidRequest("quantile", self.quantiles, accepted)
        for name in ("ranks", "ranges", "items", "contains"):
            given = getattr(self, name)
            if len(given) > MAX_ASKED:
                raise InvalidRequest(name.rstrip("s"), given, f"at most {MAX_ASKED} of them")

    @property
    def by_parameter(self) -> dict[str, Any]:
        """The questions that are asked, by parameter name."""
        each = {
            "quantile": self.quantiles,
            "rank": self.ranks,
            "range": self.ranges,
            "item": self.items,
            "contains": self.contains,
            "top": self.top,
            "values": self.values,
        }
        return {name: value for name, value in each.items() if value}


NO_QUESTIONS = MeasureQuestions()


def includes(questions: MeasureQuestions, measure: Measure) -> bool:
    """Returns whether an answer to the questions shows a measure."""
    return not questions.measures or measure.name in questions.measures


class MeasureWidening(Protocol):
    """Widens the intervals of one measure: `Widening.widen` of this measure."""

    def __call__(
        self, stack: Stack, estimates: Estimates, question: Question | None, groups: IntArray | None = None
    ) -> Estimates:
        """Returns the widened estimates.

        Args:
            groups: int64, the row of each estimate; None: there is one estimate per row.
        """


_QUESTION_NAMES = {
    "quantile": ("quantile",),
    "rank": ("rank",),
    "range": ("range",),
    "item": ("frequency", "contains"),
    "contains": ("contains",),
    "top": ("top",),
}
"""Question names per parameter. The first question that the measure answers is used."""


def _question_name(parameter: str, stack: Stack) -> str | None:
    if parameter == "values":
        return "values" if isinstance(stack, SampleStack) else None
    return next((name for name in _QUESTION_NAMES[parameter] if question_kind(name, stack) is not None), None)


def require_possible(questions: MeasureQuestions, stacks: Mapping[str, Stack]) -> None:
    """Raises InvalidRequest, with the possible questions, for a question that no measure can answer."""
    for parameter, value in questions.by_parameter.items():
        if not any(_question_name(parameter, stack) for stack in stacks.values()):
            able = "; ".join(f"{name}: {', '.join(answerable_questions(s))}" for name, s in stacks.items())
            raise InvalidRequest(parameter, value, f"what the measures can answer: {able}", "no measure can answer it")


@dataclass(frozen=True, slots=True)
class MeasureEvaluator:
    """Evaluates questions on one measure's stack.

    Attributes:
        widen: widens the answer to a question by what the whole answer lacks.
        confidence: of the interval of a function of a sample.
        own: the error of the evaluated values, before they are widened; `parts` sets it.
    """

    measure: Measure
    stack: Stack
    questions: MeasureQuestions
    widen: MeasureWidening
    confidence: float = DEFAULT_CONFIDENCE
    own: OwnError = field(default_factory=OwnError)

    def parts(self) -> list[CellPart]:
        """The measure's cell. Raises InvalidRequest."""
        selected = [
            (p, name) for p in self.questions.by_parameter if (name := _question_name(p, self.stack)) is not None
        ]
        return [self._part(parameter, name) for parameter, name in selected] if selected else self._default_parts()

    def _evaluate(self, kind: Question | None) -> Estimates:
        estimates = evaluate_question(self.stack, kind, self.questions.confidence, measure=self.measure.name)
        return self._widened(estimates, kind)

    def _widened(self, estimates: Estimates, kind: Question | None, groups: IntArray | None = None) -> Estimates:
        self.own.note(estimates)
        return self.widen(self.stack, estimates, kind, groups)

    def _evaluate_named(self, name: str, **given: Any) -> tuple[Question, Estimates]:
        kind = parse_question(name, given, self.stack, self.questions.confidence, measure=self.measure.name)
        return kind, self._evaluate(kind)

    def _part(self, parameter: str, name: str) -> CellPart:
        questions = self.questions
        match parameter:
            case "quantile":
                return self._quantiles(questions.quantiles or ())
            case "rank":
                return KeyedPart(
                    "ranks", ".rank:", {_key(x): self._evaluate_named(name, x=x)[1] for x in questions.ranks}
                )
            case "range":
                whole = Range in self.stack.questions
                each = {
                    f"{_key(lo)}:{_key(hi)}": self._evaluate_named(name, lo=lo, hi=hi)[1] for lo, hi in questions.ranges
                }
                return KeyedPart("ranges", ".range:", each, whole)
            case "top":
                return self._top(questions.top)
            case "values":
                return self._values()
        texts = questions.items if parameter == "item" else questions.contains
        answers = [self._item(parameter, name, text) for text in texts]
        return ItemsPart("items" if name == "frequency" else "contains", answers)

    def _item(self, parameter: str, name: str, text: str) -> tuple[Any, Estimates]:
        try:
            kind, estimates = self._evaluate_named(name, item=text)
        except InvalidRequest as exc:
            if exc.field != "item":
                raise
            reason = f"the question is evaluated on {self.measure.name}: measure=… selects other measures"
            raise InvalidRequest(parameter, text, exc.accepted, reason) from exc
        return getattr(kind, "item", text), estimates

    def _default_parts(self) -> list[CellPart]:
        stack = self.stack
        if isinstance(stack, RowSampleStack) and self.measure.function.sample is not None:
            part = FunctionPart.of(self.measure, stack, self.confidence, lambda e: self.widen(stack, e, None))
            for estimates in part.own_estimates:
                self.own.note(estimates)
            return [part]
        if isinstance(stack, SampleStack):
            return self._sample(stack)
        if _ranks_items(type(stack)):
            return [self._top(None)]
        if isinstance(stack, EquiWidthStack):
            return self._buckets(stack)
        if isinstance(stack, EquiDepthStack):
            count = IntervalPart("count", self._evaluate(Count()), True)
            return [count, self._boundaries(stack), *_nans(stack)]
        if (asked := self.measure.question) is not None:
            return [IntervalPart("", self._evaluate(asked)), *_nans(stack)]
        if Quantile in stack.questions:
            return [self._quantiles(DEFAULT_QUANTILES), *_nans(stack)]
        if isinstance(stack, CountMinStack):
            return [IntervalPart("", self._evaluate(Count()), True)]
        parts: list[CellPart] = [
            IntervalPart("", self._evaluate(default_question(stack, self.questions.confidence)), stack.kind in WHOLE)
        ]
        if isinstance(stack, CuckooStack) and Count in stack.questions:
            parts.append(IntervalPart("count", self._evaluate(Count()), True))
        if FalsePositiveRate in stack.questions:
            parts.append(NumberPart("false_positive_rate", stack.query(FalsePositiveRate()).value))
        if isinstance(stack, BloomStack):
            parts.append(NumberPart("fill", stack.fill()))
        return parts

    def _quantiles(self, ranks: tuple[float, ...]) -> KeyedPart:
        return KeyedPart("quantiles", "_", {_key(q): self._evaluate_named("quantile", q=q)[1] for q in ranks})

    def _top(self, k: int | None) -> ListPart:
        assert isinstance(self.stack, ItemRanking)
        try:
            asked = top_items_question(self.stack, k, self.measure.name)
            ranked = self.stack.top(asked)
        except InvalidRequest as exc:
            raise InvalidRequest("top", k, exc.accepted, exc.reason) from exc
        require_confidence(ranked.frequencies, self.questions.confidence, self.measure.name)
        frequencies = self._widened(ranked.frequencies, asked or TopItems(1), ranked.groups)
        return ListPart("top", ranked.groups, {"item": ranked.items}, frequencies, True)

    def _sample(self, stack: SampleStack) -> list[CellPart]:
        parts: list[CellPart] = []
        groups, _ = stack.sampled()
        sizes = _per_row(groups, len(stack))
        for name in ("mean", "sum", "count"):
            if question_kind(name, stack) is not None:
                kind = parse_question(name, {}, stack, self.questions.confidence, measure=self.measure.name)
                estimates = evaluate_question(stack, kind, self.questions.confidence, measure=self.measure.name)
                estimates = replace(estimates, present=sizes > 0)  # a NaN is then a sampled value
                if not parts:  # values of the other parts have other units
                    self.own.note(estimates)
                parts.append(IntervalPart(name, self.widen(stack, estimates, kind)))
        return [*parts, NumberPart("size", sizes, True)]

    def _values(self) -> ListPart:
        assert isinstance(self.stack, SampleStack)
        groups, values = self.stack.sampled()
        return ListPart("values", groups, {"value": values}, None)

    def _buckets(self, stack: EquiWidthStack) -> list[CellPart]:
        rows, bins = len(stack), stack.columns
        counts = stack.counts
        groups = np.repeat(np.arange(rows), bins)
        ends = {"from": np.tile(stack.edges[:-1], rows), "to": np.tile(stack.edges[1:], rows)}
        inside = Estimates.exact(counts[:, 1:-2].reshape(-1))
        keys = {name: pa.array(values) for name, values in ends.items()}
        inside = self.widen(stack, inside, Range(-math.inf, math.inf), groups)
        outside = [
            NumberPart(name, counts[:, at].astype(np.float64), True)
            for name, at in (("below", 0), ("above", -2), ("nan", -1))
        ]
        count = IntervalPart("count", self._evaluate(Count()), True)
        return [count, ListPart("buckets", groups, keys, inside, True), *outside]

    def _boundaries(self, stack: EquiDepthStack) -> ListPart:
        """The boundaries per row, from the least value to the greatest."""
        each = [self._evaluate(Quantile(i / stack.buckets)) for i in range(stack.buckets + 1)]
        value, lower, upper = (
            np.stack([getattr(e, name) for e in each], axis=1).reshape(-1) for name in ("value", "lower", "upper")
        )
        groups = np.repeat(np.arange(len(stack)), len(each))
        return ListPart("boundaries", groups, {}, Estimates(value, lower, upper, each[0].confidence, each[0].basis))


@cache
def _ranks_items(kind: type[Stack]) -> bool:
    """Returns whether stacks of a kind are an `ItemRanking`.

    The result is cached, because the test takes as long as evaluating a small stack.
    """
    return issubclass(kind, ItemRanking)


def _nans(stack: Stack) -> list[CellPart]:
    """Returns the number of NaN, which have no rank; no part if no group has any."""
    nans = getattr(stack, "nans", None)
    if nans is None or not nans.any():
        return []
    return [NumberPart("nan", nans.astype(np.float64), True)]


def _key(x: float) -> str:
    """A number as a unique key of its answer."""
    return str(int(x)) if x.is_integer() and abs(x) < 1e16 else repr(x)


def _per_row(groups: IntArray, rows: int) -> FloatArray:
    return np.bincount(groups, minlength=rows).astype(np.float64)
