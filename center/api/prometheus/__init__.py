"""Answers as Prometheus series, and the part of PromQL that is valid for them. Grafana reads them.

`center.api.routers.prometheus` serves it. A query's answers are samples at the ends of its windows. Each measure has
three series: its estimate and its two bounds.
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
