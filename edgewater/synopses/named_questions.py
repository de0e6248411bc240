"""The questions that users can ask of a measure, by name, and their evaluation. Pure.

A question is evaluated on a stack, so its answer covers all groups at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.base.float_bounds import SIDES
from edgewater.base.number_columns import outwards
from edgewater.synopses.base import (
    Count,
    Distinct,
    Estimates,
    IntArray,
    Maximum,
    Mean,
    Minimum,
    Quantile,
    Question,
    Rank,
    Stack,
    Sum,
    Variance,
)
from edgewater.synopses.items import coerce_item
from edgewater.synopses.quantiles.kll import KllStack
from edgewater.synopses.questions import (
    Contains,
    FalsePositiveRate,
    Frequency,
    IntersectionSize,
    ItemRanking,
    JoinSize,
    Proportion,
    Range,
    SelfJoinSize,
    SubsetCount,
    TopItems,
    UnionSize,
)
from edgewater.synopses.sampling.sample_stack import SampleStack

OF_VALUES = (Sum, Mean, Minimum, Maximum, Quantile)
"""The questions whose answers are values, or as large as values."""
QUESTION_KINDS: dict[str, tuple[type[Question], ...]] = {
    "count": (Count,),
    "sum": (Sum,),
    "mean": (Mean,),
    "variance": (Variance,),
    "min": (Minimum,),
    "max": (Maximum,),
    "distinct": (Distinct,),
    "quantile": (Quantile,),
    "rank": (Rank,),
    "frequency": (Frequency,),
    "contains": (Contains,),
    "range": (Range, SubsetCount),
    "proportion": (Proportion,),
    "self_join_size": (SelfJoinSize,),
    "join_size": (JoinSize,),
    "union_size": (UnionSize,),
    "intersection_size": (IntersectionSize,),
    "false_positive_rate": (FalsePositiveRate,),
    "top": (TopItems,),
}
"""The question classes that a name stands for. The first class that the synopsis answers is used."""

BINARY_QUESTIONS = ("join_size", "union_size", "intersection_size")
"""Questions about two synopses; `other` is the second synopsis."""

INTEGER_QUESTIONS: tuple[type[Question], ...] = (Count, Frequency, Range, TopItems)
"""Questions whose answers are integers on stacks that count."""


def question_kind(name: str, stack: Stack) -> type[Question] | None:
    """Returns the question class that a name stands for on this stack; None: the stack cannot answer it."""
    if isinstance(stack, SampleStack) and stack.item_type == "string" and name != "count":
        return None  # strings have neither a mean nor an order
    for kind in QUESTION_KINDS.get(name, ()):
        if kind in stack.questions or (kind is TopItems and isinstance(stack, ItemRanking)):
            return kind
    return None


def answerable_questions(stack: Stack) -> list[str]:
    """Names of the questions that a stack answers."""
    return [name for name in QUESTION_KINDS if question_kind(name, stack) is not None]


def parse_question(
    name: str, given: Mapping[str, Any], stack: Stack, confidence: float | None = None, *, measure: str = ""
) -> Question:
    """Builds the question of that name for a stack.

    Args:
        given: the question's fields: ``q`` (quantile), ``x`` (rank), ``item`` (frequency, contains), ``lo`` and ``hi``
            (range, proportion), ``k`` (top), ``other``, a stack (questions about two). Other keys are ignored. An item
            has its JSON type or is a string that parses as the items' type.
        confidence: of the interval; None: the question's default.
        measure: name of the measure, for messages.

    Raises:
        InvalidRequest: an unknown name, a question that the stack cannot answer, or a wrong or missing field.
    """
    kind = question_kind(name, stack)
    if kind is None:
        reason = (
            f"{measure or 'the measure'} is a {stack.kind}, which cannot answer it" if name in QUESTION_KINDS else ""
        )
        raise InvalidRequest("question", name, f"one of {', '.join(answerable_questions(stack))}", reason)
    wanted: dict[str, Any] = {}
    for field in [name for name in kind.__dataclass_fields__ if name != "confidence"]:
        if field not in given:
            raise InvalidRequest(field, None, _ACCEPTED[field], f"the question {name} requires it")
        wanted[field] = _read_field(field, given[field], stack)
    if confidence is not None and "confidence" in kind.__dataclass_fields__:
        wanted["confidence"] = confidence
    return kind(**wanted)


_ACCEPTED = {
    "q": "a rank from 0 to 1, such as 0.99",
    "x": "a number",
    "lo": "a number",
    "hi": "a number",
    "item": "a value of the measure's argument",
    "k": "a whole number",
    "other": "the measure of another query",
}


def _read_field(field: str, value: Any, stack: Stack) -> Any:
    if field == "item":
        return typed_item(value, getattr(stack, "item_type", None), field)
    if field == "other":
        return value
    if field == "k":
        return _top_count(value, getattr(stack, "k", None))
    number = _float(value)
    if number is None or math.isnan(number) or (field == "q" and not 0 <= number <= 1):
        raise InvalidRequest(field, value, _ACCEPTED[field])
    return number


def _top_count(value: Any, maximum: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (maximum is not None and value > maximum):
        accepted = f"a whole number from 1 to {maximum}" if maximum is not None else "a whole number from 1"
        raise InvalidRequest("k", value, accepted, f"the measure keeps {maximum} items" if maximum is not None else "")
    return value


def _float(value: Any) -> float | None:
    """The number as a float; None: not a number, or an integer too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def typed_item(value: Any, item_type: str | None, field: str = "item") -> Any:
    """Converts a value, or its string form, to the items' type. Raises InvalidRequest.

    Args:
        item_type: None: unknown, since there are no items; the value is returned unchanged.
    """
    if item_type is None:
        return value
    read = value
    if isinstance(value, str) and item_type != "string":
        try:
            read = _FROM_TEXT[item_type](value)
        except (ValueError, KeyError):
            raise InvalidRequest(field, value, f"an item of type {item_type}, as the values are") from None
    return coerce_item(read, item_type)


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int64": int,
    "float64": float,
    "bool": {"true": True, "false": False}.__getitem__,
}


