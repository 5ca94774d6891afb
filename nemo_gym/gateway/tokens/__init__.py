"""Token truth: what an engine sampled is what the trajectory holds.

    policy.py       tokenizer and chat template of a local directory; template.py, traits.py: how it is rendered
    specials.py     what messages spell like control tokens stays text
    incremental.py  only new messages are encoded, where that is proven equal to encoding everything
    canonical.py    when two spellings of a message are the same message (the table); history.py: at a flat cost
    forest.py       a session's turns: continue, sample again, split with a reason (splits.py); commit on success
    trajectory.py   what a trainer gets; merging.py: each sampled token exactly once; export.py: JSONL and npz
    records.py      a turn as data, for a journal

Needs the ``gateway`` extra when used; importing it does not.
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
