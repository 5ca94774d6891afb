"""NeMo Gym's module name for `nemo_gym.task_data.materialize_task`."""

from nemo_gym.task_data import materialize_task

__all__ = ["materialize_task"]
