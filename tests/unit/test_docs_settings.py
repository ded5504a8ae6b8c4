from __future__ import annotations

import re
from pathlib import Path

from cadenza_service.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_page_has_every_setting_and_no_other() -> None:
    documented = set(re.findall(r"^\| `CADENZA_([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert documented == {name.upper() for name in Settings.model_fields}
