"""From ``module:function`` to the user's function, with an error that says what is there instead."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

Entrypoint = Callable[[dict[str, Any]], object]

_NAMES_SHOWN = 5


class EntrypointError(Exception):
    """The entrypoint cannot be called; the text names it and what is there. ``__cause__`` is the user's own error."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def load(entrypoint: str) -> Entrypoint:
    """Import the module and take the function.

    Args:
        entrypoint: ``module:function``.

    Raises:
        EntrypointError: it does not import, or there is no such function.
    """
    module_name, _, function_name = entrypoint.partition(":")
    module = _import(entrypoint, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        raise EntrypointError(
            f"entrypoint {entrypoint!r}: module {module_name!r} has no function {function_name!r}",
            _instead(module, function_name),
        )
    if not callable(function):
        raise EntrypointError(
            f"entrypoint {entrypoint!r} is a {type(function).__name__}, not a function",
            _instead(module, function_name),
        )
    _check_parameters(entrypoint, function)
    return function  # type: ignore[no-any-return]


def _import(entrypoint: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if module_name == missing or module_name.startswith(missing + "."):
            remedy = "submit the folder that holds it, and give the module's path from there, such as 'examples.digits:train'"
            raise EntrypointError(
                f"entrypoint {entrypoint!r}: there is no module {missing!r} in the job's code", remedy
            ) from None
        remedy = f"add what brings {missing!r} to runtime_env.pip, or to the submitted folder"
        raise EntrypointError(
            f"entrypoint {entrypoint!r}: importing it needs the module {missing!r}, which is not installed",
            remedy,
        ) from error
    except (Exception, SystemExit) as error:
        text = f"entrypoint {entrypoint!r}: importing it raised {type(error).__name__}: {error}"
        raise EntrypointError(text, "import the module on your machine to see the same error") from error


def _instead(module: ModuleType, wanted: str) -> str:
    """What the user may have meant: the closest names first, else what the module defines."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isroutine(value) and not name.startswith("_") and value.__module__ == module.__name__
    ]
    names = difflib.get_close_matches(wanted, own, _NAMES_SHOWN) or sorted(own)[:_NAMES_SHOWN]
    if not names:
        return (
            f"module {module.__name__!r} (from {getattr(module, '__file__', 'nowhere')}) defines no function"
        )
    return f"did you mean {' or '.join(f'{module.__name__}:{name}' for name in names)}?"


def _check_parameters(entrypoint: str, function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # Some functions written in C tell nothing about their parameters.
    try:
        signature.bind({})
    except TypeError as error:
        raise EntrypointError(
            f"entrypoint {entrypoint!r} has the signature {signature}, but is called with one argument, the config: {error}",
            "define it as def train(config):",
        ) from None
