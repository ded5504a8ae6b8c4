"""Round coordination: rounds, data leases, progress, and the coordinator's server."""
