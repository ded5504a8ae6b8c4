"""Sizes and durations as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``; whole bytes below 1 KiB."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """``75`` as ``1m 15s``, ``7500`` as ``2h 05m``; tenths below ten seconds."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
