"""Center: Apache Flink, SQL on event time; rows of the answers go to standard output.

flink_center.py HOST PORT LOCAL_PORT...: a thread unpacks each site's stream into the local socket that Flink reads.
RUN (JSON) has the replay.
"""

import json
import os
import socket
import sys
import threading

import zstandard
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.table import Schema, StreamTableEnvironment

host, port, *local_ports = sys.argv[1:]
run = json.loads(os.environ["RUN"])
outside = socket.create_server((host, int(port)))
inside = [socket.create_server(("127.0.0.1", int(p))) for p in local_ports]


def forward(server):
    engine, site = server.accept()[0], outside.accept()[0]
    unpack = zstandard.ZstdDecompressor().decompressobj()
    while data := site.recv(65536):
        engine.sendall(unpack.decompress(data))


for server in inside:
    threading.Thread(target=forward, args=(server,), daemon=True).start()
environment = StreamExecutionEnvironment.get_execution_environment()
environment.set_parallelism(1)
table = StreamTableEnvironment.create(environment)
for key, value in {
    "pipeline.auto-watermark-interval": "50ms",
    "execution.buffer-timeout.interval": "20ms",
    "table.local-time-zone": "UTC",
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "100ms",
    "table.exec.mini-batch.size": "5000",
}.items():
    table.get_config().set(key, value)
schema = Schema.new_builder().column("f0", "STRING")
schema.column_by_expression("read_at", "TO_TIMESTAMP_LTZ(CAST(SPLIT_INDEX(f0, ',', 0) AS BIGINT), 3)")
for index, column in enumerate(("package", "country", "size"), 1):
    schema.column_by_expression(column, f"SPLIT_INDEX(f0, ',', {index})")
built = schema.watermark("read_at", "read_at").build()
for number, local in enumerate(local_ports):  # one source per site: the union's watermark is the slowest site's
    lines = environment._j_stream_execution_environment.socketTextStream("127.0.0.1", int(local), "\n", 0)
    from pyflink.datastream import DataStream

    table.create_temporary_view(f"site{number}", table.from_data_stream(DataStream(lines), built))
union = " UNION ALL ".join(f"SELECT read_at, package, country, `size` FROM site{n}" for n in range(len(local_ports)))
table.execute_sql(f"CREATE TEMPORARY VIEW records AS {union}")
columns = "start_ms BIGINT, package STRING, country STRING, amount BIGINT, n BIGINT"
table.execute_sql(f"CREATE TEMPORARY TABLE answers ({columns}) WITH ('connector' = 'print')")
window = f"TABLE(TUMBLE(TABLE records, DESCRIPTOR(read_at), INTERVAL '{run['window_ms'] // 1000}' SECONDS(9)))"
start_ms = "UNIX_TIMESTAMP(CAST(window_start AS STRING), 'yyyy-MM-dd HH:mm:ss.SSS') * 1000"
table.execute_sql(
    f"INSERT INTO answers SELECT {start_ms}, package, country, SUM(TRY_CAST(`size` AS BIGINT)), COUNT(*) "
    f"FROM {window} WHERE `size` <> '' GROUP BY window_start, window_end, package, country"
).wait()
