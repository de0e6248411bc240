"""`edgewater plan center`: pods, cores and bytes of a center, by arithmetic from costs that benches have measured.

A query's edge sends a frame per window, with one partial. So the center's work follows from the pairs of query and
edge, and from their windows. Queries whose windows close together share messages. This is not counted here, so the
figures are an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgewater.model.errors import InvalidConfig
from edgewater.model.quantities import duration_ms

DAY_S = 86_400
MEASURED_PARTIAL_BYTES = 3_600
"""The size of the partials with which the costs were measured."""
LOAD = 0.6
"""Part of a core that a process should use. Costs vary by 1.4 between machines, and a restart needs some reserve."""
TAKEOVER_S = 5.0
SESSIONS_PER_GATEWAY = 11_000
DATABASE_ROWS_S = 16_700
"""Maximum rows of frames per second for which one PostgreSQL was considered: docs/explanation/scale.md."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A measured cost: its value, its unit, and the bench and page that state it."""

    name: str
    value: float
    unit: str
    source: str


_SCALE = "docs/explanation/scale.md: bench.scale --only "
COSTS = {
    "frame": Cost("gateway, a frame until its acknowledgement", 780, "µs", f"{_SCALE}sessions"),
    "session": Cost("gateway, an idle session", 25, "µs/s", f"{_SCALE}sessions"),
    "session_memory": Cost("gateway, memory of a session", 75_000, "B", f"{_SCALE}sessions"),
    "join": Cost("gateway, a session that comes back", 2_400, "µs", f"{_SCALE}sessions"),
    "row": Cost("database, the row of a frame", 31, "µs", f"{_SCALE}commits"),
    "merge": Cost("executors, a partial of 3.6 KB", 220, "µs", f"{_SCALE}rates"),
    "merge_kb": Cost("executors, each further KB of a partial", 33, "µs", "docs/results.md: 200 KB, of 8 edges"),
    "facts": Cost("driver's Python, the facts of a frame", 72, "µs", f"{_SCALE}rates"),
    "jvm": Cost("driver's JVM, a frame", 95, "µs", f"{_SCALE}rates"),
    "ledger": Cost("driver's Python, a frame in the ledger", 30, "µs", f"{_SCALE}ledger"),
    "answer": Cost("driver's Python, an answer", 1_200, "µs", f"{_SCALE}rates"),
    "takeover": Cost("driver, a query's edge at a takeover", 25, "µs", "docs/decisions/0011-leases-and-drivers.md"),
    "idle_bytes": Cost("link, an edge at rest", 57, "B/s", "CHANGELOG.md: bench.scale --only edge"),
}


@dataclass(frozen=True, slots=True)
class Queries:
    """A number of queries with windows of one length."""

    count: int
    window_ms: int

    @classmethod
    def parse(cls, text: str) -> Queries:
        """Reads COUNT@WINDOW, such as 200@1m. Raises InvalidConfig."""
        count, at, window = text.partition("@")
        if not at or not count.isdecimal() or int(count) < 1:
            raise InvalidConfig(
                "--queries", text, "COUNT@WINDOW, such as 200@1m for 200 queries with windows of a minute"
            )
        return cls(int(count), duration_ms(window, "--queries", InvalidConfig))


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of a center.

    Attributes:
        edges: number of connected edges.
        edges_per_query: number of edges that answer each query.
        partial_bytes: of a query's window at an edge.
        answer_bytes: of a window's answer, merged over its edges.
        frames_days: how long the frame log keeps applied frames, in days.
        answers_days: how long answers are kept, in days.
    """

    edges: int
    queries: tuple[Queries, ...]
    edges_per_query: int
    partial_bytes: int = MEASURED_PARTIAL_BYTES
    answer_bytes: int = MEASURED_PARTIAL_BYTES
    frames_days: float = 0.0
    answers_days: float = 30.0

    @property
    def pairs(self) -> int:
        return self.edges_per_query * sum(each.count for each in self.queries)

    @property
    def answers_s(self) -> float:
        return sum(each.count * 1000 / each.window_ms for each in self.queries)

    @property
    def frames_s(self) -> float:
        return self.answers_s * self.edges_per_query


@dataclass(frozen=True, slots=True)
class Pods:
    """A component of the center: the number of its pods, and the resources of each."""

    part: str
    pods: int
    cores: float
    memory_mib: int
    because: str


@dataclass(frozen=True, slots=True)
class CenterPlan:
    """The resources that a workload needs."""

    workload: Workload
    pods: tuple[Pods, ...]
    database_cores: float
    bytes_per_day: dict[str, int]
    storage_bytes: dict[str, int]
    settings: dict[str, int]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan, with the costs that determine it."""
        rates = {"pairs": self.workload.pairs, "frames_s": self.workload.frames_s, "answers_s": self.workload.answers_s}
        return {**asdict(self), "rates": rates, "costs": [asdict(cost) for cost in COSTS.values()]}


