"""`Subject`: a stack under test, and when two stacks count as equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses.base import IntArray, Question, Stack
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import hash_values
from edgewater.synopses.registry import is_kind, stack_from_message
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.synopses.testing.zoo import ABOUT_ITEMS, ABOUT_TWO, ITEMS, QUESTIONS, SEED, zoo
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

GROUPS = 5  # limit: the time of a test


@dataclass(frozen=True)
class Subject:
    """A stack under test.

    Attributes:
        name: name in the report.
        make: builds a new empty stack, always with equal parameters.
        of: type of its values: "string", "int64", "float64" or "bool".
        equal: how two stacks of the same values compare. "bytes": equal bytes. "rounding": answers differ by the
            rounding of float64 sums. "bounds": order and merges change answers within their bounds, so the intervals of
            one question must overlap; such a stack is not commutative.
        values: name -> data set, for a stack that does not accept all values of the type; None: the `zoo`.
        questions: question class -> instances, for classes that are not built in.
        damages: how many damaged messages are read.
    """

    name: str
    make: Callable[[], Stack]
    of: str
    equal: Literal["bytes", "rounding", "bounds"] = "bytes"
    values: Mapping[str, Any] | None = None
    questions: Mapping[type[Question], tuple[Question, ...]] = field(default_factory=dict)
    damages: int = 200

    def zoo(self) -> dict[str, Any]:
        """Returns data sets by name; the first has one value, the last is larger."""
        return dict(self.values) if self.values is not None else zoo(self.of)

    def few(self) -> Any:
        return next(iter(self.zoo().values()))

    def many(self) -> Any:
        return list(self.zoo().values())[-1]

    def empty(self, groups: int = GROUPS) -> Stack:
        stack = self.make()
        stack.grow(groups)
        return stack

    def whole(self, values: Any) -> Stack:
        """Returns a stack of all values, added in one batch, in `GROUPS` groups."""
        return filled(self, codes_for(values, GROUPS), values, GROUPS)

    def parts(self, values: Any, parts: int) -> list[Stack]:
        """Returns several stacks that have all values together."""
        codes = codes_for(values, GROUPS)
        cut = np.random.default_rng(SEED + 1).integers(0, parts, len(values))
        return [
            filled(self, codes[cut == k], pick(values, np.flatnonzero(cut == k)), GROUPS)
            if (cut == k).any()
            else self.empty()
            for k in range(parts)
        ]

    def answers(self, stack: Stack) -> dict[str, npt.NDArray[Any]]:
        """Returns, per question of `questions`, the value, lower and upper bounds: shape (3, groups)."""
        result = {}
        for kind in stack.questions:
            for question in self._questions_of(kind, stack):
                answer = stack.query(question)
                name = kind.__name__ if kind in ABOUT_TWO else repr(question)
                result[name] = np.stack([answer.value, answer.lower, answer.upper])
        return result

    def _questions_of(self, kind: type[Question], stack: Any) -> tuple[Question, ...]:
        if kind in self.questions:
            return self.questions[kind]
        if kind in ABOUT_ITEMS:
            return tuple(ABOUT_ITEMS[kind](item) for item in ITEMS[self.of])
        if kind in ABOUT_TWO:
            return (ABOUT_TWO[kind](stack),)
        assert kind in QUESTIONS, f"add instances of {kind.__name__} to Subject(questions=...)"
        return QUESTIONS[kind]

    def read(self, data: bytes) -> Stack:
        """Reads a stack through the registry, or by its own class if it is not registered."""
        return self.from_message(codec.unseal(data))

    def from_message(self, message: SynopsisMessage) -> Stack:
        own = type(self.make())
        return own.from_message(message) if not is_kind(own.kind) else stack_from_message(message)

    def assert_same(self, left: Stack, right: Stack, values: Any = ()) -> None:
        """Raises AssertionError unless the stacks are equal in the sense of `equal`; `values`: all values of both."""
        assert len(left) == len(right), f"{len(left)} groups and {len(right)}"
        if self.equal == "bytes":
            assert to_bytes(left) == to_bytes(right), (
                f"bytes differ; answers {self.answers(left)}, {self.answers(right)}"
            )
            return
        mine, theirs = self.answers(left), self.answers(right)
        assert mine.keys() == theirs.keys()
        scale = _scale_of(values)
        for name, answer in mine.items():
            if self.equal == "bounds":
                apart = np.maximum(answer[1], theirs[name][1]) > np.minimum(answer[2], theirs[name][2])
                assert not apart.any(), f"{name}: intervals {answer[1:]} and {theirs[name][1:]} do not overlap"
                continue
            # Cancellation in squared deviations is relative to squares of the values, otherwise to the values.
            slack = 1e-12 * (scale * scale if name.startswith("Variance") else scale)
            np.testing.assert_allclose(answer, theirs[name], rtol=1e-9, atol=slack, err_msg=name)


def codes_for(values: Any, groups: int, seed: int = SEED) -> IntArray:
    return np.random.default_rng(seed).integers(0, groups, len(values))


def filled(subject: Subject, codes: IntArray, values: Any, groups: int) -> Stack:
    stack = subject.empty(groups)
    add(stack, codes, values)
    return stack


def add(stack: Stack, codes: IntArray, values: Any) -> None:
    """Updates a stack. Samples get record numbers, because without them they depend on the order of arrival."""
    if isinstance(stack, SampleStack):
        ids = (hash_values(values) >> np.uint64(1)).astype(np.int64)
        stack.update(codes, values, times=ids // 2**40, ids=ids)
    else:
        stack.update(codes, values)


def pick(values: Any, at: IntArray) -> Any:
    return values.take(pa.array(at)) if isinstance(values, pa.Array) else values[at]


def merged(subject: Subject, parts: list[Stack]) -> Stack:
    """Merges all stacks into an empty stack, one after the other."""
    stack = subject.empty()
    for part in parts:
        stack.merge(part, np.arange(len(part)))
    return stack


def to_bytes(stack: Stack) -> bytes:
    return codec.seal(stack.to_message())


@contextmanager
def refused(error: type[Exception], *named: str) -> Iterator[None]:
    """Raises AssertionError unless the block raises this error, with these words in its message."""
    try:
        yield
    except error as exc:
        for word in named:
            assert word in str(exc), f"{error.__name__} does not name {word!r}: {exc}"
        return
    raise AssertionError(f"no {error.__name__}")


def _scale_of(values: Any) -> float:
    """Returns the sum of the absolute values."""
    if isinstance(values, pa.Array) or not len(values):
        return 0.0
    with np.errstate(over="ignore"):
        finite = np.abs(values[np.isfinite(values)].astype(np.float64))
        return float(min(finite.sum(), 1e150))
