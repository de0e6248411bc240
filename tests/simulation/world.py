"""One world: edges, a gateway, a job and the network between them, from its first record until it is at rest.

The programs are the production code (`tests.simulation.processes`). The world starts them, kills them at any step,
breaks their network, and at last lets everything come to rest. Then every answer is checked against the truth.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import random  # noqa: TID251  (a generator of its own per seed, whose draws are cheap)
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from sqlalchemy import Engine, event

import center.catalog.catalog
import center.results.store
import center.storage.segment_files
import edge.agent
import edge.durability.journal
import edge.uplink.client
from center.catalog import Catalog, Change
from center.results import AnswerRecord, ResultStore
from center.storage.database import open_engine
from edge.process import WallClock
from edge.utilization import no_marker
from edgewater.base.errors import InvalidRequest, NotFound
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import REJECTIONS, QueryRef
from tests.center.rendered import render
from tests.center.results_world import answers_after
from tests.simulation.checkers import Falsehood, Findings, RevisionWatch, check_query, time_ms
from tests.simulation.lies import Liar
from tests.simulation.network import Channel, Network, Server
from tests.simulation.processes import (
    PUSH_ATTEMPTS,
    PUSH_RETRY_S,
    Disk,
    EdgeProgram,
    FollowedFile,
    GatewayProgram,
    JobProgram,
    Rule,
    observed_core,
)
from tests.simulation.scenario import (
    COLUMNS,
    WRONG_TYPE,
    EdgePlan,
    LinkFault,
    PlannedRecord,
    QueryChange,
    QueryPlan,
    Scenario,
)
from tests.simulation.truth import Fate, QueryTruth, TrueRecord
from tests.simulation.virtual import (
    EPOCH_MS,
    PROCESS,
    CrashableOs,
    Killed,
    Process,
    VirtualLoop,
    new_task,
    this_process,
)

LONGEST_MS = 3_000
"""No tumbling or sliding window is longer."""
STATUS_MS = 3_000
"""A gateway's sign of life is not older."""
VALUES, NULLS = 48, 56
"""Records of a source with a column, and without it after that, for which the loss of the column must be noticed."""
REST_S = 90.0
"""How long everything may take to come to rest once nothing disturbs it any more."""


@dataclass(slots=True)
class Report:
    """What one seed gave."""

    seed: int
    findings: Findings = field(default_factory=Findings)
    faults: Counter[str] = field(default_factory=Counter)
    records: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0


