"""Harvest: what an agent left in its box, read from outside and handed on as untrusted data.

`harvest_all` is all that callers need. Nothing of the box takes part in making a patch: neither its git, its
repository's configuration, hooks, attributes and ignore rules, nor any program found through its PATH.
"""

from nemo_gym.sandbox.harvest.files import harvest_all

__all__ = ["harvest_all"]
