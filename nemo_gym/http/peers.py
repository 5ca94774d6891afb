"""Requests from the pipeline to the servers of a stack: plain data out, bytes in, every error typed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, INFERENCE_TOKEN_HEADER
from nemo_gym.contract.errors import ServerError
from nemo_gym.contract.session import NO_SESSION
from nemo_gym.contract.verdict import MAX_REASON_CHARS, FailureKind, StageFailure, StageName
from nemo_gym.http.client import MAX_REPLY_BYTES, TRIES_OF_ONE_REPLICA, ServerClient, read_whole, send
from nemo_gym.http.connections import BROKEN, SET_COOKIE, Reply, TooLongError
from nemo_gym.http.requests import TooManyValuesError, check_values
from nemo_gym.http.telemetry import replica_context

CONNECT_PATIENCE_S = 60.0
"""How long to keep trying a server that refuses connections, since it may be restarting. A refused request never
started, so trying again repeats no work."""
REPLICA_PATIENCE_S = 10.0
"""The same for one replica of several: shorter, because a new attempt can use another replica."""
MAX_AGENT_REPLY_BYTES = 256 << 20
"""The limit for an agent server, which runs untrusted code: a 64 MiB artifact as base64, and a long conversation."""
MAX_AGENT_REPLY_VALUES = 5_000_000
"""JSON values in an agent server's reply; most of them are token ids."""

_KIND_BY_STAGE = {
    StageName.INIT: FailureKind.SEED_FAILED,
    StageName.RUN: FailureKind.AGENT_CRASHED,
    StageName.EVAL: FailureKind.VERIFIER_FAILED,
}
_KIND_BY_PATH = {"/harvest": FailureKind.INTERNAL, "/verdict": FailureKind.VERIFIER_FAILED}
"""The routes of an environment that RUN calls beside the agent's."""
_LOST_BY_PATH = {
    "/sessions": FailureKind.MODEL_UNREACHABLE,
    "/engines": FailureKind.MODEL_UNREACHABLE,
    "/act": FailureKind.AGENT_LOST,
    "/run": FailureKind.AGENT_LOST,
}
"""The kind of failure if no response came, by route, because a stage calls several servers. Every other route of an
attempt is the environment's."""
_KIND_BY_CODE = {
    "sandbox_create": FailureKind.SANDBOX_FAILED,
    "sandbox_create_verification": FailureKind.SANDBOX_FAILED,
    "sandbox_image_missing": FailureKind.SANDBOX_FAILED,
    "sandbox": FailureKind.SANDBOX_FAILED,
    "sandbox_capability": FailureKind.SANDBOX_FAILED,
    "sandbox_lost": FailureKind.SANDBOX_LOST,
    "model": FailureKind.MODEL_UNREACHABLE,
}
# Errors in the request itself, which a second try of it cannot mend.
_FINAL_CODES = frozenset({"config", "row", "sandbox_capability", "sandbox_image_missing", "role"})
_FINAL_STATUSES = frozenset({400, 404, 405, 413, 422, 501})
REFUSED = frozenset({401, 403, 404, 409, 410})
"""The statuses of a server that does not know an attempt, or knows a newer one."""


