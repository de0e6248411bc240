"""Parses and writes SQL: `CREATE MATERIALIZED VIEW` for a query, and the statements about queries and streams.

`parse_statement` parses a statement, and `to_sql` writes a query. Both use the mapping of a query in YAML, so
`QuerySpec.from_mapping` has every check and every default. `parse_statement(to_sql(spec)).spec() == spec` holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from sqlglot import exp, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokens import Token, TokenType

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.plain_yaml import load_yaml
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.calendars import is_zone
from edgewater.model.computed import operands
from edgewater.model.derived import arithmetic, derived_text
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.model.query import QuerySpec, column_text
from edgewater.model.syntax import MAX_DIGITS, MAX_EXPRESSIONS_LENGTH, BoundedParser, TooManySteps, syntax_error
from edgewater.synopses import function_named, meant_function

MAX_STATEMENT_TOKENS = MAX_EXPRESSIONS_LENGTH
"""The largest number of tokens of a statement, so that parsing takes at most about a second."""
STATEMENTS = (
    "CREATE [OR REPLACE] MATERIALIZED VIEW, DROP MATERIALIZED VIEW, EXPLAIN CREATE, SELECT, SHOW CREATE, DESCRIBE"
)
WINDOWS = (
    "TUMBLE(size[, offset][, zone]), HOP(every, size[, offset]) or SESSION(gap[, max]); a size is INTERVAL '1 minute'"
)

_OPTIONS = {
    "staleness": ("budget", "staleness"),
    "bytes": ("budget", "bytes"),
    "accuracy": ("accuracy", "error"),
    "confidence": ("accuracy", "confidence"),
    **{f"accuracy_{key}": ("accuracy", key) for key in ("measure", "scope", "substream", "range", "delays")},
    **{f"cache_{key}": ("cache", key) for key in ("eviction", "sizing", "estimate", "eager")},
    **{key: (key,) for key in ("lateness", "edges", "since", "until", "seed", "priority", "lookup")},
}
"""The path of the YAML key that each option of WITH sets. `error_<measure>` is handled separately."""
_ERROR = "error_"
_LISTS_OF = {"edges": str, "accuracy_measure": str, "accuracy_range": float}
"""Options that are lists, and the type of an item."""
_NO_JOIN = (
    "one stream; columns of a table come from the option lookup, as in WITH (lookup = '{halls: {key: device}}'), and"
    " columns of a file from `lookups` in the configuration of an edge"
)
_INSTEAD = {
    "distinct": "distinct(column), which estimates the number of distinct values",
    "joins": _NO_JOIN,
    "laterals": _NO_JOIN,
    "having": "no HAVING; read the answers with SELECT … FROM query WHERE measure > …",
    "order": "no ORDER BY; read the answers with SELECT … FROM query ORDER BY …",
    "sort": "no SORT BY; read the answers with SELECT … FROM query ORDER BY …",
    "limit": "no LIMIT; the measure top_k(column) has the most frequent values, and SELECT … FROM query LIMIT 10 "
    "reads some rows",
    "offset": "no OFFSET; SELECT … FROM query LIMIT … OFFSET reads some rows",
    "with_": "no WITH before SELECT; a query reads a stream",
    "qualify": "no QUALIFY; read the answers with SELECT … FROM query",
    "windows": "no WINDOW; the windows of event time are in GROUP BY: " + WINDOWS,
    "into": "no INTO; the name of the query is after MATERIALIZED VIEW",
}
"""What to write instead of a clause that a query cannot have, by sqlglot's name of the clause."""
_UNITS = {"millisecond": "ms", "second": "s", "minute": "m", "hour": "h", "day": "d", "week": "w"}
_UNIT = re.compile(rf"\s*({'|'.join(_UNITS)})s?\b[\s,]*", re.IGNORECASE)
_DIALECT = Dialect.get_or_raise(None)


