"""Generates a preset dictionary such as `edgewater/wire/preset_v1.bin`: `python tests/golden/make_preset.py FILE`.

`preset_v1.bin` never changes, since frames in logs and journals are read with it. A later version gets a new file.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from edgewater.query import QuerySpec
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.wire import FrameBody, Partial, SliceClose, body_to_wire

DAY_MS = 86_400_000
START_MS = 1_388_361_600_000
HEAD_BYTES = 1200
"""Bytes of a body that are used; counters follow them."""
MIN_NEW_BYTES = 24
"""A body is added to the dictionary if its compressed size, given those before it, is above this."""
KEYS = [[], ["status"], ["country", "url"], ["country"]]
COLUMNS = {"country": pa.string(), "url": pa.string(), "status": pa.int64()}
COLUMNS |= {"x": pa.float64(), "i": pa.int64(), "s": pa.string()}
ROW = {"country": ["a"], "url": ["a"], "status": [1], "x": [1.5], "i": [7], "s": ["a"]}
ALONE = ["bloom(s)", "cuckoo(s)", "count_min(s)", "top_k(s, 10)", "fast_agms(s)", "reservoir(x, 100)", "fifo(x, 100)",
         "biased(x, 100)", "equi_width(x, 0, 100)", "equi_depth(x)", "kll(x)", "distinct(i)", "distinct(s)",
         "quantiles(x)", "quantiles(i)"]  # fmt: skip
GROUPED = ["distinct(s)", "quantiles(x)", "var(x)", "max(x)", "min(i)", "max(i)", "sum(x)", "mean(x)", "sum(i)"]


def bodies() -> list[bytes]:
    """Returns one small body per function and kind of key; frequent ones last, where match distances are shortest."""
    made = [body({"m": function}, []) for function in ALONE]
    made += [body({"n": "count()", "value": f}, keys) for keys in KEYS[1:] for f in GROUPED]
    return [*made, body({"count": "count()", "sum": "sum(i)"}, ["country"])]


def body(measures: dict[str, str], keys: list[str]) -> bytes:
    mapping = {"name": "q", "from": "s", "measures": measures, "window": {"tumbling": "1d"}, "group_by": keys}
    bound = QuerySpec.from_mapping(mapping).bind(COLUMNS)
    row = pa.RecordBatch.from_pydict(ROW, pa.schema(list(COLUMNS.items())))
    stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
    aggregate = GroupedAggregate({key: COLUMNS[key] for key in keys}, stacks)
    values = {m.measure.name: m.argument.array(row) if m.argument else None for m in bound.measures}
    aggregate.update([row.column(key) for key in keys], values, 1, times=np.zeros(1, np.int64))
    partial = Partial(START_MS, 0, aggregate.to_bytes())
    return body_to_wire(FrameBody(START_MS + DAY_MS, (partial,), (SliceClose(START_MS, 300, 0),))).SerializeToString(
        deterministic=True
    )


def preset() -> bytes:
    kept = b""
    for piece in (b[:HEAD_BYTES] for b in bodies()):
        stream = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=kept or b"\0")
        if len(stream.compress(piece) + stream.flush()) > MIN_NEW_BYTES:
            kept += piece
    return kept[-(32 << 10) :]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} exists: it is part of the format and must not be replaced")
    target.write_bytes(preset())
