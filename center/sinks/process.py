"""`SinkProcess` runs all sinks of a center, with one thread for each sink."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from center.catalog import Catalog
from center.results import AnswerReader
from center.sinks.alert_states import AlertCollector, saved_states
from center.sinks.definitions import SinkDefinition, read_definition
from center.sinks.runner import LOOK_MS, SinkRunner
from center.sinks.store import SinkStatus, SinkStore
from edgewater.base.errors import EdgewaterError, InvalidConfig
from edgewater.base.streams import EdgeId
from edgewater.runtime.metrics import family, family_of
from edgewater.runtime.tasks import Tasks

END_S = 0.2  # limit: how long other sinks wait
"""The longest time in seconds for which the end of a changed sink may delay other sinks. If a sink takes longer to end,
it is started again after its end."""
log = logging.getLogger(__name__)


class SinkProcess:
    """Starts a thread for each sink that is defined. Stops the thread when the sink is no longer defined.

    Args:
        configured: sinks of ``center.yaml``. They replace sinks of the same name that the API has defined.
        owner: name of this process in the leases of sinks.
        now_ms: returns the wall time.
        listed: the setting `sink.secrets`.

    Attributes:
        registry: Prometheus' metrics of the process.
        tasks: the threads of the process. The process sets how it ends if one of them fails.
    """

    def __init__(
        self,
        configured: Sequence[SinkDefinition],
        catalog: Catalog,
        results: AnswerReader,
        store: SinkStore,
        *,
        owner: str,
        now_ms: Callable[[], int],
        listed: Collection[str] = (),
    ) -> None:
        self._configured = {definition.name: definition for definition in configured}
        self._catalog, self._results, self._store = catalog, results, store
        self._owner, self._now_ms, self._listed = owner, now_ms, listed
        self._running: dict[str, _RunningSink] = {}
        self._refused: dict[str, str] = {}
        self._removed: set[str] = set()
        self.registry = CollectorRegistry()
        self.registry.register(SinkCollector(store, results, now_ms))
        self.registry.register(AlertCollector(store))
        self.tasks = Tasks()
        self.registry.register(self.tasks.failures)

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set. Returns when all threads have ended."""
        following = self.tasks.thread("sinks", functools.partial(self._follow_until, stop))
        stop.wait()
        following.join()
        for sink in self._running.values():
            sink.end()
        for sink in self._running.values():
            sink.thread.join()

    def _follow_until(self, stop: threading.Event) -> None:
        has_failed = False
        while True:
            try:
                self._follow()
                has_failed = False
            except EdgewaterError as exc:
                if not has_failed:  # once per outage
                    log.warning("the definitions of sinks cannot be read: %s", exc.message)
                has_failed = True
            if stop.wait(LOOK_MS / 1000):
                return

    def problems(self) -> list[str]:
        """Returns why sinks do not work. Each text begins with the name of the sink."""
        failing = [(name, sink.runner.problem) for name, sink in sorted(self._running.items())]
        problems = [f"{name}: {problem}" for name, problem in [*failing, *sorted(self._refused.items())] if problem]
        return self.tasks.missing() + problems

    def _follow(self) -> None:
        wanted = self._wanted()
        for name, sink in list(self._running.items()):
            definition = wanted.get(name)
            if definition is None or definition.key != sink.runner.definition.key:
                sink.end()
                sink.thread.join(END_S)
            if not sink.thread.is_alive():
                del self._running[name]
        for name, definition in wanted.items():
            if name not in self._running:
                runner = SinkRunner(
                    definition,
                    self._catalog,
                    self._results,
                    self._store,
                    owner=self._owner,
                    now_ms=self._now_ms,
                    is_stored=name not in self._configured,
                )
                self._running[name] = _RunningSink(runner, self.tasks)

    def _wanted(self) -> dict[str, SinkDefinition]:
        wanted = dict(self._configured)
        self._refused = {}
        for status in self._store.statuses():
            if status.name in wanted:
                continue
            if status.definition is None:
                if status.name not in self._removed and not status.is_run(self._now_ms()):
                    self._remove(status.name)
                continue
            try:
                wanted[status.name] = read_definition(status.name, status.definition, listed=self._listed)
            except InvalidConfig as exc:  # such as a variable that this process does not have
                self._refused[status.name] = exc.message
                if status.problem != exc.message:
                    self._store.state_problem(status.name, exc.message, self._now_ms())
        if names := self._store.ending():
            from center.sinks.alerts import ending

            states = dict(saved_states(self._store))
            for name in names:
                if name in wanted:
                    continue
                if name in states and not states[name].targets:
                    self._store.forget(name)
                    end_alarms(self._catalog, name)
                else:
                    wanted[name] = ending(name)
        return wanted

    def _remove(self, name: str) -> None:
        """Ends the alarms and the alerts of a sink that has been removed from ``center.yaml``."""
        end_alarms(self._catalog, name)
        if any(sink == name for sink, _ in saved_states(self._store)):
            self._store.remove(name, ends=True)
        self._removed.add(name)


