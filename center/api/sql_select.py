"""Checks a SELECT over tables of answers before it runs: its tables, its functions, the windows that it reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import SqlglotError

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.model.syntax import BoundedParser, TooManySteps, syntax_error

MAX_TOKENS = 10_000  # limit: time of parsing
MAX_TABLES = 16  # limit: memory of a statement
_NODES = (
    exp.And, exp.Or, exp.Xor, exp.Case, exp.If, exp.Coalesce, exp.Nullif, exp.Cast, exp.TryCast, exp.Exists, exp.Array,
    exp.Count, exp.CountIf, exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Median, exp.Stddev, exp.StddevPop, exp.StddevSamp,
    exp.Variance, exp.VariancePop, exp.Corr, exp.Quantile, exp.PercentileCont, exp.PercentileDisc, exp.ApproxQuantile,
    exp.ApproxDistinct, exp.ArgMax, exp.ArgMin, exp.AnyValue, exp.First, exp.Last, exp.LogicalAnd, exp.LogicalOr,
    exp.GroupConcat, exp.ArrayAgg,
    exp.RowNumber, exp.Rank, exp.DenseRank, exp.PercentRank, exp.CumeDist, exp.Ntile, exp.Lag, exp.Lead,
    exp.FirstValue, exp.LastValue, exp.NthValue,
    exp.Abs, exp.Ceil, exp.Floor, exp.Round, exp.Sqrt, exp.Ln, exp.Log, exp.Exp, exp.Pow, exp.Sign, exp.Greatest,
    exp.Least, exp.IsNan, exp.IsInf,
    exp.Lower, exp.Upper, exp.Trim, exp.Length, exp.Substring, exp.Left, exp.Right, exp.SplitPart, exp.Replace,
    exp.Concat, exp.StartsWith, exp.EndsWith, exp.Contains, exp.RegexpLike, exp.RegexpExtract, exp.RegexpReplace,
    exp.TimestampTrunc, exp.DateTrunc, exp.DateBin, exp.DateDiff, exp.Extract, exp.Year, exp.Quarter, exp.Month,
    exp.Week, exp.Day, exp.Hour, exp.Minute, exp.Second, exp.DayOfWeek, exp.DayOfYear, exp.TimeToStr, exp.UnixToTime,
    exp.CurrentTimestamp, exp.Unnest, exp.Explode,
)  # fmt: skip
"""The functions that a SELECT may call, as sqlglot names them. They read only their arguments."""
_NAMES = ("now", "epoch_ms", "list_sum", "list_avg", "list_max", "list_min", "last", "bool_and", "bool_or")
"""Functions that a SELECT may call and that sqlglot has no class for."""
_BOUNDS = {exp.GTE: ("start", 0), exp.GT: ("start", 0), exp.LT: ("end", 1), exp.LTE: ("end", 1)}


class _Parser(BoundedParser, DuckDB.parser_class):  # type: ignore[misc]  # sqlglot is not typed
    """DuckDB's parser with bounded work."""


@dataclass(frozen=True, slots=True)
class CheckedSelect:
    """A SELECT that may run.

    Attributes:
        text: DuckDB's SQL, written from the syntax tree that was checked.
        tables: the queries that it reads.
        start_ms, end_ms: it uses only windows that start in [start_ms, end_ms); None: open.
    """

    text: str
    tables: tuple[str, ...]
    start_ms: int | None = None
    end_ms: int | None = None


def check_select(text: str) -> CheckedSelect:
    """Returns the SELECT of a text.

    Raises:
        InvalidQuery: it is no single SELECT, calls a function that is not on the list, or reads a table that is no
            query.
    """
    tree = _parsed(text)
    if not isinstance(tree, exp.Query) or isinstance(tree, exp.Values | exp.Pivot):
        raise InvalidQuery("sql", text, "a single SELECT over queries")
    for node in tree.walk():
        _check_node(node)
    aliases = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    read = [name for table in tree.find_all(exp.Table) if (name := table.name.lower()) not in aliases]
    tables = tuple(dict.fromkeys(read))
    if len(tables) > MAX_TABLES:
        raise InvalidQuery("sql", len(tables), f"a SELECT over at most {MAX_TABLES} queries")
    bounds = _window_bounds(tree) if len(read) == 1 and not aliases else {}
    return CheckedSelect(tree.sql(dialect="duckdb"), tables, bounds.get("start"), bounds.get("end"))


