"""The stages of a first answer's latency, from the `/metrics` of the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

STAGES = ("arrive", "wait", "merge", "apply")
Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(url: str) -> dict[Sample, float]:
    """Returns all samples by name and labels."""
    text = httpx.get(url).raise_for_status().text
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def since(before: Mapping[Sample, float], after: Mapping[Sample, float]) -> dict[Sample, float]:
    """Returns the increases of counters and histograms."""
    return {sample: value - before.get(sample, 0.0) for sample, value in after.items()}


def quantiles_ms(grown: Mapping[Sample, float], name: str, **labels: str) -> dict[str, float] | None:
    """Returns mean, median and 95th percentile of a histogram, interpolated linearly; None without observations."""
    buckets = defaultdict[float, float](float)
    for (sample, sample_labels), value in grown.items():
        if sample == f"{name}_bucket" and labels.items() <= dict(sample_labels).items():
            buckets[float(dict(sample_labels)["le"])] += value
    key = tuple(sorted(labels.items()))
    count, total = grown.get((f"{name}_count", key), 0.0), grown.get((f"{name}_sum", key), 0.0)
    if not count:
        return None
    bounds = [(0.0, 0.0), *sorted(buckets.items())]

    def quantile(q: float) -> float:
        for (low, below), (high, through) in pairwise(bounds):
            if through >= q * count:
                width = (high if high < float("inf") else low) - low
                return low + width * (q * count - below) / max(through - below, 1e-9)
        return bounds[-1][0]

    return {"mean": _ms(total / count), "p50": _ms(quantile(0.5)), "p95": _ms(quantile(0.95))}


def stages(grown: Mapping[Sample, float], query: str) -> dict[str, dict[str, float] | None]:
    """Returns the stages of a first answer's latency at the center; the client measures the last stage."""
    name = "edgewater_job_first_answer_seconds"
    return {stage: quantiles_ms(grown, name, stage=stage, query=query) for stage in STAGES}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
