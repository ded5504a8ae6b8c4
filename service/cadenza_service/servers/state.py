"""Reading a job's committed state from its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.connection import Buffer
from cadenza.plane.layout import NUMPY_TYPES, Cut, Layout, as_bytes
from cadenza.plane.messages import Message, Read, State
from cadenza.plane.transport import connect
from cadenza.plane.wire import Identity, ProtocolError, Role

READ_TIMEOUT_S = 600.0
"""For one shard's part of a model: a gigabyte over a slow link takes minutes."""


def fetch_state(
    shards: Sequence[tuple[str, int]], key: bytes, epoch: int, layout: Layout, cut: Cut
) -> dict[str, NDArray[Any]]:
    """All vectors of a job's model as its shards hold them, whole, by name, in the vectors' own types.

    Args:
        shards: host and port of each shard, in order.
        key: the job's key.
        epoch: the job's attempt.
        layout: the model's layout.
        cut: how it is cut among the shards.

    Raises:
        ConnectionError: a shard cannot be reached or ended the connection.
        TimeoutError: a shard did not answer in time.
        RuntimeError: the shards are not at one version, so a round is under way.
    """
    vectors = {vector.name: np.empty(vector.length, NUMPY_TYPES[vector.dtype]) for vector in layout.vectors}
    versions = set()
    for number, (host, port) in enumerate(shards):
        connection = connect(
            host, port, key, Identity(Role.OBSERVER, epoch=epoch), peer=f"shard {number}", timeout_s=30.0
        ).start()
        try:
            call = connection.call(Read(layout.every()), into=_destination(number, layout, cut, vectors))
            reply = call.result(READ_TIMEOUT_S)
            if not isinstance(reply, State):
                raise ConnectionError(f"shard {number} answered a read with {type(reply).__name__}")
            versions.add(reply.version)
        finally:
            connection.close()
    if len(versions) != 1:
        raise RuntimeError(f"the shards hold versions {sorted(versions)}; a round is under way")
    return vectors


def _destination(number: int, layout: Layout, cut: Cut, vectors: dict[str, NDArray[Any]]) -> Any:
    def destination(message: Message, length: int) -> list[Buffer]:
        parts = layout.slices(cut, number, layout.every())
        if not isinstance(message, State):
            raise ProtocolError(f"shard {number} sent bytes with {type(message).__name__}")
        return [as_bytes(piece) for part in parts for piece in part.pieces(vectors[part.vector])]

    return destination
