"""Fuzzers of what comes from outside. `python -m bench.hostile` runs them; `targets.register` adds one."""
