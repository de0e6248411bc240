"""`MeasureEvaluator`: a measure's cell in an answer, as parts. Pure.

Without questions, each kind of synopsis shows what it says itself (`edgewater.synopses.shapes`): a top-k its list, a
histogram its buckets, a sample its estimates. With questions, the cell has the answers that the synopsis can give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, assert_never

import numpy as np

from center.serving.function_values import DEFAULT_CONFIDENCE, FunctionValues
from center.serving.row_selection import ALL_ROWS, RowSelection
from edgewater.answers.cells import FunctionErrors, IntervalPart, ItemsPart, KeyedPart, ListPart, NumberPart, Part
from edgewater.answers.own_error import OwnError
from edgewater.base.errors import InvalidRequest
from edgewater.model.computed import ComputedValue
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, IntArray, ItemRanking, Question, Range, Stack, ValueSample, shapes
from edgewater.synopses.named_questions import (
    answerable_questions,
    evaluate_question,
    parse_question,
    question_kind,
    require_confidence,
    top_items_question,
)


@dataclass(frozen=True, slots=True)
class MeasureQuestions:
    """The questions that a reader asks of an answer; None and (): not asked. `QuestionParams` checks their values.

    Attributes:
        quantiles: ranks in [0, 1].
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

    @property
    def by_parameter(self) -> Mapping[str, object]:
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


def includes(questions: MeasureQuestions, measure: Measure | ComputedValue) -> bool:
    """Returns whether an answer to the questions shows a measure, or a derived one."""
    if isinstance(measure, Measure) and measure.part_of:
        return False
    return not questions.measures or measure.name in questions.measures


def computed_values(questions: MeasureQuestions, spec: QuerySpec) -> list[ComputedValue]:
    """Returns what is computed from measures: the derived measures that the questions may read, then their own."""
    reads_any = bool(questions.computed) or questions.selection.is_needed
    return [*(v for v in spec.derived if reads_any or includes(questions, v)), *questions.computed]


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
        return "values" if shapes.is_a(type(stack), ValueSample) else None
    return next((name for name in _QUESTION_NAMES[parameter] if question_kind(name, stack) is not None), None)


