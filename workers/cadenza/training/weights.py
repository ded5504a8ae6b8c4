"""local, ssp and async mode: the mean of what local steps changed, also while the worker goes on stepping.

A contribution is the model's difference to the anchor. Without overlap the worker waits for the answer, which
replaces its weights. With overlap it goes on, and what it changed since it sent stays:

    theta <- answer + (theta_now - theta_at_send),    anchor <- answer

so each local step is in exactly one contribution. With a mixing factor alpha the parameters are instead

    theta <- alpha * theta_now + (1 - alpha) * answer,    anchor <- answer

as in Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512), and alpha * (theta_now - answer) counts among what
the next contribution changes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.plane.holdings import NATIVE
from cadenza.plane.layout import Role
from cadenza.plane.link import Link
from cadenza.plane.messages import BARRIER_MODES, Joined, Notice
from cadenza.training.averaging import Averaging
from cadenza.training.flat import FlatModel, HostVectors
from cadenza.training.tally import Total

TRAVELLING_ROLES: tuple[Role, ...] = ("parameters", "buffers")


class WeightAveraging(Averaging):
    """Contributes what the local steps changed and takes the committed weights.

    Three sets of vectors in host memory, the third only with overlap: the anchor; what is sent, and later the model as
    it is now; and the model as it was sent.
    """

    def __init__(self, flat: FlatModel, link: Link, joined: Joined, optimizer: Optimizer) -> None:
        super().__init__(flat, link, joined)
        self.ahead = False
        """Whether the model holds more than the committed weights right after a merge: steps since it was sent."""
        self._optimizer = optimizer
        self._mix = joined.mix
        self._approximate = joined.mode not in BARRIER_MODES and joined.codec != NATIVE
        """Whether answers come as near to the committed weights as their codec can say, and later ones say the rest."""
        self._held_back = False
        self._sent: HostVectors | None = None

    def send(self, total: Total, *, going_on: bool) -> None:
        """Contribute; :meth:`merge` takes the answer.

        Args:
            total: what the contribution says of itself.
            going_on: the model will change before the answer is merged.
        """
        self._flat.check_unchanged()
        self._flat.gather(self._work)
        if going_on:
            copy(self._work, self._model_at_send())
        for role in TRAVELLING_ROLES:
            self._subtract_anchor(role)
        self.exchanger.send(self._work.arrays, self._anchor.arrays, total)

    def merge(self, *, changed: bool) -> bool:
        """Wait for the answer and bring it into the model.

        Args:
            changed: the model has made steps since it was sent.

        Returns:
            Whether these steps are still in the model. Where the contribution was not finite they are not: the
            model holds the committed weights.
        """
        answer = self.exchanger.land()
        poisoned = answer.note.dropped == "non_finite"
        self.ahead = changed and not poisoned
        if poisoned:
            self._flat.scatter(self._anchor)
            self._forget_optimizer_state()
        elif answer.content == "unchanged":
            # Alone, there is nothing to average with: what the model held is the committed state.
            self._anchor_at_send(changed)
        elif changed:
            self._add_committed()
        else:
            self._flat.scatter(self._anchor)
        return not poisoned

    def abstain(self, total: Total) -> None:
        """Tell of steps that were thrown away, where no contribution follows that could."""
        self.exchanger.abstain("lost", self._anchor.arrays, total)
        self._flat.scatter(self._anchor)

    # --- evaluation ---

    def hold_back(self) -> None:
        """Make the model the committed weights, and keep what it holds beyond them until :meth:`catch_up`."""
        if self.ahead:
            self._flat.gather(self._work)
            for role in TRAVELLING_ROLES:
                self._subtract_anchor(role)
        if self._approximate:
            self.exchanger.fetch(self._anchor.arrays)
        if self.ahead or self._approximate:
            self._flat.scatter(self._anchor)
        self.ahead, self._held_back = False, self._held_back or self.ahead

    def catch_up(self) -> None:
        """Take what was committed since the latest exchange. The model must not have changed since."""
        if self.exchanger.fetch(self._anchor.arrays).content == "weights":
            self._flat.scatter(self._anchor)
        self.put_back()

    def put_back(self) -> None:
        """Add to the model what :meth:`hold_back` kept."""
        if not self._held_back:
            return
        model = self._model_at_send()
        self._flat.gather(model)
        for name, values in model.flat.items():
            values.add_(self._work.flat[name])
        self._flat.scatter(model)
        self._held_back = False

    # --- memory ---

    def _model_at_send(self) -> HostVectors:
        if self._sent is None:
            self._sent = self._flat.vectors(self._flat.layout.travelling())
        return self._sent

    def _anchor_at_send(self, changed: bool) -> None:
        if changed:
            copy(self._model_at_send(), self._anchor)
        else:
            self._flat.gather(self._anchor)

    @torch.no_grad()
    def _add_committed(self) -> None:
        """Merge the anchor into a model that went on; 16-bit types round after each of the two operations."""
        self._flat.gather(self._work)
        sent = self._model_at_send()
        for name, values in self._work.flat.items():
            if self._mix is not None and name.startswith("parameters."):
                values.lerp_(self._anchor.flat[name], 1 - self._mix)
            else:
                values.sub_(sent.flat[name]).add_(self._anchor.flat[name])
        self._flat.scatter(self._work)

    def _forget_optimizer_state(self) -> None:
        forgotten = forget_non_finite_state(self._optimizer)
        if forgotten:
            text = f"optimizer state of {forgotten} parameters was not finite and starts afresh"
            data = {"worker": self._link.worker, "parameters": forgotten}
            self._link.notice(Notice("optimizer_state_dropped", text, "warning", data))


def copy(source: HostVectors, target: HostVectors) -> None:
    """Make ``target``'s values those of ``source``."""
    for name, values in target.flat.items():
        values.copy_(source.flat[name])


@torch.no_grad()
def forget_non_finite_state(optimizer: Optimizer) -> int:
    """Drop the optimizer's state of each parameter for which any of it is not finite; returns of how many."""
    bad = [
        parameter
        for parameter, state in optimizer.state.items()
        if any(
            isinstance(value, Tensor) and not bool(torch.isfinite(value).all()) for value in state.values()
        )
    ]
    for parameter in bad:
        del optimizer.state[parameter]
    return len(bad)
