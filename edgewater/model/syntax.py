"""Parsing of SQL scalar expressions by sqlglot, and properties of expressions that need no schema."""

from __future__ import annotations

import logging
import re

from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.parser import Parser

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.quantities import is_number
from edgewater.model import record_functions

MAX_DEPTH = 100  # limit: the stack of the parser
MAX_TOKENS = 4_000
"""The largest number of tokens of an expression, enough for a list of 2,000 values. The parser takes 3 to 15 µs per
token.
"""
MAX_EXPRESSIONS_LENGTH = 32_768
"""The largest length of an expression, and the largest total length of all expressions of a query, in characters, so
that reading and parsing them takes at most about a second.
"""
MAX_DIGITS = 400
"""The largest number of digits of a number. The largest float has 309, and Python converts at most 4,300."""
STEPS_PER_TOKEN = 6  # limit: CPU of the parser
"""The largest number of times that the parser may read a token, on average. Useful expressions need 1 to 3."""
logging.getLogger("sqlglot").setLevel(logging.ERROR)  # its warnings would show the text of refused statements
_DIALECT = Dialect.get_or_raise(None)
_MISSING_OPERAND = re.compile(r"Required keyword: '\w+' missing for <class '(?:\w+\.)*(\w+)'>")
"""Matches sqlglot's message about an operator or function without an operand."""
NUMBER_FUNCTIONS = ("abs", "ceil", "floor", "round", "sqrt", "ln", "greatest", "least", "isnan", "isfinite")
TEXT_FUNCTIONS = tuple(
    (
        "lower upper trim length substring left right split_part replace concat starts_with ends_with contains "
        "regexp_like regexp_extract regexp_replace"
    ).split()
)
TIME_FUNCTIONS = tuple(
    "date_trunc extract year quarter month week day day_of_week day_of_year hour minute second strftime".split()
)
SUPPORTED_FUNCTIONS = (*NUMBER_FUNCTIONS, *TEXT_FUNCTIONS, *TIME_FUNCTIONS, "nullif")
SUPPORTED_SYNTAX = (
    "arithmetic, ||, comparisons, AND/OR/NOT, IN, BETWEEN, LIKE, CASE, COALESCE, CAST, AT TIME ZONE "
    f"and the functions {', '.join(SUPPORTED_FUNCTIONS)}"
)
"""The syntax that expressions may contain in addition to columns and literals."""

_OWN_CALLS = ("strftime", "isfinite")
"""Functions of Edgewater that the parser does not know."""

_OTHER_NAMES = {
    "dow": "day_of_week(time), with 1 for Monday",
    "date_part": "extract(hour from time)",
    "date_format": "strftime(time, '%Y-%m-%d')",
    "formatdatetime": "strftime(time, '%Y-%m-%d')",
    "tostartofhour": "date_trunc('hour', time)",
    "regexp": "regexp_like(text, 'pattern')",
    "extract_regex": "regexp_extract(text, 'pattern')",
}
"""The equivalent call in Edgewater, by the name of a function in other systems."""

_NULL_REJECTING: tuple[type[exp.Expression], ...] = tuple(
    getattr(exp, name)
    for name in (
        "Paren Neg Add Sub Mul Div Mod EQ NEQ LT LTE GT GTE Not Like ILike Abs Ceil Floor Round Sqrt Ln Lower "
        "Upper Trim Length Cast Anonymous DPipe Substring Left Right SplitPart Replace StartsWith EndsWith "
        "Contains RegexpLike RegexpExtract RegexpReplace AtTimeZone DateTrunc Extract Year Quarter Month Week Day "
        "DayOfWeek DayOfYear Hour Minute Second"
    ).split()
)
"""Operators and functions whose value is null if one operand is null."""


class TooManySteps(Exception):
    """The parser has read its tokens too often.

    It is not a SqlglotError, because the parser would catch a SqlglotError and try another way.
    """


