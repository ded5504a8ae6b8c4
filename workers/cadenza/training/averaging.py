"""What averaging weights (:mod:`cadenza.training.weights`) and gradients (:mod:`cadenza.training.gradients`) share.

Both keep an *anchor*, the latest committed values of the vectors that travel, and contribute the difference to it;
in sync mode the anchor of parameters is not needed, and its memory receives the mean gradient.
"""

from __future__ import annotations

from cadenza.plane.layout import Role
from cadenza.plane.link import Link
from cadenza.plane.messages import Joined
from cadenza.training.exchange import Exchanger
from cadenza.training.flat import FlatModel, HostVectors


class Averaging:
    """What both have in common: the first state, and publishing the last."""

    def __init__(self, flat: FlatModel, link: Link, joined: Joined) -> None:
        self.exchanger = Exchanger(link, flat.layout, joined)
        self._flat = flat
        self._link = link
        self._work = flat.vectors(flat.layout.travelling())
        self._anchor = flat.vectors(flat.layout.travelling())

    def begin(self, *, publish: bool) -> None:
        """Bring the model to the job's first state: make this one that state, or take the published one."""
        static = self._static()
        arrays = {**self._anchor.arrays, **static.arrays}
        if publish:
            self._flat.gather(self._anchor)
            self._flat.gather(static)
            self._link.publish(self._flat.layout.every(), arrays)
            self._link.ready()
            return
        self.exchanger.fetch_first(arrays)
        self._flat.scatter(self._anchor)
        self._flat.scatter(static)

    def publish(self, *, everything: bool) -> None:
        """Make the model's static tensors, or all of them, the shards' state."""
        names = self._flat.layout.every() if everything else tuple(self._static().flat)
        if not names:
            return
        vectors = self._flat.vectors(names)
        self._flat.gather(vectors)
        self._link.publish(names, vectors.arrays)

    def _static(self) -> HostVectors:
        """Memory for the vectors that travel only at the beginning and the end."""
        travelling = self._flat.layout.travelling()
        return self._flat.vectors(name for name in self._flat.layout.every() if name not in travelling)

    def _subtract_anchor(self, role: Role) -> None:
        """Turn the values in the work vectors into differences; 16-bit types subtract in fp32 and round once."""
        for name, values in self._work.flat.items():
            if name.startswith(f"{role}."):
                values.sub_(self._anchor.flat[name])
