"""The console on the running demo: pictures of its pages, and how soon an answer is drawn.

    python -m bench.console_demo [--smoke] [--seconds 70] [--pictures docs/images/console] [--json FILE]

Starts `edgewater demo --stay` and opens the console at the address that it prints. While the first half of the year is
replayed, a query's page is open, and the time is taken from an answer's commit, when another reader of the result store
sees it (read every 4 ms), to the point's being drawn. Then each page is opened at two widths in both colours, and its
picture taken.
"""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from bench.console import browser, percentile, until

MEASURED = "/ui/queries/delay_by_carrier?group=%7B%22carrier%22%3A%22UA%22%7D"
PAGES = {
    "overview": "/ui/",
    "query": "/ui/queries/miles_by_destination?group=%7B%22dest%22%3A%22LAX%22%7D",
    "explain": "/ui/queries/miles_with_teterboro/2013-05-02T00:00:00Z",
    "edges": "/ui/edges?query=miles_with_teterboro",
    "budget": "/ui/budget/miles_by_destination",
    "new": "/ui/new",
    "dashboard": "/ui/dashboard?q=miles_by_destination%3Fgroup%3D%257B%2522dest%2522%253A%2522LAX%2522%257D"
    "&q=miles_landed%3Fmeasure%3Dmiles",
    "closing": "/ui/queries/miles_landed/2013-10-10T00:00:00Z",
}
"""By the name of the picture."""
READY = {
    "overview": "() => [...document.querySelectorAll('svg.spark .line')]"
    ".filter((l) => l.getAttribute('d').split('L').length > 20).length >= 4",
    "query": "() => Number(document.querySelector('.chart')?.dataset.drawn.split(':')[1]) >= 50",
    "explain": "() => document.querySelector('table.causes')",
    "edges": "() => document.querySelectorAll('table.matrix a.cell').length >= 40",
    "budget": "() => document.querySelectorAll('.stack i').length >= 3",
    "new": "() => document.querySelector('#verdict')?.dataset.checked === 'accepted'",
    "dashboard": "() => [...document.querySelectorAll('[data-panel]')]"
    ".filter((p) => Number(p.dataset.points) >= 4).length === 2",
    "closing": "() => document.querySelector('figure.closing g.phase-final')",
}
KEPT = [(name, 1280, "light") for name in PAGES] + [("query", 1280, "dark"), ("overview", 400, "light")]
"""Pictures that the documents show: (page, width in px, colour scheme)."""
COLLECT = """async () => {
    const { live } = await import('/ui/api.js');
    const take = live.handlers.answer;
    let waiting = [];
    window.drawn = [];
    live.handlers.answer = (answer) => { take(answer); waiting.push(Number(live.lastId)); };
    const chart = document.querySelector('.chart');
    new MutationObserver(() => {
        const at = Number(chart.dataset.drawn.split(':')[0]);
        window.drawn.push(...waiting.map((id) => [id, at]));
        waiting = [];
    }).observe(chart, { attributes: true, attributeFilter: ['data-drawn'] });
}"""


@contextmanager
def demo(directory: Path, seconds: float) -> Iterator[str]:
    """Starts the demo as a user does; yields the address of the console that it prints."""
    command = [sys.executable, "-m", "edgewater", "demo", "--stay", "--port", "0", "--seconds", str(seconds)]
    options = ["--directory", str(directory), "--report", str(directory / "report.json")]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        printed = []
        try:
            for line in process.stdout:
                printed.append(line)
                if found := re.search(r"look at it: (http://\S+)/ui/", line):
                    break
            else:
                raise RuntimeError("the demo ended: " + "".join(printed))
            # reads its output, so that the demo never waits for it
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


