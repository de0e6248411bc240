"""The center's processes: their start, their supervision, and preflight checks.

Called only by `center.cli`. This file imports nothing, because each command loads only the modules that its component
needs.
"""
