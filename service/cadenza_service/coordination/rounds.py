"""The round coordinator's core: which contributions make a round, with which weights, and who is answered.

Events come in as method calls with the time, decisions go out as entries of one ordered log that every
shard carries out in the same order; so shards never disagree about a round, and an answer given at one
entry shows the same version on all of them. Pure: no clock, no socket, no thread.

What a mode does (docs/protocol.md has the whole table):

- ``sync`` and ``local`` are barriers: a round is decided when every active worker has contributed;
  contribution i weighs n_i / sum(n), n being samples.
- ``async`` decides on each contribution as it arrives, with weight 1 (Downpour; Dean et al., 2012).
- ``ssp`` merges on arrival with weight n_i / sum(n of the current members), and answers a worker at clock c
  only while c - min(clock) <= s (Ho et al., 2013). With s = 0 nobody can go ahead, so it is a barrier.

A worker that evaluates is not waited for. Its next request brings it back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cadenza.plane.messages import Decision, Key, Note, Part, Received, Reply, Span, Tentative
from cadenza.spec import Mode
from cadenza_service.coordination.progress import TrainingProgress

MOST_NON_FINITE_IN_A_ROW = 10
"""A worker whose contributions are never finite trains nothing; a lone bad batch or a loss spike is forgiven."""


class MemberState(enum.Enum):
    """One worker's part in the rounds."""

    JOINING = "joining"
    ACTIVE = "active"
    EVALUATING = "evaluating"
    FINISHED = "finished"


LEGAL_MOVES = frozenset(
    {
        (MemberState.JOINING, MemberState.ACTIVE),
        (MemberState.ACTIVE, MemberState.EVALUATING),
        (MemberState.EVALUATING, MemberState.ACTIVE),
        (MemberState.ACTIVE, MemberState.FINISHED),
        (MemberState.EVALUATING, MemberState.FINISHED),
        (MemberState.JOINING, MemberState.FINISHED),
    }
)


@dataclass
class Member:
    """What the coordinator knows of one worker."""

    worker: int
    incarnation: int
    state: MemberState = MemberState.JOINING
    clock: int = 0
    """Contributions so far."""
    version: int = 0
    """The committed version that its model last held."""
    samples: int = 0
    """In its latest contribution."""
    last_seq: int = 0
    non_finite: int = 0
    """Non-finite contributions in a row."""

    def move(self, to: MemberState) -> None:
        if (self.state, to) not in LEGAL_MOVES:
            raise ValueError(f"worker {self.worker} cannot go from {self.state.value} to {to.value}")
        self.state = to


@dataclass
class Contribution:
    """A request that every shard has."""

    received: Received
    arrived_at: float

    @property
    def key(self) -> Key:
        return self.received.key

    @property
    def worker(self) -> int:
        return self.received.key.worker

    @property
    def mergeable(self) -> bool:
        return self.received.kind == "update" and self.received.finite and self.received.samples > 0

    @property
    def drop_reason(self) -> str:
        """Why it is not merged; empty where it is."""
        if self.mergeable or self.received.kind == "fetch":
            return ""
        if self.received.kind == "abstain":
            return self.received.reason or "abstained"
        return "non_finite" if not self.received.finite else "no_samples"


@dataclass
class Arrival:
    """A request of which every shard has a part, or will have."""

    message: Received
    """What it says of itself; not finite if any part of it is not."""
    begun_at: float
    """When the first shard told of it."""
    shards: dict[int, set[int]] = field(default_factory=dict)
    """By group, who has it."""

    def add(self, message: Received) -> None:
        """A shard has a group."""
        self.shards.setdefault(message.group, set()).add(message.shard)
        if not message.finite:
            self.message = message

    def has(self, group: int, rules: RoundRules) -> bool:
        """Whether every shard has a group."""
        return len(self.shards.get(group, ())) == rules.shards

    def complete(self, rules: RoundRules) -> bool:
        """Whether every shard has all of it."""
        return all(self.has(group, rules) for group in self._groups(rules))

    def lacking(self, rules: RoundRules) -> list[int]:
        """The shards that do not have all of it."""
        groups = [self.shards.get(group, set()) for group in self._groups(rules)]
        return [shard for shard in range(rules.shards) if not all(shard in group for group in groups)]

    def _groups(self, rules: RoundRules) -> range:
        return range(rules.groups if self.message.kind == "update" else 1)


