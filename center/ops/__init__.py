"""The center's processes: their start, supervision and preflight checks.

Called by `center.cli` only. Nothing is imported here: each command loads only what its component needs.
"""
