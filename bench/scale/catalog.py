"""The cost of 10,000 edges and 1,000 queries for the catalog and a gateway's plan, without a network.

CPU, rows and bytes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.first_light.synthetic_edge import STREAM, spec
from center.catalog import Catalog, SessionStart
from center.ingest.assignments import AssignmentPlan, BudgetSnapshot
from center.ingest.hello_queue import HELLOS_AT_ONCE
from center.ingest.status_writer import MAX_HEARTBEATS, MAX_STATUSES
from edge.process import now_ms
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import HeartbeatRecord, QueryStatusRecord, StreamRecord
from edgewater.model.query import QuerySpec

EDGES, QUERIES = 10_000, 1_000


def measure(smoke: bool) -> dict[str, Any]:
    """Returns the CPU of each part, in µs per edge, row or pair; every query expects every edge."""
    count, queries = (300, 5) if smoke else (EDGES, QUERIES)
    edges = [EdgeId(f"e{number:05}") for number in range(count)]
    stream = StreamRecord(STREAM, {"key": pa.string(), "value": pa.int64()}, LIVE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.db"
        catalog = Catalog(f"sqlite:///{path}")
        everywhere = {key: value for key, value in spec("q").items() if key != "edges"}
        refs = [
            catalog.queries.register(QuerySpec.from_mapping(everywhere | {"name": f"q{n}"}), now_ms())[0].ref
            for n in range(queries)
        ]

        def hellos() -> None:
            starts = [SessionStart(e, "i", {}, (stream,), 0, 0, now_ms(), "s", gateway="g") for e in edges]
            for first in range(0, count, HELLOS_AT_ONCE):
                catalog.edges.begin_sessions(starts[first : first + HELLOS_AT_ONCE])

        def heartbeats() -> None:
            beats = [HeartbeatRecord(e, {STREAM: now_ms()}, {STREAM: 1}, {}, 0, 1e6, 1, 0, now_ms()) for e in edges]
            for first in range(0, count, MAX_HEARTBEATS):
                catalog.edges.record_heartbeats(beats[first : first + MAX_HEARTBEATS])

        def statuses() -> None:
            for ref in refs[:5]:
                for first in range(0, count, MAX_STATUSES):
                    some = edges[first : first + MAX_STATUSES]
                    catalog.queries.record_statuses([QueryStatusRecord(ref, e, True, "", "") for e in some])

        def plan() -> AssignmentPlan:
            return AssignmentPlan.of(catalog.version(), catalog.queries.all(), catalog.edges.all())

        result = {
            "edges": count,
            "queries": queries,
            "cpu_us": {
                "hello, in the catalog": _cpu_us(hellos, count),
                "hello after a restart, in the catalog": _cpu_us(hellos, count),
                "heartbeat, in the catalog": _cpu_us(heartbeats, count),
                "first status of a query at an edge": _cpu_us(statuses, 5 * count),
                "the same status again": _cpu_us(statuses, 5 * count),
                "plan, per edge": _cpu_us(plan, count),
                "plan, per query": _cpu_us(plan, queries),
            },
            "assignment_bytes_per_edge": plan().assignment(edges[0], BudgetSnapshot()).queries.message.ByteSize(),
        }
        catalog.close()
        rows = count + 5 * count  # of edges, and their statuses; the row of an incarnation counts with its edge
        return result | {"catalog_bytes_per_row": round(path.stat().st_size / rows)}


def _cpu_us(act: Callable[[], object], per: int) -> float:
    before_s = time.process_time()
    act()
    return round((time.process_time() - before_s) / per * 1e6, 1)
