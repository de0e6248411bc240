"""Inputs of streams: files, standard input, pushed records (HTTP), and replays paced by a clock.

`edge.agent` builds and reads the sources. `edge.preflight` reads the beginning of files. A source decodes records and
returns chunks with positions. No source uses the core or the journal.
"""

from edge.sources.factory import (
    build_source,
    build_sources,
    check_package,
    file_opener,
    package_receivers,
    package_sources,
)
from edge.sources.grpc_receiving import GrpcReceivers
from edge.sources.http import StreamReceiver
from edge.sources.pacing import PacedSource, replay_clock
from edge.sources.receiving import PushEndpoint, Unavailable
from edge.sources.stdin import StdinSource
