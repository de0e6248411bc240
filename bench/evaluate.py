"""Questions per second that `POST …/evaluate` answers on one core, through the real ASGI application.

    python -m bench.evaluate [--questions 10000] [--smoke] [--out evaluate.json]

One process, one stream at a time, SQLite: lines are read, parsed, evaluated and written as NDJSON. Network and HTTP
server are excluded (`httpx.ASGITransport`). All questions of a row are about one window.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import pyarrow as pa

from center.api import create_app
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiSection
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import MergedDelta, ResultStore
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE, EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import SliceClose

HOUR = 3_600_000
COLUMNS = {"url": pa.string(), "ip": pa.int64(), "ms": pa.float64()}
RECORDS, GROUPS, ADDRESSES = 1_000_000, 5_000, 100_000
QUERIES: dict[str, dict[str, Any]] = {
    "all": {"measures": {"ips": "count_min(ip)", "ms": "kll(ms)", "dd": "quantiles(ms)", "seen": "bloom(ip)",
                         "top": "top_k(ip, 20)", "some": "reservoir(ms, 1000)", "clients": "distinct(ip)"}},
    "by_url": {"group_by": ["url"], "measures": {"clients": "distinct(ip, precision=10)", "n": "count()"}},
}  # fmt: skip


@dataclass(frozen=True)
class EvaluateRow:
    """The result for one kind of question."""

    name: str
    questions: int
    seconds: float
    questions_s: float
    bytes_out: int
    errors: int


def cases() -> dict[str, tuple[str, Callable[[int], dict[str, Any]]]]:
    """Returns the query and the i-th question, by name."""
    latest = {"latest": 1}
    return {
        "frequency (count_min)": ("all", lambda i: {**latest, "measure": "ips", "question": "frequency", "item": i}),
        "contains (bloom)": ("all", lambda i: {**latest, "measure": "seen", "question": "contains", "item": i}),
        "quantile (ddsketch)": (
            "all",
            lambda i: {**latest, "measure": "dd", "question": "quantile", "q": (i % 1000) / 1000},
        ),
        "quantile (kll)": (
            "all",
            lambda i: {**latest, "measure": "ms", "question": "quantile", "q": (i % 1000) / 1000},
        ),
        "mean (reservoir)": ("all", lambda i: {**latest, "measure": "some", "question": "mean"}),
        "top 20 (top_k)": ("all", lambda i: {**latest, "measure": "top", "question": "top"}),
        "distinct (hll)": ("all", lambda i: {**latest, "measure": "clients", "question": "distinct"}),
        "distinct of one group of 5,000": (
            "by_url",
            lambda i: {**latest, "measure": "clients", "question": "distinct", "group": {"url": f"/{i % GROUPS}"}},
        ),
        "distinct, all groups merged": (
            "by_url",
            lambda i: {**latest, "measure": "clients", "question": "distinct", "global": True},
        ),
    }


class CenterFixture:
    """The API over stores with one answered window per query."""

    def __init__(self, directory: Path, records: int) -> None:
        self.records = records
        url = f"sqlite:///{directory}/catalog.db"
        self.catalog, self.components = Catalog(url), ComponentRegistry(url)
        self.results = ResultStore(f"sqlite:///{directory}/results.db")
        self.app = create_app(
            self.catalog, self.results, self.components, ApiSection(), now_ms=lambda: time.time_ns() // 1_000_000
        )
        self.catalog.edges.begin_session(
            EdgeId("e"),
            "e1",
            labels={},
            streams=[StreamRecord("web", COLUMNS, LIVE)],
            oldest_seq=0,
            next_seq=0,
            now_ms=0,
        )
        ledger = Ledger()
        for name, parts in QUERIES.items():
            self._answer(
                ledger, QuerySpec.from_mapping({"name": name, "from": "web", "window": {"tumbling": "1h"}, **parts})
            )

    def _answer(self, ledger: Ledger, spec: QuerySpec) -> None:
        query = self.catalog.queries.register(spec, 0)[0]
        self.results.tick(ledger, [EdgesChanged(tuple(self.catalog.edges.all())), QueryRegistered(query)], 0)
        fact = FrameSummary(query.ref, 1, EdgeId("e"), HOUR, (SliceClose(0, self.records, 0),), (0,), 500, 0, "e1")
        delta = MergedDelta(query.ref, 0, _aggregate(spec, self.records).to_bytes())
        self.results.apply(ledger, [delta], [fact], {query.key: 1}, 0)

    def close(self) -> None:
        for store in (self.catalog, self.components, self.results):
            store.close()


def _aggregate(spec: QuerySpec, records: int) -> GroupedAggregate:
    rng = np.random.default_rng(1)
    ip = rng.integers(0, ADDRESSES, records)
    urls = pa.array([f"/{i}" for i in range(GROUPS)])
    batch = pa.record_batch(
        {
            "url": urls.take(pa.array(rng.integers(0, GROUPS, records))),
            "ip": pa.array(ip),
            "ms": pa.array(rng.lognormal(3, 1, records)),
        }
    )
    bound = spec.bind(COLUMNS)
    stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
    result = GroupedAggregate(dict(zip(spec.group_by, bound.group_types, strict=True)), stacks)
    values = {m.measure.name: m.argument.array(batch) if m.argument else None for m in bound.measures}
    result.update([batch.column(n) for n in spec.group_by], values, records)
    return result


async def _measure(
    center: CenterFixture, name: str, query: str, question: Callable[[int], dict[str, Any]], count: int
) -> EvaluateRow:
    def body(lines: range) -> Iterator[bytes]:
        for i in lines:
            yield json.dumps({"id": i, **question(i)}).encode() + b"\n"

    transport = httpx.ASGITransport(center.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        path = f"/v1/queries/{query}/evaluate"
        await client.post(path, content=b"".join(body(range(1))))  # decodes the window
        questions_body = b"".join(body(range(count)))
        began = time.perf_counter()
        reply = await client.post(path, content=questions_body)
        seconds = time.perf_counter() - began
    lines = reply.content.splitlines()
    assert len(lines) == count, f"{len(lines)} answers to {count} questions"
    errors = sum('"error"' in line.decode() for line in lines)
    return EvaluateRow(name, count, seconds, count / seconds, len(reply.content), errors)


@click.command()
@click.option("--questions", default=10_000, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, on few records.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JSON.")
def main(questions: int, smoke: bool, out: Path | None) -> None:
    """Measure the questions per second of a stream of questions."""
    questions, records = (20, 20_000) if smoke else (questions, RECORDS)
    with tempfile.TemporaryDirectory() as directory:
        center = CenterFixture(Path(directory), records)
        found = [asyncio.run(_measure(center, name, *case, questions)) for name, case in cases().items()]
        center.close()
    click.echo(f"{'question':34} {'questions/s':>12} {'µs each':>9} {'errors':>7}")
    for case in found:
        click.echo(f"{case.name:34} {case.questions_s:12,.0f} {1e6 / case.questions_s:9.1f} {case.errors:7}")
    text = json.dumps([asdict(case) for case in found], indent=1)
    if out is not None:
        out.write_text(text + "\n")
    else:
        click.echo(text)


if __name__ == "__main__":
    main()
