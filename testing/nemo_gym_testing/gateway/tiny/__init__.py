"""A small real model behind the wires of real engines, to prove that trajectories hold the tokens that were sampled.

    policies.py     whole policies on disk, of several template families: `make_policy`
    model.py        the transformer; prefixes.py: its prefix cache; sampling.py, generation.py: one call in it
    engine.py       `TinyVllmEngine`, `TinySglangEngine`: they sample from the model, or follow a script
    script.py       a script's input and output; rules.py: scripts as files; rendering.py: answers as tokens
    log.py          the engine's own record of every call
    truth.py        `check_truth` compares trajectories with that record; cover.py: which calls sampled which tokens

``python -m nemo_gym_testing.gateway.tiny --help`` serves one. Needs the ``gateway`` extra.
"""

import os

# Before numpy is loaded: two threads are slower than one for matrices this small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from nemo_gym_testing.gateway.tiny.engine import ENGINES, TinyEngine, TinySglangEngine, TinyVllmEngine
from nemo_gym_testing.gateway.tiny.log import EngineCall, read_log
from nemo_gym_testing.gateway.tiny.model import TinyModel, recompute
from nemo_gym_testing.gateway.tiny.policies import FAMILIES, make_policy
from nemo_gym_testing.gateway.tiny.rules import load_script
from nemo_gym_testing.gateway.tiny.script import CallView, Script
from nemo_gym_testing.gateway.tiny.truth import TruthReport, check_truth

__all__ = [
    "ENGINES",
    "FAMILIES",
    "CallView",
    "EngineCall",
    "Script",
    "TinyEngine",
    "TinyModel",
    "TinySglangEngine",
    "TinyVllmEngine",
    "TruthReport",
    "check_truth",
    "load_script",
    "make_policy",
    "read_log",
    "recompute",
]
