"""Turns stored answers into output for readers: JSON, tables, and answers to questions about windows.

`center.api` and `center.job` call it. It is pure, except `StoredWindows`, which reads the result store. It has no HTTP.
"""
