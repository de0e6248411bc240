"""The Prometheus collectors of the agent: `EdgeCollector` and `LookupCollector`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from edge.codecs.lenient import CONVERTED
from edge.durability import DurableCore
from edge.source_status import SourceStatus
from edge.sources.lookups import StreamLookups
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.runtime.metrics import family, family_of
from edgewater.wire import QueryRef


class EdgeCollector:
    """A Prometheus collector that reads the core's own counters at each scrape.

    Args:
        gauges: returns additional gauges, name -> (help text, value), read at each scrape.
        sources: returns the status of each source.
        refused_frames: frames refused by the center, by reason.
        refused: pushed requests that were refused and connections that were closed, by reason.
        costs: returns the seconds that each of these queries takes per record, if they are known.
        skipped: numbers of valid values that are no records, by (stream, reason).
    """

    def __init__(
        self,
        durable: DurableCore,
        gauges: Callable[[], dict[str, tuple[str, float]]],
        sources: Callable[[], Sequence[SourceStatus]],
        refused_frames: Mapping[str, int],
        refused: Mapping[str, int],
        costs: Callable[[Collection[QueryRef]], Mapping[QueryRef, float]],
        skipped: Mapping[tuple[str, str], int],
    ) -> None:
        self._durable, self._gauges, self._sources, self._skipped = durable, gauges, sources, skipped
        self._refused_frames, self._refused, self._costs = refused_frames, refused, costs

    def collect(self) -> Iterable[Metric]:
        core = self._durable.core
        streams = core.streams.items()
        yield family(
            Counter,
            "edgewater_edge_records",
            "Records read, by stream.",
            ["stream"],
            {n: s.records for n, s in streams},
        )
        text = "Watermark of the stream, event time; no sample before the first record and after the stream has ended."
        known = {n: s.watermark_ms / 1000 for n, s in streams if MIN_TIME_MS < s.watermark_ms < MAX_TIME_MS}
        yield family(Gauge, "edgewater_edge_watermark_seconds", text, ["stream"], known)
        yield from CONVERTED.collect()
        yield from self._loss_metrics()
        yield from self._source_metrics()
        yield from self._durability_metrics()
        text = "Memory of a query's open windows, and of what is kept of closed ones; limits.max_query_bytes bounds it."
        held = {ref.name: memory.nbytes for ref, memory in core.held_memory().items()}
        yield family(Gauge, "edgewater_edge_query_bytes", text, ["query"], held)
        costs = {ref.name: record_s for ref, record_s in self._costs(core.queries.keys()).items()}
        text = "CPU time in which a query processes a record."
        yield family(Gauge, "edgewater_edge_query_cost_seconds", text, ["query"], costs)
        for name, (text, value) in self._gauges().items():
            yield family(Gauge, f"edgewater_edge_{name}", text, [], {(): value})

    def _loss_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of records and values that were not counted, or not counted as requested."""
        state = self._durable.state
        losses = {tuple(kind.split("/", 1)): count for kind, count in state.losses.items()}
        text = "Records not counted in a query, by reason."
        yield family(Counter, "edgewater_edge_dropped_records", text, ["reason"], state.drops)
        text = "Failed calls of user-defined functions in queries; their value is null."
        yield family(Counter, "edgewater_edge_function_failures", text, ["function"], state.function_failures)
        text = "Values that are no records although nothing is wrong with them."
        yield family(Counter, "edgewater_edge_skipped_values", text, ["stream", "reason"], self._skipped)
        text = "Pushed requests that were refused and connections that were closed, by reason."
        yield family(Counter, "edgewater_edge_refused", text, ["reason"], self._refused)
        text = "Pushed batches that had been counted before, and were not counted again."
        yield family(Counter, "edgewater_edge_repeated_pushes", text, [], {(): state.pushes.repeated})
        yield family(
            Counter, "edgewater_edge_input_losses", "Stated losses of input, by reason.", ["stream", "reason"], losses
        )

    def _durability_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of frames and of recovery."""
        durable = self._durable
        yield family(Counter, "edgewater_edge_frames", "Frames built.", [], {(): durable.core.next_seq - 1})
        text = "Frames that the center has refused, in whole or in part, by reason."
        yield family(Counter, "edgewater_edge_refused_frames", text, ["reason"], self._refused_frames)
        text = "Damaged journal records that were skipped."
        yield family(Counter, "edgewater_edge_journal_damaged_records", text, [], {(): durable.damaged_records})
        text = "Frames that recovery, on another platform, would have built with other bodies."
        yield family(Counter, "edgewater_edge_replay_diverged_frames", text, [], {(): len(durable.diverged)})

    def _source_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of each entry of ``sources``. An unknown lag has no sample."""
        statuses, labels = {(s.stream, s.source): s for s in self._sources()}, ["stream", "source"]

        def by_reason(of: Callable[[SourceStatus], Mapping[str, int]]) -> dict[tuple[str, ...], int]:
            return {(*name, reason): n for name, status in statuses.items() for reason, n in of(status).items()}

        text = "Records read, by source, since the agent started."
        yield family_of(Counter, "edgewater_edge_source_records", text, labels, statuses, lambda s: s.records)
        text, reasons = "Records that could not be decoded.", [*labels, "reason"]
        yield family(Counter, "edgewater_edge_rejected_records", text, reasons, by_reason(lambda s: s.rejected))
        text = "Records that were counted or left out on a guess."
        yield family(Counter, "edgewater_edge_guessed_records", text, reasons, by_reason(lambda s: s.guessed))
        text = "Parts of a source, such as partitions, that cannot be read; /readyz and edge top have the reason."
        yield family_of(Gauge, "edgewater_edge_source_failing", text, labels, statuses, lambda s: s.failing)
        text = "Parts of a source, such as partitions."
        yield family_of(Gauge, "edgewater_edge_source_parts", text, labels, statuses, lambda s: s.parts)
        text = "Messages that the system has and the agent has not read; no sample if it is unknown."
        yield family_of(Gauge, "edgewater_edge_source_lag_messages", text, labels, statuses, lambda s: s.lag.messages)
        text = "Age of the oldest message that the agent has not read; no sample if it is unknown."
        yield family_of(Gauge, "edgewater_edge_source_lag_seconds", text, labels, statuses, lambda s: s.lag.seconds)
        text = "How long a source has been read without being found empty; 0 if it waits for input or has ended."
        yield family_of(Gauge, "edgewater_edge_source_behind_seconds", text, labels, statuses, lambda s: s.behind_s)
        text = "Always 1: how often a source counts a record if processes crash or connections are lost."
        delivery = {(*name, each): 1 for name, status in statuses.items() for each in status.delivery}
        yield family(Gauge, "edgewater_edge_source_delivery", text, [*labels, "delivery"], delivery)