@dataclass(frozen=True, slots=True)
class CreateQuery:
    """`CREATE [OR REPLACE] MATERIALIZED VIEW`.

    Attributes:
        mapping: the query, as a mapping for `QuerySpec.from_mapping`.
        replaces: whether another query with the same name gets a new version.
        explains: whether the statement begins with `EXPLAIN`.
    """

    mapping: Mapping[str, object]
    replaces: bool = False
    explains: bool = False

    def spec(self) -> QuerySpec:
        """Returns the query. Raises InvalidQuery. Its field is an option of WITH, if an option sets the invalid
        value.
        """
        try:
            return QuerySpec.from_mapping(self.mapping)
        except InvalidQuery as exc:
            raise InvalidQuery(_place(exc.field), exc.value, exc.accepted, exc.reason) from None


@dataclass(frozen=True, slots=True)
class DropQuery:
    """`DROP MATERIALIZED VIEW [IF EXISTS]`."""

    name: str
    if_exists: bool


@dataclass(frozen=True, slots=True)
class ShowCreate:
    """`SHOW CREATE q`."""

    name: str


@dataclass(frozen=True, slots=True)
class DescribeTable:
    """`DESCRIBE name`: a query, or a stream if no query has the name. `DESCRIBE STREAM name` is always a stream."""

    name: str
    kind: Literal["query", "stream"] | None


@dataclass(frozen=True, slots=True)
class SelectRows:
    """`SELECT`, or another statement that reads answers, in the SQL of DuckDB."""

    text: str


Statement = CreateQuery | DropQuery | ShowCreate | DescribeTable | SelectRows


def parse_statement(text: str) -> Statement:
    """Returns the statement of a text, in time linear in the length of the text.

    Raises:
        InvalidQuery: names what is wrong and what is accepted. A syntax error has its position.
    """
    read = _tokens(text)
    if len(read) > MAX_STATEMENT_TOKENS:
        raise InvalidQuery("sql", text, f"at most {MAX_STATEMENT_TOKENS} tokens", f"it has {len(read)}")
    if not read:
        raise InvalidQuery("sql", text, STATEMENTS, "it is empty")
    if any(token.token_type == TokenType.SEMICOLON for token in read[:-1]):
        raise InvalidQuery("sql", text, "one statement", "a request has one statement; send the rest after it")
    if read[0].token_type in (TokenType.SELECT, TokenType.WITH, TokenType.FROM, TokenType.L_PAREN):
        return SelectRows(text)
    parser = _StatementParser(dialect=_DIALECT)
    try:
        trees = parser.parse([_as_name(read, number) for number in range(len(read))], text)
    except TooManySteps:
        raise InvalidQuery("sql", text, STATEMENTS, "it is ambiguous to the parser at every level") from None
    except RecursionError:
        raise InvalidQuery("sql", text, "a statement with fewer nested terms") from None
    except SqlglotError as exc:
        raise InvalidQuery("sql", text, parser.expected, _where(exc)) from exc
    assert trees, "every text with a token is a statement, or raises"
    return parser.statement


def split_statements(text: str) -> list[str]:
    """Returns the statements of a file, without empty ones. Raises InvalidQuery if a quoted text or a comment has no
    end.
    """
    ends = [t.start for t in _tokens(text) if t.token_type == TokenType.SEMICOLON]
    starts = [0, *(end + 1 for end in ends)]
    parts = (text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True))
    return [part.strip() for part in parts if _tokens(part)]


def _where(exc: SqlglotError) -> str:
    """Returns the message of a syntax error, with the text before it."""
    if not isinstance(exc, ParseError) or not exc.errors:
        return syntax_error(exc)
    error = exc.errors[0]
    near = f"{error['start_context'][-40:]}»{error['highlight']}«"
    return f"{error['description']}, line {error['line']}, column {error['col']}, at {near}"


class _Tokenizer(tokens.Tokenizer):  # type: ignore[misc]  # sqlglot is not typed
    """Reads the text after EXPLAIN and SHOW as tokens, because sqlglot would read it as one text."""

    COMMANDS: set[TokenType] = set()


