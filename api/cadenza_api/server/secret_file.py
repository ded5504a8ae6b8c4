"""Files for secrets."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(path: Path, text: str) -> Path:
    """Write a file that only this user may read, in place of any that is there."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path