class Commits(threading.Thread):
    """Notes when each answer becomes visible in the result store."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.seen: dict[int, float] = {}
        self.done = threading.Event()

    def run(self) -> None:
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as store:
            last = 0
            while not self.done.wait(0.004):
                (newest,) = store.execute("SELECT coalesce(max(answer_id), 0) FROM answers").fetchone()
                now = time.time_ns() / 1e6
                for answer_id in range(last + 1, newest + 1):
                    self.seen[answer_id] = now
                last = newest


def reached(url: str) -> str:
    """Returns the least watermark of the edges; '': an edge has none."""
    edges = httpx.get(f"{url}/v1/edges").json()["edges"]
    marks = ["9999" if s["ended"] else s["watermark"] or "" for e in edges for s in e["streams"]
             if s["name"] == "flights"]  # fmt: skip
    return min(marks) if len(marks) == 3 else ""


def wait_for(url: str, watermark: str) -> None:
    while reached(url) < watermark:
        time.sleep(0.2)


def drawn_after_commit(chromium: Any, url: str, store: Path, end: str) -> list[float]:
    """Returns milliseconds from commit to drawn, for the answers that came until the replay reached `end`."""
    commits = Commits(store)
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    wait_for(url, "2013-01-10")
    page.goto(url + MEASURED)
    until(page, "() => document.querySelector('[data-live=live]') && document.querySelector('.chart')?.dataset.drawn")
    commits.start()
    time.sleep(1)  # answers that were there before have been seen by then
    page.evaluate(COLLECT)
    wait_for(url, end)
    drawn = page.evaluate("() => window.drawn")
    commits.done.set()
    commits.join()
    page.close()
    return [at - commits.seen[answer_id] for answer_id, at in drawn]


ALL = [(name, width, scheme) for name in PAGES for width in (1280, 400) for scheme in ("light", "dark")]


def take_pictures(chromium: Any, url: str, directory: Path, wanted: list[tuple[str, int, str]]) -> list[str]:
    """Writes a picture of each wanted page, width and colour scheme. Returns what is wrong with the pages."""
    directory.mkdir(parents=True, exist_ok=True)
    problems = []
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            size = {"width": width, "height": 800}
            context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            for name, path in PAGES.items():
                if (name, width, scheme) not in wanted:
                    continue
                page.goto(url + path)
                until(page, READY[name])
                page.mouse.move(0, 0)
                if (excess := page.evaluate("() => document.documentElement.scrollWidth - innerWidth")) > 0:
                    problems.append(f"{name} is {excess} px wider than the window of {width} px")
                page.screenshot(path=directory / f"{name}-{width}-{scheme}.png")
            context.close()
    return problems


def run(directory: Path, seconds: float, pictures: Path, wanted: list[tuple[str, int, str]]) -> dict[str, Any]:
    """Returns the figures and problems of one run of the demo."""
    with demo(directory, seconds) as url, browser() as chromium:
        drawn = drawn_after_commit(chromium, url, directory / "state" / "center" / "results.db", "2013-06-20")
        problems = take_pictures(chromium, url, pictures, wanted)
    return {
        "answers": len(drawn),
        "commit_to_drawn_ms_p50": percentile(drawn, 50),
        "commit_to_drawn_ms_p95": percentile(drawn, 95),
        "problems": problems,
    }


@click.command()
@click.option("--smoke", is_flag=True, help="A faster replay, to see that it runs.")
@click.option("--seconds", default=70.0, show_default=True, help="For the replay of the year.")
@click.option("--pictures", type=click.Path(path_type=Path), help="Keep those that the documents show.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(smoke: bool, seconds: float, pictures: Path | None, path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder) / "demo", 40.0 if smoke else seconds, Path(folder), KEPT if pictures else ALL)
        for name, width, scheme in KEPT if pictures else ():
            suffix = "-narrow" if width < 1000 else ""
            taken = Path(folder) / f"{name}-{width}-{scheme}.png"
            taken.replace(pictures / f"{name}{suffix}{'' if scheme == 'light' else '-dark'}.png")
    print(json.dumps(report, indent=2))
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
