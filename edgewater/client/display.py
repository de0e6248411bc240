"""Shows answers in a notebook: a table with intervals, and a band as inline SVG. Texts of answers are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from edgewater.client.interval import Interval, shown
from edgewater.model.key_texts import key_text

if TYPE_CHECKING:
    from edgewater.client.answers import Answer, Answers

ROWS = 20
"""The number of groups, or windows, that a table shows."""
LINES = 5
"""The number of groups that a chart draws. They are the groups with the widest intervals."""
COLORS = ("#3366cc", "#dc3912", "#109618", "#990099", "#ff9900")
_WIDTH, _HEIGHT, _BAR = 640, 160, 160


def answer_html(answer: Answer) -> str:
    """Returns an answer as HTML, a row per group. Each measure has its interval and a bar, with one scale per
    measure.
    """
    contract = answer.contract if answer.contract_met else f"not met: {answer.contract}"
    head = (
        f"<b>{escape(answer.query)}</b> {escape(answer.members['window']['start'])}, {answer.phase}, revision "
        f"{answer.revision}; completeness {shown(answer.completeness)}{escape(answer.limitations)}; confidence "
        f"{shown(answer.confidence)}; contract {escape(contract)}"
    )
    columns = [(name, answer[name].intervals) for name in answer.interval_columns]
    titles = "".join(f"<th>{escape(n)}</th>" for n in [*answer.group_by, *(n for n, _ in columns)])
    rows = []
    for at, group in enumerate(answer.groups[:ROWS]):
        cells = [f"<td>{escape(key_text(v))}</td>" for v in group.values()]
        cells += [f"<td>{escape(str(each[at]))}<br/>{_bar(each[at], each)}</td>" for _, each in columns]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    more = f"<p>and {len(answer) - ROWS} more groups</p>" if len(answer) > ROWS else ""
    return f"<div><p>{head}</p><table><tr>{titles}</tr>{''.join(rows)}</table>{more}</div>"


def answers_html(answers: Answers) -> str:
    """Returns answers as HTML: the band of a measure over the windows, and the last windows as a table."""
    if not answers.answers:
        return "<div><p>no answers</p></div>"
    last = answers.answers[-1]
    name = next((n for a in reversed(answers.answers) if len(a) for n in a.interval_columns), None)
    chart = "" if name is None else f"<p>{escape(name)}</p>{_band(answers.answers, name)}"
    rows = []
    for answer in answers.answers[-ROWS:]:
        each = [] if name is None else _intervals(answer, name)
        value = "" if not each else str(each[0]) if len(each) == 1 else f"{len(each)} groups"
        start = escape(answer.members["window"]["start"])
        rows.append(
            f"<tr><td>{start}</td><td>{answer.phase}</td><td>{shown(answer.completeness)}</td>"
            f"<td>{escape(value)}</td></tr>"
        )
    titles = f"<tr><th>window</th><th>phase</th><th>completeness</th><th>{escape(name or '')}</th></tr>"
    head = f"<b>{escape(last.query)}</b>, {len(answers)} windows"
    return f"<div><p>{head}</p>{chart}<table>{titles}{''.join(rows)}</table></div>"


def _intervals(answer: Answer, name: str) -> list[Interval]:
    """Returns the intervals of a column; nothing if it has other values."""
    return answer[name].intervals if name in answer.interval_columns else []


def _range(intervals: Sequence[Interval]) -> tuple[float, float]:
    known = [float(v) for i in intervals for v in (i.estimate, i.lower, i.upper) if v is not None and abs(v) < 1e300]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return low, high if high > low else low + 1.0


def _bar(interval: Interval, scale: Sequence[Interval]) -> str:
    """Returns a bar from the lower to the upper bound with a tick at the estimate. It is dashed if a bound is
    unknown.
    """
    low, high = _range(scale)

    def x(value: float) -> float:
        return round(4 + (_BAR - 8) * (value - low) / (high - low), 1)

    parts = []
    if interval.lower is not None and interval.upper is not None:
        parts.append(
            f'<line x1="{x(interval.lower)}" x2="{x(interval.upper)}" y1="6" y2="6" stroke="#3366cc" stroke-width="4"/>'
        )
    else:
        parts.append(f'<line x1="4" x2="{_BAR - 4}" y1="6" y2="6" stroke="#999" stroke-dasharray="3 3"/>')
    if interval.estimate is not None and abs(interval.estimate) < 1e300:
        at = x(interval.estimate)
        parts.append(f'<line x1="{at}" x2="{at}" y1="1" y2="11" stroke="currentColor"/>')
    return f'<svg width="{_BAR}" height="12" role="img" aria-label="{escape(str(interval))}">{"".join(parts)}</svg>'


def _band(answers: Sequence[Answer], name: str) -> str:
    """Returns, per group, a line through the estimates and a band between the bounds, with breaks where a bound is
    unknown.
    """
    series: dict[tuple[Any, ...], dict[int, Interval]] = {}
    for at, answer in enumerate(answers):
        for group, interval in zip(answer.groups, _intervals(answer, name), strict=False):
            series.setdefault(tuple(group.values()), {})[at] = interval
    widest = sorted(series, key=lambda g: -max(i.width for i in series[g].values()))[:LINES]
    low, high = _range([i for g in widest for i in series[g].values()])

    def point(at: int, value: float) -> str:
        x = 4 + (_WIDTH - 8) * (at + 0.5) / len(answers)
        return f"{x:.1f},{_HEIGHT - 4 - (_HEIGHT - 8) * (value - low) / (high - low):.1f}"

    parts = []
    for color, key in zip(COLORS, widest, strict=False):
        points = series[key]
        for run in _runs([at for at, i in sorted(points.items()) if i.lower is not None and i.upper is not None]):
            outline = [point(at, float(points[at].upper or 0)) for at in run]
            outline += [point(at, float(points[at].lower or 0)) for at in reversed(run)]
            parts.append(f'<polygon class="band" points="{" ".join(outline)}" fill="{color}" fill-opacity="0.25"/>')
        for run in _runs([at for at, i in sorted(points.items()) if i.estimate is not None]):
            line = " ".join(point(at, float(points[at].estimate or 0)) for at in run)
            label = escape(", ".join(map(str, key)) or name)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"><title>{label}</title></polyline>')
            parts += [
                f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>' for x, y in (p.split(",") for p in line.split())
            ]
    texts = ((12, high), (_HEIGHT - 2, low))
    scale = "".join(f'<text x="4" y="{y}" font-size="10">{shown(value)}</text>' for y, value in texts)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(name)}">{"".join(parts)}{scale}</svg>'
    )


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Groups consecutive positions into lists."""
    runs: list[list[int]] = []
    for at in positions:
        if runs and runs[-1][-1] == at - 1:
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs
