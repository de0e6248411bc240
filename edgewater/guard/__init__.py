"""Checks and cost bounds of bytes that arrive from another machine. The code is pure."""
