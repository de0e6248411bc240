"""`edgewater edge top`: shows one agent by requests to its own address, without a center."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.text import Text

from edge.config import load_config
from edgewater.base.errors import EdgewaterError, InvalidConfig, ProtocolError, plain
from edgewater.runtime.configuration import split_address
from edgewater.runtime.http_exchange import failure
from edgewater.runtime.terminal import show_again, table

PREFIX = "edgewater_edge_"
Samples = dict[str, dict[tuple[str, ...], float]]
"""Values of metrics, by the metric's name without its prefix, then by the values of its labels. The stream is first."""


class AgentUnreachable(EdgewaterError):
    """The agent does not answer."""


def _metrics_url(where: str) -> str:
    """Returns the base URL of an agent's /metrics and /readyz, from its address, with or without a scheme, or from its
    configuration file.

    Raises InvalidConfig.
    """
    if Path(where).is_file():
        http = load_config(Path(where)).http
        return f"http://{http.metrics}" if http.metrics else f"{'https' if http.tls else 'http'}://{http.listen}"
    if where.startswith(("http://", "https://")):
        return where.rstrip("/")
    try:
        split_address(where)
    except ValueError:
        accepted = "the agent's configuration file, or its address: 127.0.0.1:7410 or http://127.0.0.1:7410"
        raise InvalidConfig("AGENT", where, accepted) from None
    return f"http://{where}"


def _get(client: httpx.Client, url: str) -> httpx.Response:
    try:
        return client.get(url)
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        raise AgentUnreachable(f"cannot reach the agent at {url}: {failure(exc)}; does it run?") from None


def samples(client: httpx.Client, metrics_url: str) -> Samples:
    """Returns the agent's metrics.

    Raises:
        AgentUnreachable: nothing answers.
        ProtocolError: the server that answers is no agent.
    """
    url = f"{metrics_url}/metrics"
    response = _get(client, url)
    found: Samples = {}
    try:
        for family in text_string_to_metric_families(response.text if response.is_success else ""):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name.removeprefix(PREFIX)
                    labels = sorted(sample.labels.items(), key=lambda label: label[0] != "stream")
                    found.setdefault(name, {})[tuple(value for _, value in labels)] = sample.value
    except ValueError:
        found = {}
    if not found:
        raise ProtocolError(
            f"{url}: status {response.status_code} and no metric of an agent; is it an agent's address?"
        )
    return found


