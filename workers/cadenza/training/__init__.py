"""Beside the user's loop: the session and what it is made of."""
