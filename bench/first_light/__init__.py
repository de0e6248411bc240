"""Rates, latency and memory of one edge and one center (`python -m bench.first_light`)."""