def end_alarms(catalog: Catalog, sink: str) -> None:
    """Removes the alarms about a sink that is deleted."""
    for kind in ("sink-failing", "sink-gap", "sink-refused"):
        catalog.alarms.end(kind, EdgeId(""), about=f"sink {sink}: ")


class _RunningSink:
    def __init__(self, runner: SinkRunner, tasks: Tasks) -> None:
        self.runner = runner
        self._ended = threading.Event()
        self.thread = tasks.thread(f"sink-{runner.definition.name}", self._run)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            pause_s = self.runner.step()
        self.runner.stop()

    def end(self) -> None:
        self._ended.set()


class SinkCollector(Collector):
    """Metrics of all sinks. They come from the stored states, so any process can run the sinks."""

    def __init__(self, store: SinkStore, results: AnswerReader, now_ms: Callable[[], int]) -> None:
        self._store, self._results, self._now_ms = store, results, now_ms

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics. Prometheus' client calls it for each scrape."""
        try:
            each = {status.name: status for status in self._store.statuses()}
            now_ms = self._now_ms()
            lags = {name: lag_of(status, self._results, now_ms).age_ms / 1000 for name, status in each.items()}
        except EdgewaterError as exc:
            log.warning("the states of sinks cannot be read: %s", exc.message)
            each, lags = {}, {}
        sink = ["sink"]
        text = "1 if the last attempt of the sink succeeded."
        yield family_of(Gauge, "edgewater_sink_up", text, sink, each, lambda s: float(not s.problem))
        text = "1 if an operator has paused the sink."
        yield family_of(Gauge, "edgewater_sink_paused", text, sink, each, lambda s: s.paused)
        text = "Age of the oldest answer that the sink has not written."
        yield family(Gauge, "edgewater_sink_lag_seconds", text, sink, lags)
        text = "Ids of answers that were deleted before the sink had them."
        gaps = {name: s.gap[1] - s.gap[0] + 1 if s.gap else 0 for name, s in each.items()}
        yield family(Gauge, "edgewater_sink_gap_answers", text, sink, gaps)
        yield family_of(
            Counter, "edgewater_sink_answers", "Answers that were written.", sink, each, lambda s: s.answers
        )
        yield family_of(Counter, "edgewater_sink_rows", "Rows that were written.", sink, each, lambda s: s.rows)
        text = "Samples or messages that the sink's system has refused and never accepts."
        yield family_of(Counter, "edgewater_sink_refused", text, sink, each, lambda s: s.refused)


class SinkLag(NamedTuple):
    """How many stored answers a sink has not written, and the age of the oldest of them, in ms."""

    answers: int
    age_ms: int


def lag_of(status: SinkStatus, results: AnswerReader, now_ms: int) -> SinkLag:
    """Returns the lag of a sink with all its queries."""
    has = max(0, status.answer_id)
    lags = [results.lag(ref, query.answer_id, has) for ref, query in status.waiting.items()]
    given_ms = [results.answered_at_after(has), *(first_ms for _, _, first_ms in lags)]
    oldest_ms = min((ms for ms in given_ms if ms is not None), default=now_ms)
    behind = max(0, results.last_answer_id() - has) + sum(past for _, past, _ in lags)
    return SinkLag(behind, max(0, now_ms - oldest_ms))
