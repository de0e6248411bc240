"""Decodes the input of sources: framing of lines, NDJSON, CSV, Arrow columns, decompression, event time.

`edge.sources` and `edge.preflight` call this package. Only `decompression` reads files. No module uses a source, a
clock or a configuration.
"""

from edge.codecs.access_log import ACCESS_LOGS, ACCESS_NULLS, ACCESS_TIME, LogFormat, log_format
from edge.codecs.columnar import check_schema, concat, convert, is_text, needed_columns
from edge.codecs.csv_codec import CsvDialect, read_header
from edge.codecs.decompression import CODECS, HEAD_BYTES, NO_BYTES, TAIL_BYTES, Digest, OpenFile, codec_of, extended
from edge.codecs.event_time import (
    UNIT_NAMES,
    cast_or_null,
    extract_event_times,
    is_time_pattern,
    read_times,
    time_values,
)
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import EXTENSIONS, Format, TextFormat, TextFormatName
from edge.codecs.framing import Block, BlockReader, ByteStream
from edge.codecs.lenient import CONVERTED
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.line_stream import BOM, LineStream, split_header, too_long
from edge.codecs.messages import ColumnsSchema, MessageDecoder, joined
from edge.codecs.schema import (
    DAY_MS,
    MAX_SKEW_MS,
    MS_PER_UNIT,
    TIME_UNITS,
    YEAR_2000_MS,
    YEAR_2200_MS,
    EventTime,
    RecordSchema,
)
from edge.codecs.syslog import FIELDS as SYSLOG_FIELDS
from edge.codecs.syslog import SyslogFormat, is_field

__all__ = ["ColumnsSchema", "EventTime", "MessageDecoder", "RecordSchema", "TextFormat", "convert"]