def require_possible(questions: MeasureQuestions, stacks: Mapping[str, Stack]) -> None:
    """Raises InvalidRequest, with the possible questions, for a question that no measure can answer.

    Args:
        stacks: of the measures that answers show.
    """
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

    def parts(self) -> tuple[Sequence[Part], FunctionErrors | None]:
        """Returns the measure's cell, and the errors of a function of a sample. Raises InvalidRequest."""
        asked = [(p, name) for p in self.questions.by_parameter if (name := _question_name(p, self.stack)) is not None]
        if asked:
            return [self._part(self._asked(parameter, name)) for parameter, name in asked], None
        if self.measure.function.sample is None:
            return [self._part(shape) for shape in shapes.shown(self.stack, self.measure.question)], None
        values = FunctionValues.of(self.measure, self.stack, self.confidence, lambda e: self.widen(self.stack, e, None))
        for estimates in values.own_estimates:
            self.own.note(estimates)
        return values.parts(), values.errors

    def _asked(self, parameter: str, name: str) -> shapes.Shape:
        """Returns the answer to a question of the reader as a shape."""
        questions = self.questions
        match parameter:
            case "quantile":
                return replace(shapes.quantiles(()), questions=self._keyed(name, "q", questions.quantiles or ()))
            case "rank":
                return shapes.ShownKeyed("ranks", self._keyed(name, "x", questions.ranks), label="le", prefix=".rank:")
            case "range":
                each = {
                    f"{shapes.number_key(lo)}:{shapes.number_key(hi)}": self._question(name, lo=lo, hi=hi)
                    for lo, hi in questions.ranges
                }
                return shapes.ShownKeyed("ranges", each, Range in self.stack.questions, ".range:", "range")
            case "top":
                return self._top(questions.top)
            case "values":
                assert isinstance(self.stack, ValueSample)
                groups, values = self.stack.sampled()
                return shapes.ShownList("values", groups, {"value": values})
        texts = questions.items if parameter == "item" else questions.contains
        items = [self._item(parameter, name, text) for text in texts]
        return shapes.ShownItems("items" if name == "frequency" else "contains", items)

    def _question(self, name: str, **given: Any) -> Question:
        return parse_question(name, given, self.stack, self.questions.confidence, measure=self.measure.name)

    def _keyed(self, name: str, field: str, numbers: Sequence[float]) -> dict[str, Question]:
        return {shapes.number_key(x): self._question(name, **{field: x}) for x in numbers}

    def _item(self, parameter: str, name: str, text: str) -> tuple[Any, Question]:
        try:
            question = self._question(name, item=text)
        except InvalidRequest as exc:
            if exc.field != "item":
                raise
            reason = f"the question is evaluated on {self.measure.name}: measure=… selects other measures"
            raise InvalidRequest(parameter, text, exc.accepted, reason) from exc
        return getattr(question, "item", text), question

    def _top(self, k: int | None) -> shapes.ShownList:
        assert isinstance(self.stack, ItemRanking)
        try:
            asked = top_items_question(self.stack, k, self.measure.name)
            return shapes.ranking(self.stack.top(asked), asked)
        except InvalidRequest as exc:
            raise InvalidRequest("top", k, exc.accepted, exc.reason) from exc

    def _part(self, shape: shapes.Shape) -> Part:
        """Evaluates and widens what a kind shows."""
        match shape:
            case shapes.ShownInterval(name, question, whole, present, is_own):
                estimates, question = self._answer(question)
                if present is not None:
                    estimates = replace(estimates, present=present)
                return IntervalPart(name, self._widened(estimates, question, is_own=is_own), whole)
            case shapes.ShownNumber(name, values, whole, is_rare):
                return NumberPart(name, values, whole, is_rare and not values.any())
            case shapes.ShownKeyed(name, questions, whole, prefix, label):
                answers = {key: self._evaluated(question) for key, question in questions.items()}
                return KeyedPart(name, prefix or f".{name}:", answers, whole, label)
            case shapes.ShownItems(name, items, whole):
                return ItemsPart(name, f".{name}:", [(item, self._evaluated(q)) for item, q in items], whole)
            case shapes.ShownList(name, groups, keys, listed, question, whole):
                if listed is not None:
                    require_confidence(listed, self.questions.confidence, self.measure.name)
                    listed = self._widened(listed, question, groups)
                return ListPart(name, groups, keys, listed, whole)
            case shapes.ShownAnswers(name, questions, whole):
                each = [self._evaluated(question) for question in questions]
                rows = np.repeat(np.arange(len(self.stack)), len(each))
                value, lower, upper = (
                    np.stack([getattr(e, n) for e in each], axis=1).ravel() for n in ("value", "lower", "upper")
                )
                listed = Estimates(value, lower, upper, each[0].confidence, each[0].basis)
                return ListPart(name, rows, {}, listed, whole)
            case _:
                assert_never(shape)

    def _answer(self, question: Question | None) -> tuple[Estimates, Question | None]:
        """Returns the answer to a question, at the reader's confidence, and the question."""
        confidence = self.questions.confidence
        if confidence is not None and question is not None and hasattr(question, "confidence"):
            stated: Any = {"confidence": confidence}
            question = replace(question, **stated)
        return evaluate_question(self.stack, question, confidence, measure=self.measure.name), question

    def _evaluated(self, question: Question | None) -> Estimates:
        return self._widened(*self._answer(question))

    def _widened(
        self, estimates: Estimates, question: Question | None, groups: IntArray | None = None, *, is_own: bool = True
    ) -> Estimates:
        if is_own:
            self.own.note(estimates)
        return self.widen(self.stack, estimates, question, groups)
