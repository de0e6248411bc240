"""Inputs of streams: files, standard input, pushed records (HTTP), and replays paced by a clock.

`edge.agent` builds and reads the sources. `edge.preflight` reads the beginning of files. A source decodes records and
returns chunks with positions. No source uses the core or the journal.
"""
