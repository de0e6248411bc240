"""Answers as Prometheus series, and the part of PromQL that is true of them: what Grafana reads.

`center.api.routers.prometheus` serves it. A query's answers are samples at the ends of its windows; each measure has
the series of its estimate and of its two bounds.
"""

from center.api.prometheus.evaluate import PromqlError, evaluate, instant_json, parse, range_json, selectors
from center.api.prometheus.series import Axis, SeriesReader

__all__ = [
    "Axis",
    "PromqlError",
    "SeriesReader",
    "evaluate",
    "instant_json",
    "parse",
    "range_json",
    "selectors",
]
