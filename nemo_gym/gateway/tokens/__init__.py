"""Exact tokens: a trajectory holds the very tokens that an engine sampled.

    policy.py        tokenizer and chat template of a local directory; control tokens spelled in messages stay text
    template.py      how a chat template is rendered, and which shapes of messages it accepts
    byte_level.py    faster encoding and decoding for byte-level vocabularies
    history.py       when two spellings of a message are the same message (the table); reading a history incrementally
    forest.py        a session's turns: continue, sample again, split with a reason; only new messages are encoded
    turns.py         one turn, and the reasons for a split
    trajectories.py  the trainer's data, with each sampled token exactly once; JSONL and npz; turns as journal records

Needs the ``gateway`` extra when used, but not to be imported.
"""

from nemo_gym.gateway.tokens.forest import History, IncrementalEncoder, Prepared, TokenForest
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError
from nemo_gym.gateway.tokens.trajectories import Trajectory, TrajectoryTurn, trajectories_of
from nemo_gym.gateway.tokens.turns import Sampled, SplitReason, Turn

__all__ = [
    "History",
    "IncrementalEncoder",
    "PolicyTokenizer",
    "Prepared",
    "Sampled",
    "SplitReason",
    "TemplateRefusedError",
    "TokenForest",
    "Trajectory",
    "TrajectoryTurn",
    "Turn",
    "trajectories_of",
]