def _tokens(text: str) -> list[Token]:
    try:
        return list(_Tokenizer(dialect=_DIALECT).tokenize(text))
    except SqlglotError as exc:
        raise InvalidQuery("sql", text, STATEMENTS, syntax_error(exc)) from exc


def _as_name(read: list[Token], number: int) -> Token:
    """Returns a token. DISTINCT and SESSION become names if a parenthesis follows, except in `count(DISTINCT (x))`."""
    token = read[number]
    called = number + 1 < len(read) and read[number + 1].token_type == TokenType.L_PAREN
    is_inside = number and read[number - 1].token_type == TokenType.L_PAREN
    is_distinct = token.token_type == TokenType.DISTINCT and not is_inside
    if not called or not (is_distinct or token.text.upper() == "SESSION"):
        return token
    return Token(TokenType.VAR, token.text, token.line, token.col, token.start, token.end, token.comments)


class _StatementParser(BoundedParser):
    """Parses one statement.

    Attributes:
        statement: the result.
        expected: the syntax that an error message names.
    """

    FUNCTIONS = {name: build for name, build in BoundedParser.FUNCTIONS.items() if name != "QUANTILE"}
    """The functions of sqlglot without SQL's `quantile`, which requires a second argument."""
    expected = STATEMENTS
    statement: Statement

    def _parse_statement(self) -> exp.Expression | None:
        explains = self._match_text_seq("EXPLAIN")
        if self._match_text_seq("CREATE"):
            self.expected = "CREATE [OR REPLACE] MATERIALIZED VIEW name [WITH (…)] AS SELECT …"
            self.statement = self._create(bool(explains))
        elif explains:
            self.raise_error("EXPLAIN is followed by CREATE MATERIALIZED VIEW")
        elif self._match_text_seq("DROP"):
            self.expected = "DROP MATERIALIZED VIEW [IF EXISTS] name"
            self._require("MATERIALIZED", "VIEW")
            if_exists = bool(self._match_text_seq("IF", "EXISTS"))
            self.statement = DropQuery(self._name("name"), if_exists)
        elif self._match_text_seq("SHOW"):
            self.expected = "SHOW CREATE name; the API and the command line list queries, streams and edges"
            self._require("CREATE")
            if self._match_text_seq("MATERIALIZED"):
                self._require("VIEW")
            self.statement = ShowCreate(self._name("name"))
        elif self._match_texts(("DESCRIBE", "DESC")):
            self.expected = "DESCRIBE name, DESCRIBE QUERY name or DESCRIBE STREAM name"
            kind: Literal["query", "stream"] | None = None
            if self._next:
                kind = (
                    "query" if self._match_text_seq("QUERY") else "stream" if self._match_text_seq("STREAM") else None
                )
            self.statement = DescribeTable(self._name("name"), kind)
        else:
            self.raise_error("It is not one of the statements")
        return exp.Null()

    def _require(self, *words: str) -> bool:
        if not self._match_text_seq(*words):
            self.raise_error(f"Expected {' '.join(words)}")
        return True

    def _name(self, field: str) -> str:
        identifier = self._parse_id_var(any_token=True)
        name = identifier.name if identifier is not None else None
        if name is None or not NAME.fullmatch(name):
            raise InvalidQuery(field, name, NAME_ACCEPTED)
        return str(name)

    def _create(self, explains: bool) -> CreateQuery:
        replaces = bool(self._match_text_seq("OR") and self._require("REPLACE"))
        if not self._match_text_seq("MATERIALIZED", "VIEW"):
            if not (self._curr and self._curr.token_type in (TokenType.VIEW, TokenType.TABLE)):
                self.raise_error("Expected MATERIALIZED VIEW")
            reason = "a query is a materialized view: edges and center keep its answers up to date"
            raise InvalidQuery("sql", f"CREATE {self._curr.text.upper()}", "CREATE MATERIALIZED VIEW", reason)
        if self._match_text_seq("IF"):
            accepted = "CREATE MATERIALIZED VIEW, which changes nothing if the same query is registered"
            raise InvalidQuery("sql", "IF NOT EXISTS", accepted)
        name = self._name("name")
        options = self._parse_wrapped_csv(self._option) if self._match(TokenType.WITH) else []
        if not self._match(TokenType.ALIAS):
            self.raise_error("Expected AS SELECT")
        tree = self._parse_select()
        if self._index < len(self._tokens):
            self.raise_error("Unexpected token")
        if not isinstance(tree, exp.Select):
            raise InvalidQuery("sql", tree.sql() if tree is not None else None, "one SELECT from one stream after AS")
        mapping = {"name": name, **_query(tree), **_with_options(options)}
        return CreateQuery(mapping, replaces, explains)

    def _option(self) -> tuple[str, object]:
        name = self._parse_id_var(any_token=True)
        if name is None or not self._match(TokenType.EQ):
            self.raise_error("Expected option = 'value'")
        value = self._parse_bitwise()
        if value is None:
            self.raise_error(f"The option {name.name} has no value")
        return name.name.lower(), _value(value, name.name.lower())

    def _parse_projections(self) -> tuple[list[exp.Expression], None]:
        return self._parse_csv(self._item), None

    def _parse_group(self, skip_group_by_token: bool = False) -> exp.Group | None:
        if not skip_group_by_token and not self._match(TokenType.GROUP_BY):
            return None
        return exp.Group(expressions=self._parse_csv(self._item))

    def _item(self) -> exp.Expression | None:
        """Parses an expression with an optional name. Stores the original text, because sqlglot renames known
        functions.
        """
        first = self._curr
        tree = self._parse_assignment()
        if tree is not None:
            tree.meta["text"] = self._find_sql(first, self._prev)
        return self._parse_alias(tree)


