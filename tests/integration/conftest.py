"""One Ray and one controller for the tests of a module; each job brings its own code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.netlab import make_network
from tests.integration.support import Service

__all__ = ["make_network", "service"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray asks for a token unless it is told not to.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        service = Service(
            tmp_path_factory.mktemp("home"), start_timeout_s=60, join_timeout_s=60, round_timeout_s=60
        )
        yield service
        service.close()
