"""Reads files, once or by following them through rotation, with positions from which every batch can be reread.

`edge.sources.factory` and `edge.preflight` call this package. It reads no configuration and stores nothing on disk. The
positions in its chunks are its whole state.
"""

from edge.sources.files.fingerprint import matching_files
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece
from edge.sources.files.source import FileSource, parquet_opener, text_opener
