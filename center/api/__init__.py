"""The REST API: queries, answers, live streams, edges, health and metrics, over the catalog and the result store.

`center.ops` serves the application that `create_app` returns, in any number of processes. Handlers write only queries,
to the catalog, and have no state that another process needs.
"""

from center.api.app import create_app
