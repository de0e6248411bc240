"""Parsing of measures: a function of an expression over the record's columns, such as ``sum(bytes)``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow as pa
from sqlglot import exp

from edgewater.base.errors import InvalidQuery
from edgewater.model import record_functions
from edgewater.model.expressions import as_row, columns_of
from edgewater.model.syntax import called_names, check_calls, parse_sql
from edgewater.synopses import (
    Function,
    Parameters,
    Question,
    Stack,
    function_named,
    function_names,
    meant_function,
    plugins,
)

NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_CONDITIONS = (exp.Predicate, exp.Connector, exp.Not, exp.StartsWith, exp.EndsWith, exp.Contains, exp.RegexpLike)
_COUNTS = {
    "count": "count(x) counts each record in which x is not null, whether x is true or false",
    "distinct": "distinct(x) counts the values of x, and a condition has two",
}
NAME_ACCEPTED = "lower-case letters, digits and _, starting with a letter, at most 63 characters"


@dataclass(frozen=True, slots=True)
class Measure:
    """One value that a query computes: a function of an expression over the record's columns.

    Attributes:
        argument: SQL text of the expression; None for ``count()``.
        seed: seed of the query's synopses; None for the default seed, which is public.
        part_of: the derived measure whose text has this function; answers show only that one. Empty: answers show this
            measure.
    """

    name: str
    function: Function
    argument: str | None
    parameters: Parameters
    seed: int | None = field(default=None, repr=False)
    part_of: str = ""

    @classmethod
    def parse(cls, name: str, text: object) -> Measure:
        """Parses ``sum(bytes)`` or ``count_min(ip, width=65536)``. Raises InvalidQuery."""
        at = f"measures.{name}"
        if not NAME.fullmatch(name):
            raise InvalidQuery(at, name, NAME_ACCEPTED, "invalid name of a measure")
        accepted = "a function of an expression, such as sum(bytes); functions: " + ", ".join(function_names())
        if not isinstance(text, str):
            raise InvalidQuery(at, text, accepted)
        called, arguments, condition = _call(text, at, accepted)
        function = function_named(called)
        if function is None:
            why = meant_function(called) or f": {plugins.INSTALLED.hint()}"
            raise InvalidQuery(at, text, accepted, f"unknown function {called}{why}")
        positional = [a for a in arguments if not isinstance(a, exp.EQ | exp.Kwarg | exp.PropertyEQ)]
        by_name = [a for a in arguments if isinstance(a, exp.EQ | exp.Kwarg | exp.PropertyEQ)]
        named = {a.this.name: a.expression for a in by_name}
        known = {**function.parameters, **function.goals}
        if not positional and (equal := next((a for a in by_name if a.this.name not in known), None)) is not None:
            raise _condition(function, equal, at, text)
        if len(named) < len(by_name):
            raise InvalidQuery(at, text, f"each parameter of {called} at most once", "a parameter is given twice")
        expression = _argument(function, positional, at, text)
        if isinstance(expression, exp.Star):
            expression = None
        if isinstance(expression, exp.Distinct):
            raise InvalidQuery(
                at, text, f"distinct(expression) or {called}(expression)", "DISTINCT is supported in count only"
            )
        if expression is None and function.argument in ("required", "rows"):
            raise InvalidQuery(at, text, f"{called}(expression)", "an argument is missing")
        if condition is not None:
            expression = _filtered(function, expression, condition, at, text)
        if expression is not None:
            check_calls(expression, at)
        parameters = function.read_parameters(
            [_literal(p, at, text) for p in positional], {k: _literal(v, at, text) for k, v in named.items()}, at
        )
        return cls(name, function, expression.sql() if expression is not None else None, parameters)

    def stack(self, argument: pa.DataType | None) -> Stack:
        """Returns an empty stack of the measure.

        Args:
            argument: type of the argument; None if the type is unknown, or there is no argument.
        """
        return self.function.stack(self.parameters, argument, self.seed)

    @property
    def question(self) -> Question | None:
        """The question that the measure's value answers; None for the default question of its synopsis."""
        return None if self.function.question is None else self.function.question(self.parameters)

    def require_no_condition(self, argument: pa.DataType | None = None) -> None:
        """Raises InvalidQuery if the argument is a condition, and the measure does not count its values one by one.

        Called only for new queries: a registered query is served as it is.

        Args:
            argument: the argument's type, if it is known.
        """
        if self.argument is None or self.function.sample is not None:
            return
        if self.function.name not in _COUNTS and "bool" in self.function.types:
            return
        at = f"measures.{self.part_of or self.name}"
        tree = parse_sql(self.argument, at).unnest()
        if isinstance(tree, _CONDITIONS) or (argument is not None and pa.types.is_boolean(argument)):
            raise _condition(self.function, tree, at, self.to_text())

    @property
    def is_expensive(self) -> bool:
        """Whether sampling saves more time than it costs.

        This holds for a function of a sample, and for an argument that calls an expensive function.
        """
        if self.function.sample is not None:
            return True
        if self.argument is None or "(" not in self.argument:
            return False
        called = (record_functions.find(name) for name in _called(self.argument))
        return any(function is not None and function.expensive for function in called)

    @property
    def is_record_count(self) -> bool:
        """Whether the measure is the number of all records of a group."""
        return self.function.name == "count" and self.argument is None

    @property
    def entry_bytes(self) -> int:
        """Approximate upper bound for the bytes of one group's state in a frame."""
        if self.function.sample is None or self.argument is None:
            return self.function.entry_bytes(self.parameters)
        return self.function.entry_bytes(self.parameters, len(columns_of(parse_sql(self.argument, ""))))

    def to_text(self) -> str:
        """Returns the canonical text, which `parse` accepts."""
        parts = [self.argument] if self.argument is not None else []
        parts += [f"{k}={v!r}" for k, v in self.parameters if self.function.parameters[k].default != v]
        return f"{self.function.name}({', '.join(parts)})"