class BoundedParser(Parser):  # type: ignore[misc]  # sqlglot is not typed
    """A parser that does at most `STEPS_PER_TOKEN` steps per token. If a text needs more, `parse` raises TooManySteps.

    If a text is ambiguous, sqlglot goes back and tries again. Each level of nested ``struct(``, ``char(`` or ``LIMIT``
    doubles the work, so 200 bytes could take years. sqlglot's `max_nodes` limits only one attempt.
    """

    _steps_left = 0

    def parse(self, raw_tokens: list[object], sql: str) -> list[exp.Expression | None]:
        self._steps_left = STEPS_PER_TOKEN * (len(raw_tokens) + 10)
        trees: list[exp.Expression | None] = super().parse(raw_tokens, sql)
        return trees

    def _advance(self, times: int = 1) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TooManySteps
        super()._advance(times)


def _parsed(text: str, field: str) -> exp.Expression:
    """Returns sqlglot's tree of a text. Raises SqlglotError, RecursionError and InvalidQuery."""
    if len(text) > MAX_EXPRESSIONS_LENGTH:
        accepted = f"an expression of at most {MAX_EXPRESSIONS_LENGTH} characters"
        raise InvalidQuery(field, text, accepted, f"it has {len(text)}")
    tokens = _DIALECT.tokenize(text)
    if len(tokens) > MAX_TOKENS:
        raise InvalidQuery(field, text, f"an expression of at most {MAX_TOKENS} tokens", f"it has {len(tokens)}")
    try:
        trees = BoundedParser(dialect=_DIALECT).parse(tokens, text)
    except TooManySteps:
        reason = "it is ambiguous to the parser at every level"
        raise InvalidQuery(field, text, f"an expression of {SUPPORTED_SYNTAX}", reason) from None
    if not trees or trees[0] is None:
        raise ParseError(f"No expression was parsed from '{text}'")
    return exp.Block(expressions=trees) if len(trees) > 1 else trees[0]


def parse_sql(text: str, field: str) -> exp.Expression:
    """Returns the parsed expression. Raises InvalidQuery with the position of a syntax error.

    A text may have at most `MAX_EXPRESSIONS_LENGTH` characters and `MAX_TOKENS` tokens. The time is
    linear in the number of tokens.
    """
    try:
        tree = _parsed(text, field)
    except RecursionError:
        raise InvalidQuery(field, text, f"an expression of at most {MAX_DEPTH} nested terms") from None
    except SqlglotError as exc:
        raise InvalidQuery(field, text, "a SQL expression over the stream's columns", syntax_error(exc)) from exc
    if isinstance(tree, exp.Query | exp.Command | exp.DDL | exp.DML):
        raise InvalidQuery(field, text, "a SQL expression, not a statement")
    if _depth(tree) > MAX_DEPTH:
        raise InvalidQuery(field, text, f"an expression of at most {MAX_DEPTH} nested terms")
    for literal in tree.find_all(exp.Literal):
        if not literal.is_string and not (len(literal.name) <= MAX_DIGITS and is_number(literal.name)):
            raise InvalidQuery(field, text, f"numbers of at most {MAX_DIGITS} digits, such as 1.5e3")
    return tree


def syntax_error(exc: SqlglotError) -> str:
    """Returns the first line of sqlglot's message. The terminal codes for underlining become » and «."""
    reason = str(exc).replace("\x1b[4m", "»").replace("\x1b[0m", "«").splitlines()[0]
    return _MISSING_OPERAND.sub(r"an operand of \1 is missing", reason)


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
    names = (node.name.lower() for node in tree.find_all(exp.Anonymous))
    return list(dict.fromkeys(name for name in names if name not in _OWN_CALLS))


def null_rejecting_columns(tree: exp.Expression) -> list[str]:
    """Returns the columns for which a null makes the whole expression null, so no columns inside COALESCE."""
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
            near = did_you_mean(name, [*SUPPORTED_FUNCTIONS, *record_functions.installed()])
            if name in _OTHER_NAMES:
                near = f"; here it is {_OTHER_NAMES[name]}"
            reason = f"unknown function {name}{near or f': {record_functions.INSTALLED.hint()}'}"
            raise InvalidQuery(field, tree.sql(), known, reason)
