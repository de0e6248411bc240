"""The query of a plan, read from a file or built from flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgewater.model.errors import InvalidConfig, InvalidQuery
from edgewater.model.measure import Measure
from edgewater.model.quantities import duration_ms, format_duration
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlidingWindow, TumblingWindow

AGGREGATES = ("sum", "count", "min", "max")
"""The functions for which the offline optimum and the baselines are defined."""
SIMULATED = (*AGGREGATES, "mean", "var")
"""Functions that may be in the same entry as the evaluated measure."""
ROUND_WINDOWS = ("1s", "5s", "10s", "30s", "1m", "5m", "10m", "30m", "1h", "6h", "1d")
ENOUGH_WINDOWS = 30


@dataclass(frozen=True, slots=True)
class QueryFlags:
    """The flags that define or change the query; None or empty if not given."""

    file: Path | None = None
    keys: tuple[str, ...] = ()
    value: str | None = None
    aggregate: str | None = None
    window: str | None = None
    measure: str | None = None


def read_query(flags: QueryFlags) -> QuerySpec:
    """Returns the query, whose first measure is the evaluated one.

    Without a window in flags or file, the window is one millisecond, to be replaced later (`default_window`).

    Raises:
        InvalidConfig, InvalidQuery: names the field, its value and what is accepted.
    """
    query = _from_flags(flags) if flags.file is None else _from_file(flags.file, flags)
    if flags.aggregate is not None and flags.aggregate not in AGGREGATES:
        raise InvalidConfig("--aggregate", flags.aggregate, f"one of {', '.join(AGGREGATES)}")
    evaluated = query.measures[0]
    if evaluated.function.name not in AGGREGATES:
        raise InvalidQuery(
            f"measures.{evaluated.name}",
            evaluated.to_text(),
            f"a measure by one of {', '.join(AGGREGATES)}",
            "the offline optimum is not defined for it; select another measure with --measure",
        )
    if not isinstance(query.window, SlidingWindow) or not query.window.is_tumbling:
        raise InvalidQuery("window", query.window.to_mapping(), "tumbling windows, such as {tumbling: 60s}")
    return query


def _from_flags(flags: QueryFlags) -> QuerySpec:
    if flags.measure is not None:
        raise InvalidConfig("--measure", flags.measure, "--aggregate and --value, or a --query with measures")
    aggregate = flags.aggregate or ("count" if flags.value is None else "sum")
    if aggregate in AGGREGATES and aggregate != "count" and flags.value is None:
        raise InvalidConfig("--value", None, f"the column for {aggregate}")
    if aggregate not in AGGREGATES:
        raise InvalidConfig("--aggregate", aggregate, f"one of {', '.join(AGGREGATES)}")
    window = 1 if flags.window is None else duration_ms(flags.window, "--window", InvalidConfig, minimum_ms=1)
    return QuerySpec(
        "plan",
        "trace",
        (_measure(_free("measured", flags.keys), aggregate, flags.value),),
        TumblingWindow(window),
        group_by=_distinct(flags.keys),
    )


def _free(name: str, taken: tuple[str, ...]) -> str:
    while name in taken:
        name += "_"
    return name


def _distinct(keys: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(keys)) != len(keys):
        raise InvalidConfig("--key", list(keys), "each column once")
    return keys


def _measure(name: str, aggregate: str, value: str | None) -> Measure:
    # Quoted, because a column may have any name, such as "bytes sent".
    return Measure.parse(
        name, "count()" if aggregate == "count" else f'{aggregate}("{(value or "").replace(chr(34), chr(34) * 2)}")'
    )


def _from_file(path: Path, flags: QueryFlags) -> QuerySpec:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidConfig("--query", str(path), "a readable YAML file with a query", str(exc)) from exc
    query = QuerySpec.from_yaml(text)
    measures = [m for m in query.measures if m.function.name in SIMULATED]
    evaluated = _evaluated(query, flags.measure)
    if flags.value is not None or flags.aggregate is not None:
        replaced = _measure(
            evaluated.name, flags.aggregate or evaluated.function.name, flags.value or evaluated.argument
        )
        if flags.value is None and evaluated.argument is not None:
            replaced = Measure.parse(evaluated.name, f"{flags.aggregate}({evaluated.argument})")
        measures, evaluated = [replaced if m.name == evaluated.name else m for m in measures], replaced
    if flags.keys:
        query = replace(query, group_by=_distinct(flags.keys), computed=())
    window = query.window
    if flags.window is not None:
        window = TumblingWindow(duration_ms(flags.window, "--window", InvalidConfig, minimum_ms=1))
    # The simulation has no late records, no missing edges and no early answers.
    return replace(
        query,
        measures=(evaluated, *[m for m in measures if m.name != evaluated.name]),
        window=window,
        lateness_ms=0,
        edges=None,
        accuracy=None,
    )


def _evaluated(query: QuerySpec, name: str | None) -> Measure:
    """Returns the measure of --measure, else of the error budget, else the first supported measure."""
    by_name = {m.name: m for m in query.measures}
    if name is not None:
        if name not in by_name:
            raise InvalidConfig("--measure", name, f"one of the query's measures {', '.join(by_name)}")
        return by_name[name]
    if query.error_budget is not None:
        budgeted = [n for n, _ in (*query.error_budget.limits, *query.error_budget.relative)]
        able = [n for n in budgeted if by_name[n].function.name in AGGREGATES]
        return by_name[(able or budgeted)[0]]
    return next((m for m in query.measures if m.function.name in AGGREGATES), query.measures[0])


def omitted_measures(path: Path, query: QuerySpec) -> list[str]:
    """Returns the measures of the file's query that are not simulated."""
    kept = {m.name for m in query.measures}
    return [f"{m.name}: {m.to_text()}" for m in QuerySpec.from_yaml(path.read_text()).measures if m.name not in kept]


def default_window(span_ms: int) -> str:
    """Returns the longest round window that fits into the trace often enough."""
    fitting = [w for w in ROUND_WINDOWS if span_ms // duration_ms(w, "--window") >= ENOUGH_WINDOWS]
    return fitting[-1] if fitting else format_duration(max(span_ms // (ENOUGH_WINDOWS + 2), 1))
