"""Answers to a window over synopses of every kind, made as an edge makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from center.ledger.window_facts import window_facts
from center.ledger.withheld import CloseTotals
from center.results import AnswerRecord
from edgewater.answers import Phase, WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef

COLUMNS = {"url": pa.string(), "ip": pa.int64(), "ms": pa.float64(), "ok": pa.bool_()}
MINUTE = 60_000

EVERY_FUNCTION = {
    "cm": "count_min(ip, width=1024)",
    "top": "top_k(ip, 3)",
    "bf": "bloom(ip, capacity=1000)",
    "cf": "cuckoo(ip, capacity=1000)",
    "ccf": "counting_cuckoo(ip, capacity=1000)",
    "join": "fast_agms(ip)",
    "smp": "reservoir(ms, 50)",
    "names": "sample(url, 20)",
    "new": "fifo(ms, 10)",
    "bia": "biased(ms, 64)",
    "ber": "bernoulli(ms, rate=0.25)",
    "ew": "histogram(ms, lo=0, hi=100, buckets=4)",
    "ed": "equi_depth(ms, buckets=4)",
    "dd": "quantiles(ms)",
    "p99": "quantile(ms, 0.99)",
    "kl": "kll(ms)",
    "dis": "distinct(ip)",
    "n": "count()",
}


def spec(measures: Mapping[str, str], **parts: object) -> QuerySpec:
    given = {"name": "q", "from": "web", "measures": dict(measures), "window": {"tumbling": "1m"}, **parts}
    return QuerySpec.from_mapping(given)


def records(rows: int, seed: int = 7) -> pa.RecordBatch:
    """Addresses 0 … 99, of which i comes about as often as 1/(i + 1); times to serve from 0 to 120."""
    rng = np.random.default_rng(seed)
    ip = np.minimum(rng.zipf(1.5, rows) - 1, 99)
    return pa.record_batch(
        {
            "url": pa.array([f"/{i % 5}" for i in ip.tolist()]),
            "ip": pa.array(ip.astype(np.int64)),
            "ms": pa.array(rng.uniform(0, 120, rows)),
            "ok": pa.array(ip > 0),
        }
    )


def aggregate(query: QuerySpec, batch: pa.RecordBatch, *, source: int = 1) -> GroupedAggregate:
    bound = query.bind(COLUMNS)
    stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
    result = GroupedAggregate(dict(zip(query.group_by, bound.group_types, strict=True)), stacks)
    result.set_source(source)
    values = {m.measure.name: m.argument.array(batch) if m.argument else None for m in bound.measures}
    rows = batch.num_rows
    keys = [batch.column(name) for name in query.group_by]
    result.update(keys, values, rows, times=np.arange(rows), ids=np.arange(rows))
    return result


def record(
    query: QuerySpec, synopsis: bytes | None, *, start_ms: int = 0, withheld: dict[str, WithheldBound] | None = None,
    **changes: Any,
) -> AnswerRecord:  # fmt: skip
    totals = CloseTotals(observed=5, withheld=withheld)
    facts = window_facts(query, totals, expected=1, staleness_ms=1, first_staleness_ms=1)
    given: dict[str, Any] = {
        "answer_id": 1, "query": QueryRef(query.name, 1), "window_start_ms": start_ms,
        "window_end_ms": start_ms + MINUTE, "revision": 1, "phase": Phase.COMPLETE, "answered_at_ms": 0,
        "staleness_ms": 1, "facts": facts, "synopsis": synopsis,
    }  # fmt: skip
    return AnswerRecord(**{**given, **changes})
