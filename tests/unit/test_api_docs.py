from __future__ import annotations

import re
from pathlib import Path

from fastapi.routing import APIRoute

from cadenza_api.server import routes_files, routes_following, routes_jobs, routes_operations
from cadenza_service.jobs.lifecycle import JobState

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FROM_THE_FRAMEWORK = {("404", "not_found"), ("405", "method_not_allowed")}


def raised() -> set[tuple[str, str]]:
    """Status and code of every problem that the source makes."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "api" / "cadenza_api").rglob("*.py"))
    return {found for text in sources for found in re.findall(r'\bProblem\(\s*(\d{3}),\s*"([a-z_]+)"', text)}


def documented() -> set[tuple[str, str]]:
    """The same from the page's table; a row may hold several."""
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| (`[^|]*`) \|", PAGE, re.MULTILINE)
    return {
        pair
        for statuses, codes in rows
        for pair in zip(statuses.split(", "), re.findall(r"`([a-z_]+)`", codes), strict=True)
    }


def test_the_page_has_every_problem_and_no_other() -> None:
    assert len(raised()) > 15
    assert documented() == raised() | FROM_THE_FRAMEWORK


def test_the_page_has_every_route() -> None:
    for routes in (routes_files, routes_following, routes_jobs, routes_operations):
        for route in routes.router.routes:
            assert isinstance(route, APIRoute)
            path = route.path.replace("{job_id}", "{id}")
            for method in route.methods or ():
                assert re.search(rf"`{method} {re.escape(path)}(\?[^`]*)?`", PAGE), f"{method} {path}"


def test_the_page_has_every_state() -> None:
    assert all(re.search(rf"\b{state}\b", PAGE) for state in JobState)