def cores(rate_s: float, *names: str) -> float:
    """Returns the cores that events at a rate take, by the costs of these names."""
    return rate_s * sum(COSTS[name].value for name in names) / 1e6


def plan_center(workload: Workload) -> CenterPlan:
    """Plans a center. Raises InvalidConfig."""
    if not 1 <= workload.edges_per_query <= workload.edges:
        raise InvalidConfig("--edges-per-query", workload.edges_per_query, f"1 to the {workload.edges} of --edges")
    frames, pairs = workload.frames_s, workload.pairs
    gateway = _gateways(workload)
    python = cores(frames, "facts", "ledger") + cores(workload.answers_s, "answer")
    jvm, takeover_s = cores(frames, "jvm"), cores(pairs, "takeover")
    by_rate, by_takeover = math.ceil(python / LOAD), math.ceil(takeover_s / TAKEOVER_S)
    drivers = max(1, by_rate, by_takeover)
    because = f"Python takes {python:.2f} cores, a takeover by one driver {takeover_s:.1f} s; one is a standby"
    driver = Pods("job", drivers + 1, _rounded((python + jvm) / drivers), 2048, because)
    merging = cores(frames, "merge") + cores(frames * _further_kb(workload.partial_bytes), "merge_kb")
    each = max(1, math.ceil(merging / LOAD / drivers))
    executor = Pods(
        "executor",
        each * (drivers + 1),
        1.0,
        1792,
        f"merging takes {merging:.2f} cores; the standby has executors, too",
    )
    api = Pods("api", 2, 0.25, 512, "reads were not planned: scale by CPU")
    up = round(frames * workload.partial_bytes * DAY_S)
    idle = round(workload.edges * COSTS["idle_bytes"].value * DAY_S)
    results = round(workload.answers_s * workload.answer_bytes * DAY_S)
    settings = {"spark.drivers": drivers, "spark.executor.instances": each, "spark.sql.shuffle.partitions": each}
    return CenterPlan(
        workload,
        (gateway, driver, executor, api),
        _rounded(cores(frames, "row")),
        {"from_edges": up + idle, "from_an_edge": round((up + idle) / workload.edges), "to_results": results},
        {
            # If the job is away for an hour, an hour of frames is in the log. It must not be full then.
            "frame_log": round(up * max(workload.frames_days, 1 / 24)),
            "results": round(results * workload.answers_days),
        },
        settings,
        tuple(_warnings(workload, gateway.pods)),
    )


def _gateways(workload: Workload) -> Pods:
    busy = cores(workload.frames_s, "frame") + cores(workload.edges, "session")
    by_cpu, by_sessions = math.ceil(busy / LOAD), math.ceil(workload.edges / SESSIONS_PER_GATEWAY)
    count = max(2, by_cpu, by_sessions)  # one may be away
    memory = 256 + math.ceil(workload.edges / (count - 1) * COSTS["session_memory"].value / 2**20)
    return Pods("gateway", count, _rounded(busy / count), memory, f"frames and sessions take {busy:.2f} cores")


def _further_kb(partial_bytes: int) -> float:
    return max(0, partial_bytes - MEASURED_PARTIAL_BYTES) / 1000


def _rounded(value: float) -> float:
    """Returns cores in the form that Kubernetes accepts, at least a tenth."""
    return max(0.1, math.ceil(value * 100) / 100)


def _warnings(workload: Workload, gateways: int) -> Sequence[str]:
    texts = []
    if workload.frames_s > DATABASE_ROWS_S:
        texts.append(
            f"{workload.frames_s:,.0f} rows of frames a second: docs/explanation/scale.md considers at most "
            f"{DATABASE_ROWS_S:,} for one PostgreSQL. Take longer windows, or fewer edges per query"
        )
    back_s = cores(workload.edges / gateways, "join")
    if back_s > 30:
        texts.append(f"after a restart of all gateways, edges are back within {back_s:.0f} s: take more gateways")
    if (one := cores(workload.edges_per_query, "ledger")) * 1000 > 100:
        texts.append(f"a window of one query takes {one * 1000:.0f} ms in its driver, whatever the number of drivers")
    return texts
