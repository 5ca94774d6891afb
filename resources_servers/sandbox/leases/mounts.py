"""Which directories of the backend's host a caller may have mounted into its boxes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_gym.sandbox.wire.problems import BrokerError


def check_mounts(sources: Iterable[str], roots: Sequence[str] | None, *, is_stack: bool) -> None:
    """Raise `BrokerError` ``mount_refused`` for a source that is not below one of ``roots``.

    Without ``roots`` a server of the stack may mount anything, as it could with a provider of its own, and a caller
    from outside nothing: what it mounts it can read, and it need not be somebody who may read the broker's host.
    """
    if roots is None and is_stack:
        return
    allowed = [Path(os.path.realpath(root)) for root in roots or ()]
    for source in sources:
        # Links are followed first, because the backend follows them too.
        if not any(Path(os.path.realpath(source)).is_relative_to(root) for root in allowed):
            raise BrokerError(
                "mount_refused",
                f"spec.mounts: '{source}' is not below a directory that this broker lets boxes mount from; name one in"
                " its mount_roots",
            )
