"""The fixture for tests on shaped networks; all integration tests have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from benchmarks.netlab import Network, requirements

MakeNetwork = Callable[..., Network]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """Makes networks, with the arguments of `Network`, that are gone when the test has ended.

    Skips the test, naming what is missing, where the machine cannot have any.
    """
    if missing := requirements():
        pytest.skip(f"shaped networks need {missing}")
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Network(*args, **kwargs))
