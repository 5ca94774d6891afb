"""The sandbox providers of this distribution. Each is a module or small package, found through entry points.

`local` needs bubblewrap and a Linux kernel with overlayfs and namespaces; `apptainer` needs the same kernel and
Apptainer; `docker` needs a Docker Engine. Any importable class that implements `nemo_gym.sandbox.base.SandboxProvider`
can serve as a third-party provider. NeMo Gym's plugins also import the contract and the registry from here.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    for module in ("base", "registry"):
        home = importlib.import_module(f"{__name__}.{module}")
        if name in home.__all__:
            return getattr(home, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