def _parsed(text: str) -> exp.Expression:
    accepted = "a SELECT in the SQL of DuckDB"
    dialect = DuckDB()
    try:
        tokens = dialect.tokenize(text)
        if len(tokens) > MAX_TOKENS:
            raise InvalidQuery("sql", text, f"at most {MAX_TOKENS} tokens", f"it has {len(tokens)}")
        trees = [tree for tree in _Parser(dialect=dialect).parse(tokens, text) if tree is not None]
    except TooManySteps:
        raise InvalidQuery("sql", text, accepted, "it is ambiguous to the parser at every level") from None
    except RecursionError:
        raise InvalidQuery("sql", text, "a statement with fewer nested terms") from None
    except SqlglotError as exc:
        raise InvalidQuery("sql", text, accepted, syntax_error(exc)) from exc
    if len(trees) != 1:
        raise InvalidQuery("sql", text, "one statement", f"it has {len(trees)}")
    return trees[0]


def _check_node(node: exp.Expression) -> None:
    if isinstance(node, exp.With) and node.args.get("recursive"):
        raise InvalidQuery("sql", "WITH RECURSIVE", "WITH without RECURSIVE")
    if isinstance(node, exp.Table):
        plain = isinstance(node.this, exp.Identifier) and not node.args.get("db") and not node.args.get("version")
        if not plain:
            raise InvalidQuery("sql", node.sql(dialect="duckdb"), "the name of a query after FROM")
    elif isinstance(node, exp.Command | exp.DDL | exp.DML | exp.Into | exp.Placeholder | exp.Parameter):
        if not isinstance(node, exp.Query):
            raise InvalidQuery("sql", node.sql(dialect="duckdb"), "a single SELECT over queries")
    elif isinstance(node, exp.Func):
        name = node.name.lower() if isinstance(node, exp.Anonymous) else node.sql_name().lower()
        allowed = name in _NAMES if isinstance(node, exp.Anonymous) else type(node) in _NODES
        if not allowed:
            known = sorted({*(n for kind in _NODES for n in kind.sql_names()), *map(str.upper, _NAMES)})
            accepted = f"functions of this list: {', '.join(known)}"
            reason = f"the function {name} is not on the list{did_you_mean(name, map(str.lower, known))}"
            raise InvalidQuery("sql", node.sql(dialect="duckdb"), accepted, reason)


def _window_bounds(tree: exp.Expression) -> dict[str, int]:
    """Returns the bounds of window_start that WHERE states, so that only these windows are read."""
    bounds: dict[str, int] = {}
    where, source = tree.args.get("where"), tree.args.get("from_")
    reads_query = isinstance(tree, exp.Select) and source is not None and isinstance(source.this, exp.Table)
    if where is None or not reads_query or tree.args.get("joins"):
        return bounds
    for part in where.this.flatten() if isinstance(where.this, exp.And) else [where.this]:
        if type(part) not in _BOUNDS or not isinstance(part.this, exp.Column) or part.this.name != "window_start":
            continue
        millis = _time_ms(part.expression)
        if millis is not None:
            end, added = _BOUNDS[type(part)]
            choose = max if end == "start" else min
            bounds[end] = choose(bounds.get(end, millis + added), millis + added)
    return bounds


def _time_ms(node: exp.Expression) -> int | None:
    """Returns the time of a literal in ms; None: it is no literal, or DuckDB might read it differently from Python."""
    literal = node.this if isinstance(node, exp.Cast) else node
    if not isinstance(literal, exp.Literal) or not literal.is_string:
        return None
    try:
        time = datetime.fromisoformat(literal.name)
    except ValueError:
        return None
    since = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000
