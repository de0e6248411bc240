from __future__ import annotations

import pyarrow as pa

from edge.core.measure_inputs import AccuracyMeasure, MeasureArguments
from tests.query_specs import query_spec


def test_integers_beyond_2_to_53_are_observed_as_the_nearest_float() -> None:
    spec = query_spec(measures={"total": "sum(x)"}, accuracy={"error": "5%"})
    bound = spec.bind({"x": pa.int64()})
    records = pa.record_batch({"x": [2**60 + 1, 3], "event_time_ms": [0, 0]})

    seen = AccuracyMeasure(bound).observed(MeasureArguments(bound, records), None)

    assert seen.values is not None
    assert seen.values.tolist() == [2.0**60, 3.0]


def test_the_records_of_a_synopsis_are_counted_with_and_without_a_value() -> None:
    spec = query_spec(measures={"p50": "quantile(x, 0.5)"}, accuracy={"error": "5%"})
    bound = spec.bind({"x": pa.int64()})
    records = pa.record_batch({"x": pa.array([None, 3], pa.int64()), "event_time_ms": [0, 0]})

    seen = AccuracyMeasure(bound).observed(MeasureArguments(bound, records), None)

    assert seen.values is None and seen.population is None
