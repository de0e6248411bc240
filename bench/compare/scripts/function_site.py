"""Site: what a function of the records by country needs, sent when the window ends, in one zstd stream of level 19.

function_site.py FILE HOST PORT FUNCTION: `distinct` sends the sets of clients, `p99` all sizes, `top` the counts of
packages. RUN (JSON) has the replay.
"""

import collections
import itertools
import json
import os
import socket
import struct
import sys
import time

import zstandard

path, host, port, function = sys.argv[1:]
run, column = json.loads(os.environ["RUN"]), {"distinct": 4, "p99": 3, "top": 1}[function]
start, window, speed, begin = run["start_ms"], run["window_ms"], run["speed"], run["begin_s"]
parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=21, hash_log=20, chain_log=20)
packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
center = socket.create_connection((host, int(port)))
lines = open(path)
next(lines)
line, groups, number = "", {}, 0
while number < run["windows"]:
    end = start + (number + 1) * window
    time.sleep(max(0, min(0.2, begin + (end - start) / 1000 / speed - time.time())))
    clock = start + (time.time() - begin) * 1000 * speed
    while line or (line := lines.readline()):
        fields = line.rstrip().split(",")
        if int(fields[0]) >= min(clock, end):
            break
        groups.setdefault(fields[2], collections.Counter())[fields[column]] += 1
        line = ""
    if clock >= end:
        rows = []
        for country, values in sorted(groups.items()):
            items = sorted(values.items() if function == "top" else map(int, values))
            if function == "distinct":
                items = [items[0], *(after - before for before, after in itertools.pairwise(items))]
            elif function == "top":
                items = [f"{package} {count}" for package, count in items]
            else:
                items = sorted(map(int, values.elements()))
            rows.append(",".join([country, *map(str, items)]))
        data = packer.compress("\n".join(rows).encode()) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        center.sendall(struct.pack("<II", number, len(data)) + data)
        groups, number = {}, number + 1
time.sleep(3600)
