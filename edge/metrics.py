"""The Prometheus collectors of the agent: `EdgeCollector` and `LookupCollector`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from edge.durability import DurableCore
from edge.source_status import SourceStatus
from edge.sources.lookups import StreamLookups
from edgewater.model.streams import MAX_TIME_MS, MIN_TIME_MS
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
        records = CounterMetricFamily("edgewater_edge_records", "Records read, by stream.", labels=["stream"])
        watermark = GaugeMetricFamily(
            "edgewater_edge_watermark_seconds",
            "Watermark of the stream, event time; no sample before the first record and after the stream has ended.",
            labels=["stream"],
        )
        for name, stream in core.streams.items():
            records.add_metric([name], stream.records)
            if MIN_TIME_MS < stream.watermark_ms < MAX_TIME_MS:
                watermark.add_metric([name], stream.watermark_ms / 1000)
        yield records
        yield watermark
        yield from self._loss_metrics()
        yield from self._source_metrics()
        yield from self._durability_metrics()
        held = GaugeMetricFamily(
            "edgewater_edge_query_bytes",
            "Memory of a query's open windows, and of what is kept of closed ones; limits.max_query_bytes bounds it.",
            labels=["query"],
        )
        for ref, memory in core.held_memory().items():
            held.add_metric([ref.name], memory.nbytes)
        yield held
        cost = GaugeMetricFamily(
            "edgewater_edge_query_cost_seconds", "CPU time in which a query processes a record.", labels=["query"]
        )
        for ref, record_s in self._costs(core.queries.keys()).items():
            cost.add_metric([ref.name], record_s)
        yield cost
        for name, (text, value) in self._gauges().items():
            yield GaugeMetricFamily(f"edgewater_edge_{name}", text, value)

    def _loss_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of records and values that were not counted, or not counted as requested."""
        durable = self._durable
        yield _counter("dropped_records", "Records not counted in a query, by reason.", ["reason"], durable.state.drops)
        yield _counter(
            "function_failures",
            "Failed calls of user-defined functions in queries; their value is null.",
            ["function"],
            durable.state.function_failures,
        )
        yield _counter(
            "skipped_values",
            "Values that are no records although nothing is wrong with them.",
            ["stream", "reason"],
            self._skipped,
        )
        yield _counter(
            "refused",
            "Pushed requests that were refused and connections that were closed, by reason.",
            ["reason"],
            self._refused,
        )
        yield CounterMetricFamily(
            "edgewater_edge_repeated_pushes",
            "Pushed batches that had been counted before, and were not counted again.",
            durable.state.pushes.repeated,
        )
        losses = {tuple(kind.split("/", 1)): count for kind, count in durable.state.losses.items()}
        yield _counter("input_losses", "Stated losses of input, by reason.", ["stream", "reason"], losses)

    def _durability_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of frames and of recovery."""
        yield CounterMetricFamily("edgewater_edge_frames", "Frames built.", self._durable.core.next_seq - 1)
        yield _counter(
            "refused_frames",
            "Frames that the center has refused, in whole or in part, by reason.",
            ["reason"],
            self._refused_frames,
        )
        yield CounterMetricFamily(
            "edgewater_edge_journal_damaged_records",
            "Damaged journal records that were skipped.",
            self._durable.damaged_records,
        )
        yield CounterMetricFamily(
            "edgewater_edge_replay_diverged_frames",
            "Frames that recovery, on another platform, would have built with other bodies.",
            len(self._durable.diverged),
        )

    def _source_metrics(self) -> Iterable[Metric]:
        """Yields the metrics of each entry of ``sources``. An unknown lag has no sample."""
        statuses, labels = self._sources(), ["stream", "source"]
        names = [(status.stream, status.source) for status in statuses]
        records = {name: status.records for name, status in zip(names, statuses, strict=True)}
        yield _counter("source_records", "Records read, by source, since the agent started.", labels, records)
        for metric, text, of in (
            ("rejected_records", "Records that could not be decoded.", attrgetter("rejected")),
            ("guessed_records", "Records that were counted or left out on a guess.", attrgetter("guessed")),
        ):
            by_reason = {
                (*name, reason): count
                for name, status in zip(names, statuses, strict=True)
                for reason, count in of(status).items()
            }
            yield _counter(metric, text, [*labels, "reason"], by_reason)
        gauges: dict[str, tuple[str, Callable[[SourceStatus], float | None]]] = {
            "source_failing": (
                "Parts of a source, such as partitions, that cannot be read; /readyz and edge top have the reason.",
                lambda status: status.failing,
            ),
            "source_parts": ("Parts of a source, such as partitions.", lambda status: status.parts),
            "source_lag_messages": (
                "Messages that the system has and the agent has not read; no sample if it is unknown.",
                lambda status: status.lag.messages,
            ),
            "source_lag_seconds": (
                "Age of the oldest message that the agent has not read; no sample if it is unknown.",
                lambda status: status.lag.seconds,
            ),
            "source_behind_seconds": (
                "How long a source has been read without being found empty; 0 if it waits for input or has ended.",
                lambda status: status.behind_s,
            ),
        }
        for metric, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"edgewater_edge_{metric}", text, labels=labels)
            for name, status in zip(names, statuses, strict=True):
                if (found := value(status)) is not None:
                    gauge.add_metric(name, found)
            yield gauge
        delivery = GaugeMetricFamily(
            "edgewater_edge_source_delivery",
            "Always 1: how often a source counts a record if processes crash or connections are lost.",
            labels=[*labels, "delivery"],
        )
        for name, status in zip(names, statuses, strict=True):
            for each in status.delivery:
                delivery.add_metric([*name, each], 1)
        yield delivery


class LookupCollector:
    """A Prometheus collector of the lookups of an agent."""

    def __init__(self, lookups: Iterable[StreamLookups]) -> None:
        self._lookups = [lookup for stream in lookups for lookup in stream.lookups]

    def collect(self) -> Iterable[Metric]:
        if not self._lookups:
            return
        labels = ["stream", "file"]
        rows = GaugeMetricFamily("edgewater_edge_lookup_rows", "Rows of the version in use.", labels=labels)
        rejected = GaugeMetricFamily(
            "edgewater_edge_lookup_rejected_rows", "Rows of the version in use that are left out.", labels=labels
        )
        loaded = GaugeMetricFamily(
            "edgewater_edge_lookup_loaded_timestamp_seconds",
            "Time at which the version in use was loaded.",
            labels=labels,
        )
        failed = GaugeMetricFamily(
            "edgewater_edge_lookup_failed", "1 while the newest version of the file cannot be loaded.", labels=labels
        )
        unmatched = CounterMetricFamily(
            "edgewater_edge_lookup_unmatched", "Records with a key that no row has.", labels=labels
        )
        for lookup in self._lookups:
            at = [lookup.stream, lookup.config.file]
            rows.add_metric(at, lookup.rows)
            rejected.add_metric(at, lookup.rejected_rows)
            if lookup.loaded_ms is not None:
                loaded.add_metric(at, lookup.loaded_ms / 1000)
            failed.add_metric(at, float(lookup.failure is not None))
            unmatched.add_metric(at, lookup.unmatched)
        yield from (rows, loaded, failed, unmatched)


def _counter(name: str, text: str, labels: list[str], counts: Mapping[Any, int]) -> CounterMetricFamily:
    """Returns the counter ``edgewater_edge_<name>``.

    Args:
        counts: by the value of the only label, or by a tuple of the labels' values.
    """
    family = CounterMetricFamily(f"edgewater_edge_{name}", text, labels=labels)
    for values, count in counts.items():
        family.add_metric([values] if isinstance(values, str) else list(values), count)
    return family