class World:
    """Args: trace: is given a line per event."""

    def __init__(self, scenario: Scenario, directory: Path, trace: Callable[[str], None] | None = None) -> None:
        self.scenario, self.directory, self._trace = scenario, directory, trace
        self.rng = random.Random(f"world {scenario.seed}")
        self.loop = VirtualLoop(self.rng)
        self.loop.set_task_factory(new_task)
        self.loop.set_exception_handler(self._on_loop_error)
        self.network = Network(self.loop, self.rng)
        self.network.liars = {plan.name: Liar(scenario.seed) for plan in scenario.edges if plan.is_hostile}
        self.report = Report(scenario.seed)
        number = 0
        for plan in scenario.edges:
            for record in plan.records:
                number += 1
                record.values["id"] = number
        self.disks = {plan.name: Disk(plan) for plan in scenario.edges}
        self.edges: dict[str, EdgeProgram] = {}
        self.gateway: GatewayProgram | None = None
        self.jobs: dict[str, JobProgram] = {}
        self.calm = False
        self.registered: dict[QueryRef, tuple[RegisteredQuery, QueryPlan]] = {}
        self._answers: dict[int, AnswerRecord] = {}
        self._noted: dict[str, int] = {}
        self._starts: Counter[str] = Counter()
        self._positions: tuple[dict[str, int], dict[str, int]] = ({}, {})  # two looks ago, and one

    def trace(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.loop.time():9.4f} {text}")

    def now_ms(self) -> int:
        """The center's wall clock."""
        return EPOCH_MS + int(self.loop.time() * 1000)

    def _on_loop_error(self, _loop: Any, context: dict[str, Any]) -> None:
        """A callback failed: an error of the simulation, or of production code outside any task."""
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.trace(f"error: {context}")
            self.say("failed", "loop", f"{context['message']}: {error!r}"[:300])

    # Processes

    def _process(self, name: str, kind: str, skew_ms: Callable[[float], int] = lambda _: 0) -> Process:
        process = Process(name, self.loop, self.rng, self.now_ms, self._died, self._failed)
        if kind == "edge":
            process.now_ms = WallClock(lambda: (self.now_ms() + skew_ms(self.loop.time())) / 1000, self.loop.time)
        mean = self.scenario.kills.get(kind)
        if mean is not None and not self.calm and self.rng.random() < 0.8:
            process.steps_left = int(self.rng.expovariate(1 / mean))
        return process

    def _died(self, process: Process, what: str) -> None:
        kind = "edge" if process.name in self.disks else process.name.partition("-")[0]
        self.trace(f"{process.name} is killed at: {what}")
        self.report.faults[f"kill {kind}: {what}"] += 1
        self.network.on_death(process)
        delay_s = self.rng.choice((0.05, 0.3, 2.0)) if not self.calm else 0.2
        self.loop.call_later(delay_s, lambda: self._start(process.name))

    def _failed(self, process: Process, error: BaseException) -> None:
        self.trace(f"{process.name} failed: {error!r}")
        if self._trace is not None:
            import traceback

            self._trace("".join(traceback.format_exception(error)))
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
        self.say("failed", process.name, f"{type(error).__name__} at {at}: {error}"[:300])

    def say(self, kind: str, subject: str, message: str) -> None:
        self.report.findings.false.append(Falsehood(kind, subject, "", 0, message))

    def _start(self, name: str) -> None:
        if name in self.disks:
            self._start_edge(self.disks[name])
        elif name == "gateway":
            if self.gateway is not None:
                self.gateway.close()
            process = self._process("gateway", "gateway")
            self.gateway = self._started(process, lambda: GatewayProgram(process, self.directory))
        else:
            if name in self.jobs:
                self.jobs.pop(name).close()
            process = self._process(name, "job")
            repeats, drivers = 0.0 if self.calm else self.scenario.repeats_batches, self.scenario.drivers
            job = self._started(process, lambda: JobProgram(process, self.directory, repeats, drivers))
            if job is not None:
                self.jobs[name] = job

    def _started(self, process: Process, make: Callable[[], Any]) -> Any:
        self.trace(f"{process.name} starts")
        try:
            return process.run(make)
        except Killed:
            return None
        except Exception as exc:
            process.report_failure(exc)
            process.kill("failed")
            return None

    def _start_edge(self, disk: Disk) -> None:
        plan, now_s = disk.plan, self.loop.time()
        if plan.dies_s is not None and now_s >= plan.dies_s:
            return
        process = self._process(plan.name, "edge", plan.skew_ms)
        self._starts[plan.name] += 1
        directory = self.directory / plan.name
        if plan.name in self.edges:
            self.edges.pop(plan.name).close()
        program = self._started(process, lambda: EdgeProgram(process, disk, directory))
        if program is not None:
            self.edges[plan.name] = program

    # What happens

    def run(self) -> Report:
        began_s = time.process_time()
        with installed(self):
            self.catalog = Catalog(f"sqlite:///{self.directory}/catalog.db")
            self.store = ResultStore(f"sqlite:///{self.directory}/results.db")
            asyncio.set_event_loop(self.loop)
            try:
                self._live()
                self.report.virtual_s = self.loop.time()
                self._check()
            finally:
                for end in (*self.edges.values(), self.gateway, *self.jobs.values(), self.catalog, self.store):
                    if end is not None:
                        end.close()
                asyncio.set_event_loop(None)
                self.loop.close()
        self.report.records = sum(len(d.plan.records) for d in self.disks.values())
        self.report.cpu_s = time.process_time() - began_s
        return self.report

    def _live(self) -> None:
        self._start("gateway")
        scenario = self.scenario
        for name in ["job"] if scenario.drivers == 1 else [f"job-{n}" for n in range(scenario.drivers + 1)]:
            self._start(name)
        for plan in scenario.queries:
            self.loop.call_later(plan.registered_s, self._register, plan)
        for edge_plan in scenario.edges:
            self._plan_edge(edge_plan)
        for fault in scenario.links:
            self.loop.call_later(fault.at_s, self._break, fault)
        main = self.loop.create_task(self._until_rest())
        self.loop.run_until_complete(main)
        for process in [*(e.process for e in self.edges.values()), *self._center()]:
            process.alive = False
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self.loop.run_until_complete(asyncio.sleep(0.1))

    def _center(self) -> list[Process]:
        return [p.process for p in (self.gateway, *self.jobs.values()) if p is not None]

    def _plan_edge(self, plan: EdgePlan) -> None:
        self.loop.call_later(plan.joins_s, self._start_edge, self.disks[plan.name])
        if plan.joins_s:
            self.report.faults["edge joins late"] += 1
        if (plan.steps and len(plan.steps) > 1) or (plan.steps and plan.steps[0][0] > 0):
            self.report.faults["clock step"] += 1
        if plan.dies_s is not None:
            self.report.faults["edge leaves"] += 1
            self.loop.call_later(plan.dies_s, self._kill, plan.name, "for good")
        if plan.loses_state_s is not None:
            self.loop.call_later(plan.loses_state_s, self._lose_state, plan)
        if plan.restores_s is not None:
            copied_s, restored_s = plan.restores_s
            self.loop.call_later(copied_s, self._copy_state, plan)
            self.loop.call_later(restored_s, self._restore_state, plan)
        if plan.retired_s is not None:
            self.loop.call_later(plan.retired_s, self._retire, plan)
        if plan.pushed:
            for row, record in enumerate(plan.records):
                self.loop.call_later(record.at_s, self._push, self.disks[plan.name], row, 0)

    def _kill(self, edge: str, what: str) -> None:
        program = self.edges.get(edge)
        if program is not None:
            program.process.kill(what)

    def _lose_state(self, plan: EdgePlan) -> None:
        self.trace(f"{plan.name} loses its state")
        self.report.faults["state lost"] += 1
        self._kill(plan.name, "and loses its state")
        shutil.rmtree(self.directory / plan.name, ignore_errors=True)

    def _copy_state(self, plan: EdgePlan) -> None:
        """Copies what is on the disk while the edge runs."""
        copy = self.directory / f"{plan.name}-copy"
        if (self.directory / plan.name).exists():
            shutil.copytree(self.directory / plan.name, copy)

    def _restore_state(self, plan: EdgePlan) -> None:
        copy = self.directory / f"{plan.name}-copy"
        if not (copy / "identity.json").exists():
            return
        self.trace(f"{plan.name} gets an older state")
        self.report.faults["state restored"] += 1
        self._kill(plan.name, "and gets an older state")
        shutil.rmtree(self.directory / plan.name, ignore_errors=True)
        copy.rename(self.directory / plan.name)

    def _retire(self, plan: EdgePlan) -> None:
        try:
            self.catalog.edges.retire(EdgeId(plan.name))
            self.report.faults["edge retired"] += 1
            self.trace(f"{plan.name} is retired")
        except NotFound:
            plan.retired_s = None

    def _push(self, disk: Disk, row: int, attempt: int) -> None:
        """A client: it tries again while it is refused or has no reply, unless the edge forgets what it has counted."""
        program, number = self.edges.get(disk.plan.name), row_id(disk, row)
        if disk.accepted.get(number):
            return
        if program is not None and program.process.alive and program.process.run(program.agent.unavailable) is None:
            disk.accepted[number] = False
            program.process.spawn(program.push(row), "push")
            if disk.plan.loses_state_s is not None:
                return
        if attempt < PUSH_ATTEMPTS:
            self.loop.call_later(PUSH_RETRY_S, self._push, disk, row, attempt + 1)

    def _break(self, fault: LinkFault) -> None:
        self.trace(f"{fault.edge}: {fault.kind}")
        self.report.faults[f"link {fault.kind}"] += 1
        link = self.network.link(fault.edge)
        if fault.kind == "slow":
            link.slow = 30.0
        elif fault.kind == "silent":
            gateway = self.gateway.process if self.gateway is not None and self.gateway.serves(fault.edge) else None
            self.network.cut(fault.edge, tell_edge=False, tell_gateway=False, flush=False, gateway_s=2 * fault.lasts_s)
            link.up = False
            self.loop.call_later(fault.lasts_s - 0.5, self._check_silence, EdgeId(fault.edge), gateway)
        else:
            told = fault.kind == "reset"
            self.network.cut(fault.edge, tell_edge=told, tell_gateway=told, flush=self.rng.random() < 0.5)
            link.up = fault.kind != "blackout"
        self.loop.call_later(fault.lasts_s, self._mend, fault.edge)

    def _mend(self, edge: str) -> None:
        link = self.network.link(edge)
        link.up, link.slow = True, 1.0

    def _check_silence(self, name: EdgeId, gateway: Process | None) -> None:
        """Checks that a gateway records an edge as silent, and goes on recording its own sign of life. Called while the
        edge is silent, unless another fault has ended the silence.

        Args:
            gateway: the gateway that had a session with the edge when the silence began. None: no running gateway had.
                The catalog's sign of life is then of a gateway that was killed before, and is old.
        """
        known = next((e for e in self.catalog.edges.all() if e.edge == name and e.connected), None)
        if known is None or gateway is None or not gateway.alive or self.network.link(name).up:
            return
        self.report.faults["edge known to be silent"] += 1
        if known.reachable(self.now_ms()):
            self.say("status", name, "it has been silent for long, and it is reachable")
        # The catalog may also have rows of edges that were connected to a gateway that was killed before.
        self._check_sign_of_life([e for e in self.disks if self.gateway is not None and self.gateway.serves(e)])

    def _check_sign_of_life(self, served: Collection[str]) -> None:
        known = [e for e in self.catalog.edges.all() if e.edge in served]
        signs = [e.heard_by_ms for e in known if e.connected and e.heard_by_ms is not None]
        if signs and max(signs) < self.now_ms() - STATUS_MS:
            self.say("status", "gateway", f"its last sign of life is {self.now_ms() - max(signs)} ms old")

    def _register(self, plan: QueryPlan) -> None:
        query = self.catalog.queries.register(plan.spec, self.now_ms())[0]
        self.registered[query.ref] = query, plan
        self.trace(f"{query.ref.name} is registered: {plan.spec.to_mapping()}")
        if plan.registered_s:
            self.report.faults["query registered midway"] += 1
        if plan.deleted_s is not None:
            self.loop.call_later(plan.deleted_s - plan.registered_s, self._delete, plan)
        for change in plan.changes:
            self.loop.call_later(change.at_s - plan.registered_s, self._change, plan, change)

    def _change(self, plan: QueryPlan, change: QueryChange) -> None:
        """Changes a query as `PUT /v1/queries/{name}` does."""
        name, at_ms = plan.spec.name, self.now_ms() + int(change.after_s * 1000)
        try:
            before = self.catalog.queries.get(name)
            latest = self.store.latest(before.ref)
            answered_ms = MIN_TIME_MS if latest is None else latest.window_start_ms
            asked = Change(at_ms, before.ref.version, answered_ms)
            query, is_new = self.catalog.queries.register(change.spec, self.now_ms(), change=asked)
        except NotFound:
            return  # it was deleted
        except InvalidRequest as exc:
            self.report.faults["change refused"] += 1
            self.trace(f"{name} is not changed: {exc}")
            return
        if not is_new:
            return
        later = replace(plan, spec=change.spec, registered_s=max(self.loop.time(), 1e-3))
        self.registered[query.ref] = query, later
        self.report.faults["query changed"] += 1
        self.trace(f"{query.key} has the windows from {query.windows.from_ms}: {change.spec.to_mapping()}")

    def _delete(self, plan: QueryPlan) -> None:
        self.catalog.queries.delete(plan.spec.name, self.now_ms())
        self.report.faults["query deleted"] += 1
        self.trace(f"{plan.spec.name} is deleted")

    async def _until_rest(self) -> None:
        await asyncio.sleep(max([self.scenario.active_s, *(p.joins_s for p in self.scenario.edges)]))
        self.calm = True
        for program in self.edges.values():
            program.process.steps_left = None
        for process in self._center():
            process.steps_left = None
        self.trace("calm")
        quiet, since_s = 0, self.loop.time()
        while (
            quiet < 3
        ):  # a frame that was built since the last look is acknowledged by the next, and applied by the third
            await asyncio.sleep(0.8)
            quiet = quiet + 1 if not self._restless() else 0
            self._read_answers()
            if self.loop.time() > since_s + REST_S:
                self.say("never-at-rest", "world", self._restless())
                return

        for job in [job for job in self.jobs.values() if job.leads]:
            while (due_ms := job.store.correct_at_ms) is not None:  # what follows after minutes
                job.store.correct(max(due_ms, self.now_ms()))

    def _through_ms(self) -> int:
        """All windows that end by then must be closed at rest."""
        return EPOCH_MS + int(self.scenario.active_s * 1000) + LONGEST_MS

    def _restless(self) -> str:
        parts = []
        for plan in self.scenario.edges:
            program = self.edges.get(plan.name)
            if plan.dies_s is not None:
                continue
            if program is None or not program.process.alive:
                parts.append(f"{plan.name} is down")
                continue
            core = program.agent.durable.core
            noted, self._noted[plan.name] = self._noted.get(plan.name, core.next_seq), core.next_seq
            watermarks = [s.watermark_ms - EPOCH_MS for s in core.streams.values()]
            parts += [f"{plan.name}: watermark {w}" for w in watermarks if w < self._through_ms() - EPOCH_MS]
            if core.unacked and core.unacked[0].seq < noted:  # arrival reports never end
                parts.append(f"{plan.name}: {len(core.unacked)} frames are not acknowledged")
            for ref, pipeline in core.queries.items():
                if pipeline.store.losses.drops:
                    parts.append(f"{plan.name}: {ref.name} has not reported late records")
                if pipeline.through_ms < self._through_ms() - LONGEST_MS:
                    parts.append(f"{plan.name}: {ref.name} is closed through {pipeline.through_ms - EPOCH_MS}")
            running = {query.ref for query in self.catalog.queries.all() if query.is_running}
            live = {ref for ref, (_, q) in self.registered.items() if q.deleted_s is None} & running
            if core.queries.keys() | core.refused.keys() < {r for r in live if self._expects(r, plan.name)}:
                parts.append(f"{plan.name} lacks queries")
        consumed, (known, newer) = self.store.consumed(), self._positions
        self._positions = newer, self.catalog.frames.last_positions()  # a batch that was read waits for the one before
        if any(position > consumed.get(key, 0) for key, position in known.items()):
            parts.append("the job is at work")
        ledgers = [job.ledger for job in self.jobs.values() if job.leads]  # the others' are old
        if any(ledger.book(ref).deadlines.refine_at_ms is not None for ledger in ledgers for ref in ledger.queries()):
            parts.append("a changed window waits for its next revision")
        return "; ".join(parts)

    def _expects(self, ref: QueryRef, edge: str) -> bool:
        edges = self.registered[ref][1].spec.edges
        return edges is None or edge in edges

    # What is true

    def _read_answers(self) -> None:
        """Reads all answers again; one that was read before must be the same."""
        found = {a.answer_id: a for a in answers_after(self.store, 0, 100_000)}
        for number, answer in self._answers.items():
            again = found.get(number)
            if repr(again) != repr(answer):  # a withheld NaN is not equal to itself
                self.say("revision-changed", answer.query.name, f"{answer} is {found.get(number)}")
        self._answers |= found

    def _check(self) -> None:
        self._read_answers()
        rested = not any(f.kind in ("never-at-rest", "failed") for f in self.report.findings.false)
        lasting = all(p.dies_s is None for p in self.scenario.edges)
        watch = RevisionWatch()
        known = {query.ref: query for query in self.catalog.queries.all(deleted=True)}
        for ref, (_, plan) in self.registered.items():
            query = known[ref]
            self.report.faults["version ended"] += query.ended_at_ms is not None
            answers = [
                render(a, query.spec)
                for a in self._answers.values()
                if a.query == ref and a.window_start_ms in query.windows
            ]
            for answer in answers:
                self.report.findings.false += watch.note(answer, ref.version)
            truth = QueryTruth(plan.spec, self._records(query, plan), COLUMNS, query.windows)
            at_rest = rested and lasting and plan.deleted_s is None
            late = self.store.late_records(ref)
            counted = sum(n for (_, _, reason), n in late.items() if reason not in REJECTIONS)
            rejected = sum(late.values()) - counted
            closed = self._through_ms() - LONGEST_MS if lasting else None
            found = check_query(truth, answers, at_rest=at_rest, counted=counted, closed_through_ms=closed)
            self.report.findings.add(found)
            self.report.findings.false += self._false_rejections(ref, plan, answers, rejected, at_rest=at_rest)
            if self._trace is not None:
                for answer in answers:
                    self._trace(f"answer {answer}")
        self._check_status(rested=rested)
        if rested:
            self._check_segments()

    def _check_segments(self) -> None:
        """Checks that each delta is there, and that leaders sweep what killed and deposed drivers have left."""
        found = [job.segments() for job in self.jobs.values() if job.leads]
        if found:
            left, named = set[str].intersection(*(left for left, _ in found)), found[-1][1]
            self.report.faults["segment named at the end"] += len(named)
            for kind, segments in (("segment-lost", named - left), ("segment-left", left - named)):
                if segments:
                    self.say(kind, "center", ", ".join(sorted(segments)))

    def _check_status(self, *, rested: bool) -> None:
        """Checks what the catalog says of the edges: the gateway's sign of life, and alarms about columns."""
        if rested:
            self._check_sign_of_life(self.disks)
        alarms = {a.edge for a in self.catalog.alarms.latest() if a.kind == "column-null"}
        for name, disk in self.disks.items():
            if disk.plan.drift is None and EdgeId(name) in alarms:
                self.say("alarm", name, "column-null, and its columns have values")
            if rested and self._must_miss_column(disk) and EdgeId(name) not in alarms:
                self.say("alarm", name, f"no column-null, and {disk.plan.drift} drifts")
        self.report.faults["column drifts"] += sum(disk.plan.drift is not None for disk in self.disks.values())
        self.report.faults["alarm of a column"] += len(alarms)
        self.report.faults["edge is hostile"] += sum(disk.plan.is_hostile for disk in self.disks.values())

    def _must_miss_column(self, disk: Disk) -> bool:
        """Whether one agent has read enough records with a column, and then without it. Clients repeat pushes that were
        refused, so records may come in another order than they were written."""
        plan = disk.plan
        if plan.drift is None or self._starts[plan.name] > 1 or plan.joins_s or plan.dies_s is not None:
            return False
        lacking = {r.values["id"] for r in plan.records[plan.drift[1] :]}
        lacks = [number in lacking for number in disk.seen]  # in the order in which they were read
        return len(lacks) >= VALUES + NULLS and not any(lacks[:VALUES]) and all(lacks[-NULLS:])

    def _false_rejections(
        self, ref: QueryRef, plan: QueryPlan, answers: list[dict[str, Any]], counted: int, *, at_rest: bool
    ) -> list[Falsehood]:
        """What answers, and the query's counter, say of rejected records that is not true."""
        given = [(disk, r) for disk in self.disks.values() for r in disk.plan.records if r.rejected is not None]
        sure = [r.event_ms for disk, r in given if self._is_surely_rejected(disk, r) and r.rejected is WRONG_TYPE]
        is_exact = all(self._is_surely_rejected(disk, r) for disk, r in given)
        # A version that has ended does not count what is rejected later.
        is_lasting = not plan.changes and plan.spec.until_ms is None
        from_start = plan.registered_s == 0 and plan.spec.edges is not None and is_lasting
        # A state that was lost, or is older than what the center knows, may state once more what its sources reject.
        plans = [disk.plan for disk in self.disks.values()]
        is_repeated = any(p.loses_state_s is not None or p.restores_s is not None for p in plans)
        most = math.inf if is_repeated else len(given)
        false = []
        last = {a["window"]["start"]: a for a in sorted(answers, key=lambda a: a["revision"])}
        for answer in answers:
            start_ms, end_ms = (time_ms(answer["window"][side]) for side in ("start", "end"))
            stated, is_last = answer["quality"]["records"]["rejected"], answer is last[answer["window"]["start"]]
            must = sum(start_ms <= at < end_ms for at in sure) if at_rest and from_start and is_last else 0
            wrong = stated > most or (stated < must and answer["phase"] != "early")
            if wrong or (stated and answer["contract"]["met"]):
                said = f"{stated} rejected, {must} to {most} are; met: {answer['contract']['met']}"
                false.append(Falsehood("rejected", ref.name, answer["window"]["start"], answer["revision"], said))
        if at_rest and from_start and is_exact and counted != len(given):
            message = f"{counted} rejected records of {len(given)} are counted"
            false.append(Falsehood("rejected", ref.name, "", 0, message))
        return false

    @staticmethod
    def _is_surely_rejected(disk: Disk, record: PlannedRecord) -> bool:
        plan = disk.plan
        if plan.joins_s or plan.loses_state_s is not None or plan.retired_s is not None or plan.dies_s is not None:
            return False
        if plan.restores_s is not None:
            return False
        return not plan.pushed or bool(disk.accepted.get(record.values["id"]))

    def _records(self, query: RegisteredQuery, plan: QueryPlan) -> list[TrueRecord]:
        """Every record that an edge was given, with what must be true of it for one query."""
        seen_ms = {e.edge: e.first_seen_ms for e in self.catalog.edges.all()}
        first_ms = min(seen_ms.values(), default=0)
        records = []
        for disk in self.disks.values():
            name = EdgeId(disk.plan.name)
            # Windows may have been final before the center knew of the edge, unless the query names it.
            unlisted = plan.spec.edges is None and seen_ms.get(name, first_ms + 1) > first_ms
            for record in disk.plan.records:
                if record.rejected is not None:
                    continue
                rule = self._rule(disk, query.ref, record.values["id"])
                fate = self._fate(disk, record, rule, plan, unlisted)
                if fate is Fate.LOST and rule is None and self._came_after_end(disk, record, query):
                    fate = Fate.UNCERTAIN
                if fate is not None:
                    late, came_ms = (rule.late, rule.watermark_ms) if rule is not None else (False, None)
                    if fate is Fate.LOST and (disk.plan.loses_state_s is not None or disk.plan.restores_s is not None):
                        came_ms = None  # the record may have come in time before, in the state that was lost
                    late |= fate is Fate.LOST  # it may have been late in the state that was lost
                    unread = disk.plan.dies_s is not None and record.values["id"] not in disk.seen
                    if unread and disk.watermark_ms is not None:  # it would have been late, as the edge was at its end
                        window, came_ms = plan.spec.window, disk.watermark_ms
                        late |= window.slice_start(record.event_ms) + window.slice_ms <= came_ms
                    values = record.values
                    records.append(TrueRecord(disk.plan.name, record.event_ms, values, fate, late, came_ms, unread))
        return records

    @staticmethod
    def _came_after_end(disk: Disk, record: PlannedRecord, query: RegisteredQuery) -> bool:
        """Whether an edge ingested a record that was too late for each window of a version that had ended."""
        _, end_ms = query.windows.slices(query.spec.window)
        came_ms = disk.came_ms.get(record.values["id"], MIN_TIME_MS)
        return query.ended_at_ms is not None and came_ms >= end_ms + query.spec.lateness_ms

    @staticmethod
    def _rule(disk: Disk, ref: QueryRef, number: int) -> Rule | None:
        return disk.seen.get(number, {}).get(ref)

    def _fate(
        self, disk: Disk, record: PlannedRecord, rule: Rule | None, plan: QueryPlan, unlisted: bool
    ) -> Fate | None:
        number = record.values["id"]
        loses_state = disk.plan.loses_state_s is not None or disk.plan.restores_s is not None
        accepted = disk.accepted.get(number) if disk.plan.pushed else True
        if accepted is None:
            return None  # always refused: it was never given to the edge
        if not accepted or disk.plan.retired_s is not None:
            return Fate.UNCERTAIN
        if disk.plan.restores_s is not None and disk.plan.pushed and record.at_s <= disk.plan.restores_s[1]:
            return Fate.UNCERTAIN  # if no heartbeat has reached the catalog since it was accepted, nobody knows of it
        if number in disk.seen and (rule is None or rule.before_query):
            return Fate.UNCERTAIN if unlisted or plan.deleted_s is not None else Fate.LOST
        if loses_state:
            # Windows that had not begun by the center's clock are not known to lack records that were ahead of it.
            is_ahead = record.event_ms > EPOCH_MS + record.at_s * 1000
            return Fate.UNCERTAIN if unlisted or is_ahead or (rule is not None and rule.too_late) else Fate.LOST
        too_late = rule is not None and rule.too_late
        if disk.plan.memory is not None or disk.plan.is_hostile:
            return Fate.UNCERTAIN if unlisted or too_late else Fate.LOST
        if unlisted or too_late:
            return Fate.EITHER
        return Fate.COUNTED


