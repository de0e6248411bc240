"""Synopses that users' packages bring, found through the entry-point group `edgewater.synopses`.

An entry point names one thing, or a tuple of things, of three sorts: a `Stack` class (its bytes become
readable), a `Function` (queries may name it), a `SingleSynopsis` class (what `from_bytes` returns for one).
They are data and do not register themselves on import, so an entry point is taken whole or not at all.

Plugins are looked for when a name or a kind comes up that the house does not have: an edge whose queries
need none never imports one. A plugin that fails is a warning and a `Problem`; the others go on.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from edgewater.streams import COLUMN_TYPES
from edgewater.synopses import registry
from edgewater.synopses.base import Estimates, Properties, Question, Stack
from edgewater.synopses.registry import Function
from edgewater.synopses.single import SingleSynopsis

GROUP = "edgewater.synopses"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_METHODS = ("__len__", "grow", "update", "merge", "take", "reset", "query", "to_message", "from_message")


class SynopsisPluginWarning(UserWarning):
    """An entry point of `edgewater.synopses` cannot be used. Queries that need it are refused."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from: ``distribution version`` and ``name = module:object``."""

    distribution: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} (entry point {self.entry_point})"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an entry point was not taken."""

    origin: Origin
    what: str

    def __str__(self) -> str:
        return f"synopses of {self.origin}: {self.what}"


class Plugins:
    """The entry points, loaded once, at the first call of `load`.

    Attributes:
        problems: of entry points that were not taken.
        origins: function or kind -> where it is from; those of the house are not in it.
        singles: kind -> what `from_bytes` returns for it.
    """

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        self._find = find or (lambda: entry_points(group=GROUP))
        self._lock = threading.RLock()
        self._loaded = False
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}
        self.singles: dict[str, type[SingleSynopsis[Any]]] = {}

    def load(self) -> None:
        """Registers what the entry points bring. A plugin that asks for names while it is imported sees the house's."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            # In a fixed order, so that of two plugins that want one name the same one has it everywhere.
            for point in sorted(self._find(), key=lambda p: (_distribution(p), p.name, p.value)):
                origin = Origin(_distribution(point), f"{point.name} = {point.value}")
                try:
                    self._take(point.load(), origin)
                except Exception as exc:  # whatever a stranger's code raises must not stop the others
                    reason = str(exc) if isinstance(exc, _Unfit) else f"{type(exc).__name__}: {exc}"
                    self.problems.append(Problem(origin, reason))
            # Last: where warnings are errors, the first one would keep the others out.
            for problem in self.problems:
                warnings.warn(str(problem), SynopsisPluginWarning, stacklevel=3)

    def _take(self, brought: object, origin: Origin) -> None:
        """Registers everything, or raises and registers nothing."""
        things = brought if isinstance(brought, tuple | list) else (brought,)
        singles = [t for t in things if isinstance(t, type) and issubclass(t, SingleSynopsis)]
        functions = [t for t in things if isinstance(t, Function)]
        others = [t for t in things if t not in singles and t not in functions]
        stacks: list[type[Stack]] = list(dict.fromkeys([*others, *(s.stack_type for s in singles)]))
        for stack in stacks:
            _check_kind(stack)
            self._check_free(stack.kind, registry.is_kind(stack.kind), "kind")
        kinds = {s.kind for s in stacks}
        if len(kinds) < len(stacks) or len({f.name for f in functions}) < len(functions):
            raise _Unfit("it brings two things of one name")
        for function in functions:
            self._check_free(function.name, registry.is_function(function.name), "function")
            _check_function(function, kinds)
        for stack in stacks:
            registry.register_kind(stack)
        for function in functions:
            registry.register_function(function)
        self.singles.update({s.kind: s for s in singles})
        self.origins.update(dict.fromkeys([*kinds, *(f.name for f in functions)], origin))

    def _check_free(self, name: str, taken: bool, what: str) -> None:
        if taken:
            raise _Unfit(f"the {what} {name!r} is registered already, by {self.origins.get(name, 'edgewater itself')}")

    def hint(self) -> str:
        """What to say when a name is not known: that a plugin may be missing, and which did not load."""
        self.load()
        failed = "".join(f"; not loaded: {p}" for p in self.problems)
        return f"a package that brings it (entry point {GROUP}) may be missing here{failed}"


class _Unfit(Exception):
    """Why something is no synopsis or no function."""


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "(unknown distribution)"


def _check_kind(stack: Any) -> None:
    """Raises _Unfit unless a class can be a `Stack`, as far as can be said without an instance."""
    if not isinstance(stack, type):
        raise _Unfit(f"{stack!r} is none of: a Stack class, a Function, a SingleSynopsis class")
    defined = {name for c in stack.__mro__ if c is not object for name in vars(c)}
    missing = [name for name in (*_METHODS, "nbytes") if name not in defined]
    if missing:
        raise _Unfit(f"{stack.__name__} is no Stack: it lacks {', '.join(missing)}")
    kind = getattr(stack, "kind", None)
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        raise _Unfit(f"{stack.__name__}.kind is {kind!r}; expected lower-case letters, digits and _")
    properties, questions = getattr(stack, "properties", None), getattr(stack, "questions", None)
    if not isinstance(properties, Properties):
        raise _Unfit(f"{stack.__name__}.properties is {properties!r}; expected Properties(…)")
    if not isinstance(questions, tuple) or not questions or not all(_is_question(q) for q in questions):
        raise _Unfit(f"{stack.__name__}.questions is {questions!r}; expected a tuple of Question classes")
    if properties.foldable != hasattr(stack, "fold"):
        has = "no" if properties.foldable else "a"
        raise _Unfit(f"{stack.__name__}.properties says foldable={properties.foldable}, and it has {has} method fold")
    if (properties.invertible or properties.linear) and not (properties.mergeable and properties.invertible):
        raise _Unfit(f"{stack.__name__} has linear={properties.linear}: what is linear merges and is invertible")


def _is_question(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, Question)


def _check_function(function: Function, kinds: set[str]) -> None:
    """Raises _Unfit unless the function makes, with its defaults, stacks that answer and come back from bytes."""
    if not _NAME.fullmatch(function.name):
        raise _Unfit(f"function {function.name!r}: a name is lower-case letters, digits and _")
    unknown = [t for t in function.types if t not in COLUMN_TYPES]
    if unknown:
        raise _Unfit(f"function {function.name}: {unknown} are no column types; expected of {', '.join(COLUMN_TYPES)}")
    needed = any(p.default is registry.REQUIRED for p in function.parameters.values())
    if function.unavailable or needed:
        return  # without parameters there is nothing to try
    for type_ in (None, *(COLUMN_TYPES[t] for t in function.types)):
        at = f"function {function.name} of {type_ if type_ is not None else 'a type not known yet'}"
        stack = function.make(function.read_parameters([], {}, function.name), type_)
        kind = getattr(stack, "kind", None)
        if kind not in kinds and not (isinstance(kind, str) and registry.is_kind(kind)):
            raise _Unfit(f"{at} makes a stack of kind {kind!r}, which nobody registers: list its class beside it")
        stack.grow(1)
        answer = stack.query(None)
        if len(stack) != 1 or not isinstance(answer, Estimates) or len(answer) != 1:
            raise _Unfit(
                f"{at}: a stack of one group has length {len(stack)} and answers {answer!r}; expected one each"
            )
        again = type(stack).from_message(stack.to_message())
        if len(again) != 1 or not np.array_equal(again.query(None).value, answer.value, equal_nan=True):
            raise _Unfit(f"{at}: an empty stack does not come back from its bytes")


INSTALLED = Plugins()
"""Those of this process."""
