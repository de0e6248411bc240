"""What the tests of running containers share: waiting, pushed records, and the truth about them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

WINDOW_S = 10
SERVICES, ROUTES = ("shop", "api"), ("/", "/cart", "/search")
Group = tuple[str, str, str]
"""Start of the window, service, route."""


def until(what: str, answer: Callable[[], Any], seconds: float) -> Any:
    """Returns the first true value of `answer`; a server that does not answer yet is waited for."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            if value := answer():
                return value
        except (httpx.TransportError, httpx.HTTPStatusError) as exc:
            last = exc
        time.sleep(0.25)
    raise AssertionError(f"{what}: not within {seconds:.0f} s; last: {last}")


def ready(url: str, client: httpx.Client) -> bool:
    return client.get(url).status_code == 200


@dataclass
class Truth:
    """Counts and sums of all records that were accepted."""

    requests: Counter[Group] = field(default_factory=Counter)
    bytes: Counter[Group] = field(default_factory=Counter)

    def push(self, client: httpx.Client, url: str, start_s: int, count: int, seconds: int = 2 * WINDOW_S) -> None:
        """Pushes `count` records whose times begin at `start_s`, spread over `seconds`."""
        lines, counted = [], []
        for i in range(count):
            at = start_s + i * seconds // count
            record = {"service": SERVICES[i % 2], "route": ROUTES[i % 3], "status": 200, "bytes": 100 + i}
            lines.append(json.dumps({"time": datetime.fromtimestamp(at, UTC).isoformat(), "latency_ms": 1.5, **record}))
            counted.append(((_start(at), record["service"], record["route"]), record["bytes"]))
        reply = client.post(
            f"{url}/v1/streams/requests", content="\n".join(lines), headers={"Content-Type": "application/x-ndjson"}
        )
        reply.raise_for_status()
        for group, size in counted:
            self.requests[group] += 1  # type: ignore[index]
            self.bytes[group] += size  # type: ignore[index]


def _start(at_s: int) -> str:
    return datetime.fromtimestamp(at_s - at_s % WINDOW_S, UTC).strftime("%FT%TZ")


def answered(client: httpx.Client, query: str, edges: int) -> Truth | None:
    """The groups of the newest answers, or None until all windows are complete, exact, and have `edges` edges."""
    answers = client.get(f"/v1/queries/{query}/windows", params={"limit": 200}).raise_for_status().json()["answers"]
    found = Truth()
    for answer in answers:
        completeness = answer["quality"]["completeness"]
        if (completeness["ratio"], completeness["expected"]) != (1.0, edges):
            return None
        for row in answer["data"]:
            group = (answer["window"]["start"], row["group"]["service"], row["group"]["route"])
            found.requests[group] = exact(row["requests"])
            found.bytes[group] = exact(row["bytes"])
    return found


def exact(value: Mapping[str, Any]) -> int:
    assert value["lower"] == value["estimate"] == value["upper"], value
    return int(value["estimate"])
