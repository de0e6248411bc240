"""Decodes the input of sources: framing of lines, NDJSON, CSV, Arrow columns, decompression, event time.

`edge.sources` and `edge.preflight` call this package. Only `decompression` reads files. No module uses a source, a
clock or a configuration.
"""

from edge.codecs.columnar import convert
from edge.codecs.formats import TextFormat
from edge.codecs.messages import ColumnsSchema, MessageDecoder
from edge.codecs.schema import EventTime, RecordSchema

__all__ = ["ColumnsSchema", "EventTime", "MessageDecoder", "RecordSchema", "TextFormat", "convert"]
