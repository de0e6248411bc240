"""Third-party synopses, discovered through the entry-point group `edgewater.synopses`.

An entry point refers to one object, or a tuple of objects, of three types: a `Stack` class (its bytes become readable),
a `Function` (queries may name it), a `SingleSynopsis` class (`from_bytes` returns it for its kind). Importing them
registers nothing; the loader registers all objects of an entry point, or none.

Plugins are loaded when a name or kind that is not built in is looked up. So an edge whose queries use only built-in
functions imports none. A plugin that fails gives a warning and a `PluginProblem`; the other plugins are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np

from edgewater.base.plugins import NAME, InvalidPlugin, PluginLoader, PluginOrigin, PluginProblem
from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses import registry
from edgewater.synopses.base import Estimates, Properties, Question, Stack
from edgewater.synopses.registry import Function
from edgewater.synopses.shapes import Shape, shown
from edgewater.synopses.single import SingleSynopsis

__all__ = ["GROUP", "INSTALLED", "PluginOrigin", "PluginProblem", "Plugins", "SynopsisPluginWarning"]

GROUP = "edgewater.synopses"
_MEMBER = re.compile(r"|(?!(estimate|lower|upper|not_finite)$)[a-z][a-z0-9_]*")
"""Names of members of a cell, which are not those of an interval."""
_METHODS = ("__len__", "grow", "update", "merge", "take", "reset", "query", "to_message", "from_message")


class SynopsisPluginWarning(UserWarning):
    """An entry point of `edgewater.synopses` cannot be used. Queries that name it are refused."""


class Plugins(PluginLoader):
    """The entry points of `edgewater.synopses`.

    Attributes:
        singles: kind -> the class that `from_bytes` returns for it.
    """

    group, provides, warning = GROUP, "synopses", SynopsisPluginWarning

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self.singles: dict[str, type[SingleSynopsis[Any]]] = {}

    def _register(self, provided: object, origin: PluginOrigin) -> None:
        """Registers all objects of an entry point, or raises InvalidPlugin and registers none."""
        objects = provided if isinstance(provided, tuple | list) else (provided,)
        singles = [o for o in objects if isinstance(o, type) and issubclass(o, SingleSynopsis)]
        functions = [o for o in objects if isinstance(o, Function)]
        others = [o for o in objects if o not in singles and o not in functions]
        stacks: list[type[Stack]] = list(dict.fromkeys([*others, *(s.stack_type for s in singles)]))
        for stack in stacks:
            _check_kind(stack)
            self._check_free(stack.kind, registry.is_kind(stack.kind), "kind")
        kinds = {s.kind for s in stacks}
        if len(kinds) < len(stacks) or len({f.name for f in functions}) < len(functions):
            raise InvalidPlugin("it defines two objects of one name")
        for function in functions:
            self._check_free(function.name, registry.is_function(function.name), "function")
            _check_function(function, kinds)
        for stack in stacks:
            registry.register_kind(stack)
        for function in functions:
            registry.register_function(function)
        self.singles.update({s.kind: s for s in singles})
        self.origins.update(dict.fromkeys([*kinds, *(f.name for f in functions)], origin))


def _check_kind(stack: Any) -> None:
    """Raises InvalidPlugin unless a class satisfies `Stack`, as far as it can be checked without an instance."""
    if not isinstance(stack, type):
        raise InvalidPlugin(f"{stack!r} is none of: a Stack class, a Function, a SingleSynopsis class")
    defined = {name for c in stack.__mro__ if c is not object for name in vars(c)}
    missing = [name for name in (*_METHODS, "nbytes") if name not in defined]
    if missing:
        raise InvalidPlugin(f"{stack.__name__} is not a Stack: it lacks {', '.join(missing)}")
    kind = getattr(stack, "kind", None)
    if not isinstance(kind, str) or not NAME.fullmatch(kind):
        raise InvalidPlugin(f"{stack.__name__}.kind is {kind!r}; expected lower-case letters, digits and _")
    properties, questions = getattr(stack, "properties", None), getattr(stack, "questions", None)
    if not isinstance(properties, Properties):
        raise InvalidPlugin(f"{stack.__name__}.properties is {properties!r}; expected Properties(…)")
    if not isinstance(questions, tuple) or not questions or not all(_is_question(q) for q in questions):
        raise InvalidPlugin(f"{stack.__name__}.questions is {questions!r}; expected a tuple of Question classes")
    if properties.linear and not properties.mergeable:
        raise InvalidPlugin(f"{stack.__name__} is linear: a linear state is mergeable")


def _is_question(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, Question)


def _check_function(function: Function, kinds: set[str]) -> None:
    """Raises InvalidPlugin unless stacks with default parameters answer and round-trip as bytes."""
    if not NAME.fullmatch(function.name):
        raise InvalidPlugin(f"function {function.name!r}: a name is lower-case letters, digits and _")
    unknown = [t for t in function.types if t not in COLUMN_TYPES]
    if unknown:
        raise InvalidPlugin(
            f"function {function.name}: {unknown} are not column types; expected {', '.join(COLUMN_TYPES)}"
        )
    required = any(p.default is registry.REQUIRED for p in function.parameters.values())
    if function.unavailable or required:
        return  # without parameters no stack can be made
    for type_ in (None, *(COLUMN_TYPES[t] for t in function.types)):
        at = f"function {function.name} of {type_ if type_ is not None else 'an unknown type'}"
        stack = function.make(function.read_parameters([], {}, function.name), type_)
        kind = getattr(stack, "kind", None)
        if kind not in kinds and not (isinstance(kind, str) and registry.is_kind(kind)):
            raise InvalidPlugin(
                f"{at} makes a stack of kind {kind!r}, which is not registered: list its class beside it"
            )
        stack.grow(1)
        answer = stack.query(None)
        if len(stack) != 1 or not isinstance(answer, Estimates) or len(answer) != 1:
            raise InvalidPlugin(
                f"{at}: a stack of one group has length {len(stack)} and answers {answer!r}; expected 1 and one"
            )
        names = [shape.name if isinstance(shape, Shape) else repr(shape) for shape in shown(stack)]
        if not names or len(set(names)) < len(names) or not all(map(_MEMBER.fullmatch, names)):
            raise InvalidPlugin(f"{at} shows {names}; expected shapes with different names, such as count")
        again = type(stack).from_message(stack.to_message())
        if len(again) != 1 or not np.array_equal(again.query(None).value, answer.value, equal_nan=True):
            raise InvalidPlugin(f"{at}: an empty stack read from its bytes answers differently")


INSTALLED = Plugins()
"""The plugins of this process."""

registry.add_plugins(lambda: INSTALLED)
