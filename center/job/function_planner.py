"""Looks at the answers to functions of samples, and tells the edges how large a sample the next windows need.

Beside the batches: a function and its resamples take their time, and no answer waits for them.
"""

from __future__ import annotations

import logging
import threading

from center.catalog import Catalog, query_key
from center.job.function_rates import FunctionRates
from center.job.ledger_writer import LedgerWriter
from center.job.metrics import JobMetrics
from center.results import ResultStore
from center.sampling import rates_differ
from edgewater.errors import EdgewaterError, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


class FunctionRatePlanner:
    """The plans of all queries whose accuracy is about a function of a sample.

    After a restart each query keeps the rate that it was told, until a new window says another.
    """

    def __init__(self, writer: LedgerWriter, store: ResultStore, catalog: Catalog, metrics: JobMetrics) -> None:
        self._writer, self._store, self._catalog, self._metrics = writer, store, catalog, metrics
        self._plans: dict[QueryRef, FunctionRates] = {}
        self._told: dict[QueryRef, dict[EdgeId, float]] = {}
        self._looked: dict[QueryRef, int] = {}  # the id of the newest answer of all queries by then

    def look(self) -> None:
        """Takes in each query's newest answer. Raises StorageError."""
        queries = self._writer.sampled_functions()
        for ref in [r for r in self._plans if r not in queries]:
            for known in (self._plans, self._told, self._looked):
                known.pop(ref, None)
        if not queries:
            return
        newest = self._store.last_answer_id()
        for ref, (spec, edges) in queries.items():
            # Of other measures a sample would make wrong numbers. An answer has all its rows: much to load in vain.
            if len(spec.measures) > 1 or self._looked.get(ref) == newest:
                continue
            try:
                self._look_at(ref, spec, edges)
                self._looked[ref] = newest
            except StorageError:
                raise
            except Exception:  # a user's code, or damaged bytes: the other queries have their plans
                logger.exception("query %s: no look at its function of a sample", query_key(ref))

    def _look_at(self, ref: QueryRef, spec: QuerySpec, edges: tuple[EdgeId, ...]) -> None:
        plan = self._plans.setdefault(ref, FunctionRates())
        record = self._store.latest(ref)
        if record is None or plan.knows(record):
            return
        plan.note(record, spec)
        rates = dict.fromkeys(edges, plan.rate)
        for edge, rate in rates.items():
            self._metrics.needed_rate.labels(ref.name, edge).set(rate)
        if rates_differ(self._told.get(ref, {}), rates):
            self._catalog.record_sampling_rates(ref, rates)
            self._told[ref] = rates


class FunctionRateThread(threading.Thread):
    """Looks now and then, until stopped."""

    def __init__(self, planner: FunctionRatePlanner, stop: threading.Event) -> None:
        super().__init__(name="functions", daemon=True)
        self._planner, self._stopping = planner, stop

    def run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self._planner.look()
            except EdgewaterError as exc:  # Edges go on at the rates they have.
                logger.warning("no look at functions of samples: %s", exc)
            except Exception:
                if not self._stopping.is_set():
                    logger.exception("no look at functions of samples; trying again")
