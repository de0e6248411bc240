"""The console on the running demo: pictures of its pages.

    python -m bench.console_demo [--smoke] [--seconds 70] [--pictures docs/images/console]

Starts `edgewater demo --stay` and opens the console at the address that it prints. When half of the year has been
replayed, each page is opened at two widths in both colours, and its picture taken.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from bench.console import browser, until

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


@contextmanager
def demo(directory: Path, seconds: float) -> Iterator[str]:
    """Starts the demo as a user does; yields the address of the console that it prints."""
    command = [sys.executable, "-m", "edgewater", "demo", "--stay", "--port", "0", "--seconds", str(seconds)]
    command += ["--directory", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
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


def reached(url: str) -> str:
    """Returns the least watermark of the edges; '': an edge has none."""
    edges = httpx.get(f"{url}/v1/edges").json()["edges"]
    marks = ["9999" if s["ended"] else s["watermark"] or "" for e in edges for s in e["streams"]
             if s["name"] == "flights"]  # fmt: skip
    return min(marks) if len(marks) == 3 else ""


def wait_for(url: str, watermark: str) -> None:
    while reached(url) < watermark:
        time.sleep(0.2)


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


def run(directory: Path, seconds: float, pictures: Path, wanted: list[tuple[str, int, str]]) -> list[str]:
    """Takes the pictures on one run of the demo. Returns what is wrong with the pages."""
    with demo(directory, seconds) as url, browser() as chromium:
        wait_for(url, "2013-06-20")
        return take_pictures(chromium, url, pictures, wanted)


@click.command()
@click.option("--smoke", is_flag=True, help="A faster replay, to see that it runs.")
@click.option("--seconds", default=70.0, show_default=True, help="For the replay of the year.")
@click.option("--pictures", type=click.Path(path_type=Path), help="Keep those that the documents show.")
def main(smoke: bool, seconds: float, pictures: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        problems = run(Path(folder) / "demo", 40.0 if smoke else seconds, Path(folder), KEPT if pictures else ALL)
        for name, width, scheme in KEPT if pictures else ():
            suffix = "-narrow" if width < 1000 else ""
            taken = Path(folder) / f"{name}-{width}-{scheme}.png"
            taken.replace(pictures / f"{name}{suffix}{'' if scheme == 'light' else '-dark'}.png")
    print(json.dumps({"problems": problems}, indent=2))


if __name__ == "__main__":
    main()