def _query(tree: exp.Select) -> dict[str, object]:
    """Returns the keys `from`, `where`, `measures`, `group_by` and `window` of a SELECT. Raises InvalidQuery."""
    for clause, value in tree.args.items():
        if value and clause not in ("expressions", "from_", "where", "group", "kind", "hint"):
            clauses = value if isinstance(value, list) else [value]
            shown = " ".join(c.sql() if isinstance(c, exp.Expression) else str(c) for c in clauses)
            raise InvalidQuery("sql", shown.strip(), _INSTEAD.get(clause, "SELECT … FROM … WHERE … GROUP BY …"))
    result: dict[str, object] = {"from": _stream(tree)}
    if tree.args.get("where") is not None:
        result["where"] = tree.args["where"].this.sql()
    measures, named_keys = _select_items(tree.expressions)
    windows, keys = [], []
    for item in tree.args["group"].expressions if tree.args.get("group") is not None else ():
        if (window := _window(item)) is not None:
            windows.append(window)
        else:
            keys.append(_key(item, named_keys))
    if len(windows) != 1:
        reason = f"GROUP BY has {len(windows)} windows of event time"
        raise InvalidQuery("window", None, f"one of {WINDOWS} in GROUP BY", reason)
    _take_derived(named_keys, keys, measures)
    order = [item.alias for item in tree.expressions]
    measures = {name: measures[name] for name in sorted(measures, key=order.index)}
    return result | {"measures": measures, "window": windows[0]} | ({"group_by": keys} if keys else {})


def _stream(tree: exp.Select) -> str:
    source = tree.args["from_"].this if tree.args.get("from_") is not None else None
    if isinstance(source, exp.Table) and isinstance(source.this, exp.Identifier) and source.sql() == source.this.sql():
        return str(source.name)
    reason = "a query reads a stream, not the rows of another SELECT" if isinstance(source, exp.Subquery) else ""
    if isinstance(source, exp.Table) and source.alias:
        reason = "columns are named without the stream, so the stream needs no alias"
    raise InvalidQuery("from", source.sql() if source is not None else None, "the name of a stream after FROM", reason)


def _text(item: exp.Expression) -> str:
    return str(item.meta.get("text") or item.sql())


