"""The control plane: REST API, Python client, command line."""
