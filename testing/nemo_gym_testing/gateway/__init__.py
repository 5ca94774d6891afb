"""Engines to test against: real servers on real sockets, with a log of everything sampled and faults on demand."""

from nemo_gym_testing.gateway.engine import CallLog, FakeEngine
from nemo_gym_testing.gateway.faults import Abort, CutOff, Fault, Garbage, Hang, Status
from nemo_gym_testing.gateway.openai import FakeOpenAIEngine
from nemo_gym_testing.gateway.sampler import Sampled, hashed_sampler
from nemo_gym_testing.gateway.sglang import FakeSglangEngine
from nemo_gym_testing.gateway.vllm import FakeVllmEngine

__all__ = [
    "Abort",
    "CallLog",
    "CutOff",
    "FakeEngine",
    "FakeOpenAIEngine",
    "FakeSglangEngine",
    "FakeVllmEngine",
    "Fault",
    "Garbage",
    "Hang",
    "Sampled",
    "Status",
    "hashed_sampler",
]
