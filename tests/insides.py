"""Insides that tests need, each in one place: no test names a private attribute for them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase
from sqlalchemy import Engine

from edgewater.synopses import registry


def reading(metric: MetricWrapperBase) -> float:
    """Returns the value of a counter or a gauge, which has all its labels."""
    (family,) = metric.collect()
    return next(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def engine_of(store: Any) -> Engine:
    """Returns the database of a store, to write what another release wrote, or to let a statement fail."""
    engine: Engine = store._engine
    return engine


def forget_registrations(patch: pytest.MonkeyPatch) -> None:
    """Forgets the kinds and functions that the test registers from now on."""
    for name in ("_KINDS", "_FUNCTIONS"):
        patch.setattr(registry, name, dict(getattr(registry, name)))