def _is_measure(item: exp.Expression) -> bool:
    """Returns whether an item of SELECT calls a measure's function, or a function with a similar name. Its arithmetic
    may be about such calls.
    """
    texts = [_text(item), *(operand.sql() for operand in operands(item))]
    names = [called[1].lower() for text in texts if (called := re.match(r"(\w+)\s*\(", text))]
    return any(name == "distinct" or function_named(name) is not None or meant_function(name) for name in names)


def _select_items(items: Iterable[exp.Expression]) -> tuple[dict[str, object], dict[str, str]]:
    """Returns the measures of SELECT and the expressions of the key columns, both by name."""
    measures: dict[str, object] = {}
    keys: dict[str, str] = {}
    for item in items:
        inner, alias = (item.this, item.alias) if isinstance(item, exp.Alias) else (item, "")
        if isinstance(inner, exp.Star):
            raise InvalidQuery("measures", "*", "measures with names, such as SELECT count(*) AS records")
        is_measure = _is_measure(inner)
        if is_measure and not alias:
            raise _without_name(_text(inner))
        name = alias or (inner.name if isinstance(inner, exp.Column) else _text(inner))
        if name in measures or name in keys:
            raise InvalidQuery(f"measures.{name}", name, "each name once", "SELECT has it twice")
        if is_measure:
            measures[name] = _text(inner)
        else:
            keys[name] = _text(inner)
    return measures, keys


def _without_name(text: str) -> InvalidQuery:
    return InvalidQuery("measures", text, f"a name for the measure: {text} AS name")


def _key(item: exp.Expression, named: Mapping[str, str]) -> object:
    """Returns an entry of `group_by`: a column, the name of an expression in SELECT, or an expression."""
    inner, alias = (item.this, item.alias) if isinstance(item, exp.Alias) else (item, "")
    if isinstance(inner, exp.Aliases):
        raise InvalidQuery("group_by", inner.sql(), "columns and expressions", "no ROLLUP, CUBE or GROUPING SETS")
    if isinstance(inner, exp.Literal):
        raise InvalidQuery("group_by", inner.sql(), "the name of a column or an expression", "positions are not read")
    text = _text(inner)
    if alias:
        return {alias: text}
    if isinstance(inner, exp.Column) and not inner.table:
        if (expression := named.get(inner.name)) not in (None, text):
            return {inner.name: expression}
        return column_text(inner.name)
    same = next((name for name, expression in named.items() if expression == text and name != text), None)
    return {same: text} if same is not None else text


def _take_derived(named: Mapping[str, str], keys: list[object], measures: dict[str, object]) -> None:
    """Adds the items of SELECT that are derived from the measures to these. Raises InvalidQuery for an item that is
    neither a measure nor in GROUP BY.
    """
    names = {name for key in keys for name in (key if isinstance(key, dict) else [key])}
    texts = {text for key in keys for text in (key.values() if isinstance(key, dict) else [key])}
    for name, text in named.items():
        if name in ("window_start", "window_end") and text == name:
            raise InvalidQuery(f"measures.{name}", text, "SELECT without it", "every answer states it")
        if name not in names and text not in texts:
            tree = arithmetic(text)
            if tree is not None and all(column.name in measures for column in tree.find_all(exp.Column)):
                if name == text:
                    raise _without_name(text)
                measures[name] = text
                continue
            called = re.match(r"(\w+)\s*\(", text)
            hint = meant_function(called[1].lower()) if called else ""
            accepted = "a measure such as sum(column), or a column that is in GROUP BY too"
            raise InvalidQuery(f"measures.{name}", text, accepted, hint.removeprefix(", ") or "it is neither")


def _window(item: exp.Expression) -> dict[str, object] | None:
    """Returns the window of an item of GROUP BY; None if the item is a key."""
    if not isinstance(item, exp.Anonymous) or item.name.lower() not in _WINDOW_KEYS:
        return None
    keys = _WINDOW_KEYS[item.name.lower()]
    arguments = list(item.expressions)
    if arguments and isinstance(arguments[0], exp.Column):
        column = arguments.pop(0)
        if column.name != TIME_COLUMN:
            reason = "the time of a record is set in the configuration of its edge"
            raise InvalidQuery("window", column.sql(), f"{TIME_COLUMN}, or no column", reason)
    zone = _zone(arguments[-1]) if "tumbling" in keys and len(arguments) > 1 else None
    if zone is not None:
        del arguments[-1]
    required = 2 if "every" in keys else 1
    if not required <= len(arguments) <= len(keys):
        raise InvalidQuery("window", _text(item), WINDOWS)
    spans = {key: _value(argument, f"window.{key}") for key, argument in zip(keys, arguments, strict=False)}
    return spans if zone is None else {**spans, "zone": zone}


