"""Parameter-server shards: committed weights, aggregation, server optimizers."""
