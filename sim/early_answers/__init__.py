"""Watermarks under a virtual clock: the production decision and its rivals on made and recorded arrivals."""