def _zone(node: exp.Expression) -> str | None:
    """Returns the name of a time zone; None if the argument is a length."""
    if isinstance(node, exp.Literal) and node.is_string and ("/" in node.name or is_zone(node.name)):
        return str(node.name)
    return None


_WINDOW_KEYS = {"tumble": ("tumbling", "offset"), "hop": ("every", "sliding", "offset"), "session": ("session", "max")}
"""The YAML keys of a window, by window function, in the order of the function's arguments."""


def _value(node: exp.Expression, field: str) -> object:
    """Returns the value of an option, or of an argument of a window, as YAML has it."""
    match node:
        case exp.Literal() if node.is_string:
            return node.name
        case exp.Literal() if len(node.name) <= MAX_DIGITS:
            return int(node.name) if node.name.isdigit() else float(node.name)
        case exp.Neg() if isinstance(value := _value(node.this, field), int | float):
            return -value
        case exp.Interval() | exp.Add():
            return _duration(node, field)
        case exp.Cast() if isinstance(node.this, exp.Literal):  # TIMESTAMP '2013-01-01T00:00:00Z'
            return node.this.name
        case exp.Array() | exp.Tuple():
            return [_value(item, field) for item in node.expressions]
        case exp.Boolean():
            return bool(node.this)
    raise InvalidQuery(field, node.sql(), "a text in quotes, a number, or a list such as ARRAY['a', 'b']")


def _duration(node: exp.Expression, field: str) -> str:
    """Converts INTERVAL '1 hour 30 minutes' to 1h30m. `duration_ms` later refuses a text that is no duration."""
    if isinstance(node, exp.Add):
        return _duration(node.this, field) + _duration(node.expression, field)
    if not isinstance(node, exp.Interval) or not isinstance(node.this, exp.Literal):
        raise InvalidQuery(field, node.sql(), "a length such as INTERVAL '1 minute'")
    text = f"{node.this.name} {node.text('unit')}"
    return _UNIT.sub(lambda unit: _UNITS[unit[1].lower()], text).strip()


def _with_options(options: list[tuple[str, object]]) -> dict[str, Any]:
    """Returns the keys of a query that the options of WITH set. Raises InvalidQuery."""
    result: dict[str, Any] = {}
    seen = set()
    for name, value in options:
        if name in seen:
            raise InvalidQuery(name, value, "each option once", "it is given twice")
        seen.add(name)
        path = ("budget", "error", name.removeprefix(_ERROR)) if name.startswith(_ERROR) else _OPTIONS.get(name)
        if path is None:
            known = [*_OPTIONS, f"{_ERROR}<measure>"]
            reason = f"unknown option{did_you_mean(name, known)}"
            raise InvalidQuery(name, value, f"one of the options {', '.join(known)}", reason)
        if name in _LISTS_OF and isinstance(value, str):
            value = _items(value, name)
        if name == "lookup":
            value = _mapping(value)
        target = result
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
    return result


def _mapping(value: object) -> object:
    try:
        return load_yaml(str(value))
    except yaml.YAMLError as exc:
        raise InvalidQuery("lookup", value, "a mapping such as '{halls: {key: device}}'", str(exc)) from None


def _items(text: str, name: str) -> list[object]:
    kind = _LISTS_OF[name]
    try:
        return [kind(item.strip()) for item in text.split(",")]
    except ValueError:
        raise InvalidQuery(name, text, "two numbers such as '0, 1'") from None