def row_id(disk: Disk, row: int) -> int:
    return int(disk.plan.records[row].values["id"])


class _Time:
    """Stands for the `time` module at an edge."""

    @staticmethod
    def monotonic() -> float:
        return this_process().monotonic()

    thread_time = monotonic


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Puts the virtual machines under the production code: clocks, disks, the network and random numbers."""
    rng = random.Random(f"production {world.scenario.seed}")

    def set_all(values: dict[tuple[Any, str], Any]) -> dict[tuple[Any, str], Any]:
        old = {(owner, name): getattr(owner, name) for owner, name in values}
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        return old

    class VirtualUplink(edge.uplink.client.Uplink):
        def _channel(self) -> Any:
            return Channel(world.network)

    class VirtualCore:
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return observed_core(world.disks[this_process().name])(*args, **options)

    def build_sources(_config: Any, _clocks: Any, *, now_ms: Any, idle: Any = no_marker, **more: Any) -> list[Any]:
        process = this_process()
        disk = world.disks[process.name]
        if disk.plan.pushed:
            return real_build_sources(_config, _clocks, now_ms=now_ms, idle=idle, **more)
        return [FollowedFile(disk, process, idle)]

    real_build_sources: Any = edge.agent.assembly.build_sources
    old = set_all(
        {
            (edge.agent.assembly, "now_ms"): lambda: this_process().now_ms(),
            (edge.agent.assembly, "time"): _Time,
            (edge.agent.assembly, "Uplink"): VirtualUplink,
            (edge.agent.assembly, "EdgeCore"): VirtualCore,
            (edge.agent.assembly, "build_sources"): build_sources,
            (edge.agent.agent, "release_free_memory"): lambda: None,
            (edge.durability.journal, "os"): CrashableOs(),
            (center.storage.segment_files, "os"): CrashableOs(),
            (grpc.aio, "server"): lambda options=(): Server(world.network, this_process()),
            (center.catalog.catalog, "open_engine"): shared_engine,
            (center.results.store, "open_engine"): shared_engine,
            (uuid, "uuid4"): lambda: uuid.UUID(int=rng.getrandbits(128), version=4),
        }
    )

    def on_commit(_connection: Any) -> None:
        process = PROCESS.get()
        if process is not None:
            process.step("commit")

    state = random.getstate()
    random.seed(f"global {world.scenario.seed}")
    event.listen(Engine, "commit", on_commit)
    disabled = logging.root.manager.disable
    if world._trace is None:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        event.remove(Engine, "commit", on_commit)
        random.setstate(state)
        set_all(old)


@cache
def shared_engine(url: str) -> Engine:
    """One engine per database for all programs and seeds: compiling their statements takes longer than running them."""
    return open_engine(url)


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> Report:
    """Runs one world to its end and checks all its answers."""
    directory = _directory()
    try:
        return World(Scenario.draw(seed), directory, trace).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()


@cache
def _directory() -> Path:
    """A directory for the disks of this process's worlds, in memory where that is possible."""
    directory = tempfile.TemporaryDirectory(prefix="edgewater-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(directory.cleanup)
    return Path(directory.name)


__all__ = ["Report", "World", "run_seed", "time_ms"]
