"""From what a hook decided to what stands in a result row: one shape, and no reward without a valid verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.contract.rows import PARAMS_KEY, RESPONSE_KEY
from nemo_gym.contract.session import Artifact
from nemo_gym.contract.verdict import decide_validity


def work_digest(response: Any, artifacts: Sequence[Artifact]) -> str:
    """What identifies the work of an attempt: its response and what was harvested."""
    digest = hashlib.sha256(orjson.dumps(response, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    for artifact in artifacts:
        content = artifact.sha256 or hashlib.sha256(artifact.data.encode()).hexdigest()
        digest.update(orjson.dumps([artifact.name, artifact.kind, content, artifact.truncated, artifact.error]))
    return digest.hexdigest()


def reply_fields(reply: Mapping[str, Any]) -> dict[str, Any]:
    """What a NeMo Gym ``verify`` returned, with its verdict made explicit and without the request it repeats."""
    fields = {key: value for key, value in reply.items() if key not in (PARAMS_KEY, RESPONSE_KEY)}
    return {**fields, **decide_validity(reply).as_fields()}
