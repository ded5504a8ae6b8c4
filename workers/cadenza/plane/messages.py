"""The messages of the data plane and of the control connection, as typed, checked structures.

Each travels as MessagePack in a frame (see :mod:`cadenza.plane.wire`); bulk bytes follow it in the same frame.
docs/protocol.md tells who sends what when. This module imports neither ray nor torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cadenza.plane.causes import Cause
from cadenza.plane.layout import Cut, Layout
from cadenza.plane.monitor import LeftOut, LinkFacts

RequestKind = Literal["update", "abstain", "fetch"]
Content = Literal["weights", "change", "gradient", "gradients", "unchanged"]
Stream = Literal["stdout", "stderr"]
SyncPhase = Literal["send", "wait", "receive", "apply"]
Overlap = Literal["auto", "on", "off"]

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

BARRIER_MODES = ("sync", "local")
"""In which a round waits for every active worker."""

SYNC_BOUNDS_S: tuple[float, ...] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
"""Upper bounds of the buckets of synchronisation times, in seconds."""

BUCKETS = len(SYNC_BOUNDS_S) + 1
"""The last one is +Inf."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class's name is the tag."""


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What makes a request unique: applied once, however often it is sent."""

    worker: Count
    incarnation: Count
    seq: Positive


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``start`` to ``stop`` of a leased run of samples, used up by one contribution."""

    lease: int
    start: Count
    stop: Count


# --- worker <-> shard ------------------------------------------------------------------------------


class Units(Message, frozen=True, omit_defaults=True):
    """Consecutive units of an update on its way to a shard, or of the answer on its way back. One-way.

    The body is the units' values, encoded: deltas, or in sync mode mean gradients (buffers are always deltas);
    back come what Answer calls their content. Those of one update may come in any order, before or after its
    Request. A unit that comes again takes the place of the earlier one, until the update is complete, or the
    answer is there.
    """

    seq: Positive
    """The Request's."""
    vector: str
    first: Count
    """The first unit's number among those that the shard owns of this vector."""
    count: Positive
    codec: str
    turn: Count
    """What a codec that draws at random is seeded with, beside the job's seed."""
    packed: bool = False
    """One unit, of which only the values that are not zero travel."""


# --- worker -> shard -------------------------------------------------------------------------------


class Publish(Message, frozen=True):
    """The sender's values of the named vectors become the shard's; the body is the shard's slices in layout order."""

    vectors: tuple[str, ...]


class Request(Message, frozen=True):
    """A worker's turn: an update to be merged, an abstention from the round, or a wish for the committed state.

    An update's values travel in Units; it is complete when its Request and all units are there.
    """

    kind: RequestKind
    seq: Positive
    base_version: Annotated[int, Meta(ge=-1)]
    """The version that the update was computed from; -1 for a worker that has none."""
    vectors: tuple[str, ...]
    """update: what is pushed; fetch: what the answer shall hold."""
    samples: Count = 0
    steps: Count = 0
    """Local optimizer steps in it."""
    loss: float | None = None
    """Mean training loss over ``samples``; none if unknown or not finite."""
    present: bytes = b""
    """sync mode: bit i (little-endian within bytes) says that the i-th trainable parameter has a gradient."""
    spans: tuple[Span, ...] = ()
    lost_samples: Count = 0
    """Samples of steps that were thrown away since the latest contribution; they are in no contribution."""
    lost_spans: tuple[Span, ...] = ()
    """Where leased, the positions of these samples."""
    reason: str = ""
    """abstain: why, such as ``amp_overflow``."""
    link: LinkFacts | LeftOut | None = None
    """What the worker's previous update to this shard showed of the link."""


class Read(Message, frozen=True):
    """An observer's wish for the committed state as it is, outside all rounds. Answered by State."""

    vectors: tuple[str, ...]


# --- shard -> worker -------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """The call was carried out."""


class Refused(Message, frozen=True):
    """The call was not carried out."""

    code: str
    message: str


class Note(msgspec.Struct, frozen=True):
    """What the coordinator tells one worker with an answer; the same from every shard."""

    version: int
    round: int
    steps: int
    """Committed global steps after this round."""
    dropped: str = ""
    """Why this worker's contribution was not merged; empty where it was."""
    staleness: int = 0
    stop: str = ""
    """Why training ends now; empty while it goes on."""
    evaluate: bool = False
    """This worker is asked to evaluate the committed weights."""
    local_steps: int = 1
    """Steps until this worker's next contribution."""