def top_items_question(stack: Stack, k: int | None, measure: str = "") -> TopItems | None:
    """The question for the k most frequent items; None: the measure's own k. Raises InvalidRequest."""
    if k is None:
        return None
    asked = parse_question("top", {"k": k}, stack, measure=measure)
    assert isinstance(asked, TopItems)
    return asked


def default_question(stack: Stack, confidence: float | None) -> Question | None:
    """Returns the question that a stack answers by default; None: the stack's `query` chooses it."""
    for kind in (Distinct, SelfJoinSize):
        if kind in stack.questions:
            return kind() if confidence is None else kind(confidence)
    if isinstance(stack, SampleStack) and stack.item_type == "string":
        if Count not in stack.questions:
            reason = f"a {stack.kind} of strings has no estimate"
            raise InvalidRequest("question", None, "values=true of an answer", reason)
        return Count()
    if Mean in stack.questions and isinstance(stack, SampleStack):
        return Mean() if confidence is None else Mean(confidence)
    if Quantile in stack.questions and isinstance(stack, KllStack):
        return Quantile(0.5) if confidence is None else Quantile(0.5, confidence)
    return None


def read_confidence(given: Any) -> float | None:
    """Validates a confidence. None means that the caller did not state one. Raises InvalidRequest."""
    if given is None:
        return None
    number = isinstance(given, int | float) and not isinstance(given, bool)
    # 0.5 + confidence / 2 must differ from 1 as a float, or the interval is unbounded.
    if not number or not 0 < given < 1 or 0.5 + given / 2 == 1:
        raise InvalidRequest("confidence", given, "a number between 0 and 1, such as 0.95")
    return float(given)


def evaluate_question(
    stack: Stack, asked: Question | None, confidence: float | None = None, *, measure: str = ""
) -> Estimates:
    """Returns the stack's answer per group, at `confidence` or higher (`ItemRanking.top` answers `TopItems`).

    Synopses count integers beyond 2^53 as the nearest float64, so bounds of values are moved outwards there.

    Raises:
        InvalidRequest: the stack's intervals have a lower confidence; the message names it.
    """
    estimates = stack.query(asked)
    require_confidence(estimates, confidence, measure)
    is_exact = estimates.integers is not None or estimates.present is not None
    if is_exact or not isinstance(asked, OF_VALUES):
        return estimates
    lower, upper = map(outwards, (estimates.lower, estimates.upper), SIDES)
    return replace(estimates, lower=lower, upper=upper)


def require_confidence(estimates: Estimates, confidence: float | None, measure: str) -> None:
    """Raises InvalidRequest unless the intervals hold at `confidence`; None accepts any."""
    if confidence is not None and len(estimates) and estimates.confidence < confidence - 1e-12:
        held = f"{estimates.confidence:.6g}"
        raise InvalidRequest("confidence", confidence, f"at most {held}, or none", f"{measure} is given at {held}")


def merge_groups(stack: Stack) -> Stack:
    """Merges all groups of a stack into one, in log₂(groups) merges of stacks. Returns a copy."""
    groups = len(stack)
    result = stack.take(np.arange(groups))
    if not groups:
        result.grow(1)
    while groups > 1:
        half = (groups + 1) // 2
        behind: IntArray = np.arange(half, groups)
        kept = result.take(np.arange(half))
        kept.merge(result.take(behind), behind - half)
        result, groups = kept, half
    return result
