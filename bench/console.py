"""The console in a real browser: how soon an answer is drawn, what a tab costs, how large it is, and when it paints.

    python -m bench.console [--smoke] [--json FILE]

`commit_to_drawn_ms`: from the end of the transaction that commits an answer until the chart has drawn it. `core_share`:
CPU time of the browser's renderer over wall time, while `--queries` queries of `--groups` groups are live in one tab,
each answered once a second. The answers are in the store before, and are shown to the API one after the other.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from bench.outcome import store_result
from center.api import console
from center.results import AnswerChanges, AnswerRecord, NewestAnswers, ResultStore
from edgewater.answers import Phase
from edgewater.base.streams import MAX_TIME_MS
from edgewater.wire import QueryRef
from tests.center.api.conftest import HOUR, T0, Desk

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


@contextmanager
def new_desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder))
        yield desk
        for store in (desk.catalog, desk.components, desk.results):
            store.close()


def until(page: Any, expression: str, argument: Any = None) -> Any:
    return page.wait_for_function(expression, arg=argument, timeout=60_000).json_value()


def drawn_after_commit(chromium: Any, answers: int) -> list[float]:
    """Returns milliseconds from commit to drawn, per answer."""
    took = []
    with new_desk() as desk:
        desk.now = time.time_ns() // 1_000_000
        desk.connect("jfk")
        query = desk.register(edges=["jfk"])
        desk.report(query, "jfk", T0, {"UA": 5})
        with desk.served() as url:
            page = chromium.new_page()
            page.goto(f"{url}/ui/queries/flights")
            until(
                page,
                "() => document.querySelector('[data-live=live]') && document.querySelector('.chart')?.dataset.drawn",
            )
            for hour in range(1, answers + 1):
                time.sleep(0.15 + 0.05 * (hour % 5))  # so that answers are not in step with the poll or the redraws
                desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 5 + hour % 7, "AA": 2})
                committed = time.time_ns() / 1e6
                at = until(
                    page,
                    "(n) => { const [t, seen] = document.querySelector('.chart').dataset.drawn.split(':').map(Number);"
                    " return seen > n && t; }",
                    hour,
                )
                took.append(at - committed)
            page.close()
    return took


class Unveiled:
    """A result store whose readers of streams see only the answers up to `newest`."""

    def __init__(self, results: ResultStore) -> None:
        self._results = results
        self.newest = results.last_answer_id()

    def last_answer_id(self) -> int:
        return self.newest

    def newest_answers(self, after: int) -> NewestAnswers:
        return NewestAnswers(self.newest)

    def changes_after(self, after: int, limit: int, ref: QueryRef | None = None) -> AnswerChanges:
        changes = self._results.changes_after(after, limit, ref)
        return replace(changes, records=[a for a in changes.records if a.answer_id <= self.newest])

    def latest(self, ref: QueryRef, min_phase: Phase = Phase.EARLY, until_ms: int = MAX_TIME_MS) -> AnswerRecord | None:
        return self._results.answer(ref, T0, 1)


def renderer_share(chromium: Any, queries: int, groups: int, seconds: float) -> dict[str, float]:
    """Returns CPU of the browser's processes over wall time, with this many live queries; and the answers per
    second.
    """
    flights: dict[str | None, int] = {f"C{i:03}": 1 + i % 3 for i in range(groups)}
    with new_desk() as desk:
        desk.connect("jfk")
        registered = [desk.register(name=f"q{i:03}", edges=["jfk"], measures={"n": "count()"}) for i in range(queries)]
        for query in registered:
            desk.report(query, "jfk", T0, flights)
        shown = Unveiled(desk.results)
        for hour in range(1, round(seconds) + 1):
            for query in registered:
                desk.report(query, "jfk", T0 + hour * HOUR, flights)
        app = desk.app()
        services = app.state.services
        object.__setattr__(services.feed, "results", shown)
        services.feed.changes._read = shown.newest_answers
        desk.app = lambda **_: app  # type: ignore[method-assign]
        with desk.served() as url:
            page = chromium.new_page()
            page.goto(f"{url}/ui/")
            until(page, "(n) => document.querySelectorAll('tr[data-given]').length === n", queries)
            time.sleep(1)
            tab = [p for p in psutil.Process().children(recursive=True) if "--type=renderer" in p.cmdline()]

            def spent() -> float:
                return sum(p.cpu_times().user + p.cpu_times().system for p in tab)

            page.evaluate("async () => { window.live = (await import('/ui/api.js')).live; }")
            first, last = shown.newest, desk.results.last_answer_id()
            began, cpu = time.monotonic(), spent()
            while shown.newest < last:
                shown.newest = min(last, first + round((time.monotonic() - began) * queries))
                time.sleep(0.005)
            until(page, "(last) => Number(live.lastId) >= last", last)
            wall = time.monotonic() - began
            share, given = (spent() - cpu) / wall, last - first
            page.close()
    return {"core_share": share, "answers_per_s": given / wall}


def first_paint(chromium: Any, loads: int) -> list[float]:
    with new_desk() as desk, desk.served() as url:
        took = []
        for _ in range(loads):
            page = chromium.new_page()
            page.goto(f"{url}/ui/")
            took.append(until(page, "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
            page.close()
    return took


def percentile(values: list[float], q: float) -> float:
    return round(float(np.percentile(values, q)), 1)


@click.command()
@click.option("--smoke", is_flag=True, help="Small numbers, to see that it runs.")
@click.option("--queries", default=100, show_default=True)
@click.option("--groups", default=200, show_default=True)
@click.option("--answers", default=100, show_default=True, help="For the latency.")
@click.option("--seconds", default=20.0, show_default=True, help="For the CPU.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(smoke: bool, queries: int, groups: int, answers: int, seconds: float, path: Path | None) -> None:
    if smoke:
        queries, groups, answers, seconds = 3, 10, 2, 0.3
    folder = Path(console.__file__).parent / "ui"
    files = [path.read_bytes() for path in folder.rglob("*") if path.name.endswith(console.SENT)]
    report: dict[str, Any] = {"gzipped_bytes": sum(len(gzip.compress(body)) for body in files), "files": len(files)}
    if CHROMIUM is None:
        print("no Chromium on this machine: only the size is measured")
    else:
        with browser() as chromium:
            paints = first_paint(chromium, 2 if smoke else 10)
            drawn = drawn_after_commit(chromium, answers)
            report |= {
                "first_paint_ms_p50": percentile(paints, 50),
                "first_paint_ms_max": percentile(paints, 100),
                "commit_to_drawn_ms_p50": percentile(drawn, 50),
                "commit_to_drawn_ms_p95": percentile(drawn, 95),
                "queries": queries,
                "groups": groups,
                **{k: round(v, 3) for k, v in renderer_share(chromium, queries, groups, seconds).items()},
            }
    print(json.dumps(report, indent=2) if path is None else store_result(path, report))


if __name__ == "__main__":
    main()
