"""What every process needs: configuration, log, health endpoints, connections, plugins.

The only I/O of the shared code beside the client.
"""
