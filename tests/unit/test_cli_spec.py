"""Spec files: how they are read, changed from the command line, and refused field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza_api.cli.spec_file import LocalSpec, SpecError, load_spec
from cadenza_api.cli.yaml_text import parse
from cadenza_api.user_errors import UserError

MINIMAL = "name: char\nentrypoint: train:main\n"


def load(tmp_path: Path, text: str, *changes: str, name: str | None = None) -> LocalSpec:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return load_spec(path, name=name, changes=changes)


def problems(tmp_path: Path, text: str, *changes: str) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text, *changes)
    assert all(str(problem) in str(caught.value) for problem in caught.value.problems)
    return {problem.field: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2", -2),
        ("0x1f", 31),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("", None),
        ("2024-05-01", "2024-05-01"),
        ("1:30", "1:30"),
        ("'1e-3'", "1e-3"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ('{"a": [1.5e3, false, null]}', {"a": [1500.0, False, None]}),
        ("base: &b {k: 1}\nmore:\n  <<: *b\n  l: 2", {"base": {"k": 1}, "more": {"k": 1, "l": 2}}),
    ],
)
def test_scalars_mean_what_people_expect(text: str, value: Any) -> None:
    parsed = parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_json_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{"name": "char", "entrypoint": "train:main", "config": {"lr": 1e-3}}')
    assert load_spec(path).spec.config == {"lr": 0.001}


def test_the_command_line_changes_fields(tmp_path: Path) -> None:
    text = MINIMAL + "sync: {mode: local, local_steps: 4}\nconfig:\n"
    changes = [
        "sync.mode=ssp",
        "sync.local_steps=null",
        "config.lr=1e-3",
        "workers.min=3",
        "config.tags=[a, b]",
    ]
    local = load(tmp_path, text, *changes, name="other")
    assert local.spec.name == "other"
    assert (local.spec.sync.mode, local.spec.sync.local_steps, local.spec.workers.min) == ("ssp", None, 3)
    assert local.spec.config == {"lr": 0.001, "tags": ["a", "b"]}


@pytest.mark.parametrize("change", ["sync.mode", "=1", "sync..mode=1", ".a=1", "name.first=x", "config=[1"])
def test_a_change_that_makes_no_sense_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load(tmp_path, MINIMAL, change)


def test_every_wrong_field_is_named_with_its_value_and_what_would_do(tmp_path: Path) -> None:
    text = "entrypoint: train.py\nwokers: {}\nworkers: {min: 0}\nsync: {mode: fast, outer: {name: sgd, lrr: 1}}\n"
    found = problems(tmp_path, text)
    assert found == {
        "name": "name: is required",
        "entrypoint": found["entrypoint"],
        "wokers": "wokers: is not a known key; did you mean 'workers'?",
        "workers.min": "workers.min: input should be greater than or equal to 1 (it is 0)",
        "sync.mode": "sync.mode: must be one of 'sync', 'local', 'ssp' or 'async' (it is 'fast')",
        "sync.outer.lrr": "sync.outer.lrr: is not a known key; did you mean 'lr'?",
    }
    assert "(it is 'train.py'); write module:function" in found["entrypoint"]


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("sync: {mode: sync, local_steps: 8}", "sync.local_steps", "is 8, but mode 'sync' averages"),
        ("workers: {min: 3, max: 1}", "workers.max", "below workers.min, which is 3; raise max or lower min"),
        ("stop: {target: {metric: loss}}", "stop.target", "exactly one of 'below' and 'above'"),
        ("sync: {outer: {name: adamm}}", "sync.outer", "must be one of 'average', 'sgd', 'nesterov'"),
        ("sync: {outer: {}}", "sync.outer", "needs its key 'name'"),
        ("sync: fast", "sync", "must be a mapping"),
        ("zzz: 1", "zzz", "known here: config, data,"),
        ("env: {1a: x}", "env.1a", "the first not a digit"),
        ("runtime_env: {pip: ['a b c']}", "runtime_env.pip", "is not a requirement"),
        ("runtime_env: {working_dir: nowhere}", "runtime_env.working_dir", "nowhere is not a folder"),
        ("config: {lr: .nan}", "config.lr", "cannot be sent as JSON"),
        ("config: {tags: !!set {a, b}}", "config.tags", "cannot be sent as JSON"),
    ],
)
def test_contradictions_and_mistakes_name_their_field(
    tmp_path: Path, text: str, field: str, part: str
) -> None:
    found = problems(tmp_path, MINIMAL + text)
    assert list(found) == [field]
    assert part in found[field]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: b: c", "neither YAML nor JSON"),
        ("name: a\nname: b", "the key 'name' is given twice"),
        ("- name", "does not hold a mapping"),
        ("", "does not hold a mapping"),
        ("a: !!python/object:os.system {}", "neither YAML nor JSON"),
    ],
)
def test_files_that_hold_no_spec_are_refused(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        load(tmp_path, text)


def test_the_values_of_variables_are_not_shown(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL + "env: {PIN: 123456}") == {
        "env.PIN": "env.PIN: input should be a valid string"
    }


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere\.yaml"):
        load_spec(tmp_path / "nowhere.yaml")


def test_the_working_dir_is_relative_to_the_spec_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "code").mkdir(parents=True)
    (tmp_path / "project" / "spec.yaml").write_text(MINIMAL + "runtime_env: {working_dir: code}\n")
    monkeypatch.chdir(tmp_path)
    local = load_spec(Path("project/spec.yaml"))
    assert local.folder is not None
    assert local.folder.resolve() == tmp_path / "project" / "code"
    assert local.with_package("sha256:" + "0" * 64).runtime_env.package == "0" * 64


@pytest.mark.parametrize(
    "line", ["", "runtime_env: {pip: [einops]}", f"runtime_env: {{working_dir: 'sha256:{'a' * 64}'}}"]
)
def test_no_folder_is_uploaded_where_none_is_meant(tmp_path: Path, line: str) -> None:
    assert load(tmp_path, MINIMAL + line).folder is None
