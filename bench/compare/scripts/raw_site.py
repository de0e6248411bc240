"""Site: sends records as they come, as CSV of the columns that are needed, in one zstd stream.

raw_site.py FILE HOST PORT LEVEL RATE SEED: a uniform sample of RATE. RUN (JSON) has the replay.
"""

import json
import os
import random
import socket
import sys
import time

import zstandard

path, host, port, level, rate, seed = sys.argv[1:]
run, rate, draw = json.loads(os.environ["RUN"]), float(rate), random.Random(int(seed)).random
start, last = run["start_ms"], run["start_ms"] + run["windows"] * run["window_ms"] + 1000
packer = zstandard.ZstdCompressor(level=int(level)).compressobj()
center = socket.create_connection((host, int(port)))
lines = open(path)
next(lines)
line, tick, clock = "", run["begin_s"], 0
while clock < last:
    tick = max(tick + 0.2, time.time())
    time.sleep(max(0, tick - time.time()))
    clock = min(start + int((time.time() - run["begin_s"]) * 1000 * run["speed"]), last)
    out = []
    while line or (line := lines.readline()):
        if int(line.split(",", 1)[0]) >= clock:
            break
        if rate >= 1 or draw() < rate:
            out.append(",".join(line.rstrip().split(",")[:4]) + "\n")
        line = ""
    out.append(f"{clock},,,\n")  # the site's clock, as a watermark
    center.sendall(packer.compress("".join(out).encode()) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
time.sleep(3600)
