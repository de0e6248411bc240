"""Center: Spark Structured Streaming over folders of CSV files, one per site.

spark_center.py HOST PORT ANSWERS_FILE FOLDER...: a thread unpacks each site's stream into files of its folder.
RUN (JSON) has the replay.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import zstandard
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

host, port, path, *folders = sys.argv[1:]
run, server = json.loads(os.environ["RUN"]), socket.create_server((host, int(port)))


def receive(folder):
    site, rest, written_s, number = server.accept()[0], b"", 0.0, 0
    unpack = zstandard.ZstdDecompressor().decompressobj()
    site.settimeout(0.2)
    while True:
        with contextlib.suppress(TimeoutError):
            rest += unpack.decompress(site.recv(65536))
        end = rest.rfind(b"\n") + 1
        if end and time.time() - written_s >= 0.2:
            hidden = Path(folder, f".{number}")
            hidden.write_bytes(rest[:end])
            hidden.rename(Path(folder, f"{number:06}.csv"))
            rest, written_s, number = rest[end:], time.time(), number + 1


for folder in folders:
    Path(folder).mkdir(exist_ok=True)
    threading.Thread(target=receive, args=(folder,), daemon=True).start()
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.sql.session.timeZone", "UTC")
spark = builder.config("spark.driver.memory", "1g").getOrCreate()
records = None
for folder in folders:  # one watermark per site: the slowest site decides
    site = spark.readStream.schema("at long, package string, country string, size long").csv(folder)
    site = site.withColumn("at", F.timestamp_millis("at")).withWatermark("at", "0 seconds")
    records = site if records is None else records.union(site)
sums = records.groupBy(F.window("at", f"{run['window_ms']} milliseconds"), "package", "country")
sums = sums.agg(F.sum("size").alias("amount"), F.count("size").alias("n"))
answers = open(path, "w")


def give(rows, _):
    windows = {}
    for row in rows.where("n > 0").select(F.unix_millis("window.start"), "package", "country", "amount", "n").collect():
        number = (row[0] - run["start_ms"]) // run["window_ms"]
        windows.setdefault(number, {})[f"{row[1]},{row[2]}"] = row[3], row[4]
    for number, groups in windows.items():
        print(json.dumps({"window": number, "given_s": time.time(), "groups": groups}), file=answers, flush=True)


query = sums.writeStream.outputMode("append").foreachBatch(give).option("checkpointLocation", f"{path}.checkpoint")
query.start().awaitTermination()
