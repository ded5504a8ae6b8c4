"""YAML as the 1.2 core schema reads it, and closed against keys given twice.

PyYAML follows YAML 1.1, where ``1e-3`` is a string, ``off`` is false and ``2024-05-01`` is a date. In a
training spec each of these is a trap: a learning rate that arrives as text fails long after the submission.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                message = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}  # Its own, empty table: not one rule of YAML 1.1 is inherited.


def _resolve(tag: str, pattern: str, first: Iterable[str]) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("merge", r"^<<$", "<")
_resolve("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""])
_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("int", r"^(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$", "-+0123456789")
_resolve("float", r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_resolve("float", r"^[-+]?[0-9]+[eE][-+]?[0-9]+$", "-+0123456789")
_resolve("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.")


def parse(text: str) -> Any:
    """The value that ``text`` holds. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
