"""NeMo Gym's module name for the types of episodes; see `nemo_gym.contract.episodes`."""

from nemo_gym.contract.episodes import (
    BaseEpisodeRequest,
    BaseEpisodeResponse,
    EpisodeFailure,
    EpisodeId,
    FailureStage,
    MaterializedTask,
    TaskId,
    is_materialized_task_row,
)

__all__ = [
    "BaseEpisodeRequest",
    "BaseEpisodeResponse",
    "EpisodeFailure",
    "EpisodeId",
    "FailureStage",
    "MaterializedTask",
    "TaskId",
    "is_materialized_task_row",
]
