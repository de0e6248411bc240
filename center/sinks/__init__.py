"""Sinks write answers to other systems, such as a PostgreSQL database.

The process `edgewater center sink` runs the sinks. Each sink reads answers in the order in which they become visible.
Its target stores a position per query together with the answers. Packages provide kinds of sinks (`center.sinks.base`).
"""

from center.sinks.base import Sink, SinkAnswer, SinkContext, SinkQuery
from center.sinks.definitions import read_definition
from center.sinks.runner import SinkRunner
from center.sinks.store import SinkStatus, SinkStore

__all__ = ["Sink", "SinkAnswer", "SinkContext", "SinkQuery", "SinkRunner", "SinkStatus", "SinkStore", "read_definition"]
