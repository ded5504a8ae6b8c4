"""The user's code on its way to the nodes of the workers: zip files in Ray's own key-value store.

Ray takes a working folder as a ``gcs://`` URI, unpacks it once on each node that needs it, and forgets it when
no actor uses it any more. So a package is put there afresh at every start. All of Ray's private interfaces
that this needs are used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray._private.runtime_env import packaging

PIN_S = 600
"""How long a package stays without an actor that uses it: longer than an actor takes from its creation to its
node's download."""


def publish(path: Path, digest: str) -> str:
    """Make the zip file known to all nodes.

    Args:
        path: the zip; it is unpacked as it is, a single top-level folder included.
        digest: its sha256 in hex, which names it.

    Returns:
        The URI for ``runtime_env["working_dir"]``.

    Raises:
        RuntimeError: Ray cannot take it.
    """
    uri = f"gcs://_ray_pkg_cadenza_{digest}.zip"
    packaging.pin_runtime_env_uri(uri, expiration_s=PIN_S)
    if not packaging.package_exists(uri):
        packaging.upload_package_to_gcs(uri, path.read_bytes())
    return uri


def runtime_env(
    uri: str | None, pip: Sequence[str], variables: Mapping[str, str], setup_timeout_s: float
) -> dict[str, Any]:
    """What Ray prepares on a node before a worker starts there."""
    environment: dict[str, Any] = {
        "env_vars": dict(variables),
        "config": {"setup_timeout_seconds": max(1, int(setup_timeout_s))},
    }
    if uri is not None:
        environment["working_dir"] = uri
    if pip:
        environment["pip"] = list(pip)
    return environment