def _place(field: str) -> str:
    """Returns the option of WITH for a field of a query in YAML; the field itself if no option sets it."""
    if field.startswith("budget.error"):
        return field.removeprefix("budget.").replace(".", "_", 1)
    return next((name for name, path in _OPTIONS.items() if field == ".".join(path)), field)


def to_sql(spec: QuerySpec, *, seed: bool = True, replaces: bool = False) -> str:
    """Returns the statement that registers a query. `parse_statement` accepts it.

    Args:
        seed: see `QuerySpec.to_mapping`.
        replaces: whether to write OR REPLACE.
    """
    mapping = spec.to_mapping(seed=seed)
    options = [f"  {name} = {_literal(value)}" for name, value in _options(mapping)]
    computed = dict(spec.computed)
    keys = [_identifier(name) for name in spec.group_by]
    items = [f"{computed[n]} AS {k}" if n in computed else k for n, k in zip(spec.group_by, keys, strict=True)]
    items += [f"{m.to_text()} AS {_identifier(m.name)}" for m in spec.measures if not m.part_of]
    items += [f"{derived_text(value, spec.measures)} AS {_identifier(value.name)}" for value in spec.derived]
    create = "CREATE OR REPLACE" if replaces else "CREATE"
    lines = [f"{create} MATERIALIZED VIEW {_identifier(spec.name)}"]
    if options:
        lines += ["WITH (", ",\n".join(options), ")"]
    lines[-1] += " AS"
    lines += ["SELECT", ",\n".join(f"  {item}" for item in items), f"FROM {_identifier(spec.stream)}"]
    if spec.where is not None:
        lines.append(f"WHERE {spec.where}")
    lines.append(f"GROUP BY {', '.join([_window_text(spec.window.to_mapping()), *keys])}")
    return "\n".join(lines) + "\n"


def _options(mapping: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    for measure, limit in mapping.get("budget", {}).get("error", {}).items():
        yield f"{_ERROR}{measure}", limit
    for name, path in _OPTIONS.items():
        value: Any = mapping
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield name, value


def _literal(value: object) -> str:
    """Returns a YAML value as SQL."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, list):
        texts = [item if isinstance(item, str) else repr(item) for item in value]
        if any("," in text or text != text.strip() for text in texts):
            return f"ARRAY[{', '.join(map(_literal, value))}]"
        return _literal(", ".join(texts))
    if isinstance(value, Mapping):
        return _literal(json.dumps(value, ensure_ascii=False))
    return repr(value)


def _identifier(name: str) -> str:
    """Returns a name, in quotes unless it is a plain word."""
    read = _Tokenizer(dialect=_DIALECT).tokenize(name) if NAME.fullmatch(name) else []
    is_plain = [t.token_type for t in read] == [TokenType.VAR] and name not in _WORDS
    return name if is_plain else exp.to_identifier(name, quoted=True).sql()


_WORDS = frozenset(BoundedParser.FUNCTION_PARSERS) | frozenset({"if", "session"})
_WORDS = frozenset(word.lower() for word in _WORDS)
"""Words that the tokenizer accepts as names, but the parser does not accept everywhere."""


def _window_text(mapping: Mapping[str, str | int]) -> str:
    for function, keys in _WINDOW_KEYS.items():
        if next(iter(mapping)) in keys[:2]:
            arguments = [_interval(str(mapping[key])) for key in keys if key in mapping]
            if "zone" in mapping:
                arguments.append(exp.Literal.string(str(mapping["zone"])).sql())
            assert len(arguments) == len(mapping), mapping
            return f"{function.upper()}({', '.join(arguments)})"
    raise AssertionError(mapping)


def _interval(duration: str) -> str:
    """Converts ``90s`` to INTERVAL '90 seconds'."""
    count, suffix = re.fullmatch(r"(-?\d+) ?([a-z]+)", duration).groups()  # type: ignore[union-attr]  # format_duration
    # Calendar units are not abbreviated.
    unit = next((unit for unit, short in _UNITS.items() if short == suffix), suffix)
    return f"INTERVAL '{count} {unit}{'' if count == '1' else 's'}'"