@dataclass(frozen=True)
class Happened:
    """Something for the job's events."""

    kind: str
    message: str
    severity: str = "info"
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class JobFails:
    """Training cannot go on."""

    kind: str
    message: str
    remedy: str
    worker: int | None = None


@dataclass(frozen=True)
class Used:
    """What a decision did with leased data, for the ledger."""

    merged: tuple[Span, ...]
    dropped: tuple[Span, ...]


@dataclass(frozen=True)
class Dropped:
    """A contribution that was not merged, for the counters."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Stale:
    """The staleness of a merged contribution, in versions."""

    worker: int
    versions: int


Output = Decision | Tentative | Happened | JobFails | Used | Dropped | Stale


@dataclass(frozen=True)
class RoundRules:
    """The spec's part in the rounds."""

    mode: Mode
    local_steps: int
    staleness: int
    epoch: int
    shards: int
    round_timeout_s: float
    groups: int = 1
    """Parts in which the shards tell of a request, and in which a barrier's round is answered."""
    history_rounds: int = 16
    """sync: how many rounds an evaluating worker may miss; the shards keep their mean gradients for it meanwhile."""

    @property
    def barrier(self) -> bool:
        return self.mode in ("sync", "local") or (self.mode == "ssp" and self.staleness == 0)


class Rounds:
    """All rounds of one attempt of a job."""

    def __init__(self, rules: RoundRules, progress: TrainingProgress) -> None:
        self.rules = rules
        self.progress = progress
        self.members: dict[int, Member] = {}
        self.version = 0
        self.round = 0
        self.index = 0
        self.last_finished: int | None = None
        """The worker that finished latest: once nobody trains, the one that completes the model."""
        self._arriving: dict[Key, Arrival] = {}
        self._waiting: dict[int, Contribution] = {}
        """Complete, not yet decided upon; by worker."""
        self._held: dict[int, tuple[Contribution, int]] = {}
        """ssp: merged, with its staleness, but not yet answered; by worker."""
        self._early: tuple[Part, ...] = ()
        """What groups of the open round were answered with; the first of them fixes it."""
        self._answered: set[int] = set()
        """Groups of the open round that were."""

    # --- events ---

    def join(self, worker: int, incarnation: int) -> None:
        """A worker is there; it takes part once :meth:`start` lets all of them go."""
        self.members[worker] = Member(worker, incarnation)

    def start(self) -> None:
        """The first state is published: every worker that joined takes part from the first round on."""
        for member in self.members.values():
            member.move(MemberState.ACTIVE)

    def expects(self, key: Key) -> bool:
        """Whether a request of this key would still count: from a current member, and not decided upon before."""
        member = self.members.get(key.worker)
        return member is not None and key.incarnation == member.incarnation and key.seq > member.last_seq

    def received(self, message: Received, now: float) -> list[Output]:
        """A shard has a group of a request. It counts once every shard has all of it."""
        key = message.key
        member = self.members.get(key.worker)
        if member is None or key.incarnation != member.incarnation:
            return [Dropped(key.worker, "stale_incarnation")]
        if key.seq <= member.last_seq:
            return [Dropped(key.worker, "duplicate")] if message.shard == message.group == 0 else []
        arrival = self._arriving.setdefault(key, Arrival(message, now))
        arrival.add(message)
        if not arrival.complete(self.rules):
            return self._answer_early()
        del self._arriving[key]
        member.last_seq = key.seq
        return self._complete(member, Contribution(arrival.message, now), now)

    def evaluating(self, worker: int, now: float) -> list[Output]:
        """A worker evaluates; rounds go on without it."""
        self.members[worker].move(MemberState.EVALUATING)
        return self._advance(now)

    def finish(self, worker: int, now: float) -> list[Output]:
        """A worker takes no more steps."""
        self.members[worker].move(MemberState.FINISHED)
        self.last_finished = worker
        return self._advance(now)

    def tick(self, now: float) -> list[Output]:
        """Time passes: a round that waits too long ends the job, naming who is missing.

        It begins to wait when the first shard has a part of the first contribution: where a shard cannot be reached,
        no contribution ever arrives as a whole.
        """
        waiting = [*self._waiting.values(), *(contribution for contribution, _ in self._held.values())]
        begun = [contribution.arrived_at for contribution in waiting]
        begun += [arrival.begun_at for arrival in self._arriving.values()]
        oldest = min(begun, default=now)
        if now - oldest <= self.rules.round_timeout_s:
            return []
        partial = {key.worker: arrival.lacking(self.rules) for key, arrival in sorted(self._arriving.items())}
        # Without a barrier nobody is waited for but where somebody's answer is held back.
        awaited = self.missing() if waiting or self.rules.barrier else []
        missing = [*(worker for worker in awaited if worker not in partial), *partial]
        names = ", ".join(_named(worker, partial.get(worker, ())) for worker in missing) or "nobody"
        return [
            JobFails(
                "timeout",
                f"round {self.round + 1} waited {now - oldest:.0f} s for {names}",
                "see the worker's log for what it was doing; raise CADENZA_ROUND_TIMEOUT_S if a step may take that long",
                missing[0] if missing else None,
            )
        ]

    # --- views ---

    def active(self) -> list[Member]:
        """Members that rounds wait for, in order."""
        return [member for _, member in sorted(self.members.items()) if self._required(member)]

    def in_step(self) -> list[int]:
        """Workers that a barrier makes take equally many steps, in order; none where there is no barrier."""
        return [member.worker for member in self.active()] if self.rules.barrier else []

    def training(self) -> list[Member]:
        """Members that have not finished."""
        return [
            member for _, member in sorted(self.members.items()) if member.state is not MemberState.FINISHED
        ]

    def _evaluating(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.state is MemberState.EVALUATING)

    def missing(self) -> list[int]:
        """Workers whose contribution the open round waits for."""
        if self.rules.barrier:
            return [member.worker for member in self.active() if member.worker not in self._waiting]
        slowest = self._slowest_clock()
        return [
            member.worker
            for member in self.active()
            if member.clock == slowest and member.worker not in self._held
        ]

    # --- before the decision ---

    def _answer_early(self) -> list[Output]:
        """Behind a barrier, a group that every member has sent is answered before the others have come.

        That is tentative. Where the decision turns out otherwise, since something that comes later is not finite,
        the shards answer those groups again.
        """
        if not self.rules.barrier or self.rules.groups == 1:
            return []
        arrivals = {key.worker: arrival for key, arrival in self._arriving.items()}
        workers = sorted({member.worker for member in self.active()} | set(self._waiting))
        if any(worker not in arrivals and worker not in self._waiting for worker in workers):
            return []
        contributions = [
            self._waiting[worker] if worker in self._waiting else Contribution(arrivals[worker].message, 0.0)
            for worker in workers
        ]
        merged = [contribution for contribution in contributions if contribution.mergeable]
        parts = self._parts(merged) if merged else ()
        if not parts or any(c.drop_reason == "non_finite" for c in contributions):
            return []
        self._early = self._early or parts
        if self._early != parts:
            return []
        waited = [arrivals[worker] for worker in workers if worker not in self._waiting]
        groups = [
            group
            for group in range(self.rules.groups)
            if group not in self._answered and all(arrival.has(group, self.rules) for arrival in waited)
        ]
        self._answered.update(groups)
        return [self._tentative(group, parts) for group in groups]

    def _tentative(self, group: int, parts: tuple[Part, ...]) -> Tentative:
        self.index += 1
        return Tentative(self.index, self.rules.epoch, group, parts)

    # --- decisions ---

    def _required(self, member: Member) -> bool:
        if member.state is MemberState.ACTIVE:
            return True
        # Evaluating in sync mode: the shards keep only so many mean gradients for it to catch up with.
        behind = self.version - member.version
        return (
            member.state is MemberState.EVALUATING
            and self.rules.mode == "sync"
            and behind >= self.rules.history_rounds
        )

    def _complete(self, member: Member, contribution: Contribution, now: float) -> list[Output]:
        if member.state is MemberState.EVALUATING:
            member.move(MemberState.ACTIVE)
            member.clock = max(member.clock, self._slowest_clock(besides=member.worker))
        if contribution.received.kind == "fetch":
            return [*self._answer_fetch(member, contribution), *self._advance(now)]
        member.clock += 1
        member.samples = contribution.received.samples or member.samples
        self._waiting[member.worker] = contribution
        return self._advance(now)

    def _answer_fetch(self, member: Member, contribution: Contribution) -> list[Output]:
        member.version = self.version
        return [self._decision(replies=(Reply(contribution.key, self._note(contribution, evaluate=False)),))]

    def _advance(self, now: float) -> list[Output]:
        """Decide whatever can be decided."""
        outputs: list[Output] = []
        while ready := self._ready():
            for contribution in ready:
                del self._waiting[contribution.worker]
            outputs += self._decide(ready, now)
        return [*outputs, *self._release()]

    def _ready(self) -> list[Contribution]:
        """The contributions of the next round, in member order; none while it has to wait."""
        if not self._waiting:
            return []
        if not self.rules.barrier:
            return [
                min(
                    self._waiting.values(),
                    key=lambda contribution: (contribution.arrived_at, contribution.worker),
                )
            ]
        if any(member.worker not in self._waiting for member in self.active()):
            return []
        return [self._waiting[worker] for worker in sorted(self._waiting)]

    def _decide(self, ready: list[Contribution], now: float) -> list[Output]:
        merged = [contribution for contribution in ready if contribution.mergeable]
        outputs: list[Output] = [
            Stale(contribution.worker, self.version - contribution.received.base_version)
            for contribution in merged
        ]
        for contribution in ready:
            outputs += self._judge(contribution)
        parts = self._parts(merged)
        self._early, self._answered = (), set()
        self.round += 1
        self.version += bool(parts)
        dropped = [contribution for contribution in ready if not contribution.mergeable]
        self._commit(merged, dropped, now)
        lost = tuple(span for contribution in ready for span in contribution.received.lost_spans)
        used = Used(_spans(merged), _spans(dropped) + lost)
        decision = self._decision(
            parts=parts,
            replies=self._replies(ready),
            present=_union(contribution.received.present for contribution in merged),
            spans=used.merged,
        )
        return [*outputs, used, decision]

    def _judge(self, contribution: Contribution) -> list[Output]:
        """Count a contribution that is not merged, and fail the job when a worker sends nothing else."""
        member = self.members[contribution.worker]
        reason = contribution.drop_reason
        if not reason:
            member.non_finite = 0
            return []
        outputs: list[Output] = [Dropped(member.worker, reason)]
        if reason == "non_finite":
            member.non_finite += 1
            outputs.append(
                Happened(
                    "contribution_dropped",
                    f"round {self.round + 1}: worker {member.worker}'s contribution was not finite and was dropped "
                    f"({member.non_finite} in a row)",
                    "warning",
                    {
                        "worker": member.worker,
                        "round": self.round + 1,
                        "reason": reason,
                        "in_a_row": member.non_finite,
                    },
                )
            )
        if member.non_finite >= MOST_NON_FINITE_IN_A_ROW:
            outputs.append(
                JobFails(
                    "non_finite",
                    f"worker {member.worker} sent {member.non_finite} contributions in a row that were not finite",
                    "lower the learning rate, clip gradients (session.step(loss, clip_norm=1.0)) or look for bad samples",
                    member.worker,
                )
            )
        return outputs

    def _parts(self, merged: list[Contribution]) -> tuple[Part, ...]:
        weights = self._weights(merged)
        if self.rules.mode == "async":
            # Running statistics are means over the workers; with weight 1 each, K workers would move them K times as fast.
            share = 1.0 / max(len(self.training()), 1)
            return tuple(Part(contribution.key, 1.0, share) for contribution in merged)
        return tuple(Part(c.key, weight, weight) for c, weight in zip(merged, weights, strict=True))

    def _weights(self, merged: list[Contribution]) -> list[float]:
        """n_i / sum(n): over the round behind a barrier, else over the latest known n of all members."""
        samples = {contribution.worker: contribution.received.samples for contribution in merged}
        if not self.rules.barrier:
            own = next(iter(samples.values()), 1)
            samples |= {m.worker: m.samples or own for m in self.active() if m.worker not in samples}
        total = sum(samples.values())
        return [contribution.received.samples / total for contribution in merged]

    def _commit(self, merged: list[Contribution], dropped: list[Contribution], now: float) -> None:
        samples = sum(contribution.received.samples for contribution in merged)
        known = [c.received for c in merged if c.received.loss is not None]
        weight = sum(received.samples for received in known)
        loss = (
            sum((received.loss or 0.0) * received.samples for received in known) / weight if weight else None
        )
        steps = max((float(contribution.received.steps) for contribution in merged), default=0.0)
        if not self.rules.barrier:
            steps /= max(len(self.training()), 1)
        lost = sum(contribution.received.samples for contribution in dropped)
        lost += sum(contribution.received.lost_samples for contribution in [*merged, *dropped])
        self.progress.commit(samples=samples, dropped=lost, steps=steps, loss=loss, now=now)

    def _replies(self, ready: list[Contribution]) -> tuple[Reply, ...]:
        if self.rules.mode == "ssp":
            for contribution in ready:
                self._held[contribution.worker] = (contribution, self._staleness(contribution))
            return ()
        elected = self._elect([contribution.worker for contribution in ready])
        replies = []
        for contribution in ready:
            self.members[contribution.worker].version = self.version
            replies.append(
                Reply(contribution.key, self._note(contribution, evaluate=contribution.worker == elected))
            )
        return tuple(replies)

    def _release(self) -> list[Output]:
        """ssp: answer the workers that lead the slowest one by no more than the bound."""
        slowest = self._slowest_clock()
        free = sorted(w for w in self._held if self.members[w].clock - slowest <= self.rules.staleness)
        if not free:
            return []
        elected = self._elect(free)
        replies = []
        for worker in free:
            contribution, staleness = self._held.pop(worker)
            self.members[worker].version = self.version
            note = self._note(contribution, evaluate=worker == elected, staleness=staleness)
            replies.append(Reply(contribution.key, note))
        return [self._decision(replies=tuple(replies))]

    def _slowest_clock(self, besides: int | None = None) -> int:
        return min((member.clock for member in self.active() if member.worker != besides), default=0)

    def _elect(self, answered: list[int]) -> int | None:
        """The worker that is asked to evaluate now, if it is time and none evaluates yet."""
        if (
            any(self._evaluating())
            or not answered
            or self.progress.stop_reason
            or not self.progress.evaluation_due()
        ):
            return None
        self.progress.evaluation_given()
        return answered[0]

    def _note(self, contribution: Contribution, *, evaluate: bool, staleness: int | None = None) -> Note:
        return Note(
            version=self.version,
            round=self.round,
            steps=self.progress.steps,
            dropped=contribution.drop_reason,
            staleness=self._staleness(contribution) if staleness is None else staleness,
            stop=self.progress.stop_reason,
            evaluate=evaluate,
            local_steps=self.rules.local_steps,
        )

    def _staleness(self, contribution: Contribution) -> int:
        """Versions between what a just-merged contribution was computed from and where it was applied."""
        return self.version - contribution.received.base_version - 1 if contribution.mergeable else 0

    def _decision(
        self,
        *,
        parts: tuple[Part, ...] = (),
        replies: tuple[Reply, ...] = (),
        present: bytes = b"",
        spans: tuple[Span, ...] = (),
    ) -> Decision:
        self.index += 1
        return Decision(
            index=self.index,
            epoch=self.rules.epoch,
            round=self.round,
            version=self.version,
            parts=parts,
            replies=replies,
            present=present,
            keep_after=min((member.version for member in self._evaluating()), default=None),
            spans=spans,
        )


def _named(worker: int, lacking: Sequence[int]) -> str:
    """A worker in a sentence, with the parameter servers that do not have its contribution yet, if others do."""
    shards = ", ".join(map(str, lacking))
    return f"worker {worker} (not yet on parameter server {shards})" if lacking else f"worker {worker}"


def _spans(contributions: list[Contribution]) -> tuple[Span, ...]:
    return tuple(span for contribution in contributions for span in contribution.received.spans)


def _union(masks: Iterable[bytes]) -> bytes:
    """The bitwise or of masks of equal length."""
    union = 0
    length = 0
    for mask in masks:
        union |= int.from_bytes(mask, "little")
        length = max(length, len(mask))
    return union.to_bytes(length, "little")
