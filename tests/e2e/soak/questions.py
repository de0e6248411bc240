"""The queries of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.e2e.soak.plan import Episode

STALENESS_MS = 1500
CHANGED = "changed"
"""The query that gets a second version."""


def second_version(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns what the query becomes: other groups, other measures, windows of twice the length."""
    size_ms = int(spec["window"]["tumbling"].removesuffix("ms"))
    changed = {"measures": {"rows": "count()", "ids": "sum(n)"}, "window": {"tumbling": f"{2 * size_ms}ms"}}
    return {**spec, **changed, "group_by": ["k", "src"]}


def specs(episode: Episode, stream: str, edges: Sequence[str]) -> list[dict[str, Any]]:
    """The exact query, which every episode has, and the drawn ones; names begin with the stream's."""
    window = {"tumbling": f"{episode.window_ms}ms"}
    lateness = f"{episode.lateness_ms}ms"
    common: dict[str, Any] = {"from": stream, "window": window, "lateness": lateness}
    if episode.listed:
        common["edges"] = list(edges)
    sliding = {"sliding": f"{2 * episode.window_ms}ms", "every": f"{episode.window_ms}ms"}
    each = {
        "exact": {
            "group_by": ["k", "src"],
            "measures": {
                "rows": "count()", "ids": "sum(n)", "total": "sum(v)", "least": "min(v)", "most": "max(v)",
                "average": "mean(p)", "spread": "var(p)", "float": "sum(x)",
            },
        },
        "logs": {"group_by": ["k"], "measures": {"logs": "sum(ln(z))", "top": "max(ln(z))", "low": "min(ln(z))"}},
        "budget": {
            "group_by": ["k", "src"],
            "measures": {"rows": "count()", "total": "sum(v)", "most": "max(v)"},
            "budget": {"error": {"rows": 2, "total": 800, "most": 200}},
        },
        "budget_logs": {
            "group_by": ["k"],
            "measures": {"logs": "sum(ln(z))", "top": "max(ln(z))"},
            "budget": {"error": {"logs": 8, "top": 1}},
        },
        "stale": {
            "group_by": ["k", "src"],
            "measures": {"rows": "count()", "total": "sum(p)", "most": "max(v)"},
            "budget": {"staleness": f"{STALENESS_MS}ms"},
        },
        "early": {"measures": {"total": "sum(p)"}, "accuracy": {"error": "5%", "confidence": "95%"}},
        "sliding": {"where": "v > 100", "group_by": ["k"], "measures": {"rows": "count()", "most": "max(v)"},
                    "window": sliding},
        "session": {"measures": {"rows": "count()", "total": "sum(p)"}, "window": {"session": "300ms", "max": "3s"}},
        "sketch": {"group_by": ["k"], "measures": {"ids": "distinct(n)", "x": "quantiles(x)"}},
        "late_query": {"group_by": ["src"], "measures": {"rows": "count()", "ids": "sum(n)"}},
        CHANGED: {"group_by": ["src"], "measures": {"rows": "count()", "total": "sum(v)"}},
    }  # fmt: skip
    wanted = ["exact", *episode.queries]
    if "late-query" in episode.kinds:
        wanted.append("late_query")
    if "put" in episode.kinds:
        wanted.append(CHANGED)
    return [{"name": f"{stream}_{name}", **common, **each[name]} for name in wanted]