class Answer(Message, frozen=True):
    """The answer to a Request. The values came before it, in Units; for a fetch they are the body, the shard's slices
    of ``vectors`` in layout order.

    ``weights``: committed values. ``change``: what to add to the committed values that the worker holds (buffers, and
    vectors of 16-bit types, are committed values there too). ``gradient``: the mean gradient (and, for buffers,
    committed values). ``gradients``: the mean gradients of the rounds that the worker missed, oldest first, one after
    another. ``unchanged``: no values; the worker's base version is the committed one.
    """

    content: Content
    note: Note
    vectors: tuple[str, ...] = ()
    present: tuple[bytes, ...] = ()
    """gradient, gradients: for each round, which parameters got a gradient from anyone."""
    waited_s: float = 0.0
    """From the end of the worker's request until the last one's that was waited for, and the decision."""
    served_s: float = 0.0
    """From then until the answer began."""
    link: LinkFacts | LeftOut | None = None
    """What the shard's previous answer to this worker showed of the link."""
    pace_bytes_per_s: float | None = None
    """At which rate all workers on other hosts together should send to this shard; none while that is not known."""


class State(Message, frozen=True):
    """The answer to Read; the body is the shard's slices of the vectors in layout order."""

    version: int
    round: int


# --- coordinator <-> shard -------------------------------------------------------------------------


class Assign(Message, frozen=True):
    """What a shard holds; sent once, before any worker speaks to it."""

    layout: Layout
    shard: int
    shards: int
    mode: str
    outer: dict[str, Any]
    cut: Cut = Cut(shards=1)
    codec: str = "fp32"
    """In which answers travel."""
    groups: Positive = 1
    """Parts in which a barrier's round is answered; see Tentative."""
    seed: int = 0
    congestion_control: str = "auto"


class Received(Message, frozen=True):
    """A shard has one group of a worker's request, complete and checked. One-way.

    A request without values is in group 0 as a whole.
    """

    shard: int
    group: Count
    key: Key
    kind: RequestKind
    base_version: int
    samples: int
    steps: int
    loss: float | None
    finite: bool
    present: bytes
    spans: tuple[Span, ...]
    reason: str
    lost_samples: Count = 0
    lost_spans: tuple[Span, ...] = ()


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A contribution that a decision merges, with its weights."""

    key: Key
    weight: float
    buffer_weight: float


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A request that a decision answers."""

    key: Key
    note: Note


class Tentative(Message, frozen=True):
    """An entry of the coordinator's log: answer one group of a round that is still open as if ``parts`` were all of it.

    Nothing is committed by it. Where the round's Decision names other parts, the group is answered again.
    """

    index: int
    epoch: int
    group: Count
    parts: tuple[Part, ...]


class Decision(Message, frozen=True):
    """One entry of the coordinator's ordered log; every shard carries out the same entries in the same order.

    It is also the commit record: with the weights, each shard keeps the latest one.
    """

    index: int
    """Counts from 1 without a gap."""
    epoch: int
    round: int
    version: int
    """The version after it; it grows by one exactly where ``parts`` is not empty."""
    parts: tuple[Part, ...] = ()
    """In member order, which is the order of summation."""
    replies: tuple[Reply, ...] = ()
    present: bytes = b""
    """sync mode: which parameters got a gradient from anyone."""
    keep_after: int | None = None
    """sync mode: the version that an evaluating worker's model holds (the oldest, if several evaluate). Answers of
    later rounds are kept for it; none where nobody evaluates."""
    spans: tuple[Span, ...] = ()
    """The data that this commit used up."""


# --- worker -> coordinator (control connection) ----------------------------------------------------


class Join(Message, frozen=True):
    """The worker has its model and waits for the others. Answered by Joined when all are there."""

    layout: Layout
    node: str
    device: str


