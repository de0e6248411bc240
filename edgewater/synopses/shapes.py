"""What a kind of synopsis shows in an answer: members of a cell, in terms of questions and arrays.

The center evaluates the questions, widens their intervals, and writes the members in every format. So a kind states
only what it shows (`Showing`), and a kind without such a statement shows `default_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa

from edgewater.synopses.base import BoolArray, Distinct, Estimates, FloatArray, IntArray, Quantile, Question, Stack
from edgewater.synopses.questions import FalsePositiveRate, ItemRanking, RankedItems, SelfJoinSize, TopItems

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99)
"""The quantiles that a kind which answers `Quantile` shows."""
Label = Literal["item", "quantile", "le", "range"]
"""The label of Prometheus series that has the key of an answer."""


@dataclass(frozen=True, slots=True)
class ShownInterval:
    """One interval per group.

    Attributes:
        name: of the member of the cell; empty: the members of the interval are the cell's own.
        question: its answer is the interval; None: the kind's default question.
        whole: integral numbers are written as integers.
        present: which groups have a value; None: those whose value is not NaN.
        is_own: whether its error is an error of the measure. The error of a value in another unit is not.
    """

    name: str = ""
    question: Question | None = None
    whole: bool = False
    present: BoolArray | None = None
    is_own: bool = True


@dataclass(frozen=True, slots=True)
class ShownNumber:
    """One number per group without an interval, such as the size of a sample.

    Attributes:
        is_rare: JSON and the Prometheus face leave it out if it is 0 in each group. Tables always have it.
    """

    name: str
    values: FloatArray
    whole: bool = False
    is_rare: bool = False


@dataclass(frozen=True, slots=True)
class ShownKeyed:
    """The answers to several questions, by the key of each: quantiles, ranks, ranges.

    Attributes:
        prefix: columns of tables are named measure + prefix + key; empty: ``.name:``.
    """

    name: str
    questions: Mapping[str, Question]
    whole: bool = False
    prefix: str = ""
    label: Label = "item"


@dataclass(frozen=True, slots=True)
class ShownItems:
    """The answers to a question about several items: a list of ``{"item": …, "estimate": …, …}``."""

    name: str
    questions: Sequence[tuple[Any, Question]]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class ShownList:
    """A list per group, of any length: ranked items, buckets, sampled values.

    Attributes:
        groups: int64 group of each entry, ascending.
        keys: the members of an entry besides its interval.
        estimates: one per entry; None: an entry is the value of the only key.
        question: what the estimates answer, so that they are widened like answers to it.
    """

    name: str
    groups: IntArray
    keys: Mapping[str, pa.Array]
    estimates: Estimates | None = None
    question: Question | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class ShownAnswers:
    """A list per group with the answer to each question: the boundaries of buckets."""

    name: str
    questions: Sequence[Question]
    whole: bool = False


Shape: TypeAlias = ShownInterval | ShownNumber | ShownKeyed | ShownItems | ShownList | ShownAnswers


@runtime_checkable
class Showing(Protocol):
    """A stack that says what it shows."""

    def shown(self, asked: Question | None = None) -> Sequence[Shape]:
        """Returns the members of a cell, in order; their names differ.

        Args:
            asked: the question that the function of the query asks (`Function.question`); None: it asks none.
        """


def shown(stack: Stack, asked: Question | None = None) -> Sequence[Shape]:
    """Returns what a stack shows."""
    if not is_a(type(stack), Showing):
        return default_shapes(stack, asked)
    assert isinstance(stack, Showing)
    return stack.shown(asked)


@cache
def is_a(kind: type[Stack], protocol: type) -> bool:
    """Returns whether stacks of a kind have the methods of a protocol.

    The result is cached, because the test takes as long as evaluating a small stack.
    """
    return issubclass(kind, protocol)


def default_shapes(stack: Stack, asked: Question | None = None) -> tuple[Shape, ...]:
    """Returns what a kind shows that says nothing: its most frequent items, its quantiles, or its default question."""
    if asked is not None:
        return (ShownInterval(question=asked),)
    if isinstance(stack, ItemRanking):
        return (ranking(stack.top()),)
    if Quantile in stack.questions:
        return (quantiles(DEFAULT_QUANTILES),)
    question = next((kind() for kind in (Distinct, SelfJoinSize) if kind in stack.questions), None)
    if FalsePositiveRate in stack.questions:
        rate = ShownNumber("false_positive_rate", stack.query(FalsePositiveRate()).value)
        return (ShownInterval(question=question), rate)
    return (ShownInterval(question=question),)


def shows_integers(stack: Stack) -> bool:
    """Returns whether a stack shows its value as an integer."""
    first = shown(stack)[0]
    return isinstance(first, ShownInterval) and first.whole


def quantiles(ranks: Sequence[float]) -> ShownKeyed:
    """Returns the quantiles at these ranks as a member of a cell."""
    return ShownKeyed("quantiles", {number_key(q): Quantile(q) for q in ranks}, prefix="_", label="quantile")


def ranking(ranked: RankedItems, question: TopItems | None = None) -> ShownList:
    """Returns the most frequent items as a member of a cell."""
    asked = question or TopItems(1)
    return ShownList("top", ranked.groups, {"item": ranked.items}, ranked.frequencies, asked, True)


def nans(counts: IntArray) -> ShownNumber:
    """Returns the number of NaN per group as a member of a cell."""
    return ShownNumber("nan", counts.astype(np.float64), whole=True, is_rare=True)


def number_key(x: float) -> str:
    """Returns a number as the key of its answer."""
    return str(int(x)) if x.is_integer() and abs(x) < 1e16 else repr(x)
