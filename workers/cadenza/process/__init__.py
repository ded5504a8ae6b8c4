"""The worker process: loads and runs the user's function."""
