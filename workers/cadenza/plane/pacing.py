"""At which rate a link that many senders share is to be filled: a controller, pure, fed once per round.

A pace above the link's rate costs more than one below: three per cent too fast fill a router's queue within a round,
and what is lost then takes one sender out of step while all others wait for it. So:

    calm       the round came at the pace, without a queue:  rate ← rate · (1 + step), and the step doubles
    ceiling    the next step would pass a rate that overloaded the link within the last 32 rounds:  rate stays
    overload   a queue above 40 ms, or 0.5 % sent again, or
               a queue above 10 ms and 4 % less delivered:   ceiling ← rate, rate ← that of the last calm round,
                                                             or 0.95 · rate if there was none since the last overload
    collapse   an overload that delivered less than half:    rate ← what was delivered, and no ceiling is known
    otherwise  something else was the limit (workers that compute):  rate stays

The step begins at 2 % and ends at 12.5 %, half of BBR's probe (Cardwell, Cheng, Gunn, Yeganeh, Jacobson 2016); the
ceiling is remembered as cubic remembers its last one (Ha, Rhee, Xu 2008).
"""

from __future__ import annotations

from typing import Final

import msgspec

OVERLOAD_DELAY_S: Final = 0.04
"""A queue this long is most of what small routers keep. It also rises where another flow takes a share."""
OVERLOAD_LOSS: Final = 0.005
LAG_DELAY_S: Final = 0.01
LAG_SHARES: Final = (0.8, 0.96)
"""Where queues are long, a pace above the rate shows by a queue and by a little less than the pace having come. Much
less comes from workers that compute."""
FIRST_STEP: Final = 0.02
MOST_STEP: Final = 0.125
BACK_OFF: Final = 0.95
COLLAPSE: Final = 0.5
"""Less than this part of the rate delivered: the link has changed, steps of five per cent would take too long."""
BOUND_SHARE: Final = 0.9
"""A round that came at less than this part of the pace was limited by something else."""
CEILING_SHARE: Final = 0.98
"""How near to the last ceiling the rate may go while that is remembered."""
CEILING_ROUNDS: Final = 32
"""One overloaded round in 32 is the price for noticing that a link has become faster."""


class PaceState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a shared link between rounds."""

    rate_bytes_per_s: float
    """Payload, for all who share the link together: what `congestion.plan_for` takes."""
    step: float = FIRST_STEP
    ceiling_bytes_per_s: float | None = None
    """A rate that overloaded the link; none, or forgotten, if there was no overload lately."""
    calm_bytes_per_s: float | None = None
    """The last rate that filled the link and left it calm; none since an overload."""
    rounds: int = 0
    """Since the last overload."""


class PacedRound(msgspec.Struct, frozen=True, kw_only=True):
    """What one round showed, all senders of the link together."""

    delivered_bytes_per_s: float
    """All bytes over the time from the first one's arrival to the last one's."""
    queueing_delay_s: float
    """The greatest of the senders' `LinkFacts.queueing_delay_s`."""
    retransmitted_share: float
    """Of all senders together."""


def first_pace(delivered_bytes_per_s: float) -> PaceState:
    """Where to begin: what an unpaced transfer delivered, such as that of the first state.

    Raises:
        ValueError: the rate is not above 0.
    """
    if not 0 < delivered_bytes_per_s < float("inf"):
        raise ValueError(f"delivered_bytes_per_s {delivered_bytes_per_s}: give a measured rate above 0")
    return PaceState(rate_bytes_per_s=delivered_bytes_per_s)


def next_pace(state: PaceState, seen: PacedRound) -> PaceState:
    """The pace of the next round, after a round at ``state``'s."""
    rate, rounds = state.rate_bytes_per_s, state.rounds + 1
    if _overloaded(rate, seen):
        if seen.delivered_bytes_per_s < COLLAPSE * rate:
            return PaceState(rate_bytes_per_s=seen.delivered_bytes_per_s)
        lower = state.calm_bytes_per_s or BACK_OFF * rate
        return PaceState(rate_bytes_per_s=lower, ceiling_bytes_per_s=rate)
    ceiling = state.ceiling_bytes_per_s if rounds < CEILING_ROUNDS else None
    stay = msgspec.structs.replace(state, rounds=rounds, ceiling_bytes_per_s=ceiling)
    if seen.delivered_bytes_per_s < BOUND_SHARE * rate:
        return stay
    calm = msgspec.structs.replace(stay, calm_bytes_per_s=rate)
    higher = rate * (1 + state.step)
    if ceiling is not None and higher > CEILING_SHARE * ceiling:
        return msgspec.structs.replace(
            calm, rate_bytes_per_s=max(rate, CEILING_SHARE * ceiling), step=FIRST_STEP
        )
    return msgspec.structs.replace(calm, rate_bytes_per_s=higher, step=min(MOST_STEP, 2 * state.step))


def _overloaded(rate_bytes_per_s: float, seen: PacedRound) -> bool:
    least, most = LAG_SHARES
    lags = least <= seen.delivered_bytes_per_s / rate_bytes_per_s < most
    return (
        seen.queueing_delay_s > (LAG_DELAY_S if lags else OVERLOAD_DELAY_S)
        or seen.retransmitted_share > OVERLOAD_LOSS
    )
