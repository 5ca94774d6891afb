"""Calls to a judge model. Its failure never becomes a reward."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from nemo_gym.contract.verdict import NG_FAILURE_CLASS_KEY, FailureKind, Verdict
from nemo_gym.http.client import ServerClient, get_response_json, raise_for_status

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=BaseModel)

JUDGE_FAILED = "judge_failed"


class JudgeError(Exception):
    """A judge could not be reached, or its reply could not be read. The sample has no verdict."""


async def reraise_judge_errors(call: Awaitable[T]) -> T:
    """Return the result of ``call``. Any error it raises becomes a `JudgeError` that names the error."""
    try:
        return await call
    except JudgeError:
        raise
    except Exception as error:
        # The boundary of a judge's client code: after any error the sample counts as not judged.
        raise JudgeError(f"{type(error).__name__}: {error}") from error


async def call_judge(
    server_client: ServerClient, *, server_name: str, url_path: str, json: Any, response_model: type[ReplyT]
) -> ReplyT:
    """Ask the model server ``server_name``, and return its reply as ``response_model``; raises `JudgeError`."""

    async def ask() -> ReplyT:
        response = await server_client.post(server_name=server_name, url_path=url_path, json=json)
        await raise_for_status(response)
        return response_model.model_validate(await get_response_json(response))

    return await reraise_judge_errors(ask())


def judge_failsafe(verify: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap ``verify`` so that a `JudgeError` becomes an invalid verdict: no reward, ``mask_sample``, failure class."""

    @functools.wraps(verify)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return await verify(*args, **kwargs)
        except JudgeError as error:
            from nemo_gym.http.requests import JsonResponse

            body = next((arg for arg in (*kwargs.values(), *args) if isinstance(arg, BaseModel)), None)
            request = body.model_dump(mode="json") if body is not None else {}
            return JsonResponse({**request, **judge_failure_fields(error)})

    return guarded


def judge_failure_fields(error: JudgeError) -> dict[str, Any]:
    """The invalid verdict of a sample that could not be judged, as fields of its result row."""
    verdict = Verdict.invalid(FailureKind.VERIFIER_FAILED, f"the judge failed: {error}")
    return {**verdict.as_fields(), NG_FAILURE_CLASS_KEY: JUDGE_FAILED, "_ng_failure_judge_error": str(error)}
