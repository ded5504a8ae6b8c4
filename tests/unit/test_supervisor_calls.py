"""Ray's errors in our words."""

from __future__ import annotations

from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RuntimeEnvSetupError

from cadenza_service.orchestration.calls import is_final, why


def died(text: str) -> ActorDiedError:
    return ActorDiedError(
        ActorDiedErrorContext(error_message=text, class_name="Worker", actor_id=b"0" * 16, pid=77)
    )


def test_a_died_actor_is_told_without_rays_advice() -> None:
    error = died(
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Some common causes include: (1) many, (2) others"
    )
    assert "class_name: Worker" in str(error)
    assert why(error) == "its worker process has died. Worker exit type: SYSTEM_ERROR"
    assert is_final(error)


def test_an_actor_whose_constructor_raised_is_told_by_its_error() -> None:
    text = "The actor died because of an error raised in its creation task, ray::X()\n  File ...\nOSError: no port\n"
    assert why(died(text)) == "OSError: no port"


def test_an_environment_that_does_not_install_is_told_by_pips_last_word() -> None:
    error = RuntimeEnvSetupError(
        "Traceback (most recent call last):\n  File ...\nLast 50 lines of stdout:\n"
        "    ERROR: Could not find a version\n    ERROR: No matching distribution found for nothing==1\n"
    )
    assert why(error) == "No matching distribution found for nothing==1"
    assert is_final(error)


def test_an_environment_without_an_installers_error_is_told_by_its_last_line() -> None:
    assert why(RuntimeEnvSetupError("first\n\nthe disk is full\n")) == "the disk is full"


def test_an_actor_out_of_reach_is_not_yet_lost() -> None:
    assert not is_final(ActorUnavailableError("no route", None))
    assert not is_final(GetTimeoutError("no answer in time"))
