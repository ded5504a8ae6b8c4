"""The REST API: routes, problem documents, event streams, metrics, and the process that serves them on Ray Serve."""
