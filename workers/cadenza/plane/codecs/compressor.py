"""One worker's sending side of a job: a codec, and all that a sender has to remember for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codec_names import check_codec, parse_codec
from cadenza.plane.codecs.base import Codec, Floats, Turn
from cadenza.plane.codecs.feedback import compress, correct_momentum
from cadenza.plane.codecs.powersgd import WarmPowerSgd
from cadenza.plane.codecs.registry import codec_named
from cadenza.plane.codecs.sparsified import Dgc
from cadenza.plane.layout import accumulator
from cadenza.plane.units import Unit

State = dict[str, NDArray[Any] | str]


class Compressor:
    """Encodes a worker's units, with error feedback where the codec is biased.

    Different units may be encoded by different threads at the same time; all else only between rounds.

    Args:
        codec_name: such as ``int8`` or ``topk:0.01``.
        lengths: elements of each vector by its name, such as ``parameters.float32``.
        seed: of the job.
        worker: -1 for a server.
        repeatable: whether a unit may be encoded again in its round, which then counts instead of the first time. What
            was remembered before the round is kept for that, which takes as much memory again.

    Raises:
        ValueError: there is no codec of that name.
    """

    def __init__(
        self,
        codec_name: str,
        lengths: Mapping[str, int],
        *,
        seed: int,
        worker: int,
        repeatable: bool = False,
    ) -> None:
        self._lengths = dict(lengths)
        self._seed = seed
        self._worker = worker
        self._residual: dict[str, Floats] = {}
        """What is owed, by vector; DGC's v."""
        self._momentum: dict[str, Floats] = {}
        """DGC's u, by vector."""
        self._repeatable = repeatable
        self._before: dict[tuple[str, int], tuple[int, list[Floats]]] = {}
        """By unit, the latest round and what was remembered before it."""
        self._codec = self._adopted(codec_name)

    @property
    def codec(self) -> Codec:
        """The codec in force."""
        return self._codec

    def size_bytes(self, unit: Unit, round: int) -> int:
        """What ``encode`` writes."""
        return self._codec.size_bytes(unit, round)

    def encode(self, values: Floats, unit: Unit, round: int, out: memoryview) -> None:
        """Write ``values`` and what is owed for ``unit`` into ``out``, which has ``size_bytes`` bytes."""
        turn = Turn(self._seed, round, self._worker)
        residual = _part(self._residual, unit)
        momentum = _part(self._momentum, unit)
        if self._repeatable:
            self._before_round(unit, round, residual, momentum)
        if isinstance(self._codec, Dgc) and residual is not None and momentum is not None:
            correct_momentum(self._codec, values, momentum, residual, unit, turn, out)
        elif residual is None or not (self._codec.biased or residual.any()):
            self._codec.encode(values, unit, turn, out)
        else:
            compress(self._codec, values, residual, unit, turn, out, residual)

    def switch(self, codec_name: str) -> None:
        """Use another codec from the next round on. What is owed under the old one is sent under the new one.

        An exact or unbiased codec sends it with the first values of each unit, and owes nothing after. DGC's
        momentum ends with DGC.
        """
        self._codec = self._adopted(codec_name)

    def state_dict(self) -> State:
        """A copy of all that is remembered: loaded into a compressor of the same job, its next bytes are the same."""
        state: State = {"codec": self._codec.name}
        for kind, vectors in (("residual", self._residual), ("momentum", self._momentum)):
            state |= {f"{kind}/{name}": array.copy() for name, array in vectors.items()}
        if isinstance(self._codec, WarmPowerSgd):
            state |= {f"start/{key}": array.copy() for key, array in self._codec.kept.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what ``state_dict`` told.

        Raises:
            ValueError: ``state`` is not of a compressor of the same vectors. Nothing has changed then.
        """
        parts = {kind: _named(state, kind) for kind in ("residual", "momentum", "start")}
        known = {f"{kind}/{name}" for kind, arrays in parts.items() for name in arrays} | {"codec"}
        if unknown := sorted(set(state) - known):
            raise ValueError(
                f"the compressor's state holds {unknown[0]!r}, which is not known; it is of another release"
            )
        for kind in ("residual", "momentum"):
            for name, array in parts[kind].items():
                self._check(f"{kind}/{name}", name, array)
        codec_name = check_codec(str(state.get("codec")))
        self._residual, self._momentum = parts["residual"], parts["momentum"]
        self._codec = self._adopted(codec_name)
        if isinstance(self._codec, WarmPowerSgd):
            self._codec.kept = parts["start"]

    def _before_round(self, unit: Unit, round: int, *remembered: Floats | None) -> None:
        """Remember what is remembered before a unit's first time in a round; take it back before another."""
        parts = [part for part in remembered if part is not None]
        key = unit.vector, unit.number
        latest, copies = self._before.get(key, (-1, []))
        if latest != round or len(copies) != len(parts):
            self._before[key] = (round, [part.copy() for part in parts])
            return
        for part, copy in zip(parts, copies, strict=True):
            np.copyto(part, copy)

    def _adopted(self, codec_name: str) -> Codec:
        codec = codec_named(codec_name)
        if codec.biased:
            self._allocate(self._residual)
        # A server's answers have their momentum already: for them DGC is top-k with error feedback.
        if isinstance(codec, Dgc) and self._worker >= 0:
            self._allocate(self._momentum)
        else:
            self._momentum.clear()
        base, parameter = parse_codec(codec_name)
        return WarmPowerSgd(int(parameter or 0)) if base == "powersgd" else codec

    def _allocate(self, arrays: dict[str, Floats]) -> None:
        for name, length in self._lengths.items():
            if name not in arrays:
                arrays[name] = np.zeros(length, _kind(name))

    def _check(self, key: str, name: str, array: Any) -> None:
        length = self._lengths.get(name)
        if array.shape != (length,) or array.dtype != _kind(name):
            raise ValueError(
                f"the compressor's state {key!r} has shape {array.shape} and type {array.dtype}; the model's has "
                f"{length} elements of {_kind(name)}: it is the state of another model"
            )


def _part(arrays: Mapping[str, Floats], unit: Unit) -> Floats | None:
    array = arrays.get(unit.vector)
    return None if array is None else array[unit.start : unit.stop]


def _named(state: Mapping[str, Any], kind: str) -> dict[str, Any]:
    prefix = f"{kind}/"
    return {key.removeprefix(prefix): array.copy() for key, array in state.items() if key.startswith(prefix)}


def _kind(vector: str) -> np.dtype[Any]:
    return accumulator(vector.rpartition(".")[2])
