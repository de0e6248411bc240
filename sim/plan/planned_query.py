"""The query of a plan, read from a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from edgewater.base.errors import InvalidConfig, InvalidQuery
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlidingWindow

AGGREGATES = ("sum", "count", "min", "max")
"""The functions for which the offline optimum and the baselines are defined."""
SIMULATED = (*AGGREGATES, "mean", "var")
"""Functions that may be in the same entry as the evaluated measure."""


def read_query(file: Path) -> QuerySpec:
    """Returns the query of a file, with the evaluated measure first.

    That is the measure of the error budget, or the first measure that can be evaluated.

    Raises:
        InvalidConfig, InvalidQuery: names the field, its value and what is accepted.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidConfig("--query", str(file), "a readable YAML file with a query", str(exc)) from exc
    query = QuerySpec.from_yaml(text)
    evaluated = _evaluated(query)
    if evaluated.function.name not in AGGREGATES:
        accepted = f"a measure by one of {', '.join(AGGREGATES)}"
        reason = "the offline optimum is not defined for it"
        raise InvalidQuery(f"measures.{evaluated.name}", evaluated.to_text(), accepted, reason)
    if not isinstance(query.window, SlidingWindow) or not query.window.is_tumbling:
        raise InvalidQuery("window", query.window.to_mapping(), "tumbling windows, such as {tumbling: 60s}")
    others = [m for m in query.measures if m.function.name in SIMULATED and m.name != evaluated.name]
    # The simulation has no late records, no missing edges and no early answers.
    return replace(query, measures=(evaluated, *others), lateness_ms=0, edges=None, accuracy=None)


def free_name(name: str, taken: Collection[str]) -> str:
    """Returns the name, with underscores behind it until it is not taken."""
    while name in taken:
        name += "_"
    return name


def _evaluated(query: QuerySpec) -> Measure:
    by_name = {m.name: m for m in query.measures}
    if query.error_budget is not None:
        budgeted = [n for n, _ in (*query.error_budget.limits, *query.error_budget.relative)]
        able = [n for n in budgeted if by_name[n].function.name in AGGREGATES]
        return by_name[(able or budgeted)[0]]
    return next((m for m in query.measures if m.function.name in AGGREGATES), query.measures[0])


def omitted_measures(path: Path, query: QuerySpec) -> list[str]:
    """Returns the measures of the file's query that are not simulated."""
    kept = {m.name for m in query.measures}
    return [f"{m.name}: {m.to_text()}" for m in QuerySpec.from_yaml(path.read_text()).measures if m.name not in kept]
