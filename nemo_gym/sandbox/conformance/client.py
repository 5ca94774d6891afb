"""A second process for the conformance suite: creates a box or connects to one, then exits or waits.

Run as ``python -m nemo_gym.sandbox.conformance.client JSON``, where the JSON holds ``provider`` (its configuration),
``spec`` (fields of the box) or ``connect`` (a serialized handle), and ``then``: ``exit`` or ``wait``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider


async def run(order: dict[str, Any]) -> None:
    provider = create_provider(order["provider"])
    if "connect" in order:
        box = await AsyncSandbox.connect(order["connect"], provider=provider)
    else:
        box = await AsyncSandbox(
            provider, SandboxSpec(**order["spec"] | {"network": NetworkPolicy(order["spec"]["network"])})
        ).start()
    result = await box.exec(order["command"])
    sys.stdout.write(json.dumps({"sandbox_id": box.handle.sandbox_id, "stdout": result.stdout}) + "\n")
    sys.stdout.flush()
    if order["then"] == "wait":
        await asyncio.sleep(3600)
    if "connect" in order:
        await box.stop()
    await provider.aclose()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
