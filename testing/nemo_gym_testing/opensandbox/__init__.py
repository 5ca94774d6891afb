"""A double of an OpenSandbox server: its HTTP interface in this process, over boxes of another provider.

    python -m nemo_gym_testing.opensandbox --port 8080 --api-key KEY

It serves what the SDK's lifecycle, commands and files need, knows boxes only while it runs, and can be told to fail in
the ways that the real one fails (`Faults`). Snapshots, templates, pools and volumes of other kinds than a host's
directory are refused.
"""

from nemo_gym_testing.opensandbox.faults import Faults
from nemo_gym_testing.opensandbox.server import FakeOpenSandbox, serving

__all__ = ["FakeOpenSandbox", "Faults", "serving"]
