"""Parsing of SQL scalar expressions by sqlglot, and properties of expressions that need no schema."""

from __future__ import annotations

import re

import sqlglot
from sqlglot import exp

from edgewater import record_functions
from edgewater.errors import InvalidQuery

MAX_DEPTH = 100
_MISSING_OPERAND = re.compile(r"Required keyword: '\w+' missing for <class '(?:\w+\.)*(\w+)'>")
"""sqlglot's message for an operator or function without an operand."""
SUPPORTED_SYNTAX = (
    "arithmetic, comparisons, AND/OR/NOT, IN, BETWEEN, LIKE, CASE, COALESCE, CAST "
    "and the functions abs, ceil, floor, round, sqrt, ln, lower, upper, trim, length, nullif"
)
"""What expressions may contain besides columns and literals."""

_NULL_REJECTING = (
    exp.Paren, exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod,
    exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Not, exp.Like, exp.ILike,
    exp.Abs, exp.Ceil, exp.Floor, exp.Round, exp.Sqrt, exp.Ln,
    exp.Lower, exp.Upper, exp.Trim, exp.Length, exp.Cast, exp.Anonymous,
)  # fmt: skip
"""Operators and functions whose value is null if one operand is null."""


def parse_sql(text: str, field: str) -> exp.Expression:
    """Returns the parsed expression. Raises InvalidQuery with the position of a syntax error."""
    try:
        tree = sqlglot.parse_one(text)
    except RecursionError:
        raise InvalidQuery(field, text, f"an expression of at most {MAX_DEPTH} nested terms") from None
    except sqlglot.errors.SqlglotError as exc:
        reason = str(exc).replace("\x1b[4m", "»").replace("\x1b[0m", "«").splitlines()[0]
        reason = _MISSING_OPERAND.sub(r"an operand of \1 is missing", reason)
        raise InvalidQuery(field, text, "a SQL expression over the stream's columns", reason) from exc
    if tree is None or isinstance(tree, exp.Query | exp.Command | exp.DDL | exp.DML):
        raise InvalidQuery(field, text, "a SQL expression, not a statement")
    if _depth(tree) > MAX_DEPTH:
        raise InvalidQuery(field, text, f"an expression of at most {MAX_DEPTH} nested terms")
    return tree


def _depth(tree: exp.Expression) -> int:
    """Returns the number of levels of a syntax tree, without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in node.iter_expressions()]
    return depth


def column_names(tree: exp.Expression) -> list[str]:
    """Returns the columns that an expression reads, in order of first appearance."""
    return list(dict.fromkeys(node.name for node in tree.find_all(exp.Column)))


def called_names(tree: exp.Expression) -> list[str]:
    """Returns the plugin functions that an expression calls, in lower case, in order of first appearance."""
    return list(dict.fromkeys(node.name.lower() for node in tree.find_all(exp.Anonymous)))


def null_rejecting_columns(tree: exp.Expression) -> list[str]:
    """Returns the columns whose null makes the whole expression null (unlike a column inside COALESCE)."""
    if isinstance(tree, exp.Column):
        return [tree.name]
    if not isinstance(tree, _NULL_REJECTING):
        return []
    return list(dict.fromkeys(name for child in tree.iter_expressions() for name in null_rejecting_columns(child)))


def check_calls(tree: exp.Expression, field: str) -> None:
    """Raises InvalidQuery for a call of a function that is neither built in nor provided by a plugin."""
    for name in called_names(tree):
        if record_functions.find(name) is None:
            known = ", ".join([SUPPORTED_SYNTAX, *sorted(record_functions.installed())])
            reason = f"unknown function {name}: {record_functions.INSTALLED.hint()}"
            raise InvalidQuery(field, tree.sql(), known, reason)
