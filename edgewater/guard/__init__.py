"""Checks and cost bounds of bytes that arrive from another machine. Pure."""