class LookupCollector:
    """A Prometheus collector of the lookups of an agent."""

    def __init__(self, lookups: Iterable[StreamLookups]) -> None:
        self._lookups = {(each.stream, each.config.file): each for stream in lookups for each in stream.lookups}

    def collect(self) -> Iterable[Metric]:
        if not self._lookups:
            return
        labels, each = ["stream", "file"], self._lookups
        yield family_of(
            Gauge, "edgewater_edge_lookup_rows", "Rows of the version in use.", labels, each, lambda k: k.rows
        )
        text = "Rows of the version in use that are left out."
        yield family_of(Gauge, "edgewater_edge_lookup_rejected_rows", text, labels, each, lambda k: k.rejected_rows)
        text = "Time at which the version in use was loaded."
        loaded = {name: k.loaded_ms / 1000 for name, k in each.items() if k.loaded_ms is not None}
        yield family(Gauge, "edgewater_edge_lookup_loaded_timestamp_seconds", text, labels, loaded)
        text = "1 while the newest version of the file cannot be loaded."
        yield family_of(
            Gauge, "edgewater_edge_lookup_failed", text, labels, each, lambda k: float(k.failure is not None)
        )
        text = "Records with a key that no row has."
        yield family_of(Counter, "edgewater_edge_lookup_unmatched", text, labels, each, lambda k: k.unmatched)
