"""The data plane: what travels, and how."""
