"""What the parts of a job's process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from center.catalog import Catalog
from center.job.metrics import JobMetrics
from center.results import ResultStore
from center.storage.progress import DriverProgress, NoProgress


@dataclass(frozen=True, slots=True)
class JobParts:
    """What the parts of a job's process share.

    Attributes:
        now_ms: wall clock, ms; the time of answers.
        progress: where a part notes the query that it works on.
    """

    catalog: Catalog
    store: ResultStore
    metrics: JobMetrics
    now_ms: Callable[[], int]
    progress: DriverProgress = field(default_factory=NoProgress)