class Joined(Message, frozen=True):
    """What a worker needs to begin."""

    publish: bool
    """This worker's model is the job's first state: publish all vectors, then send Ready."""
    mode: str
    local_steps: int
    epochs: int
    workers: int
    shards: tuple[tuple[str, int], ...]
    """Host and port of each shard, by number."""
    codec: str
    round_timeout_s: float
    """How long the coordinator lets a round wait; a worker waits a little longer."""
    cut: Cut = Cut(shards=1)
    """How vectors are cut into units, and whose they are."""
    congestion_control: str = "auto"
    """What CADENZA_CONGESTION_CONTROL says to the service."""
    fan_in: Positive = 1
    """Workers on other hosts that send to one shard at a time, at most."""
    overlap: Overlap = "off"
    mix: float | None = None
    """With overlap: the share of its own weights that a worker keeps when an answer is merged; none: full correction."""
    seed: int = 0
    """The job's seed, for codecs that draw at random."""


class Ready(Message, frozen=True):
    """The publisher has published. Answered by Done; then the other workers' Join is answered."""


class Lease(Message, frozen=True):
    """A wish for samples to train on. Answered by Leased, or by Exhausted."""

    dataset_size: Count
    batch_size: Positive
    shuffle: bool
    epochs: Positive
    drop_last: bool = False


class Leased(Message, frozen=True):
    """Positions ``start`` to ``stop`` of epoch ``epoch``'s order are the worker's to train on.

    Position p is sample ``permutation(seed, epoch)[p]`` where shuffled, else sample p.
    """

    lease: int
    epoch: int
    start: int
    stop: int
    seed: int


class Exhausted(Message, frozen=True):
    """No more data: the epochs are handed out, or training ends."""

    reason: str


class Evaluating(Message, frozen=True):
    """The worker evaluates: rounds go on without it until its next Request. Answered by Done."""


class Report(Message, frozen=True):
    """Metrics that the user's code reported. One-way."""

    metrics: dict[str, float]
    steps: int


class LinkReport(msgspec.Struct, frozen=True):
    """A worker's link to the shards on other hosts, in both directions, as the latest syncs showed it."""

    goodput_bytes_per_s: float
    """Of updates, over all connections; acknowledged bytes over busy time."""
    rtt_s: float
    """Under load; the slowest connection's, as all that follows."""
    queueing_delay_s: float
    congestion: float
    """0 to 1; see :mod:`cadenza.plane.monitor`. The worse direction's."""
    retransmits: int
    """Segments that this worker sent again, since it joined."""
    cause: Cause
    """What took the time of the latest sync."""
    reason: str


class Telemetry(Message, frozen=True):
    """Cumulative figures of one worker since it joined. One-way; also its sign of life."""

    steps: int
    samples: int
    compute_seconds: float
    push_bytes: int
    pull_bytes: int
    raw_push_bytes: int
    raw_pull_bytes: int
    phases: dict[
        SyncPhase, tuple[Annotated[tuple[int, ...], Meta(min_length=BUCKETS, max_length=BUCKETS)], float]
    ]
    """By phase: cumulative bucket counts (bounds: SYNC_BOUNDS_S, then +Inf) and the sum of seconds."""
    link: LinkReport | None = None
    """None while nothing is known: before the first sync, and where all shards are on the worker's host."""


class Log(Message, frozen=True):
    """Lines that the worker printed. One-way."""

    lines: tuple[tuple[float, Stream, str], ...]
    """Seconds since the Unix epoch, stream, text."""


class Notice(Message, frozen=True):
    """Something that the user should see as an event. One-way."""

    kind: str
    message: str
    severity: str
    data: dict[str, Any] = {}


class Ended(Message, frozen=True):
    """The attempt failed: no request will be answered any more, on any connection. One-way, to the worker."""

    reason: str


class Finish(Message, frozen=True):
    """The worker has no more steps to take and nothing pending. Answered by Finished."""


class Finished(Message, frozen=True):
    """``last``: no other worker trains; evaluate if asked to, and publish what the shards lack."""

    last: bool


class Published(Message, frozen=True):
    """The last worker has published what the shards lacked: the model is complete. Answered by Done."""


class Failed(Message, frozen=True):
    """The user's code, or the worker itself, failed. One-way."""

    kind: str
    message: str
    traceback: str
    step: int | None
    remedy: str = ""


AnyMessage = (
    Units | Publish | Request | Read | State | Done | Refused | Answer | Assign | Received | Tentative | Decision | Join | Joined | Ready | Lease | Leased
    | Exhausted | Ended | Evaluating | Report | Telemetry | Log | Notice | Finish | Finished | Published | Failed
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in ``data``; raises msgspec.ValidationError or DecodeError on anything else."""
    return _decoder.decode(data)
