"""The job spec: closed, frozen, and clear about what contradicts what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cadenza.spec import JobSpec, RuntimeEnv, Target

MINIMAL = {"name": "job", "entrypoint": "module:train"}
DIGEST = "sha256:" + "a" * 64


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({**MINIMAL, **fields})


def refusals(**fields: Any) -> dict[str, str]:
    """What is wrong by place."""
    with pytest.raises(ValidationError) as caught:
        spec(**fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def test_name_and_entrypoint_are_enough() -> None:
    job = spec()
    assert (job.workers.most, job.sync.interval, job.sync.outer.name) == (1, 8, "average")
    assert (job.servers.count, job.servers.placement) == (None, "auto")
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({})
    assert {error["loc"] for error in caught.value.errors()} == {("name",), ("entrypoint",)}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"worker": {}}, "worker"),
        ({"workers": {"minimum": 1}}, "workers.minimum"),
        ({"servers": {"shards": 1}}, "servers.shards"),
        ({"sync": {"stale": 1}}, "sync.stale"),
        ({"sync": {"outer": {"name": "average", "lr": 1}}}, "sync.outer.average.lr"),
        ({"sync": {"outer": {"name": "sgd", "nesterov": True}}}, "sync.outer.sgd.nesterov"),
        ({"stop": {"epochs": 1}}, "stop.epochs"),
        ({"stop": {"target": {"metric": "a", "below": 1, "over": 2}}}, "stop.target.over"),
        ({"data": {"epoch": 1}}, "data.epoch"),
        ({"evaluation": {"every": 1}}, "evaluation.every"),
        ({"runtime_env": {"conda": []}}, "runtime_env.conda"),
    ],
)
def test_an_unknown_key_is_named(fields: dict[str, Any], place: str) -> None:
    assert refusals(**fields) == {place: "Extra inputs are not permitted"}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"name": ""}, "name"),
        ({"name": "-a"}, "name"),
        ({"name": "a" * 64}, "name"),
        ({"name": "a\n"}, "name"),
        ({"entrypoint": "module"}, "entrypoint"),
        ({"entrypoint": "module:train()"}, "entrypoint"),
        ({"entrypoint": "module:train\n"}, "entrypoint"),
        ({"entrypoint": "../module:train"}, "entrypoint"),
        ({"workers": {"min": 0}}, "workers.min"),
        ({"workers": {"min": 10_001}}, "workers.min"),
        ({"workers": {"cpus": -1}}, "workers.cpus"),
        ({"workers": {"cpus": float("inf")}}, "workers.cpus"),
        ({"workers": {"gpus": float("nan")}}, "workers.gpus"),
        ({"servers": {"count": 0}}, "servers.count"),
        ({"servers": {"replicas": 2}}, "servers.replicas"),
        ({"servers": {"placement": "packed"}}, "servers.placement"),
        ({"sync": {"mode": "bsp"}}, "sync.mode"),
        ({"sync": {"local_steps": 0}}, "sync.local_steps"),
        ({"sync": {"codec": "zip"}}, "sync.codec"),
        ({"sync": {"outer": {"name": "adagrad"}}}, "sync.outer"),
        ({"sync": {"outer": {"name": "sgd", "lr": 0}}}, "sync.outer.sgd.lr"),
        ({"sync": {"outer": {"name": "sgd", "lr": float("inf")}}}, "sync.outer.sgd.lr"),
        ({"sync": {"outer": {"name": "nesterov", "momentum": 1}}}, "sync.outer.nesterov.momentum"),
        ({"sync": {"outer": {"name": "nesterov", "momentum": 0}}}, "sync.outer.nesterov.momentum"),
        ({"data": {"epochs": 0}}, "data.epochs"),
        ({"stop": {"samples": 0}}, "stop.samples"),
        ({"stop": {"seconds": float("inf")}}, "stop.seconds"),
        ({"stop": {"target": {"metric": "", "below": 1}}}, "stop.target.metric"),
        ({"stop": {"target": {"metric": "a", "below": float("nan")}}}, "stop.target.below"),
        ({"evaluation": {"every_samples": 0}}, "evaluation.every_samples"),
        ({"env": {"A=B": "1"}}, "env.A=B.[key]"),
        ({"env": {"A": 1}}, "env.A"),
        ({"labels": {"a": None}}, "labels.a"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"config": []}, "config"),
        ({"runtime_env": {"pip": ["not a requirement"]}}, "runtime_env.pip"),
    ],
)
def test_a_value_out_of_bounds_is_named(fields: dict[str, Any], place: str) -> None:
    assert list(refusals(**fields)) == [place]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"workers": {"min": 3, "max": 2}}, ["workers.max", "workers.min"]),
        ({"workers": {"gpus": 1.5}}, ["workers.gpus"]),
        ({"sync": {"mode": "sync", "local_steps": 8}}, ["sync.local_steps", "'sync'"]),
        ({"sync": {"mode": "sync", "outer": {"name": "sgd"}}}, ["sync.outer", "'sync'"]),
        ({"sync": {"mode": "local", "staleness": 2}}, ["sync.staleness", "'local'"]),
        ({"sync": {"mode": "async", "staleness": 2}}, ["sync.staleness", "'async'"]),
        ({"stop": {"target": {"metric": "a"}}}, ["stop.target", "below", "above"]),
        ({"stop": {"target": {"metric": "a", "below": 1, "above": 2}}}, ["stop.target"]),
    ],
)
def test_fields_that_contradict_each_other_are_named_with_a_remedy(
    fields: dict[str, Any], names: list[str]
) -> None:
    (message,) = refusals(**fields).values()
    assert all(name in message for name in names)
    assert ";" in message or "give" in message


@pytest.mark.parametrize("gpus", [0, 0.25, 1, 2, 8.0])
def test_gpus_are_whole_or_a_part_of_one(gpus: float) -> None:
    assert spec(workers={"gpus": gpus}).workers.gpus == gpus


def test_a_checked_spec_does_not_change() -> None:
    job = spec()
    for section, field in ((job, "name"), (job.workers, "min"), (job.sync.outer, "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, field, "x")


def test_defaults_follow_the_mode() -> None:
    intervals = {mode: spec(sync={"mode": mode}).sync.interval for mode in ("sync", "local", "ssp", "async")}
    assert intervals == {"sync": 1, "local": 8, "ssp": 1, "async": 1}
    assert spec(sync={"mode": "ssp"}).sync.bound == 4
    assert spec(sync={"mode": "ssp", "staleness": 0}).sync.bound == 0
    assert spec(workers={"min": 3}).workers.most == 3


@pytest.mark.parametrize(
    "working_dir", ["code", "/code", DIGEST[:-1], DIGEST + "\n", DIGEST.upper(), "sha256:" + "g" * 64, ""]
)
def test_only_an_uploaded_package_can_be_run(working_dir: str) -> None:
    with pytest.raises(ValueError, match=r"runtime_env\.working_dir.* is not an uploaded package; upload"):
        RuntimeEnv(working_dir=working_dir).check_uploaded()


def test_a_package_is_known_by_its_digest() -> None:
    env = RuntimeEnv(working_dir=DIGEST)
    env.check_uploaded()
    assert env.package == "a" * 64
    RuntimeEnv().check_uploaded()
    assert RuntimeEnv().package is None


def test_a_target_lies_beyond_its_line() -> None:
    assert Target(metric="a", below=1.0).reached(0.9)
    assert not Target(metric="a", below=1.0).reached(1.0)
    assert Target(metric="a", above=1.0).reached(1.1)
    assert not Target(metric="a", above=1.0).reached(float("nan"))


# --- through JSON and back ---

numbers = st.floats(0.001, 1e6, allow_nan=False)
outers = st.one_of(
    st.just({"name": "average"}),
    st.fixed_dictionaries({"name": st.just("sgd"), "lr": numbers, "momentum": st.floats(0, 0.99)}),
    st.fixed_dictionaries({"name": st.just("nesterov")}, optional={"lr": numbers}),
)
syncs = st.one_of(
    st.just({"mode": "sync"}),
    st.fixed_dictionaries(
        {"mode": st.sampled_from(["local", "async"]), "outer": outers},
        optional={"local_steps": st.integers(1, 99)},
    ),
    st.fixed_dictionaries({"mode": st.just("ssp")}, optional={"staleness": st.integers(0, 99)}),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
specs = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True),
        "entrypoint": st.just("a.b_c:train"),
    },
    optional={
        "config": st.dictionaries(st.text(), values, max_size=4),
        "workers": st.fixed_dictionaries(
            {"min": st.integers(1, 4), "max": st.integers(4, 9), "cpus": numbers}
        ),
        "servers": st.fixed_dictionaries(
            {
                "count": st.none() | st.integers(1, 9),
                "placement": st.sampled_from(["auto", "spread", "dedicated"]),
            }
        ),
        "sync": syncs,
        "stop": st.fixed_dictionaries(
            {"seconds": numbers, "target": st.just({"metric": "a", "below": -1.5})}
        ),
        "env": st.dictionaries(
            st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), st.text(), max_size=3
        ),
        "labels": st.dictionaries(st.text(), st.text(), max_size=3),
        "seed": st.integers(0, 2**63 - 1),
    },
)


@settings(deadline=None, max_examples=40)
@given(document=specs)
def test_a_spec_survives_json_and_a_second_check(document: dict[str, Any]) -> None:
    job = JobSpec.model_validate(document)
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert JobSpec.model_validate(job.model_dump(mode="json")) == job
