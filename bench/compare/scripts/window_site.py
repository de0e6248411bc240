"""Site: exact sums and counts per window, sent when the window ends, as columns in one zstd stream of level 19.

window_site.py FILE HOST PORT [DROP_BYTES]: groups with at most so many bytes are not sent. RUN (JSON) has the replay.
"""

import json
import os
import socket
import struct
import sys
import time

import zstandard

path, host, port, *drop = sys.argv[1:]
run, limit = json.loads(os.environ["RUN"]), int(drop[0]) if drop else -1
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
        at, package, country, size = line.split(",")[:4]
        if int(at) >= min(clock, end):
            break
        group = groups.setdefault(f"{package},{country}", [0, 0])
        group[0] += int(size)
        group[1] += 1
        line = ""
    if clock >= end:
        rows = sorted((key, *sums) for key, sums in groups.items() if sums[0] > limit)
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        body = "\n\n".join("\n".join(map(str, column)) for column in columns)
        data = packer.compress(body.encode()) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        center.sendall(struct.pack("<II", number, len(data)) + data)
        groups, number = {}, number + 1
time.sleep(3600)
