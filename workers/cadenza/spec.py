"""The job spec: what a user submits, checked before anything starts.

Unknown keys are errors, every field but ``name`` and ``entrypoint`` has a default, and fields that
contradict each other are refused by name. This module imports neither ray nor torch, so that the API
and the command line can check a spec in milliseconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cadenza.plane.codec_names import check_codec

Mode = Literal["sync", "local", "ssp", "async"]
PlacementChoice = Literal["auto", "spread", "dedicated"]

ENTRYPOINT_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
PACKAGE_PATTERN = r"^sha256:[0-9a-f]{64}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"

OWN_PACKAGES = frozenset({"cadenza", "cadenza_service", "cadenza_api"})
"""Top-level names that a job's code may not have: it comes first on the workers' path, and would hide ours."""

DEFAULT_LOCAL_STEPS: dict[Mode, int] = {"sync": 1, "local": 8, "ssp": 1, "async": 1}
DEFAULT_STALENESS = 4


def hides_ours(path: str) -> bool:
    """Whether a file at ``path`` in a job's code (with ``/``) would be imported in place of one of OWN_PACKAGES."""
    top, _, below = path.partition("/")
    return (top if below else top.removesuffix(".py")) in OWN_PACKAGES and path.endswith(".py")


class Section(BaseModel):
    """A part of the spec: closed against unknown keys and not changed after it was checked."""

    # A spec travels and is stored as JSON, which has neither NaN nor infinities.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RuntimeEnv(Section):
    """The code and the packages that the job's workers run with."""

    working_dir: str | None = None
    """``sha256:<64 hex>`` of an uploaded package, or none where the workers' image holds the code.
    The command line also takes a local folder here, uploads it and puts its digest in its place."""

    pip: tuple[str, ...] = ()
    """Requirements installed for this job only; Ray clones its virtual environment for them, which costs
    a minute or more at each worker's start."""

    @field_validator("pip")
    @classmethod
    def _requirements(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            try:
                Requirement(line)
            except InvalidRequirement as error:
                raise ValueError(f"{line!r} is not a requirement as pip takes it: {error}") from None
        return value

    @property
    def package(self) -> str | None:
        """The package's hex digest, without its prefix."""
        if self.working_dir is None:
            return None
        return self.working_dir.removeprefix("sha256:")

    def check_uploaded(self) -> None:
        """Raise ValueError unless the code is an uploaded package; the service reads no folder of a caller."""
        if self.working_dir is not None and not re.fullmatch(PACKAGE_PATTERN, self.working_dir):
            raise ValueError(
                f"runtime_env.working_dir: {self.working_dir!r} is not an uploaded package; upload a zip with "
                "PUT /v1/packages/{sha256} (cadenza submit does it for a folder) and give 'sha256:<digest>'"
            )


class Workers(Section):
    """How many worker processes, and what each one takes from the cluster."""

    min: int = Field(1, ge=1, le=10_000)
    max: int | None = Field(None, ge=1, le=10_000)
    """None: the same as ``min``."""

    cpus: float = Field(1, ge=0)
    gpus: float = Field(0, ge=0)

    @field_validator("gpus")
    @classmethod
    def _whole(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError(
                f"workers.gpus is {value:g}, but only a part of one GPU can be shared; give a whole number, or one below 1"
            )
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Workers:
        if self.max is not None and self.max < self.min:
            raise ValueError(
                f"workers.max is {self.max}, below workers.min, which is {self.min}; raise max or lower min"
            )
        return self

    @property
    def most(self) -> int:
        """The upper bound, whether given or not."""
        return self.min if self.max is None else self.max


class Servers(Section):
    """The parameter-server pool."""

    count: int | None = Field(None, ge=1, le=1_000)
    """Shards. None: one on each node that the placement has for them."""

    placement: PlacementChoice = "auto"
    """``spread``: beside the workers, on their nodes; ``dedicated``: on nodes without workers of the job;
    auto chooses by the bytes on the busiest link."""

    replicas: Literal[1] = 1
    cpus: float = Field(0, ge=0)


class Average(Section):
    """Server optimizer: the weights move by the mean of the deltas."""

    name: Literal["average"] = "average"


class OuterSgd(Section):
    """Server optimizer: SGD with heavy-ball momentum on the mean delta."""

    name: Literal["sgd"]
    lr: float = Field(1.0, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)


class OuterNesterov(Section):
    """Server optimizer: SGD with Nesterov momentum on the mean delta (DiLoCo's, arXiv 2311.08105)."""

    name: Literal["nesterov"]
    lr: float = Field(0.7, gt=0)
    momentum: float = Field(0.9, gt=0, lt=1)


Outer = Annotated[Average | OuterSgd | OuterNesterov, Field(discriminator="name")]


class Sync(Section):
    """When and how the workers' updates come together."""

    mode: Mode = "local"
    local_steps: int | None = Field(None, ge=1, le=1_000_000)
    """Optimizer steps between two contributions. None: 8 in local mode, else 1."""

    staleness: int | None = Field(None, ge=0, le=1_000_000)
    """ssp only: by how many clocks the fastest worker may lead the slowest. None: 4."""

    codec: str = "auto"
    """How updates and answers are encoded: a codec's name, with its parameter if it has one (``topk:0.01``). fp32 is the
    parameters' own type; auto is fp32 unless something else is known to be better."""

    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether a worker goes on stepping while its update travels. In sync mode: whether gradients leave as the
    backward pass produces them."""

    overlap_mix: float | None = Field(None, ge=0, lt=1)
    """The share of its own weights that a worker keeps when an answer is merged under overlap (Streaming DiLoCo,
    arXiv 2501.18512). None: full correction, which counts every local step exactly once."""

    groups: int | None = Field(None, ge=1, le=64)
    """Parts in which a round of sync or local mode is answered. None: 16 with dedicated servers, else 1. With 1, answers leave once the round is decided, which
    costs nothing where each worker's node has a shard. With more, the first answers leave while later parts still come:
    that uses both directions of a dedicated server's link, and hides the decision's way on long routes."""

    policy: Literal["fixed"] = "fixed"
    aggregate: Literal["mean"] = "mean"
    outer: Outer = Average()

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        return value if value == "auto" else check_codec(value)

    @model_validator(mode="after")
    def _consistent(self) -> Sync:
        if self.mode == "sync" and self.local_steps not in (None, 1):
            raise ValueError(
                f"sync.local_steps is {self.local_steps}, but mode 'sync' averages gradients at every step; "
                "remove it or set mode: local"
            )
        if self.mode == "sync" and self.outer.name != "average":
            raise ValueError(
                f"sync.outer is {self.outer.name!r}, but in mode 'sync' the worker's own optimizer applies the mean "
                "gradient; remove it or set mode: local"
            )
        if self.overlap_mix is not None and (self.mode == "sync" or self.overlap == "off"):
            raise ValueError(
                f"sync.overlap_mix is {self.overlap_mix:g}, but nothing is merged under overlap with mode {self.mode!r} and "
                f"overlap {self.overlap!r}; remove it, or set mode: local and overlap: on"
            )
        if self.mode != "ssp" and self.staleness is not None:
            raise ValueError(
                f"sync.staleness is {self.staleness}, but only mode 'ssp' has a bound, not {self.mode!r}; remove it or set mode: ssp"
            )
        return self

    @property
    def interval(self) -> int:
        """Local steps between two contributions, whether given or not."""
        return self.local_steps or DEFAULT_LOCAL_STEPS[self.mode]

    @property
    def bound(self) -> int:
        """The ssp bound, whether given or not."""
        return DEFAULT_STALENESS if self.staleness is None else self.staleness


class Data(Section):
    """How often the leased dataset is gone through."""

    epochs: int = Field(1, ge=1)


class Target(Section):
    """Stop when a reported metric crosses a line."""

    metric: str = Field(min_length=1)
    """A name given to ``session.report``, or ``loss``, the training loss, where none of that name is reported."""

    below: float | None = None
    above: float | None = None

    @model_validator(mode="after")
    def _one_side(self) -> Target:
        if (self.below is None) == (self.above is None):
            raise ValueError("stop.target: give exactly one of 'below' and 'above'")
        return self

    def reached(self, value: float) -> bool:
        """Whether ``value`` lies beyond the line."""
        if self.below is not None:
            return value < self.below
        return self.above is not None and value > self.above


class Stop(Section):
    """When to stop before the data ends; whichever comes first."""

    samples: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)
    target: Target | None = None


class Evaluation(Section):
    """How often one worker is asked to evaluate the committed weights (the end of the job always asks)."""

    every_samples: int | None = Field(None, ge=1)
    """None: at the end of each epoch of the leased data."""


class JobSpec(Section):
    """A training job as submitted."""

    name: str = Field(pattern=NAME_PATTERN)
    entrypoint: str = Field(pattern=ENTRYPOINT_PATTERN)
    """``module:function``; the function is called with ``config`` on each worker."""

    config: dict[str, Any] = {}
    runtime_env: RuntimeEnv = RuntimeEnv()
    workers: Workers = Workers()
    servers: Servers = Servers()
    sync: Sync = Sync()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    stop: Stop = Stop()
    env: dict[Annotated[str, Field(pattern=VARIABLE_PATTERN)], str] = {}
    labels: dict[str, str] = {}
    seed: int = Field(0, ge=0, le=2**63 - 1)
