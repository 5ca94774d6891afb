"""A double of an OpenSandbox server: its HTTP interface in this process, over boxes of another provider.

    python -m nemo_gym_testing.opensandbox --port 8080 --api-key KEY

It serves what the SDK's lifecycle, commands and files need, remembers boxes only while it runs, and can be made to
fail in the ways in which real servers fail (`Faults`). It refuses snapshots, templates, pools, and all volumes except
host directories.
"""

from nemo_gym_testing.opensandbox.faults import Faults
from nemo_gym_testing.opensandbox.server import FakeOpenSandbox, serving

__all__ = ["FakeOpenSandbox", "Faults", "serving"]