class PeerError(Exception):
    """A server of the stack returned an error, or no response at all (``status`` 0)."""

    def __init__(self, server: str, path: str, status: int, problem: Mapping[str, Any]) -> None:
        self.server, self.path, self.status, self.problem = server, path, status, problem
        super().__init__(f"{server}{path}: {problem.get('detail') or problem.get('title') or f'status {status}'}")

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: no response came, or the server says so."""
        return self.status == 0 or self.problem.get("retryable") is True

    @property
    def retry_after_s(self) -> float:
        """For how long the server asks to wait; 0 if it names no time."""
        wait_s = self.problem.get("retry_after_s")
        return float(wait_s) if isinstance(wait_s, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class PeerReply:
    body: bytes
    cookies: Mapping[str, str]

    def json(self) -> Any:
        return orjson.loads(self.body)


class Peers:
    """Calls servers by instance name.

    Args:
        replicas: server → replica number, for one attempt. The attempt's first request to a server chooses the least
            busy replica and enters it here; later requests use the same replica.
        max_tries: for one request; defaults to the client's limit.
    """

    def __init__(
        self,
        client: ServerClient,
        *,
        connect_patience_s: float = CONNECT_PATIENCE_S,
        replicas: MutableMapping[str, int] | None = None,
        max_tries: int | None = None,
    ) -> None:
        self._client = client
        self._patience_s = connect_patience_s
        self._replicas = replicas
        self._max_tries = max_tries

    def of_attempt(self, replicas: MutableMapping[str, int]) -> Peers:
        """Peers for one attempt. Replicas that it chooses are added to ``replicas``."""
        return Peers(self._client, connect_patience_s=self._patience_s, replicas=replicas, max_tries=self._max_tries)

    def base_url(self, server: str) -> str:
        return self._client.base_url(server)

    async def post(
        self,
        server: str,
        path: str,
        body: Mapping[str, Any],
        *,
        control_token: str | None = None,
        inference_token: str | None = None,
        cookies: Mapping[str, str] | None = None,
        idempotent: bool = False,
        from_agent: bool = False,
    ) -> PeerReply:
        """Send ``body`` as JSON. Raises `PeerError` for any status of 300 or more (redirects are not followed), for an
        unreachable peer, and for a reply that is too large; ``from_agent`` applies an agent server's lower limits."""
        headers: dict[str, str] = {}
        if control_token is not None:
            headers[CONTROL_TOKEN_HEADER] = control_token
        if inference_token is not None:
            headers[INFERENCE_TOKEN_HEADER] = inference_token
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        reply = await self._send(
            server,
            path,
            "POST",
            max_bytes=MAX_AGENT_REPLY_BYTES if from_agent else MAX_REPLY_BYTES,
            data=orjson.dumps(body),
            headers=headers,
            idempotent=idempotent,
        )
        if from_agent:
            try:
                await check_values(reply.body, MAX_AGENT_REPLY_VALUES)
            except TooManyValuesError:
                raise _too_large(server, path, f"holds more than {MAX_AGENT_REPLY_VALUES} JSON values") from None
        return reply

    async def get(self, server: str, path: str) -> PeerReply:
        return await self._send(server, path, "GET")

    async def _send(
        self, server: str, path: str, method: str, *, max_bytes: int = MAX_REPLY_BYTES, **options: Any
    ) -> PeerReply:
        chosen = self._replicas if self._replicas is not None else {}
        if self._max_tries is not None:
            options["max_tries"] = self._max_tries
        is_new = self._replicas is not None and server not in chosen and len(self._client.replica_urls(server)) > 1
        patience_s = min(self._patience_s, REPLICA_PATIENCE_S) if server in chosen else self._patience_s
        if is_new or server in chosen:
            options["max_tries"] = TRIES_OF_ONE_REPLICA
        give_up = time.monotonic() + patience_s
        while True:
            if is_new:
                chosen[server] = self._client.choose_replica(server)
            try:
                with replica_context(chosen):
                    incoming = await self._client.send(send, server, path, method, **options)
                body = await read_whole(incoming, max_bytes)
                if incoming.status >= 300:
                    raise PeerError(server, path, incoming.status, _problem(body, incoming.status))
                return PeerReply(body, _cookies(incoming))
            except TooLongError:
                raise _too_large(server, path, f"is larger than {max_bytes} bytes") from None
            except ServerError as error:
                if error.details.get("started") != "no" or time.monotonic() >= give_up:
                    problem = {"detail": error.message, **error.details}
                    if error.details.get("started") == "no" and server in chosen:
                        problem["replica_lost"] = True
                    raise PeerError(server, path, 0, problem) from error
            except BROKEN as error:
                detail = f"the connection broke ({type(error).__name__}: {error})"
                raise PeerError(server, path, 0, {"detail": detail}) from error
            await asyncio.sleep(0.5)


def _too_large(server: str, path: str, problem: str) -> PeerError:
    # Status 413 is final: trying the same again would get the same reply.
    return PeerError(server, path, 413, {"code": "reply_too_large", "detail": f"the answer {problem}"})


def _cookies(incoming: Reply) -> Mapping[str, str]:
    """The name and value of each cookie in the reply, without its attributes, which are for browsers."""
    if SET_COOKIE not in incoming.headers:
        return {}
    pairs = (cookie.partition(";")[0].partition("=") for cookie in incoming.headers[SET_COOKIE].split("\n"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _problem(body: bytes, status: int) -> Mapping[str, Any]:
    """The problem document of an error response; also made from FastAPI's own errors and from plain text."""
    try:
        problem = orjson.loads(body)
    except orjson.JSONDecodeError:
        problem = {"detail": body[:300].decode(errors="replace").strip()}
    if not isinstance(problem, dict):
        problem = {"detail": str(problem)[:300]}
    if isinstance(problem.get("detail"), list):  # request validation: name the fields, not their (private) values
        fields = [".".join(map(str, item.get("loc", ()))) for item in problem["detail"] if isinstance(item, dict)]
        problem = {"detail": f"the request was refused (status {status}); fields: {', '.join(fields)}"}
    return problem


def kind_by_route(stage: StageName, path: str) -> FailureKind:
    """Return the kind of failure of a route whose response says nothing more precise."""
    return _KIND_BY_PATH.get(path, _KIND_BY_STAGE[stage])


def failure_of_peer(stage: StageName, error: PeerError) -> StageFailure:
    """Translate a peer's error into a failure of the attempt's stage."""
    code = str(error.problem.get("code", ""))
    if error.problem.get("code_hint") == NO_SESSION:
        kind = FailureKind.ENVIRONMENT_LOST
    elif error.status == 0:
        kind = _LOST_BY_PATH.get(error.path, FailureKind.ENVIRONMENT_LOST)
    else:
        kind = _KIND_BY_CODE.get(code, kind_by_route(stage, error.path))
    refused = error.status in REFUSED
    retryable_by_peer = error.problem.get("retryable")
    final = (code in _FINAL_CODES or error.status in _FINAL_STATUSES) and retryable_by_peer is not True
    return StageFailure(
        stage=stage,
        kind=kind,
        reason=str(error)[:MAX_REASON_CHARS],
        retryable=not final or (stage is StageName.EVAL and refused),
        # A fenced, forgotten or foreign attempt, or one whose replica is lost, cannot be verified by another try; it
        # takes a new attempt.
        new_attempt=stage is not StageName.EVAL or refused or error.problem.get("replica_lost") is True,
        details={"server": error.server, "status": error.status, "code": code},
    )
