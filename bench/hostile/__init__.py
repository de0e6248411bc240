"""Fuzzers of input from outside. `python -m bench.hostile` runs them; `targets.register` adds a target."""