def look(client: httpx.Client, metrics_url: str) -> dict[str, Any]:
    """Returns the agent's state as JSON."""
    found = samples(client, metrics_url)
    ready = _get(client, f"{metrics_url}/readyz")

    def by_name(metric: str) -> dict[str, float]:
        return {"/".join(labels): value for labels, value in sorted(found.get(metric, {}).items())}

    def one(metric: str) -> float | None:
        return found.get(metric, {}).get(())

    sources = _sources(client, metrics_url)

    def by_reason(kind: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for source in sources:
            for reason, records in source.get(kind, {}).items():  # an agent of 0.3.0 has no guesses
                key = f"{source['stream']}/{reason}"
                counts[key] = counts.get(key, 0) + records
        return counts

    return {
        "ready": ready.status_code == 200,
        "not_ready": [] if ready.status_code == 200 else _reasons(ready),
        "connected": one("connected") == 1.0,
        "retired": one("retired") == 1.0,
        "records": by_name("records_total"),
        "watermarks": by_name("watermark_seconds"),
        "rejected": by_reason("rejected"),
        "guessed": by_reason("guessed"),
        "sources": sources,
        "dropped": by_name("dropped_records_total"),
        "input_losses": by_name("input_losses_total"),
        "refused": by_name("refused_total"),
        "query_bytes": by_name("query_bytes"),
        "query_cost_seconds": by_name("query_cost_seconds"),
        **{name: one(name) for name in GAUGES},
        "frames": one("frames_total"),
    }


GAUGES = tuple(
    (
        "queries limited_queries backlog_bytes pending_bytes journal_bytes bandwidth_bytes_per_second rtt_seconds "
        "busy_share backfill_records clock_step_seconds"
    ).split()
)


def _reasons(response: httpx.Response) -> list[str]:
    try:
        body = response.json()
        return [str(reason) for reason in body["missing"]]
    except (ValueError, KeyError, TypeError):
        return [response.text[:200]]


def _sources(client: httpx.Client, metrics_url: str) -> list[dict[str, Any]]:
    """Returns the status of each source, as `edge.source_status.SourceStatus.to_json`. Raises ProtocolError."""
    url = f"{metrics_url}/v1/sources"
    response = _get(client, url)
    try:
        return list(response.json()["sources"])
    except (ValueError, KeyError, TypeError):
        raise ProtocolError(f"{url}: status {response.status_code}; is it an agent of this release?") from None


def top(where: str, interval_s: float, once: bool, as_json: bool) -> None:
    """Shows an agent's state once, or until Ctrl-C."""
    metrics_url = _metrics_url(where)
    with httpx.Client(timeout=10, trust_env=False) as client:
        if as_json:
            click.echo(json.dumps(look(client, metrics_url)))
            return
        last = list[tuple[Mapping[str, Any], float]]()

        def view() -> Group:
            before, at = last[0] if last else (None, 0.0)
            state, now = look(client, metrics_url), time.monotonic()
            last[:] = [(state, now)]
            return _view(state, before, now - at)

        show_again(view, interval_s, once)


def _view(state: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Group:
    def rate(stream: str, records: float) -> str:
        if before is None or seconds <= 0:
            return ""
        return f"{(records - before['records'].get(stream, 0)) / seconds:.0f}"

    ready = "ready" if state["ready"] else "not ready: " + "; ".join(state["not_ready"])
    link = "connected" if state["connected"] else "not connected"
    records = [
        (name, f"{n:.0f}", rate(name, n), _time(state["watermarks"].get(name))) for name, n in state["records"].items()
    ]
    lost = [
        (kind, name, f"{n:.0f}")
        for kind in ("rejected", "guessed", "dropped", "input_losses", "refused")
        for name, n in state[kind].items()
        if n
    ]
    queries = [_query_row(state, name) for name in sorted(state["query_bytes"])]
    gauges = [(name, "?" if state[name] is None else f"{state[name]:g}") for name in (*GAUGES, "frames")]
    earlier = {(s["stream"], s["source"]): s["records"] for s in before["sources"]} if before else {}
    sources = [_source_row(source, earlier, seconds) for source in state["sources"]]
    return Group(
        Text(plain(f"{ready}; {link}{'; retired' if state['retired'] else ''}")),
        table(("stream", "records", "per second", "watermark"), records, "records in"),
        table(list(sources[0]), [list(row.values()) for row in sources], "sources") if sources else Text("no source"),
        table(("kind", "reason", "records"), lost, "not counted, or counted on a guess")
        if lost
        else Text("every record is counted"),
        table(QUERY_COLUMNS, queries, "queries") if queries else Text("no query"),
        table(("", "value"), gauges),
    )


def _source_row(source: Mapping[str, Any], before: Mapping[tuple[str, str], int], seconds: float) -> dict[str, str]:
    """Returns the cells of a source, by column."""
    was, lag = before.get((source["stream"], source["source"])), source["lag"]
    failing = f"{source['failing']} of {source['parts']} failing" if source["parts"] > 1 else "failing"
    each = list(source["positions"].values())
    text = " ".join(f"{name} {value}" for name, value in each[0].items()) if len(each) == 1 else ""

    def reasons(kind: str) -> str:
        return ", ".join(f"{reason} {n}" for reason, n in source.get(kind, {}).items())

    return {
        "stream": source["stream"],
        "source": source["source"],
        "state": f"{failing}: {source['reason']}" if source["failing"] else str(source["state"]),
        "per second": "" if was is None or seconds <= 0 else f"{(source['records'] - was) / seconds:.0f}",
        "rejected": reasons("rejected"),
        "guessed": reasons("guessed"),
        "lag": "?" if lag["messages"] is None else str(lag["messages"]),
        "lag, s": "?" if lag["seconds"] is None else f"{lag['seconds']:.1f}",
        "position": text or (f"of {source['parts']} parts: --json" if each else ""),
        "delivery": ", ".join(source["delivery"]),
    }


QUERY_COLUMNS = ("query", "µs a record", "bytes of open windows")


def _query_row(state: Mapping[str, Any], name: str) -> tuple[str, ...]:
    record_s = state["query_cost_seconds"].get(name)
    return name, "" if record_s is None else f"{1e6 * record_s:.2f}", f"{state['query_bytes'][name]:.0f}"


def _time(seconds: float | None) -> str:
    from edgewater.base.timestamps import rfc3339

    return "none" if seconds is None else rfc3339(int(seconds * 1000))
