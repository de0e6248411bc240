"""The query that a plan is made for: from a file, or from a few flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgewater.errors import InvalidConfig, InvalidQuery
from edgewater.measure import Measure
from edgewater.quantities import duration_ms, format_duration
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.windows import SlidingWindow, TumblingWindow

AGGREGATES = ("sum", "count", "min", "max")
"""Those whose errors the offline optimum and the baselines are defined for."""
CARRIED = (*AGGREGATES, "mean", "var")
"""What may be in the same entry as the measure that is judged."""
ROUND_WINDOWS = ("1s", "5s", "10s", "30s", "1m", "5m", "10m", "30m", "1h", "6h", "1d")
ENOUGH_WINDOWS = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say about the query; None and empty: nothing."""

    file: Path | None = None
    keys: tuple[str, ...] = ()
    value: str | None = None
    aggregate: str | None = None
    window: str | None = None
    measure: str | None = None


def read_query(asked: Asked) -> QuerySpec:
    """The query, its first measure being the one that is judged; without one that is asked for, the window is
    one millisecond and to be chosen later (`chosen_window`).

    Raises:
        InvalidConfig, InvalidQuery: names the field, its value and what is accepted.
    """
    query = _from_flags(asked) if asked.file is None else _from_file(asked.file, asked)
    if asked.aggregate is not None and asked.aggregate not in AGGREGATES:
        raise InvalidConfig("--aggregate", asked.aggregate, f"one of {', '.join(AGGREGATES)}")
    judged = query.measures[0]
    if judged.function.name not in AGGREGATES:
        raise InvalidQuery(
            f"measures.{judged.name}", judged.to_text(), f"a measure by one of {', '.join(AGGREGATES)}",
            "its error against the offline optimum is not defined; choose another one by --measure",
        )  # fmt: skip
    if not isinstance(query.window, SlidingWindow) or not query.window.is_tumbling:
        raise InvalidQuery("window", query.window.to_mapping(), "tumbling windows, such as {tumbling: 60s}")
    return query


def _from_flags(asked: Asked) -> QuerySpec:
    if asked.measure is not None:
        raise InvalidConfig("--measure", asked.measure, "--aggregate and --value, or a --query that has measures")
    aggregate = asked.aggregate or ("count" if asked.value is None else "sum")
    if aggregate in AGGREGATES and aggregate != "count" and asked.value is None:
        raise InvalidConfig("--value", None, f"the column of which the {aggregate} is taken")
    if aggregate not in AGGREGATES:
        raise InvalidConfig("--aggregate", aggregate, f"one of {', '.join(AGGREGATES)}")
    window = 1 if asked.window is None else duration_ms(asked.window, "--window", InvalidConfig, minimum_ms=1)
    return QuerySpec(
        "plan", "trace", (_measure(_free("measured", asked.keys), aggregate, asked.value),), TumblingWindow(window),
        group_by=_distinct(asked.keys),
    )  # fmt: skip


def _free(name: str, taken: tuple[str, ...]) -> str:
    while name in taken:
        name += "_"
    return name


def _distinct(keys: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(keys)) != len(keys):
        raise InvalidConfig("--key", list(keys), "each column once")
    return keys


def _measure(name: str, aggregate: str, value: str | None) -> Measure:
    # A column may be called anything, such as "bytes sent": quoted it is a column all the same.
    return Measure.parse(
        name, "count()" if aggregate == "count" else f'{aggregate}("{(value or "").replace(chr(34), chr(34) * 2)}")'
    )


def _from_file(path: Path, asked: Asked) -> QuerySpec:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidConfig("--query", str(path), "a query as YAML that can be read", str(exc)) from exc
    query = QuerySpec.from_yaml(text)
    measures = [m for m in query.measures if m.function.name in CARRIED]
    judged = _judged(query, asked.measure)
    if asked.value is not None or asked.aggregate is not None:
        replaced = _measure(judged.name, asked.aggregate or judged.function.name, asked.value or judged.argument)
        if asked.value is None and judged.argument is not None:
            replaced = Measure.parse(judged.name, f"{asked.aggregate}({judged.argument})")
        measures, judged = [replaced if m.name == judged.name else m for m in measures], replaced
    keys = _distinct(asked.keys) or query.group_by
    window = query.window
    if asked.window is not None:
        window = TumblingWindow(duration_ms(asked.window, "--window", InvalidConfig, minimum_ms=1))
    # What does not matter to one replay of all edges: how late records may be, who is expected, shards; and
    # an accuracy, which is about what has not arrived.
    return replace(
        query, measures=(judged, *[m for m in measures if m.name != judged.name]), group_by=keys, window=window,
        lateness_ms=0, edges=None, shards=1, accuracy=None,
    )  # fmt: skip


def _judged(query: QuerySpec, name: str | None) -> Measure:
    """The one asked for; or that of the error budget; or the first that can be."""
    by_name = {m.name: m for m in query.measures}
    if name is not None:
        if name not in by_name:
            raise InvalidConfig("--measure", name, f"one of the query's measures {', '.join(by_name)}")
        return by_name[name]
    if isinstance(query.budget, ErrorBudget):
        named = [n for n, _ in (*query.budget.limits, *query.budget.relative)]
        able = [n for n in named if by_name[n].function.name in AGGREGATES]
        return by_name[(able or named)[0]]
    return next((m for m in query.measures if m.function.name in AGGREGATES), query.measures[0])


def left_out(path: Path, query: QuerySpec) -> list[str]:
    """The measures of the file's query that are not simulated."""
    kept = {m.name for m in query.measures}
    return [f"{m.name}: {m.to_text()}" for m in QuerySpec.from_yaml(path.read_text()).measures if m.name not in kept]


def chosen_window(span_ms: int) -> str:
    """The longest round window of which there are enough in the trace."""
    fitting = [w for w in ROUND_WINDOWS if span_ms // duration_ms(w, "--window") >= ENOUGH_WINDOWS]
    return fitting[-1] if fitting else format_duration(max(span_ms // (ENOUGH_WINDOWS + 2), 1))
