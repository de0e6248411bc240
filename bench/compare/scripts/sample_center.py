"""Center of sampled records: Horvitz-Thompson estimates. sample_center.py HOST PORT ANSWERS_FILE SITES RATE"""

import json
import os
import socket
import sys
import threading
import time

import zstandard

host, port, path, sites, rate = sys.argv[1:]
run, weight = json.loads(os.environ["RUN"]), 1 / float(rate)
server, lock, windows, clocks = socket.create_server((host, int(port))), threading.Lock(), {}, {}
answers = open(path, "w")


def give():
    while len(clocks) == int(sites) and give.next < run["windows"]:
        if min(clocks.values()) < run["start_ms"] + (give.next + 1) * run["window_ms"]:
            return
        answer = {"window": give.next, "given_s": time.time(), "groups": windows.pop(give.next, {})}
        print(json.dumps(answer), file=answers, flush=True)
        give.next += 1


def serve(site, number):
    unpack, rest = zstandard.ZstdDecompressor().decompressobj(), ""
    while data := site.recv(65536):
        *lines, rest = (rest + unpack.decompress(data).decode()).split("\n")
        with lock:
            for line in lines:
                at, package, country, size = line.split(",")
                if not size:
                    clocks[number] = int(at)
                    continue
                window = windows.setdefault((int(at) - run["start_ms"]) // run["window_ms"], {})
                group = window.setdefault(f"{package},{country}", [0, 0])
                group[0] += int(size) * weight
                group[1] += weight
            give()


give.next = 0
for number in range(int(sites)):
    threading.Thread(target=serve, args=(server.accept()[0], number)).start()
