"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# An example's wall-clock time says nothing on a machine that does other things too.
settings.register_profile("cadenza", deadline=None)
settings.load_profile("cadenza")
