"""The module name under which NeMo Gym looks for the facade; new code imports from `nemo_gym.sandbox`."""

from nemo_gym.sandbox.facade import AsyncSandbox, Sandbox

__all__ = ["AsyncSandbox", "Sandbox"]
