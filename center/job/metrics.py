"""The metrics of the job."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from prometheus_client import Summary

from center.ledger import Emission, FrameSummary
from edgewater.answers import Phase
from edgewater.runtime.metrics import Metrics
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

WAIT_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)  # format: buckets of a histogram
# format: buckets of a histogram
STAGE_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 60.0)
DELAY_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)  # format: buckets of a histogram


class JobMetrics(Metrics):
    """The metrics of one job."""

    def __init__(self) -> None:
        super().__init__("edgewater_job_")
        self._add_batches()
        self._add_queries()
        self._add_early_answers()
        self._add_driver()
        self._by_query = (
            *(self.missed, self.first_answer, self.coverage, self.confidence, self.final_answers),
            *(self.verified, self.chosen_wait, self.straggler_share, self.needed_rate),
        )
        self._queries: AbstractSet[str] = frozenset()
        self._edges: AbstractSet[str] = frozenset()

    def _add_batches(self) -> None:
        self.batches = self.counter("batches", "Batches of frames (plans) applied.")
        self.rows = self.counter("rows", "Rows after merging.")
        self.frames = self.counter("frames", "Frames applied.")
        text = (
            "From the start of a batch's tasks until it is applied; a batch is merged while the one before is applied."
        )
        self.batch_seconds = self.histogram("batch_seconds", text)
        text = "From the arrival of a frame at the gateway until it is applied."
        self.frame_delay = self.histogram("frame_delay_seconds", text, buckets=DELAY_BUCKETS_S)
        text = (
            "From a window's end until its first answer is in the store, by stage: until its last frame was at the "
            "gateway (arrive), until its batch began (wait), merging (merge), until the batch before was applied "
            "(queue), transaction (apply)."
        )
        self.first_answer = Summary(
            "edgewater_job_first_answer_seconds", text, ["query", "stage"], registry=self.registry
        )
        self.first_answer_stage = self.histogram(
            "first_answer_stage_seconds", "The same, of all queries.", "stage", buckets=STAGE_BUCKETS_S
        )
        text = "Bytes of segments with results of tasks that are not applied."
        self.unapplied_bytes = self.gauge("unapplied_result_bytes", text)
        self.last_batch = self.gauge("last_batch_timestamp_seconds", "When the last batch was applied.")

    def _add_queries(self) -> None:
        self.answers = self.counter("answers", "Answers.", "cause")
        text = "Windows whose first answer was later than the staleness budget."
        self.missed = self.counter("missed_deadlines", text, "query")
        text = (
            "Final answers, by the first cause why they do not meet their contract whatever their values are; `none`:"
            " there is no such cause."
        )
        self.final_answers = self.counter("final_answers_by_cause", text, "query", "cause")
        text = (
            "Queries whose frames are kept and not applied: paused until the job tries them again, or quarantined until"
            " an operator retries them."
        )
        self.set_aside = self.gauge("set_aside_queries", text, "state")
        self.skipped = self.counter("skipped", "Frames and partials that cannot be applied.", "kind")
        self.losses = self.counter("input_losses", "Losses of input that edges have stated, once per query.", "reason")

    def _add_early_answers(self) -> None:
        text = "From the time that an edge's arrival report is about until its frame is at the gateway."
        self.report_delay = self.histogram("report_delay_seconds", text, buckets=STAGE_BUCKETS_S)
        # By query, only sum and count: buckets of hundreds of queries would make a scrape take seconds of the job's
        # CPU.
        text = "Fraction of the query's last early-answered windows whose first interval contained the final value."
        self.coverage = self.gauge("interval_coverage_ratio", text, "query")
        text = "The confidence of the query's accuracy: what the coverage should be."
        self.confidence = self.gauge("interval_confidence_ratio", text, "query")
        text = "Early answers compared with the final one, by whether their interval contained it."
        self.verified = self.counter("verified_intervals", text, "query", "held")
        text = "Event time from a window's end until its first early answer."
        self.chosen_wait = self.histogram("chosen_wait_seconds", text, "query", buckets=WAIT_BUCKETS_S)
        text = "Fraction of the last early answer's records that had not arrived."
        self.straggler_share = self.gauge("straggler_share", text, "query")
        text = "Fraction of an edge's records that the accuracy needs processed."
        self.needed_rate = self.gauge("needed_sampling_rate", text, "query", "edge")

    def _add_driver(self) -> None:
        text = "From the begin of the driver's term until frames were applied, or none was left."
        self.start_seconds = self.gauge("start_seconds", text)
        self.leads = self.gauge("leads", "1: this driver holds the lease; 0: it is a standby.")
        self.drivers = self.gauge("drivers", "Drivers that lead at the same time (spark.drivers).")
        text = "How often the lease had been taken when this driver took it."
        self.lease_epoch = self.gauge("lease_epoch", text)
        self.failures = self.counter("failures", "Failures that are retried.", "where")

    def keep_only(self, queries: AbstractSet[str], edges: AbstractSet[str]) -> None:
        """Removes the series of queries that have been deleted, and of edges that have been retired.

        Otherwise a deleted query's last coverage would be reported, and would raise alerts, until the job ends.
        """
        for name in self._queries - queries:
            for metric in self._by_query:
                metric.remove_by_labels({"query": name})
        for edge in self._edges - edges:
            self.needed_rate.remove_by_labels({"edge": edge})
        self._queries, self._edges = queries, edges

    def observe_accuracy(self, emission: Emission) -> None:
        """Observes an answer's wait, stragglers and interval coverage, if its query has an accuracy."""
        accuracy, query = emission.facts.accuracy, emission.query.name
        if accuracy is None:
            return
        if emission.facts.predicted is not None and emission.facts.predicted.confidence is not None:
            self.confidence.labels(query).set(emission.facts.predicted.confidence)
        if accuracy.coverage is not None:
            self.coverage.labels(query).set(accuracy.coverage)
        if accuracy.covered is not None:
            self.verified.labels(query, "yes" if accuracy.covered else "no").inc()
        if accuracy.is_predicted and emission.phase is Phase.EARLY:
            if accuracy.straggler_share is not None:
                self.straggler_share.labels(query).set(accuracy.straggler_share)
            if emission.revision == 1 and accuracy.waited_ms is not None:
                self.chosen_wait.labels(query).observe(accuracy.waited_ms / 1000)

    def observe_batch(
        self,
        summaries: Sequence[FrameSummary],
        emissions: Iterable[Emission],
        began_ms: int,
        merged_ms: int,
        turn_ms: int,
        applied_ms: int,
    ) -> None:
        """Observes the delays of a batch's frames, and of its first answers by stage.

        The stages use wall clocks of three machines. A clock offset moves time from one stage to the next.
        """
        arrived_ms: dict[QueryRef, int] = {}
        for summary in summaries:
            self.frame_delay.observe(max(0, applied_ms - summary.received_at_ms) / 1000)
            arrived_ms[summary.query] = max(summary.received_at_ms, arrived_ms.get(summary.query, 0))
        for emission in emissions:
            last_ms = arrived_ms.get(emission.query)
            if emission.revision != 1 or last_ms is None:
                continue
            stages = {
                "arrive": last_ms - (emission.answered_at_ms - emission.facts.staleness_ms),
                "wait": began_ms - last_ms,
                "merge": merged_ms - began_ms,
                "queue": turn_ms - merged_ms,
                "apply": applied_ms - turn_ms,
            }
            for stage, ms in stages.items():
                self.first_answer.labels(emission.query.name, stage).observe(max(0, ms) / 1000)
                self.first_answer_stage.labels(stage).observe(max(0, ms) / 1000)
            log.debug(
                "%s: window to %d %s, ms after its end by stage: %s",
                emission.query.name,
                emission.window_end_ms,
                emission.phase,
                stages,
            )
