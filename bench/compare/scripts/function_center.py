"""Center of function_site.py: merges the sites' windows. function_center.py HOST PORT ANSWERS_FILE SITES FUNCTION"""

import collections
import itertools
import json
import socket
import struct
import sys
import threading
import time

import zstandard

host, port, path, sites, function = sys.argv[1:]
server, lock, windows, out = socket.create_server((host, int(port))), threading.Lock(), {}, open(path, "w")


def answer(groups):
    if function == "distinct":
        return {country: [len(set(clients))] for country, clients in groups.items()}
    if function == "p99":
        return {country: [sorted(sizes)[int(0.99 * (len(sizes) - 1))]] for country, sizes in groups.items()}
    counts = {country: collections.Counter() for country in groups}
    for country, items in groups.items():
        for package, count in items:
            counts[country][package] += count
    return {f"{country},{p}": [n] for country, count in counts.items() for p, n in count.most_common(20)}


def serve(site):
    unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    stream = site.makefile("rb")
    while header := stream.read(8):
        number, size = struct.unpack("<II", header)
        rows = unpack.decompress(stream.read(size)).decode().split("\n")
        with lock:
            window = windows.setdefault(number, [0, {}])
            window[0] += 1
            for country, *items in (row.split(",") for row in rows if row):
                if function == "top":
                    values = [(package, int(n)) for package, n in (item.split(" ") for item in items)]
                else:
                    values = map(int, items)
                    values = itertools.accumulate(values) if function == "distinct" else values
                window[1].setdefault(country, []).extend(values)
            if window[0] == int(sites):
                groups = answer(window[1])
                print(json.dumps({"window": number, "given_s": time.time(), "groups": groups}), file=out, flush=True)


while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