def _condition(function: Function, condition: exp.Expression, at: str, text: str) -> InvalidQuery:
    """Returns the error for a condition as an argument. It says how its records are counted."""
    written = condition.sql()
    counted = f"count() filter (where {written})"
    accepted = counted if function.name in _COUNTS else f"{function.name}(if({written}, 1, 0)), or {counted}"
    reason = _COUNTS.get(function.name, f"{function.name} is of numbers, and the argument is a condition")
    return InvalidQuery(at, text, accepted, reason)


def _filtered(
    function: Function, expression: exp.Expression | None, condition: exp.Expression, at: str, text: str
) -> exp.Expression:
    """Returns the argument that is null in all records that do not fulfil the condition. No function counts a null."""
    if function.sample is not None or (expression is None and function.name != "count"):
        accepted = f"a query of its own with `where: {condition.sql()}`"
        raise InvalidQuery(at, text, accepted, f"{function.name} is of whole records, and has no FILTER")
    value = expression if expression is not None else exp.Literal.number(1)
    return exp.Case(ifs=[exp.If(this=condition, true=value)])


@lru_cache(maxsize=1024)
def _called(expression: str) -> tuple[str, ...]:
    """Returns the plugin functions that an expression calls. The result is cached, because parsing takes about 1 ms."""
    return tuple(called_names(parse_sql(expression, "")))


def _argument(function: Function, positional: list[exp.Expression], at: str, text: str) -> exp.Expression | None:
    """Removes the function's argument from the positional arguments and returns it. The other arguments are parameters.

    A function of a sample takes a row: all arguments before the first literal.
    """
    if not positional or function.argument == "none":
        return None
    if function.sample is None:
        return positional.pop(0)
    columns: list[exp.Expression] = []
    while positional and not isinstance(
        positional[0].this if isinstance(positional[0], exp.Neg) else positional[0], exp.Literal
    ):
        columns += columns_of(positional.pop(0))
    least, most = function.sample.columns
    if columns and not least <= len(columns) <= most:
        accepted = (
            f"{function.name} of {least} column" if least == most else f"{function.name} of {least} to {most} columns"
        )
        raise InvalidQuery(at, text, accepted, f"it has {len(columns)}")
    return as_row(columns) if columns else None


def _call(text: str, at: str, accepted: str) -> tuple[str, list[exp.Expression], exp.Expression | None]:
    """Returns the function's name as written, its arguments, and the condition of its FILTER."""
    # `distinct` is a keyword of SQL, and SQL's `quantile` has two arguments.
    match = re.fullmatch(r"\s*(distinct|quantile)\s*\((.*)\)\s*", text, re.IGNORECASE | re.DOTALL)
    tree = parse_sql(f"{match[1]}_of({match[2]})" if match else text, at)
    condition = tree.expression.this if isinstance(tree, exp.Filter) else None
    tree = tree.this if isinstance(tree, exp.Filter) else tree
    if isinstance(tree, exp.Count) and isinstance(tree.this, exp.Distinct):
        return "distinct", list(tree.this.expressions), condition
    if isinstance(tree, exp.Anonymous):
        name = match[1].lower() if match else tree.name.lower()
        return name, list(tree.expressions), condition
    if isinstance(tree, exp.Func):
        # These are all child expressions, because some nodes of the parser, such as corr(x, y), have no list of
        # arguments.
        arguments = list(tree.iter_expressions())
        name = re.match(r"\s*(\w+)\s*\(", text)
        if name:
            return name[1].lower(), arguments, condition
    raise InvalidQuery(at, text, accepted)


def _literal(node: exp.Expression, at: str, text: str) -> object:
    negative = isinstance(node, exp.Neg)
    inner = node.this if negative else node
    if isinstance(inner, exp.Literal):
        if inner.is_string:
            return inner.this
        number = int(inner.this) if inner.is_int else float(inner.this)
        return -number if negative else number
    raise InvalidQuery(at, text, "parameters that are literals, such as precision=14", f"{node.sql()} is not")
