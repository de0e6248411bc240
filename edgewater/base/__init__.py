"""The ground floor: errors, streams, quantities, timestamps, columns of numbers, nested messages, plain YAML, plugins.

All packages of `edgewater` stand on it, and it imports none of them.
"""
