"""Cadenza's library: what runs beside a PyTorch training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.training.session import Session, join

__all__ = ["Session", "join"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the API and the command line import cadenza.spec and must not pay for torch.
    if name in __all__:
        from cadenza.training import session

        return getattr(session, name)
    raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
