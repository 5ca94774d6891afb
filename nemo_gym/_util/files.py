"""Writing to descriptors."""

from __future__ import annotations

import os


def write_all(descriptor: int, data: bytes | bytearray | memoryview, *, at_once: int | None = None) -> None:
    """Write all of ``data``; ``os.write`` may take only a part.

    Args:
        at_once: most bytes that one call is given.

    Raises:
        OSError: a part may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:at_once]) :]
