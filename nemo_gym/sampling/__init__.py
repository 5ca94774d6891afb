"""Sampling for RL: batches of effective groups from the rollout pipeline."""

from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.sampling.groups import Batch, Carried, Group, GroupFilter, MixedOutcomes, Sample, ValidSamples
from nemo_gym.sampling.loader import RowFile
from nemo_gym.sampling.opening import BlockingSampler, open_sampler
from nemo_gym.sampling.sampler import NoEffectiveGroupsError, RolloutSampler

__all__ = [
    "Batch",
    "BlockingSampler",
    "Carried",
    "Group",
    "GroupFilter",
    "MixedOutcomes",
    "NoEffectiveGroupsError",
    "RolloutSampler",
    "RowFile",
    "Sample",
    "SamplingConfig",
    "ValidSamples",
    "open_sampler",
]
