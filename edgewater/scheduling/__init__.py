"""When the next watermark that ends a window is expected (`IngestionHistory`). Pure: no clock, no threads.

The center's admission and the simulator of schedulers (`bench.scheduling`) order queries by it: see
`docs/explanation/scheduling.md`.
"""

from edgewater.scheduling.ingestion import DelayInterval, IngestionHistory

PATIENCE = 2.0  # measured: bench.scheduling
"""Factor of the work that remains until an answer. Queries that are due run in the order of their watermarks' arrival
plus this product. With 0 this is earliest deadline first. A large factor is shortest remaining first, which halves the
mean past overload and starves the tail.
"""
