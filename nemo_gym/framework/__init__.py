"""The framework for trainers: it runs agents in gateway sessions, and puts scored trajectories into TransferQueue."""

from nemo_gym.framework.config import FrameworkConfig, RunnerConfig
from nemo_gym.framework.framework import (
    AgentFramework,
    AllSessionsFailedError,
    OpenAICompatibleAgentFramework,
    TrajectorySink,
)
from nemo_gym.framework.gateways import GatewayPool, SessionLostError
from nemo_gym.framework.runners import AgentRunner, SessionHandle

__all__ = [
    "AgentFramework",
    "AgentRunner",
    "AllSessionsFailedError",
    "FrameworkConfig",
    "GatewayPool",
    "OpenAICompatibleAgentFramework",
    "RunnerConfig",
    "SessionHandle",
    "SessionLostError",
    "TrajectorySink",
]
