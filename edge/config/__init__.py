"""The configuration of an edge: one YAML file.

Paths are relative to the working directory. Secrets and the edge's id are given literally or as ``{env: NAME}`` or
``{file: PATH}``. With an id from the environment, many machines can share one file. No other values in the file are
replaced.
"""

from edge.config.connections import HttpConfig, LimitsConfig, UplinkConfig
from edge.config.edge_config import EdgeConfig, load_config, parse_config
from edge.config.section import HttpTlsConfig, Model, TlsConfig
from edge.config.sources import FileConfig, HttpPushConfig, PackageSourceConfig, SourceConfig, StdinConfig
from edge.config.streams import LookupConfig, ReplayConfig, StreamConfig, TimeConfig, Zone
from edge.config.text import MAX_PATTERN, CsvConfig, MessageConfig, RegexConfig, TextConfig

__all__ = ["MessageConfig", "Model", "TextConfig", "TlsConfig"]
