"""What happens in one world, drawn by its seed: edges, queries, records and faults."""

from __future__ import annotations

import math
import random  # noqa: TID251  (a generator of its own per seed, whose draws are cheap)
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from edge.records import RejectionReason
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.byte_budget import PERIODS_MS, ByteBudget, close_bytes
from edgewater.model.query import QuerySpec, StalenessBudget
from edgewater.model.windows import SessionWindow
from tests.simulation.virtual import EPOCH_MS

STREAM = "events"
WRONG_TYPE, MALFORMED = RejectionReason.WRONG_TYPE, RejectionReason.MALFORMED
COLUMNS = {"id": pa.int64(), "k": pa.string(), "x": pa.int64(), "f": pa.float64()}
COMPUTED_KEYS = 0.25
ONE_QUANTILE = 0.3
COMBINED = 0.3
"""Of queries with an error budget, those that have a staleness budget too."""
ONE_ERROR = 0.6
"""Of queries with an accuracy about a sum or a count, those that have an error budget too."""
GENEROUS = 0.4
"""Of queries with an error budget, those whose edges withhold nearly all groups."""
CONSTANTS = 0.4
"""Probability that edges of a world have a column with one value in all their records."""
HOSTILE = 0.2
"""Probability that one edge of several is hostile."""
SILENT, SILENCE_S = 0.15, 16.0
"""Probability that two edges fall silent in one interval, and for how long: the gateway knows it after 12.5 s."""
CHANGES = 0.35
"""Probability that a query is changed while it runs."""
AWAY = 0.5
"""Probability that an edge is cut off when a query is changed, so that it hears late of the border."""
TEMPORARY = 0.1
"""Probability that a query ends by itself."""
RATIOS = 0.5
"""Of queries with two or more exact measures, those that have the quotient of the first two as a measure."""
SKETCHES = 0.2
"""Probability of a sketch in a query."""
CROWDED, CROWD = 0.15, 200
"""Probability that records have many groups and all queries have a deadline, and the groups of each key."""
THRIFTY = 0.15
"""Probability that the queries have byte budgets, where they may."""
COLUMN_NAMES = {"id": "int64", "k": "string", "x": "int64", "f": "float64"}


@dataclass(frozen=True, slots=True)
class PlannedRecord:
    """A record, and the virtual time at which it is written to its edge's file, or pushed.

    Attributes:
        rejected: the reason for which its source rejects it; None: it is valid.
    """

    at_s: float
    event_ms: int
    values: dict[str, Any]
    rejected: RejectionReason | None = None


@dataclass(slots=True)
class EdgePlan:
    """One edge.

    Attributes:
        pushed: its records are pushed; otherwise they are lines of a file that it follows.
        joins_s: when it is first started.
        steps: (time, ms): how far its clock is from the center's from then on.
        dies_s: it is not started again after this time; None: it lives.
        loses_state_s: it is killed and its state directory is deleted; None: never.
        restores_s: its state directory is copied at the first time and replaced by the copy at the second; None: never.
        retired_s: the operator retires it; None: never.
        memory: bytes that open slices may hold, of one query and of all; None: as configured by default.
        constant: the value of k in all its records, which its configuration states; None: it states none.
        drift: a column, and the index of the first record whose value in it is null, as if its source had renamed the
            column; None: no column drifts.
        is_hostile: its frames have impossible statements (`tests.simulation.lies`).
    """

    name: str
    pushed: bool
    disorder_ms: int
    idle_ms: int | None
    records: list[PlannedRecord]
    joins_s: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)
    dies_s: float | None = None
    loses_state_s: float | None = None
    restores_s: tuple[float, float] | None = None
    retired_s: float | None = None
    memory: tuple[int, int] | None = None
    constant: str | None = None
    drift: tuple[str, int] | None = None
    is_hostile: bool = False

    def skew_ms(self, at_s: float) -> int:
        return next((ms for since_s, ms in reversed(self.steps) if since_s <= at_s), 0)


