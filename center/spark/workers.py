"""What Spark's Python workers need besides their work."""

from __future__ import annotations

import gc
from functools import cache


@cache
def settle() -> None:
    """Takes what a worker has imported out of the garbage collector's sight, once per process.

    Spark's workers run a full collection after every task. Walking the 140,000 objects of our modules,
    SQLAlchemy's and Arrow's takes 0.1 s, which is more than the merging of a usual batch.
    """
    gc.collect()
    gc.freeze()
