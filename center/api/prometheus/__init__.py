"""Answers as Prometheus series, and the part of PromQL that is valid for them. Grafana reads them.

`center.api.routers.prometheus` serves it. A query's answers are samples at the ends of its windows. Each measure has
three series: its estimate and its two bounds.
"""
