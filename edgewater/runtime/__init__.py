"""The code that every process needs: configuration, log, health endpoints, connections, plugins.

In the shared code, only this package and the client do I/O.
"""
