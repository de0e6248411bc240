"""Sampling rates for queries with an accuracy of a function of a sample, learnt from their answers.

The update runs beside the batches: a function and its resamples take time, and no answer waits for them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

import numpy as np

from center.early import SamplingPlan, plan_rate, plans_differ
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.results import AnswerRecord
from center.serving.function_values import SEED, function_confidence
from center.storage.progress import Track
from edgewater.base.errors import EdgewaterError, StorageError
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.synopses import GroupedAggregate, RowSampleStack
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

RECENT_WINDOWS = 5
"""The rate is the highest rate that one of this many windows needed. Windows differ, and unprocessed rows cannot be
recovered."""
RATE_MARGIN = 1.25
"""Factor over the needed rate."""
UPDATE_INTERVAL_S = 2.0  # limit: writes to the catalog


class FunctionRates:
    """The rate of one query: 1 until the first answer. Pure."""

    def __init__(self) -> None:
        self._needed: deque[tuple[int, float]] = deque(maxlen=RECENT_WINDOWS)
        self._seen: tuple[int, int] | None = None

    @property
    def rate(self) -> float:
        """The rate for the next windows, in (0, 1]."""
        return min(1.0, RATE_MARGIN * max(rate for _, rate in self._needed)) if self._needed else 1.0

    def has_seen(self, record: AnswerRecord) -> bool:
        return self._seen == (record.window_start_ms, record.revision)

    def add(self, record: AnswerRecord, spec: QuerySpec) -> None:
        """Adds the rate that an answer's window needed. Raises SynopsisError for damaged bytes."""
        self._seen = record.window_start_ms, record.revision
        if record.synopsis is None:
            return
        needed = list(needed_rates(GroupedAggregate.from_bytes(record.synopsis), spec))
        if needed:
            if self._needed and self._needed[-1][0] == record.window_start_ms:
                self._needed.pop()
            self._needed.append((record.window_start_ms, max(needed)))


def needed_rates(aggregate: GroupedAggregate, spec: QuerySpec) -> Iterable[float]:
    """Yields the rate that each group of a window needs for the query's accuracy."""
    accuracy = spec.accuracy
    assert accuracy is not None
    measure = next(m for m in spec.measures if m.name == accuracy.measure)
    function, stack = measure.function.sample, aggregate.measures[measure.name]
    assert function is not None and isinstance(stack, RowSampleStack)
    parameters, rng = dict(measure.parameters), np.random.default_rng(SEED)
    confidence = function_confidence(spec, measure, len(stack))
    for rows, rate in zip(stack.rows_by_group(), stack.rates(), strict=True):
        yield plan_rate(function, parameters, rows, float(rate), accuracy.error, rng, confidence=confidence)


class StoredRates:
    """Sampling rates in the catalog, from which gateways send them to edges."""

    def __init__(self, shared: JobParts) -> None:
        self._shared = shared
        self._stored: dict[QueryRef, dict[EdgeId, SamplingPlan]] = {}

    def store(self, ref: QueryRef, plans: dict[EdgeId, SamplingPlan]) -> None:
        """Stores the sampling that a query needs, by edge, if it differs enough. Raises StorageError."""
        for edge, plan in plans.items():
            self._shared.metrics.needed_rate.labels(ref.name, edge).set(plan.rate)
        if plans_differ(self._stored.get(ref, {}), plans):
            self._shared.catalog.budgets.record_sampling(ref, plans)
            self._stored[ref] = plans

    def forget(self, ref: QueryRef) -> None:
        self._stored.pop(ref, None)


class FunctionRatePlanner:
    """The rates of all queries with an accuracy of a function, stored in the catalog for the gateways.

    After a restart each query keeps its stored rate until a new window needs another rate.
    """

    def __init__(self, writer: LedgerWriter, shared: JobParts) -> None:
        self._writer, self._shared = writer, shared
        self._rates: dict[QueryRef, FunctionRates] = {}
        self._stored = StoredRates(shared)
        self._checked: dict[QueryRef, int] = {}  # last answer id of the store when the query was checked

    def run(self, stop: threading.Event, leads: threading.Event) -> None:
        """Updates the rates at intervals until `stop` is set, while `leads` is set."""
        while not stop.wait(UPDATE_INTERVAL_S):
            if not leads.is_set():
                continue
            try:
                self.update()
            except Exception as exc:  # edges continue with their rates
                is_foreign = not isinstance(exc, EdgewaterError)
                log.warning("sampling rates of functions are not updated; trying again: %s", exc, exc_info=is_foreign)

    def update(self) -> None:
        """Reads each query's newest answer and stores the rates that have changed. Raises StorageError."""
        queries = self._writer.sampled_functions()
        for ref in [r for r in self._rates if r not in queries]:
            self._stored.forget(ref)
            for state in (self._rates, self._checked):
                state.pop(ref, None)
        if not queries:
            return
        newest = self._shared.store.last_answer_id()
        for ref, (spec, edges) in queries.items():
            # With several measures a sample would distort the other measures. Reading an answer loads all its rows, so
            # it is read only if the store has changed.
            if len(spec.measures) > 1 or self._checked.get(ref) == newest:
                continue
            self._shared.progress.enter(Track.FUNCTIONS, query_key(ref))
            try:
                self._update_query(ref, spec, edges)
                self._checked[ref] = newest
            except StorageError:
                raise
            except Exception:  # a user's function, or damaged bytes: the other queries must get their rates
                log.exception("query %s: the sampling rate of its function is not updated", query_key(ref))
            finally:
                self._shared.progress.step(Track.FUNCTIONS)

    def _update_query(self, ref: QueryRef, spec: QuerySpec, edges: tuple[EdgeId, ...]) -> None:
        plan = self._rates.setdefault(ref, FunctionRates())
        record = self._shared.store.latest(ref)
        if record is None or plan.has_seen(record):
            return
        plan.add(record, spec)
        self._stored.store(ref, dict.fromkeys(edges, SamplingPlan(plan.rate)))
