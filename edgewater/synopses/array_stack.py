"""The base class of built-in stacks, and array helpers that several kinds of stack use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.base.streams import type_name
from edgewater.synopses.base import NUMBER_TYPES, BoolArray, Estimates, IntArray, Properties, Question, Questions
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.codec import ArrayRoles
from edgewater.synopses.encoding.layout import Layout, field, layout_for
from edgewater.synopses.registry import Function, Parameters, register_function, register_kind
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

T = TypeVar("T", bound=np.generic)


class ArrayStack:
    """A stack whose state is a few arrays of shape (groups,), each with a value for "empty".

    Subclasses define `arrays` (name -> dtype, empty value) and implement `update`, `merge` and `query`. Attributes that
    are arguments of the constructor are named in `required`, `options` or `carried`.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    properties: ClassVar[Properties]
    questions: ClassVar[Questions]
    arrays: ClassVar[dict[str, tuple[str, float]]]
    required: ClassVar[tuple[str, ...]] = ()
    """Attributes that are parameters: equal in stacks that merge, and in every message."""
    options: ClassVar[tuple[str, ...]] = ()
    """Attributes that are parameters unless they are None."""
    carried: ClassVar[tuple[str, ...]] = ()
    """Further attributes that a copy takes over: of ``level``, ``source``, ``seed`` and ``item_type``."""
    types: ClassVar[tuple[str, ...]] = NUMBER_TYPES
    """The names of the types of values that it accepts."""
    layouts: ClassVar[tuple[Layout, ...]] = ()
    """The layouts of the kind's messages, each with another number of arrays; empty: the kind declares no layout."""
    stacking: ClassVar[ArrayRoles | None] = None
    """The roles of the message's arrays when partials are read as one stack (`encoding.stacking`). `merge` then accepts
    repeated codes, and gives the same bytes as merging one partial after the other. None: partials merge one by one."""

    def __init__(self, groups: int = 0) -> None:
        self._length = groups
        self._state: dict[str, npt.NDArray[Any]] = {
            name: np.full(max(groups, 1), empty, dtype) for name, (dtype, empty) in self.arrays.items()
        }

    def __len__(self) -> int:
        return self._length

    def _view(self, name: str) -> npt.NDArray[Any]:
        return self._state[name][: self._length]

    @property
    def parameters(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in (*self.required, *self.options)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _header_parameters(self) -> dict[str, Any]:
        """The parameters in the header of a message."""
        return self.parameters

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._state.values())

    def grow(self, groups: int) -> None:
        if groups <= self._length:
            return
        for name, (_, empty) in self.arrays.items():
            old = self._state[name]
            if groups > len(old):
                # Doubling keeps growth amortised O(1) per group.
                wider = np.full(max(groups, 2 * len(old)), empty, old.dtype)
                wider[: self._length] = old[: self._length]
                self._state[name] = wider
        self._length = groups

    def take(self, groups: IntArray) -> Self:
        result = self._empty()
        result._length = len(groups)
        result._state = {name: self._view(name)[groups] for name in self.arrays}
        return result

    def _copy_single(self) -> Self:
        """Copies a stack of one group: `take` without its checks. The copy shares all state outside `arrays`; the
        caller copies what is mutable."""
        result = object.__new__(type(self))  # `copy.copy` takes five times as long
        result.__dict__.update(self.__dict__)
        result._state = {name: held.copy() for name, held in self._state.items()}
        return result

    def _empty(self) -> Self:
        """Returns an empty stack with equal parameters, of no groups."""
        return type(self)(**self.parameters, **{name: getattr(self, name) for name in self.carried})

    def reset(self, groups: IntArray) -> None:
        for name, (_, empty) in self.arrays.items():
            self._state[name][groups] = empty

    def query(self, question: Question | None = None) -> Estimates:
        raise NotImplementedError

    def check(self, question: Question | None) -> None:
        """Raises InvalidRequest for a question that is not one of `questions`."""
        if question is not None and not isinstance(question, self.questions):
            able = ", ".join(q.__name__ for q in self.questions)
            raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    def _require_equal_parameters(self, other: ArrayStack) -> None:
        """Raises IncompatibleSynopses unless parameters are equal, and levels and seeds, if the kind has them."""
        codec.require_equal(self.kind, self.parameters, other.parameters)
        codec.require_equal(f"{self.kind} of level", getattr(self, "level", None), getattr(other, "level", None))
        if getattr(self, "seed", None) != getattr(other, "seed", None):
            # The message does not contain the seeds: they are secrets of the queries.
            raise IncompatibleSynopses(
                f"{self.kind}: the seeds differ. To join or merge synopses of two queries, give both the same `seed`"
            )

    def to_message(self) -> SynopsisMessage:
        message = self._header()
        message.arrays.extend(codec.encode(self._view(name)) for name in self.arrays)
        return message

    def _header(self) -> SynopsisMessage:
        """Returns a message without arrays."""
        seed = getattr(self, "seed", 0) if "seed" in self.carried else 0
        return codec.header(self.kind, self.version, self._header_parameters, seed=seed)

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters, arrays = cls._open(message)
        try:
            return cls._decoded(cls._arguments(message, parameters), arrays)
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc

    @classmethod
    def _arguments(cls, message: SynopsisMessage, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the constructor that the header of a message has. Raises KeyError."""
        given = {name: parameters[name] for name in cls.required}
        given |= {name: parameters[name] for name in cls.options if name in parameters}
        return given | ({"seed": message.seed} if "seed" in cls.carried else {})

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        """Returns the stack of a message's arrays, which fit the layout.

        Args:
            given: arguments of the constructor.

        Raises:
            KeyError, IndexError, TypeError, ValueError, InvalidRequest: the arrays are no state of this kind.
        """
        result = cls(**given)
        result._load(arrays)
        return result

    @classmethod
    def _open(cls, message: SynopsisMessage) -> tuple[dict[str, Any], list[Any]]:
        """Returns a message's parameters and its arrays, which have the types, shapes and ranges of its layout.

        Raises:
            CorruptSynopsis, UnsupportedVersion: not a message of this kind.
        """
        parameters = codec.open_message(message, cls.kind, cls.version, len(message.arrays))
        layouts = cls.layouts or (Layout.of(*(field(name, dtype) for name, (dtype, _) in cls.arrays.items())),)
        return parameters, layout_for(cls.kind, layouts, message.arrays).decode(cls.kind, message.arrays)

    def _load(self, decoded: Sequence[npt.NDArray[Any]]) -> None:
        """Sets `arrays` from the first arrays of a message."""
        self._state.update(zip(self.arrays, decoded, strict=False))
        self._length = len(decoded[0])


def register_stack(stack: type[Any], name: str = "", *aliases: str, **declared: Any) -> None:
    """Registers a kind of stack and its query function.

    Args:
        stack: a class over `ArrayStack`.
        name: the name of the function; by default the kind's.
        declared: attributes of the `Function`. Its parameters are arguments of the stack's constructor.
    """

    def make(parameters: Parameters, data_type: pa.DataType | None, seed: int | None = None) -> Any:
        given = dict(parameters)
        if "item_type" in stack.carried:
            given["item_type"] = None if data_type is None else type_name(data_type)
        return stack(**given) if seed is None else stack(**given, seed=seed)

    register_kind(stack)
    declared = {"make": make, "types": stack.types, "seeded": "seed" in stack.carried, **declared}
    register_function(Function(name or stack.kind, **declared), *aliases)


def with_capacity(rows: npt.NDArray[T], groups: int) -> npt.NDArray[T]:
    """Returns `rows` if it has at least `groups` rows.

    Otherwise returns a copy with zero rows added, by half or more.
    """
    if groups <= len(rows):
        return rows
    wider = np.zeros((max(groups, len(rows) * 3 // 2), *rows.shape[1:]), rows.dtype)
    wider[: len(rows)] = rows
    return wider


def rounds(codes: IntArray) -> list[IntArray]:
    """Returns positions in `codes` by occurrence: the first occurrence of each code, then the second, and so on."""
    counts = np.bincount(codes)
    if counts.max(initial=0) <= 1:
        return [np.arange(len(codes))]
    order = np.argsort(codes, kind="stable")
    occurrence = np.empty(len(codes), np.int64)
    occurrence[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_occurrence = np.argsort(occurrence, kind="stable")
    return np.split(by_occurrence, np.cumsum(np.bincount(occurrence))[:-1])


def keep_better(better: np.ufunc, held: npt.NDArray[Any], codes: IntArray, values: npt.NDArray[Any]) -> None:
    """Replaces, in place, ``held[codes[i]]`` by ``values[i]`` if that is smaller (or larger), one i after the other."""
    if has_negative_zero(held) or has_negative_zero(values):
        for at in rounds(codes):
            held[codes[at]] = better(held[codes[at]], values[at])
    else:
        better.at(held, codes, values)


def has_negative_zero(values: npt.NDArray[Any]) -> bool:
    """Returns whether any float64 is -0.0. Operations differ in which of both zeros they count as smaller."""
    return values.dtype.kind == "f" and bool((np.signbit(values) & (values == 0.0)).any())


def group_mask(groups: IntArray, length: int) -> BoolArray:
    """Returns a mask of shape (length,) that is true at `groups`."""
    mask = np.zeros(length, bool)
    mask[groups] = True
    return mask


def halvings(number: int) -> int:
    """Returns how often a positive whole number is divisible by 2."""
    return (number & -number).bit_length() - 1
