"""The API's documentation in a real browser: it renders, breaks no policy, and asks nobody but the API."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from center.api import pages

WITHIN_S = 120
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
)  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass(frozen=True)
class Seen:
    """What a page has become: its document, its console, and the addresses that it asked for."""

    document: str
    console: list[str]
    asked: set[str]


def open_page(chromium: str, url: str, profile: Path) -> Seen:
    requests = profile.with_suffix(".json")
    command = [
        chromium, *QUIET, f"--user-data-dir={profile}", f"--log-net-log={requests}", "--enable-logging=stderr",
        "--virtual-time-budget=10000", "--timeout=60000", "--dump-dom", url,
    ]  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, check=True, env=os.environ | {"HOME": str(profile)}
    )
    return Seen(
        ran.stdout,
        [line for line in ran.stderr.splitlines() if "CONSOLE" in line],
        _asked(json.loads(requests.read_text()), url),
    )


def _asked(log: dict, url: str) -> set[str]:
    """What a page asked for; not what the browser asks for itself."""
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    started = [event["params"] for event in log["events"] if "url" in event.get("params", {})]
    return {p["url"] for p in started if p["url"] == url or p.get("initiator") == origin}


def test_the_documentation_renders_breaks_no_policy_and_asks_no_other_host(
    desk, tmp_path: Path, chromium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with desk.served() as url:
        docs = open_page(chromium, f"{url}/docs", tmp_path / "profile")
        shown = set(re.findall(r'data-path="([^"]+)"', docs.document.replace("\u200b", "")))
        described = desk.get("/openapi.json").json()["paths"]
        assert shown == set(described)
        assert docs.console == []
        assert {f"{url}/openapi.json", f"{url}/docs/start.js"} <= docs.asked
        hosts = {urlsplit(asked).netloc for asked in docs.asked if not asked.startswith("data:")}
        assert hosts == {urlsplit(url).netloc}

        # The same with a page that does what it must not: all of it is noticed.
        bad = '<script>1</script><img src="http://other.invalid/x.png"><script src="docs/start.js"></script>'
        monkeypatch.setattr(pages, "DOCS", pages.DOCS.replace("</body>", f"{bad}</body>"))
        broken = open_page(chromium, f"{url}/docs", tmp_path / "another")
        assert sum("Content Security Policy" in line for line in broken.console) >= 2
