"""Runs one episode: processes, inputs and faults; then every answer against the records that were written."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.model.query import QuerySpec
from edgewater.model.window_range import WindowRange
from edgewater.model.windows import SessionWindow
from tests.brokers import MOSQUITTO
from tests.e2e.soak.plan import FILE_FAULTS, IDLE_MS, INPUT_S, SOURCES, Episode, Fault
from tests.e2e.soak.questions import CHANGED, second_version, specs
from tests.e2e.soak.reader import Reader
from tests.e2e.soak.records import COLUMNS, Handed, InputLog, RecordSource
from tests.e2e.soak.sources import FileInput, Input, KafkaInput, MqttInput, PushInput, StdinInput, wall_ms
from tests.e2e.soak.system import Brokers, Center, Edge, SoakFailed, topic_of, wait_until_ready
from tests.e2e.soak.warehouse import Warehouse
from tests.simulation.checkers import Falsehood, Findings, check_query, time_ms
from tests.simulation.truth import Fate, QueryTruth, TrueRecord

SETTLE_S = 45.0
CORRECTED_S = 600.0
"""Late records that come again and again are stated after 1, 2, 4 … minutes."""
RECOVERY_S = 180.0
UNSYNCED_MS = 8000
"""Records of a source that cannot be read again which are this old at a kill have been synced."""
ROTATION_MS = 2500
"""A rotation that loses what has not been read loses records of so long before and after it, at most."""
LONG_UNREAD_MS = 12_000
"""As `ROTATION_MS`, where the edge may not have read for a while."""
TWIN_START_S = 30.0
VALUES, NULLS = 48, 96
"""Records of a source with a column, and without it after that, for which the loss of the column must be noticed."""
ALL_KINDS = tuple(SOURCES)
LOSSY = ("copytruncate", "delete", "same-inode")
AWAY = {"kill-edge", "stop-edge", "pause-edge", "lost-state", "old-state", "disk-full", "join", "clock"}
"""Faults during which an edge does not read."""
ARROW_COLUMNS = {name: pa.string() if t == "string" else getattr(pa, t)() for name, t in COLUMNS.items()}
RECORDS_OF_AN_EDGE = 1_000_000


@dataclass(frozen=True, slots=True)
class Loss:
    """Records of an edge that may be lost, or counted twice, if the answers say that they are not complete.

    Attributes:
        kinds: kinds of the sources; records handed over in [from_ms, to_ms].
    """

    edge: str
    kinds: tuple[str, ...]
    from_ms: int
    to_ms: int


@dataclass(slots=True)
class EpisodeResult:
    """What an episode found.

    Attributes:
        skipped: faults that could not be made to happen, and why.
    """

    episode: Episode
    findings: Findings
    records: int = 0
    reads: int = 0
    seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)


class EpisodeRun:
    """One episode on a running center."""

    def __init__(self, episode: Episode, center: Center, directory: Path, warehouse: Warehouse | None = None) -> None:
        self.episode, self.center, self.directory, self.warehouse = episode, center, directory, warehouse
        self.stream = f"s{episode.number}"
        self.log = InputLog(episode.disorder_ms, IDLE_MS)
        own_disk = "disk-full" in episode.kinds
        port, plans = center.demo.gateway_port, episode.edges
        self.skipped: list[str] = []
        if MOSQUITTO is None and any(source.kind == "mqtt" for plan in plans for source in plan.sources):
            self.skipped.append("mqtt: mosquitto is not installed; the source is Kafka")
            plans = tuple(plan.without_mqtt() for plan in plans)
        self.brokers = Brokers(directory, plans)
        self.edges = [
            Edge(plan, self.stream, port, directory, episode.disorder_ms, own_disk, self.brokers) for plan in plans
        ]
        self.specs = specs(episode, self.stream, [edge.name for edge in self.edges])
        self.inputs: dict[str, list[Input]] = {}
        self.losses: list[Loss] = []
        self.joined: dict[str, int] = {}
        self.retired: dict[str, int] = {}
        self.drifting: set[str] = set()
        self.late_query_ms: int | None = None
        self.border_ms: int | None = None
        self.repeats: list[Loss] = []
        self.reader = Reader(center, [s["name"] for s in self.specs if not s["name"].endswith("late_query")])
        self._rng = np.random.default_rng(episode.seed)

    def run(self) -> EpisodeResult:
        began = time.monotonic()
        try:
            self._register([s for s in self.specs if not s["name"].endswith("late_query")])
            self.brokers.start()
            first = [edge for edge in self.edges if not edge.plan.joins_at_s]
            for edge in first:
                self._make_inputs(edge)
                edge.start()
            wait_until_ready(first)
            self.brokers.wait_for_sessions([edge.plan for edge in first])
            self.reader.start()
            self._disturb(first)
            ready = self._settle()
            self.reader.stop()
            self.reader.read_all_revisions()
            self._write_evidence()
            result = self._check(ready)
        finally:
            self._tear_down()
        result.seconds = time.monotonic() - began
        return result

    def _register(self, wanted: Sequence[dict[str, Any]]) -> None:
        for spec in wanted:
            self.center.request("POST", "/v1/queries", json=spec).raise_for_status()

    def _make_inputs(self, edge: Edge) -> None:
        e = self.episode
        for i, source in enumerate(edge.plan.sources):
            number = (self.edges.index(edge) * 10 + i) * RECORDS_OF_AN_EDGE
            drawn = RecordSource(f"{edge.name}/{i}", source.profile, e.lateness_ms, number, self._rng.spawn(1)[0])
            common = (edge.name, drawn, self.log, source.records_per_s, "bad" in e.kinds)
            made: Input
            if source.kind == "file":
                made = FileInput(*common, edge.log_file)
            elif source.kind == "http":
                arrow, forgets = bool(self._rng.random() < 0.5), {"lost-state", "clock", "retire"} & set(e.kinds)
                made = PushInput(*common, edge.push_url, arrow, not forgets)
            elif source.kind == "kafka":
                assert self.brokers.kafka is not None
                made = KafkaInput(*common, self.brokers.kafka, topic_of(edge.name, i))
            elif source.kind == "mqtt":
                assert self.brokers.mqtt is not None
                made = MqttInput(*common, self.brokers.mqtt, topic_of(edge.name, i))
            else:
                made = StdinInput(*common)
            self.inputs.setdefault(edge.name, []).append(made)

    def _start_inputs(self, edge: Edge) -> None:
        self._connect_stdin(edge)
        for made in self.inputs[edge.name]:
            made.start()

    def _connect_stdin(self, edge: Edge) -> None:
        for made in self.inputs[edge.name]:
            if isinstance(made, StdinInput):
                made.process = edge.process

    # Faults

    def _disturb(self, first: Sequence[Edge]) -> None:
        """Starts the inputs, and runs the faults at their times, each in a thread of its own."""
        begin = time.monotonic()
        failures: list[BaseException] = []
        for edge in first:
            self._start_inputs(edge)

        def later(at_s: float, action: Callable[[], None]) -> threading.Thread:
            def wait_and_act() -> None:
                try:
                    time.sleep(max(0.0, begin + at_s - time.monotonic()))
                    action()
                except BaseException as exc:
                    failures.append(exc)

            thread = threading.Thread(target=wait_and_act, daemon=True)
            thread.start()
            return thread

        threads = [later(f.at_s, lambda f=f: self._happen(f)) for f in self.episode.faults]  # type: ignore[misc]
        for edge in self.edges:
            if edge.plan.joins_at_s:
                threads.append(later(edge.plan.joins_at_s, lambda edge=edge: self._join(edge)))  # type: ignore[misc]
        time.sleep(INPUT_S)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        for inputs in self.inputs.values():
            for made in inputs:
                made.stop()

    def _happen(self, fault: Fault) -> None:
        edge = self.edges[fault.edge]
        if fault.kind in FILE_FAULTS:
            self._rotate(fault, edge)
        else:
            getattr(self, "_" + fault.kind.replace("-", "_"))(fault, edge)

    def _join(self, edge: Edge) -> None:
        """An edge that comes later, with a log that it has kept since before."""
        self._make_inputs(edge)
        for made in self.inputs[edge.name]:
            made.capped = False
            if isinstance(made, FileInput):
                made.start()
        time.sleep(1.5)
        edge.start()
        wait_until_ready([edge])
        self.brokers.wait_for_sessions([edge.plan])
        self.joined[edge.name] = wall_ms()
        self._connect_stdin(edge)
        for made in self.inputs[edge.name]:
            if not isinstance(made, FileInput):
                made.start()

    def _rotate(self, fault: Fault, edge: Edge) -> None:
        file = next(i for i in self.inputs[edge.name] if isinstance(i, FileInput))
        if fault.kind == "same-inode":
            self._down(edge, ("file",))
            file.rotate(fault.kind)
            time.sleep(fault.lasts_s / 2)
            self._up(edge)
            return
        loses = fault.kind in LOSSY or (fault.kind == "compress" and AWAY & set(self.episode.kinds))
        for _ in range(1 + int(fault.lasts_s > 2)):
            file.rotate(fault.kind)
            if loses:
                self._may_lose(edge, ("file",))
            time.sleep(fault.lasts_s)

    def _may_lose(self, edge: Edge, kinds: tuple[str, ...]) -> None:
        now, before_ms = wall_ms(), LONG_UNREAD_MS if AWAY & set(self.episode.kinds) else ROTATION_MS
        self.losses.append(Loss(edge.name, kinds, now - before_ms, now + ROTATION_MS))

    def _down(self, edge: Edge, at_risk: tuple[str, ...], before_ms: int = UNSYNCED_MS) -> None:
        for made in self.inputs[edge.name]:
            made.capped = False
        edge.kill()
        now = wall_ms()
        self.losses.append(Loss(edge.name, at_risk, now - before_ms, now + 1000))

    def _up(self, edge: Edge) -> None:
        edge.start()
        self._connect_stdin(edge)

    def _kill_edge(self, fault: Fault, edge: Edge) -> None:
        self._down(edge, ("stdin",))
        time.sleep(fault.lasts_s)
        self._up(edge)

    def _stop_edge(self, fault: Fault, edge: Edge) -> None:
        for made in self.inputs[edge.name]:
            made.capped = False
        self.losses.append(Loss(edge.name, ("stdin",), wall_ms() - 1000, wall_ms() + 5000))
        edge.stop()
        time.sleep(fault.lasts_s)
        self._up(edge)

    def _pause_edge(self, fault: Fault, edge: Edge) -> None:
        for made in self.inputs[edge.name]:
            made.capped = False
        edge.signal(signal.SIGSTOP)
        time.sleep(fault.lasts_s + IDLE_MS / 1000)
        edge.signal(signal.SIGCONT)

    def _lost_state(self, fault: Fault, edge: Edge) -> None:
        self._down(edge, ALL_KINDS, before_ms=10**9)
        edge.lose_state()
        time.sleep(fault.lasts_s)
        self._up(edge)

    def _copied_state(self, fault: Fault, edge: Edge) -> None:
        edge.copy_state()
        edge.start_twin()
        deadline = time.monotonic() + TWIN_START_S
        while not edge.twin_has_connected() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(fault.lasts_s)
        edge.stop_twin()
        self.losses.append(Loss(edge.name, ALL_KINDS, 0, wall_ms() + LONG_UNREAD_MS))

    def _old_state(self, fault: Fault, edge: Edge) -> None:
        edge.copy_state()
        time.sleep(fault.lasts_s)
        self._down(edge, ALL_KINDS, before_ms=10**9)
        edge.restore_state()
        self._up(edge)
        # What the agent accepts until the center has refused its state goes as well.
        self.losses.append(Loss(edge.name, ALL_KINDS, wall_ms(), wall_ms() + LONG_UNREAD_MS))

    def _clock(self, fault: Fault, edge: Edge) -> None:
        for made in self.inputs[edge.name]:
            made.capped = False
        step_s = float(self._rng.choice([40.0, -20.0, 3600.0, 5.0]))
        edge.step_clock(step_s)
        time.sleep(fault.lasts_s)
        edge.step_clock(0.0)

    def _disk_full(self, fault: Fault, edge: Edge) -> None:
        if not edge.has_own_disk:
            self.skipped.append("disk-full: a tmpfs cannot be mounted here")
            return
        for made in self.inputs[edge.name]:
            made.capped = False
        edge.fill_disk()
        time.sleep(fault.lasts_s)
        edge.free_disk()
        if edge.process is not None and edge.process.poll() is not None:
            self._up(edge)  # it ended, as service managers expect of a full disk

    def _drift(self, fault: Fault, edge: Edge) -> None:
        self.drifting.add(edge.name)
        for made in self.inputs[edge.name]:
            made.drifts = True

    def _retire(self, fault: Fault, edge: Edge) -> None:
        self.retired[edge.name] = wall_ms()
        self.center.request("DELETE", f"/v1/edges/{edge.name}")

    def _cut(self, fault: Fault, edge: Edge) -> None:
        edge.link.cut()
        time.sleep(fault.lasts_s)
        edge.link.heal()

    def _duplicate(self, fault: Fault, edge: Edge) -> None:
        for _ in range(2):
            edge.link.hold_replies()
            time.sleep(fault.lasts_s / 2)
            edge.link.heal()
            time.sleep(0.3)

    def _broker_away(self, fault: Fault, edge: Edge) -> None:
        # Not longer: nobody can tell a broker that says nothing from a broker that has nothing to say.
        self.brokers.pause(IDLE_MS / 3000)

    def _broker_restart(self, fault: Fault, edge: Edge) -> None:
        """Restarts mosquitto. A publisher whose acknowledgement got lost publishes again."""
        broker = self.brokers.mqtt
        if broker is None:
            self.skipped.append("broker-restart: the topics of the Kafka broker are in memory")
            return
        for made in (made for inputs in self.inputs.values() for made in inputs if isinstance(made, MqttInput)):
            made.capped = False
        began = wall_ms()
        broker.stop()
        time.sleep(fault.lasts_s / 2)
        broker.start()
        self.repeats += [Loss(e.name, ("mqtt",), began - ROTATION_MS, wall_ms() + LONG_UNREAD_MS) for e in self.edges]

    def _kill_gateway(self, fault: Fault, edge: Edge) -> None:
        self.center.kill("gateway")

    def _kill_api(self, fault: Fault, edge: Edge) -> None:
        self.center.kill("api")

    def _kill_sink(self, fault: Fault, edge: Edge) -> None:
        self.center.kill("sink")

    def _kill_job(self, fault: Fault, edge: Edge) -> None:
        self.center.kill_driver()

    def _checkpoints(self, fault: Fault, edge: Edge) -> None:
        self.center.kill_driver()
        self.center.delete_checkpoints()

    def _late_query(self, fault: Fault, edge: Edge) -> None:
        self.late_query_ms = wall_ms()
        late = [s for s in self.specs if s["name"].endswith("late_query")]
        self._register(late)
        self.reader.queries += [s["name"] for s in late]

    def _put(self, fault: Fault, edge: Edge) -> None:
        """Changes a query. The border is near: an edge that is away hears of it late."""
        (spec,) = [s for s in self.specs if s["name"].endswith(CHANGED)]
        path, params = f"/v1/queries/{spec['name']}", {"at": str(wall_ms() + 1000)}
        reply = self.center.request("PUT", path, json=second_version(spec), params=params)
        if reply.status_code == 422:
            self.skipped.append(f"put: {reply.json()['detail']}")
            return
        reply.raise_for_status()
        self.border_ms = time_ms(reply.json()["begins"])

    # The end

    def _settle(self) -> bool:
        """Waits until every window with records has its final answer.

        Returns False if that does not come while the center and all edges say for `SETTLE_S` that they are ready.

        Raises:
            SoakFailed: they do not become ready.
        """
        truths = self._truths()
        began = ready_since = time.monotonic()
        while time.monotonic() - ready_since < SETTLE_S:
            if all(self._is_final(truth) for truth in truths.values()):
                time.sleep(1.5)
                until = time.monotonic() + CORRECTED_S
                while self.center.waits_for_corrections() and time.monotonic() < until:
                    time.sleep(1)
                return True
            self.center.check_alive()
            if not (self.center.is_ready() and all(edge.is_ready() for edge in self.edges)):
                ready_since = time.monotonic()
            if ready_since - began > RECOVERY_S:
                raise SoakFailed(f"center and edges were not ready within {RECOVERY_S:.0f} s after the last fault")
            time.sleep(0.5)
        return False

    def _is_final(self, truth: QueryTruth) -> bool:
        newest = self.reader.newest(truth.spec.name)
        phases = {time_ms(start): answer["phase"] for start, answer in newest.items()}
        if isinstance(truth.spec.window, SessionWindow) or truth.spec.name.endswith("late_query"):
            return bool(phases) and all(phase == "final" for phase in phases.values())
        return all(
            phases.get(start, "" if _must_be_answered(truth, start) else "final") == "final" for start in truth.windows
        )

    def _truths(self) -> dict[str, QueryTruth]:
        truths = {}
        for mapping in self.specs:
            spec = QuerySpec.from_mapping(mapping)
            records = [self._true_record(h, spec) for h in self.log.handed]
            again = [
                replace(r, fate=Fate.UNCERTAIN)
                for r, h in zip(records, self.log.handed, strict=True)
                if self._may_repeat(h)
            ]
            records += again
            truths[spec.name] = QueryTruth(spec, records, ARROW_COLUMNS)
            if spec.name.endswith(CHANGED) and self.border_ms is not None:
                # The first version counts nothing any more once it has ended, and edges may hear late of the second.
                late = {
                    id(r) for r, h in zip(records, self.log.handed, strict=False) if h.watermark_ms >= self.border_ms
                }
                sure = [replace(r, fate=Fate.UNCERTAIN) if id(r) in late else r for r in records]
                truths[spec.name] = QueryTruth(spec, sure, ARROW_COLUMNS, WindowRange(until_ms=self.border_ms))
                lost = [replace(r, fate=Fate.LOST) if r.fate is Fate.COUNTED else r for r in records]
                changed = QuerySpec.from_mapping(second_version(mapping))
                own = WindowRange(self.border_ms)
                truths[f"{spec.name}@2"] = QueryTruth(changed, lost, ARROW_COLUMNS, own)
        return truths

    def _true_record(self, handed: Handed, spec: QuerySpec) -> TrueRecord:
        r = handed.record
        values = {name: getattr(r, name) for name in COLUMNS}
        if isinstance(spec.window, SessionWindow):
            closes = r.at + spec.window.longest_ms
            final = closes + spec.lateness_ms
        else:
            start = spec.window.slice_start(r.at)
            closes = start + spec.window.slice_ms
            final = spec.window.last_window_end(start) + spec.lateness_ms
        late = closes <= handed.watermark_ms
        return TrueRecord(handed.edge, r.at, values, self._fate(handed, spec, final), late, handed.watermark_ms)

    def _fate(self, handed: Handed, spec: QuerySpec, final_ms: int) -> Fate:
        if not handed.certain:
            return Fate.UNCERTAIN
        kind = self._kind_of(handed.edge, handed.record.src)
        if self._may_be_lost(handed.edge, kind, handed.at_ms):
            return Fate.LOST
        joined = self.joined.get(handed.edge)
        if joined is not None and not self.episode.listed and handed.at_ms <= joined + 3000:
            return Fate.EITHER
        if handed.edge in self.retired and final_ms > self.retired[handed.edge] - ROTATION_MS:
            # What it had accepted in windows that were open is missing, and they say so; later it accepts nothing.
            is_read = kind == "http" or handed.at_ms <= self.retired[handed.edge]
            return Fate.LOST if is_read else Fate.UNCERTAIN
        if spec.name.endswith("late_query") and (
            self.late_query_ms is None or min(handed.record.at, handed.at_ms) <= self.late_query_ms + 3000
        ):
            return Fate.LOST
        return Fate.COUNTED

    def _may_be_lost(self, edge: str, kind: str, at_ms: int) -> bool:
        return any(x.edge == edge and kind in x.kinds and x.from_ms <= at_ms <= x.to_ms for x in self.losses)

    def _may_repeat(self, handed: Handed) -> bool:
        """Whether the broker may have the record twice: the answers then state `at-least-once`."""
        kind = self._kind_of(handed.edge, handed.record.src)
        return any(
            x.edge == handed.edge and kind in x.kinds and x.from_ms <= handed.at_ms <= x.to_ms for x in self.repeats
        )

    def _false_deliveries(self) -> list[Falsehood]:
        """Answers that state another delivery than the sources of their edges have."""
        true = {edge.name: edge.plan.delivery for edge in self.edges if edge.plan.delivery}
        always = true.keys() - self.retired.keys() - self.joined.keys()
        false = []
        for query in self.reader.queries:
            for start, answer in self.reader.newest(query).items():
                stated = answer["quality"]["completeness"].get("delivery", {})
                if not (true.items() >= stated.items() and stated.keys() >= always):
                    message = f"the delivery is stated as {stated}; it is {true}"
                    false.append(Falsehood("delivery", query, start, int(answer["revision"]), message))
        return false

    def _kind_of(self, name: str, src: str) -> str:
        edge = next(e for e in self.edges if e.name == name)
        return edge.plan.sources[int(src.rpartition("/")[2])].kind

    def _write_evidence(self) -> None:
        """Writes the records and the answers beside the logs, for who looks into a false statement."""
        with (self.directory / "records.ndjson").open("w") as file:
            for h in self.log.handed:
                file.write(json.dumps(asdict(h)) + "\n")
        with (self.directory / "answers.ndjson").open("w") as file:
            for windows in self.reader.answers.values():
                for revisions in windows.values():
                    file.writelines(json.dumps(answer) + "\n" for answer in revisions.values())

    def _check(self, settled: bool) -> EpisodeResult:
        findings = Findings()
        findings.false += self.reader.false
        self.reader.false = []
        for name, truth in self._truths().items():
            read = self.reader.answers.get(truth.spec.name, {}).values()
            answers = [a for revisions in read for a in revisions.values() if a["version"] == _version(name)]
            findings.add(self._check_query(truth, answers, settled, _version(name)))
            if settled and not name.partition("@")[0].endswith(("late_query", CHANGED)):
                findings.false += self._false_rejections(truth.spec)
        starts = {q: list(self.reader.newest(q))[:2] for q in self.reader.queries}
        findings.cells += self.reader.compare_forms(starts)
        if self.warehouse is not None and settled:
            newest = {q: self.reader.newest(q) for q in self.reader.queries}
            false, cells = self.warehouse.compare(self.center, newest)
            findings.false += false
            findings.cells += cells
        findings.false += self._false_deliveries()
        findings.false += self._unannounced() + (self._false_columns() if settled else [])
        findings.false += self.reader.false
        if not settled:
            message = f"/readyz of the center and all edges is 200, and answers are not final {SETTLE_S:.0f} s after"
            findings.false.append(Falsehood("readyz", self.stream, "", 0, message))
        return EpisodeResult(
            self.episode, findings, len(self.log.handed), self.reader.reads, skipped=sorted(set(self.skipped))
        )

    def _false_rejections(self, spec: QuerySpec) -> list[Falsehood]:
        """What the newest answers, and the query's page, say of rejected records that is not true."""
        sure = [
            r
            for r in self.log.rejected
            if r.certain and r.edge not in self.retired
            and not self._may_be_lost(r.edge, self._kind_of(r.edge, r.src), r.at_ms)
        ]  # fmt: skip
        most = math.inf if self.losses else len(self.log.rejected)  # what may be lost may also be read twice
        false = []
        total = int(self.center.request("GET", f"/v1/queries/{spec.name}").json()["rejected"])
        if not len(sure) <= total <= most:
            message = f"the query's page has {total} rejected records; there are {len(sure)} to {most}"
            false.append(Falsehood("rejected", spec.name, "", 0, message))
        for start, answer in self.reader.newest(spec.name).items():
            stated = answer["quality"]["records"]["rejected"]
            begin_ms, end_ms = time_ms(start), time_ms(answer["window"]["end"])
            must = sum(r.event_ms is not None and begin_ms <= r.event_ms < end_ms for r in sure)
            if not must <= stated <= most or (stated and answer["contract"]["met"]):
                message = f"{stated} rejected, {must} to {most} are; met: {answer['contract']['met']}"
                false.append(Falsehood("rejected", spec.name, start, int(answer["revision"]), message))
        return false

    def _false_columns(self) -> list[Falsehood]:
        """Alarms about columns that have their values, and columns that were renamed without an alarm."""
        alarms = {alarm["edge"] for alarm in self.center.alarms() if alarm["kind"] == "column-null"}
        names = {edge.name for edge in self.edges}
        false = [(edge, "column-null, and no column has lost its values") for edge in alarms & names - self.drifting]
        for edge in sorted(self.drifting - alarms - {loss.edge for loss in self.losses}):
            values: dict[str, list[int]] = {}
            for handed in self.log.handed:
                if handed.edge == edge:
                    values.setdefault(handed.record.src, [0, 0])[handed.record.p is None] += 1
            if any(before >= VALUES and after >= NULLS for before, after in values.values()):
                false.append((edge, f"no column-null; records with and without p: {values}"))
        return [Falsehood("alarm", edge, "", 0, message) for edge, message in false]

    def _unannounced(self) -> list[Falsehood]:
        """What answers state to be lost or uncounted without an alarm."""
        raised = {(alarm["kind"], alarm["edge"]) for alarm in self.center.alarms()}
        false = []
        for query in self.reader.queries:
            stated: set[tuple[str, str]] = set()
            for answer in self.reader.newest(query).values():
                completeness = answer["quality"]["completeness"]
                stated |= {("state-lost", edge) for edge in completeness.get("lost_state", ())}
                stated |= {("input-lost", loss["edge"]) for loss in completeness.get("losses", ())}
                if answer["quality"]["records"]["after_final"]:
                    stated.add(("records-after-final", ""))
            after_final = {("records-after-final", "") for kind, _ in raised if kind == "records-after-final"}
            false += [Falsehood("alarm", query, "", 0, f"no alarm {s}") for s in sorted(stated - raised - after_final)]
        return false

    def _check_query(self, truth: QueryTruth, answers: Sequence[Any], settled: bool, version: int) -> Findings:
        end = max((w.end_ms for w in truth.windows.values()), default=0)
        late = truth.spec.name.endswith("late_query")
        # The query's page also counts records that came too late for windows without any answer.
        page = self.center.request("GET", f"/v1/queries/{truth.spec.name}", params={"version": version}).json()
        stated = sum(a["quality"]["records"]["after_final"] for a in answers if a["phase"] == "final")
        return check_query(
            truth,
            answers,
            at_rest=settled,
            counted=max(0, page["after_final"] - stated),
            closed_through_ms=None if late else end,
            late_is_known=False,
        )

    def _tear_down(self) -> None:
        self.reader.stop()
        for inputs in self.inputs.values():
            for made in inputs:
                made.abandon()
        for edge in self.edges:
            if edge.process is not None:
                edge.signal(signal.SIGCONT)
            edge.close()
        self.brokers.close()
        if not self.center.is_alive():
            return
        for spec in self.specs:
            self.center.request("DELETE", f"/v1/queries/{spec['name']}")
        for edge in self.edges:
            self.center.request("DELETE", f"/v1/edges/{edge.name}")


def _version(name: str) -> int:
    """The version of a query of which a truth has the key."""
    return int(name.partition("@")[2] or 1)


def _must_be_answered(truth: QueryTruth, start_ms: int) -> bool:
    window = truth.windows[start_ms]
    return any(truth.fate(i, window.end_ms) is Fate.COUNTED for i in window.records)
