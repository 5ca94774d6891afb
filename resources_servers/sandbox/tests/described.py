"""The operations of the API's own description, and how requests for them are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import schemathesis
from schemathesis.core.result import Ok


@schemathesis.serializer("application/x-tar")
def tar_bytes(ctx: Any, value: Any) -> bytes:
    """Bodies of archives: whatever was made up, as bytes."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def operations_of(url: str) -> Mapping[str, Any]:
    """``METHOD /path`` → operation, as a running broker describes them."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}
