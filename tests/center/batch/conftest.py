"""Records whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest


@pytest.fixture(scope="session")
def records() -> pd.DataFrame:
    """20,000 records over about 100 s in no order: time in ms, IPs as texts, sizes, latencies, sites."""
    rng = np.random.default_rng(20_210_714)
    n = 20_000
    return pd.DataFrame(
        {
            "ts": 1_640_995_200_000 + rng.integers(0, 100_000, n),
            "ip": [f"10.0.{i // 256}.{i % 256}" for i in np.minimum(rng.zipf(1.3, n), 999)],
            "size": rng.integers(0, 5000, n),
            "latency": rng.lognormal(3, 1, n),
            "site": rng.choice(["jfk", "lga", "ewr"], n, p=[0.7, 0.2, 0.1]),
        }
    )


@pytest.fixture(scope="session")
def df(spark: Any, records: pd.DataFrame) -> Any:
    """The records in 4 partitions."""
    return spark.createDataFrame(records).repartition(4).cache()
