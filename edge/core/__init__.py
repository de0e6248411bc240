"""The deterministic state machine of an edge: events in, effects out.

`EdgeCore` aggregates ingested batches per query and slice, and builds frames when the uplink pulls. Run by
`edge.durability`, which journals its events, and by the simulator. It has no clock, no I/O and no randomness: times and
the measured link are in the events.
"""
