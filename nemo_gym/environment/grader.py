"""Calls an environment's grading hook, and turns whatever happens into the fields of a result row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from starlette.requests import Request

from nemo_gym.contract.errors import InvalidBodyError, NemoGymError
from nemo_gym.contract.rows import PARAMS_KEY, RESPONSE_KEY
from nemo_gym.contract.session import Artifact, RolloutIdentity
from nemo_gym.contract.verdict import FailureKind, Verdict, decide_validity, verdict_of_error
from nemo_gym.environment.judge import JudgeError, judge_failure_fields
from nemo_gym.http.metrics import Counter
from nemo_gym.http.plugin_call import PluginCall, plain
from nemo_gym.http.request_state import describe_request
from nemo_gym.http.tracing import step

if TYPE_CHECKING:
    from nemo_gym.environment.hooks import EnvironmentHooks

log = structlog.get_logger(__name__)

VERDICTS = Counter("nemo_gym_verdicts", "Verdicts by outcome: valid, or the kind of failure", ("outcome",))


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


class Grader:
    """One environment's ``grade`` or ``verify``."""

    def __init__(self, server: EnvironmentHooks) -> None:
        self._server = server
        self._hook: PluginCall | None = None

    async def nemo_verify(self, request: Request, row: dict[str, Any]) -> dict[str, Any]:
        """The reply to a NeMo Gym caller that names no attempt: what ``verify`` returns, and nothing more."""
        server = self._server
        if server.overrides("grade") and not server.overrides("verify"):
            response = row.pop(RESPONSE_KEY, None) or {}
            task_id = server.task_id(row) or "unnamed"
            rollout = RolloutIdentity(rollout_id="unnamed", task_id=task_id, group_id=task_id)
            return {**row, RESPONSE_KEY: response, **await self.grade(request, row, response, (), rollout)}
        try:
            return plain(await self._verify(request, row))
        except JudgeError as error:
            return {**row, **judge_failure_fields(error)}

    async def _verify(self, request: Request, body: dict[str, Any]) -> Any:
        if self._hook is None:
            self._hook = PluginCall(self._server.verify)
        return await self._hook(request, body)

    async def grade(
        self,
        request: Request,
        row: dict[str, Any],
        response: dict[str, Any],
        artifacts: Sequence[Artifact],
        rollout: RolloutIdentity,
    ) -> dict[str, Any]:
        """The verdict of an attempt as fields of its result row. Every failure of ours becomes an invalid verdict."""
        with step("verify", has_span=False) as grading:
            fields = await self._graded(request, row, response, artifacts, rollout)
            outcome = "valid" if fields["valid"] else str(fields.get("failure_kind") or "invalid")
            VERDICTS.add(outcome)
            if not fields["valid"]:
                grading.outcome = outcome
            said = {"valid": fields["valid"], "reward": fields.get("reward"), "task_id": rollout.task_id}
            describe_request(request.scope, "verify", said)
        return fields

    async def _graded(
        self,
        request: Request,
        row: dict[str, Any],
        response: dict[str, Any],
        artifacts: Sequence[Artifact],
        rollout: RolloutIdentity,
    ) -> dict[str, Any]:
        try:
            if self._server.overrides("grade"):
                return (await self._server.grade(row, response, artifacts, rollout)).as_fields()
            result = await self._verify(request, {**row, RESPONSE_KEY: response})
            reply = plain(result, exclude={PARAMS_KEY, RESPONSE_KEY})
            return reply_fields({key: value for key, value in reply.items() if key not in row or row[key] != value})
        except JudgeError as error:
            return judge_failure_fields(error)
        except InvalidBodyError:
            raise
        except NemoGymError as error:
            log.warning("no verdict", rollout_id=rollout.rollout_id, code=error.code, error=error.message)
            return verdict_of_error(error).as_fields()
        except Exception as error:
            # The boundary of plugin code: whatever the grader raised, it is not a reward.
            log.exception("verify failed", rollout_id=rollout.rollout_id)
            reason = f"verify raised {type(error).__name__}; the environment's log has the traceback"
            return Verdict.invalid(FailureKind.VERIFIER_FAILED, reason).as_fields()
