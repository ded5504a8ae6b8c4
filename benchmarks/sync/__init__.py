"""What a synchronisation costs, beside what the link allows and beside peers. ``python -m benchmarks.sync``."""