@dataclass(frozen=True, slots=True)
class QueryChange:
    """A new version of a query.

    Attributes:
        after_s: time from the change to the border that it asks for; negative: into the past, which may be refused.
    """

    at_s: float
    after_s: float
    spec: QuerySpec


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """A query, when it is registered and deleted, and how it is changed meanwhile."""

    spec: QuerySpec
    registered_s: float
    deleted_s: float | None
    changes: tuple[QueryChange, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A fault of one edge's link.

    Attributes:
        kind: reset (both ends notice), half-open (none does), blackout (nothing passes for `lasts_s`), slow, silent
            (blackout, and the gateway's call stays open for longer).
    """

    at_s: float
    edge: str
    kind: str
    lasts_s: float


@dataclass(slots=True)
class Scenario:
    """Everything that a seed decides before its world begins. During the run it decides delays and kills.

    Attributes:
        drivers: how many lead at the same time; of more than one there is a standby too.
        kills: per kind of process, the mean number of steps until it is killed; absent: it is not.
    """

    seed: int
    active_s: float
    edges: list[EdgePlan]
    queries: list[QueryPlan]
    links: list[LinkFault]
    kills: dict[str, float]
    repeats_batches: float
    drivers: int = 1

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        return _Draw(random.Random(f"scenario {seed}")).scenario(seed)


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def scenario(self, seed: int) -> Scenario:
        rng = self.rng
        active_s = rng.uniform(4.0, 9.0)
        edges = [self.edge(f"e{i}", active_s) for i in range(rng.choice((1, 2, 2, 3, 4)))]
        for edge in edges[1:]:
            if self.chance(0.15):
                edge.joins_s = rng.uniform(0.5, active_s)
            if self.chance(0.08):
                edge.dies_s = rng.uniform(1.0, active_s)
                if self.chance(0.5):
                    edge.retired_s = edge.dies_s + rng.uniform(0.1, 5.0)
        for edge in edges:
            if edge.dies_s is None and self.chance(0.1):
                edge.loses_state_s = edge.joins_s + rng.uniform(1.0, active_s)
        memory = random.Random(f"memory {seed}")
        for edge in edges:
            if memory.random() < 0.1:
                edge.memory = memory.choice(((6_000, 60_000), (14_000, 14_000), (24_000, 30_000)))
        restored = random.Random(f"restored state {seed}")
        for edge in edges:
            if edge.dies_s is None and edge.loses_state_s is None and restored.random() < 0.1:
                copied_s = edge.joins_s + restored.uniform(0.5, active_s)
                edge.restores_s = copied_s, copied_s + restored.choice((0.2, 1.0, 4.0))
        crowded = random.Random(f"crowded {seed}")
        is_crowded = crowded.random() < CROWDED
        for edge in edges if is_crowded else ():
            self.crowd(edge, crowded)
        drift = random.Random(f"drift {seed}")
        for edge in edges:
            if drift.random() < 0.2:
                self.drift(edge, drift)
        constants = random.Random(f"constants {seed}")
        if constants.random() < CONSTANTS and not is_crowded:
            for edge in edges:
                edge.constant = constants.choice(("a", "b", "c", "c", None))
                for record in edge.records if edge.constant is not None else ():
                    record.values["k"] = edge.constant
        hostile = random.Random(f"hostile {seed}")
        if len(edges) > 1 and hostile.random() < HOSTILE:
            self.make_hostile(edges[-1])
        spoiled = random.Random(f"rejected {seed}")
        for edge in edges:
            share = spoiled.choice((0.0, 0.0, 0.05, 0.3))
            reasons = spoiled.choice(((WRONG_TYPE,), (WRONG_TYPE, MALFORMED)))
            edge.records = [
                replace(r, rejected=spoiled.choice(reasons)) if spoiled.random() < share else r for r in edge.records
            ]
        count = rng.choice((1, 1, 2, 2, 3))
        queries = [self.query(f"q{i}", [e.name for e in edges], active_s) for i in range(count)]
        if is_crowded:
            queries = self.hurried(queries, crowded)
        thrifty = random.Random(f"bytes {seed}")
        if thrifty.random() < THRIFTY:
            queries = [self.thrifty(plan, thrifty) for plan in queries]
        queries = [self.changed(plan, seed, [e.name for e in edges], active_s) for plan in queries]
        links = [self.link_fault(rng.choice(edges).name, active_s) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
        away = random.Random(f"away at changes {seed}")
        for change in (change for plan in queries for change in plan.changes):
            if away.random() < AWAY:
                at_s, lasts_s = max(0.0, change.at_s - 0.1), away.choice((0.5, 3.0, 6.0))
                links.append(LinkFault(at_s, away.choice(edges).name, "blackout", lasts_s))
        silent = random.Random(f"silent {seed}")
        if len(edges) > 1 and silent.random() < SILENT:
            at_s = silent.uniform(1.0, active_s)
            links += [LinkFault(at_s, edge.name, "silent", SILENCE_S) for edge in silent.sample(edges, 2)]
        kills = {}
        for kind, often in (("edge", 60), ("gateway", 60), ("job", 25)):
            if self.chance(0.55):
                kills[kind] = often * rng.choice((0.5, 1, 3))
        drivers = random.Random(f"drivers {seed}").choice((1, 1, 1, 2, 2, 3))
        return Scenario(seed, active_s, edges, queries, links, kills, rng.choice((0.0, 0.0, 0.2)), drivers)

    def edge(self, name: str, active_s: float) -> EdgePlan:
        rng = self.rng
        pushed = self.chance(0.4)
        disorder_ms = rng.choice((0, 0, 200, 1000))
        # Pushes never end, so only the idle rule closes their last windows.
        idle_ms = rng.choice((500, 2000)) if pushed else rng.choice((None, 500, 2000))
        edge = EdgePlan(name, pushed, disorder_ms, idle_ms, [])
        if self.chance(0.15):
            at_s = rng.uniform(0, active_s)
            edge.steps = [(at_s, rng.choice((-3000, -400, 400, 3000)))]
            if self.chance(0.6):
                edge.steps.append((at_s + rng.uniform(0.5, 4.0), 0))
        elif self.chance(0.3):
            edge.steps = [(0.0, rng.randint(-300, 300))]
        edge.records = self.records(edge, active_s)
        return edge

    def records(self, edge: EdgePlan, active_s: float) -> list[PlannedRecord]:
        rng = self.rng
        rate = rng.choice((0.5, 4.0, 10.0))
        groups = rng.choice(("a", "ab", "abcd"))
        values = rng.choice(("small", "small", "positive", "signed", "large", "floats"))
        delay_s = rng.choice((0.0, 0.05, 0.4))
        silent = sorted(rng.uniform(0, active_s) for _ in range(2)) if self.chance(0.3) else [0.0, 0.0]
        result = []
        at_s = rng.expovariate(rate)
        while at_s < active_s:
            if not silent[0] <= at_s < silent[1]:
                lag_s = rng.expovariate(1 / delay_s) if delay_s else 0.0
                if self.chance(0.02):
                    lag_s += rng.uniform(0, 4.0)
                elif self.chance(0.02):
                    lag_s -= rng.uniform(0, 1.5)  # ahead of the clock
                event_ms = EPOCH_MS + edge.skew_ms(at_s) + math.floor((at_s - lag_s) * 1000)
                record = {"k": rng.choice(groups) if not self.chance(0.03) else None, **self.value(values)}
                result.append(PlannedRecord(at_s, event_ms, record))
            at_s += rng.expovariate(rate)
        return result

    @staticmethod
    def drift(edge: EdgePlan, rng: random.Random) -> None:
        """Doubles the records, so that many have the column and many lack it, and removes its values from one on."""
        again = [replace(r, at_s=r.at_s + 0.01, values=dict(r.values)) for r in edge.records]
        edge.records = sorted([*edge.records, *again], key=lambda r: r.at_s)
        column, begin = rng.choice("xf"), round(len(edge.records) * rng.uniform(0.3, 0.6))
        edge.drift = column, begin
        for record in edge.records[begin:]:
            record.values[column] = None

    @staticmethod
    def crowd(edge: EdgePlan, rng: random.Random) -> None:
        """Repeats the records with many keys, so that the groups of a window take several frames."""
        again = [replace(r, at_s=r.at_s + k / 100, values=dict(r.values)) for r in edge.records for k in range(8)]
        edge.records = sorted(again, key=lambda r: r.at_s)
        for record in edge.records:
            record.values["k"] = f"{record.values['k']}{rng.randrange(CROWD)}"

    @staticmethod
    def hurried(plans: list[QueryPlan], rng: random.Random) -> list[QueryPlan]:
        """Returns several queries by group, with staleness budgets. Their edges close windows provisionally."""
        budgets = [StalenessBudget(rng.choice((1_000, 3_000))) for _ in range(3)]
        return [
            replace(
                plan, spec=replace(plan.spec, name=f"q{n}", budget=budget, accuracy=None, group_by=("k",), computed=())
            )
            for n, (plan, budget) in enumerate(zip(plans * 3, budgets, strict=False))
        ]

    @staticmethod
    def thrifty(plan: QueryPlan, rng: random.Random) -> QueryPlan:
        """Returns the query with a byte budget that binds or does not, if it may have one."""
        spec = plan.spec
        if spec.accuracy is not None or isinstance(spec.window, SessionWindow):
            return plan
        closes = PERIODS_MS["hour"] / spec.window.slice_ms * close_bytes(spec.name, [m.name for m in spec.measures])
        return replace(
            plan, spec=replace(spec, byte_budget=ByteBudget(round(closes * rng.choice((4, 20, 500))), "hour"))
        )

    @staticmethod
    def make_hostile(edge: EdgePlan) -> None:
        """Gives the edge a group of its own, so that the bounds of the honest edges' groups stay."""
        edge.is_hostile, edge.constant = True, "h"
        for record in edge.records:
            record.values["k"] = "h"

    def value(self, kind: str) -> dict[str, Any]:
        rng = self.rng
        x: int | None = rng.randint(0, 9)
        f: float | None = rng.uniform(0, 10)
        if kind == "positive":
            x, f = rng.randint(1, 100_000), rng.lognormvariate(3, 1.5)
        elif kind == "signed":
            x, f = rng.randint(-50, 50), rng.gauss(0, 10)
        elif kind == "large":
            x, f = rng.choice((2**53 - 1, 2**53 + 1, -(2**53) - 1, 2**60, 1)), rng.choice((1e16, 1.0, -1e16))
        elif kind == "floats":
            f = rng.choice((0.1, 1e-300, 1e300, math.nan, math.inf, -math.inf)) if self.chance(0.05) else f
        if self.chance(0.03):
            x = None
        if self.chance(0.03):
            f = None
        return {"x": x, "f": f}

    def query(self, name: str, edges: list[str], active_s: float) -> QueryPlan:
        rng = self.rng
        functions = ["count()", "sum(x)", "sum(f)", "min(x)", "max(x)", "max(f)", "mean(f)", "mean(x)", "count(f)"]
        # Drawn apart, so that the other draws of a seed stay.
        one = random.Random(f"{name} quantile").random() < ONE_QUANTILE
        sketches = ["distinct(x)", "quantile(x, 0.9)" if one else "quantiles(x)"]
        chosen = rng.sample(functions, rng.randint(1, 3)) + ([rng.choice(sketches)] if self.chance(SKETCHES) else [])
        measures = {f"m{i}": text for i, text in enumerate(chosen)}
        mapping: dict[str, Any] = {"name": name, "from": STREAM, "measures": measures}
        shape = rng.random()
        size_ms = rng.choice((1000, 2000, 3000))
        if shape < 0.65:
            mapping["window"] = {"tumbling": f"{size_ms}ms"}
        elif shape < 0.85:
            mapping["window"] = {"sliding": f"{size_ms}ms", "every": f"{rng.choice((500, 1000))}ms"}
        else:
            mapping["window"] = {"session": rng.choice(("200ms", "1s")), "max": rng.choice(("4s", "10s"))}
        if self.chance(0.6):
            # Drawn apart, so that the other draws of a seed stay. Groups merge: a and b are one key.
            is_computed = random.Random(f"{name} {size_ms} key").random() < COMPUTED_KEYS
            mapping["group_by"] = [{"k": "replace(k, 'b', 'a')"}] if is_computed else ["k"]
        if self.chance(0.2):
            mapping["where"] = "x > 2"
        if self.chance(0.5):
            mapping["lateness"] = rng.choice(("500ms", "2s", "10s"))
        if self.chance(0.7):
            mapping["edges"] = edges
        kind = rng.random()
        if kind < 0.35:
            limits = {
                m: rng.choice((0.5, 5.0, 100.0, "5%"))
                for m, text in measures.items()
                if text.partition("(")[0] in ("count", "sum", "min", "max")
            }
            if limits:
                if random.Random(f"generous {name} {limits} {size_ms}").random() < GENEROUS:
                    limits = {m: limit if isinstance(limit, str) else 1e6 for m, limit in limits.items()}
                mapping["budget"] = {"error": limits}
                # Drawn apart, so that the other draws of a seed stay.
                if random.Random(f"{name} {limits} {size_ms}").random() < COMBINED:
                    mapping["budget"]["staleness"] = "1s"
        elif kind < 0.6:
            mapping["budget"] = {"staleness": rng.choice(("300ms", "1s", "3s"))}
        if "error" not in mapping.get("budget", {}) and "session" not in mapping["window"] and self.chance(0.25):
            target = next((m for m, text in measures.items() if text in ("count()", "sum(x)", "mean(x)")), None)
            counts = "count()" in chosen
            synopsis = next((m for m, text in measures.items() if text in sketches[not counts :]), None)
            # Drawn apart, so that the other draws of a seed stay.
            if synopsis is not None and (target is None or random.Random(f"synopsis {name} {size_ms}").random() < 0.5):
                mapping["accuracy"] = {"error": "20%", "measure": synopsis, "substream": "250ms"}
            elif target is not None:
                mapping["accuracy"] = {"error": rng.choice(("5%", "20%")), "measure": target, "substream": "250ms"}
                # Drawn apart, so that the other draws of a seed stay.
                withheld = random.Random(f"one error {name} {measures} {size_ms}")
                if measures[target] != "mean(x)" and withheld.random() < ONE_ERROR:
                    others = {m: withheld.choice((2.0, 1e6)) for m, f in measures.items() if f != measures[target]}
                    share = withheld.choice((mapping["accuracy"]["error"], "2%"))
                    mapping.setdefault("budget", {})["error"] = {**others, target: share}
        registered_s = 0.0 if self.chance(0.8) else rng.uniform(0, active_s)
        if registered_s and "accuracy" not in mapping and self.chance(0.5):
            mapping["since"] = "beginning"
        # Drawn apart, so that the other draws of a seed stay.
        if len(chosen) > 1 and not set(chosen[:2]) & set(sketches) and random.Random(f"ratio {name}").random() < RATIOS:
            mapping["measures"] = {**measures, "ratio": "m0 / m1"}
        deleted_s = rng.uniform(registered_s, active_s) if self.chance(0.08) else None
        return QueryPlan(QuerySpec.from_mapping(mapping), registered_s, deleted_s)

    @staticmethod
    def changed(plan: QueryPlan, seed: int, edges: list[str], active_s: float) -> QueryPlan:
        """Adds changes. Drawn apart, so that the other draws of a seed stay."""
        name = plan.spec.name
        rng = random.Random(f"changes {name} {seed}")
        changes = []
        for number in range(rng.choice((1, 1, 2)) if rng.random() < CHANGES else 0):
            spec = _Draw(random.Random(f"change {number} {name} {seed}")).query(name, edges, active_s).spec
            if rng.random() < 0.5:  # only its measures change
                spec = replace(plan.spec, measures=spec.measures, derived=spec.derived, budget=None, accuracy=None)
            spec = replace(spec, until_ms=None)
            if rng.random() < 0.3 and spec.accuracy is None:
                spec = replace(spec, since_ms=MIN_TIME_MS)
            at_s = rng.uniform(plan.registered_s, active_s)
            changes.append(QueryChange(at_s, rng.choice((-0.5, 0.05, 0.5, 2.0)), spec))
        spec = plan.spec
        if rng.random() < TEMPORARY:
            ends_s = plan.registered_s + rng.uniform(1.0, active_s)
            spec = replace(spec, until_ms=EPOCH_MS + int(ends_s * 1000))
        return replace(plan, spec=spec, changes=tuple(sorted(changes, key=lambda c: c.at_s)))

    def link_fault(self, edge: str, active_s: float) -> LinkFault:
        rng = self.rng
        kind = rng.choice(("reset", "half-open", "blackout", "slow"))
        return LinkFault(rng.uniform(0, active_s), edge, kind, rng.choice((0.3, 2.0, 8.0)))
