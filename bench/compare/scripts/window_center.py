"""Center of window_site.py: adds the sites' windows. window_center.py HOST PORT ANSWERS_FILE SITES"""

import json
import socket
import struct
import sys
import threading
import time

import zstandard

host, port, path, sites = sys.argv[1:]
server, lock, windows, out = socket.create_server((host, int(port))), threading.Lock(), {}, open(path, "w")


def serve(site):
    unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    stream = site.makefile("rb")
    while header := stream.read(8):
        number, size = struct.unpack("<II", header)
        keys, *columns = (c.split("\n") for c in unpack.decompress(stream.read(size)).decode().split("\n\n"))
        with lock:
            answer = windows.setdefault(number, [0, {}])
            answer[0] += 1
            for key, amount, count in zip(keys, *columns, strict=True) if keys[0] else ():
                group = answer[1].setdefault(key, [0, 0])
                group[0] += int(amount)
                group[1] += int(count)
            if answer[0] == int(sites):
                given_s = time.time()
                print(json.dumps({"window": number, "given_s": given_s, "groups": answer[1]}), file=out, flush=True)


while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
