"""The names of codecs and their parameters. Needs nothing, so that a job's spec is checked in no time.

A name is ``int8`` or, with a parameter, ``topk:0.01``. Without its parameter a name means the default.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Whole(NamedTuple):
    """A parameter that counts something."""

    letter: str
    default: int
    most: int

    def parse(self, text: str) -> int | None:
        """The number, or None where ``text`` is none that is allowed."""
        value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
        return value if 1 <= value <= self.most else None

    def __str__(self) -> str:
        return f"{self.letter} from 1 to {self.most}, {self.default} unless given"


class Fraction(NamedTuple):
    """A parameter that is a share of the values."""

    default: float
    letter: str = "f"

    def parse(self, text: str) -> float | None:
        """The number, or None where ``text`` is none that is allowed."""
        value = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", text) else 0.0
        return value if 0 < value <= 1 else None

    def __str__(self) -> str:
        return f"{self.letter} above 0 and at most 1, {self.default} unless given"


PARAMETERS: dict[str, Whole | Fraction | None] = {
    "fp32": None,
    "bf16": None,
    "fp16": None,
    "fp8_e4m3": None,
    "fp8_e5m2": None,
    "int8": None,
    "e3m0": None,
    "qsgd": Whole("s", default=16, most=32_767),
    "terngrad": None,
    "sign": None,
    "topk": Fraction(0.01),
    "randomk": Fraction(0.1),
    "dgc": Fraction(0.001),
    "powersgd": Whole("r", default=4, most=256),
}
"""Each codec's parameter; None where it has none."""

CODEC_NAMES = tuple(PARAMETERS)
"""All codecs, without parameters."""


class CodecName(NamedTuple):
    """A checked name."""

    base: str
    parameter: int | float | None

    def __str__(self) -> str:
        return self.base if self.parameter is None else f"{self.base}:{self.parameter!r}"


def parse_codec(name: str) -> CodecName:
    """``name`` in its parts, a default filled in.

    Raises:
        ValueError: there is no such codec, or its parameter is not allowed.
    """
    base, colon, text = name.partition(":")
    if base not in PARAMETERS:
        raise ValueError(f"codec {name!r} is not known; choose {choices()}")
    parameter = PARAMETERS[base]
    if parameter is None:
        if colon:
            raise ValueError(
                f"codec {name!r}: {base} has no parameter; write {base!r}, or choose {choices()}"
            )
        return CodecName(base, None)
    value = parameter.parse(text) if colon else parameter.default
    if value is None:
        raise ValueError(f"codec {name!r}: {text!r} is not allowed; choose {choices()}")
    return CodecName(base, value)


def check_codec(name: str) -> str:
    """The canonical form of ``name``, such as ``topk:0.01`` for ``topk``; raises ValueError like ``parse_codec``."""
    return str(parse_codec(name))


def choices() -> str:
    """All names with what their parameters may be, for an error text."""
    return ", ".join(
        base if parameter is None else f"{base}:{parameter.letter} ({parameter})"
        for base, parameter in PARAMETERS.items()
    )
