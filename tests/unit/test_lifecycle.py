from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from cadenza_service.jobs.lifecycle import (
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    JobState,
    predecessors,
    successors,
)


def test_the_value_of_a_state_is_its_name() -> None:
    assert all(state.value == state.name for state in JobState)


def test_nothing_leaves_a_terminal_state_and_everything_leads_to_one() -> None:
    assert not any(source in TERMINAL for source, _ in TRANSITIONS)
    for state in set(JobState) - TERMINAL:
        assert {JobState.FAILED, JobState.CANCELLED} <= successors(state)


def test_no_state_leads_to_itself() -> None:
    assert not any(source is target for source, target in TRANSITIONS)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(JobState, JobState)))
def test_predecessors_and_successors_are_the_table(source: JobState, target: JobState) -> None:
    legal = (source, target) in TRANSITIONS
    assert (source in predecessors(target)) is legal
    assert (target in successors(source)) is legal


def test_only_a_waiting_job_can_become_unschedulable() -> None:
    assert predecessors(JobState.UNSCHEDULABLE) == {JobState.QUEUED}
    assert predecessors(JobState.RUNNING) == {JobState.STARTING, JobState.RECOVERING}


def test_an_illegal_move_names_the_job_and_the_legal_ones() -> None:
    message = str(IllegalTransition("digits-abc", JobState.RUNNING, JobState.QUEUED))
    assert "digits-abc: RUNNING -> QUEUED" in message
    assert message.endswith("CANCELLED, FAILED, RECOVERING, SUCCEEDED")
    assert "nothing, it is final" in str(IllegalTransition("a", JobState.FAILED, JobState.RUNNING))


def test_lifecycle_and_settings_load_without_ray_torch_or_a_database() -> None:
    code = (
        "import sys, cadenza_service.jobs.lifecycle, cadenza_service.settings;"
        "print([m for m in ('ray', 'torch', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
