"""Entry points that work, and what the user reads about those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza.plane.link import LinkError
from cadenza.process.entrypoint import EntrypointError, load
from cadenza.process.failures import TRACEBACK_LIMIT_BYTES, failure_of, traceback_of


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def problem(entrypoint: str) -> EntrypointError:
    with pytest.raises(EntrypointError) as caught:
        load(entrypoint)
    return caught.value


def test_a_function_in_a_package_is_found(code: Path) -> None:
    (code / "pkg_found").mkdir()
    (code / "pkg_found" / "deep.py").write_text("def train(config): return config['lr']\n")
    assert load("pkg_found.deep:train")({"lr": 0.5}) == 0.5


def test_a_missing_module_is_named(code: Path) -> None:
    (code / "pkg_half").mkdir()
    assert "there is no module 'no_such'" in str(problem("no_such:train"))
    assert "there is no module 'no_such'" in str(problem("no_such.inner:train"))
    error = problem("pkg_half.inner:train")
    assert "there is no module 'pkg_half.inner'" in str(error)
    assert "submit the folder" in error.remedy
    assert error.__cause__ is None


def test_a_missing_dependency_is_told_from_a_missing_entrypoint(code: Path) -> None:
    (code / "needs_more.py").write_text("import no_such_library\n")
    error = problem("needs_more:train")
    assert "needs the module 'no_such_library'" in str(error)
    assert "runtime_env.pip" in error.remedy
    assert "needs_more.py" in traceback_of(error.__cause__)


def test_the_closest_function_is_suggested(code: Path) -> None:
    (code / "typo.py").write_text(
        "from os.path import join\ndef train(config): ...\ndef evaluate(config): ...\n"
    )
    assert problem("typo:trian").remedy == "did you mean typo:train?"
    assert problem("typo:zzz").remedy == "did you mean typo:evaluate or typo:train?"


def test_a_module_without_functions_says_where_it_came_from(code: Path) -> None:
    (code / "bare.py").write_text("x = 1\n")
    assert str(code / "bare.py") in problem("bare:train").remedy


def test_what_is_not_callable_or_takes_no_config_is_refused(code: Path) -> None:
    (code / "odd.py").write_text(
        "train = 3\ndef none(): ...\ndef two(config, more): ...\ndef fine(config, more=1): ...\n"
    )
    assert "is a int, not a function" in str(problem("odd:train"))
    assert "is called with one argument" in str(problem("odd:none"))
    assert "is called with one argument" in str(problem("odd:two"))
    load("odd:fine")


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)", "def train(config:"])
def test_an_error_while_importing_keeps_its_traceback(code: Path, body: str) -> None:
    (code / "breaks.py").write_text(f"# first line\n{body}\n")
    try:
        error = problem("breaks:train")
    finally:
        (code / "breaks.py").unlink()
    failure = failure_of(error, None)
    assert failure.kind == "entrypoint"
    assert "importing it raised" in failure.message
    assert "breaks.py" in failure.traceback
    assert "importlib" not in failure.traceback
    assert "entrypoint.py" not in failure.traceback


def test_a_users_error_is_told_in_one_line() -> None:
    try:
        raise KeyError("lr")
    except KeyError as error:
        failure = failure_of(error, 50)
    assert (failure.kind, failure.message, failure.step) == ("user_error", "KeyError: 'lr'", 50)
    assert "test_worker_entrypoint.py" in failure.traceback


def test_an_error_without_a_text_and_a_lost_link() -> None:
    assert failure_of(AssertionError(), 1).message == "AssertionError"
    assert failure_of(LinkError("shard 1 is gone"), 1).kind == "link"


def test_a_huge_traceback_keeps_both_ends() -> None:
    try:
        raise ValueError("x" * 100_000 + "the end")
    except ValueError as error:
        text = traceback_of(error)
    assert len(text.encode()) <= TRACEBACK_LIMIT_BYTES
    assert text.startswith("Traceback")
    assert text.rstrip().endswith("the end")
    assert "bytes left out" in text
