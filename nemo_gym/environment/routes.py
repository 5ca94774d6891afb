"""The routes of every environment, and the rules they enforce whatever a plugin does.

Permissions: a pipeline seeds, and verifies and closes with the attempt's control token; an operator may verify again;
an agent may call seed, verify and close only with the row reference made for its attempt, and by default sees only the
public part of a row or a verdict. A server without credentials (a plugin in its own tests) behaves like NeMo Gym's.

This module also turns the outcome of a plugin's grading hook, including any error, into fields of a result row.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import structlog
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from nemo_gym._util.suggest import validation_problems
from nemo_gym._util.tasks import without_exit
from nemo_gym.config_types import AggregateMetricsRequest
from nemo_gym.contract.credentials import (
    CONTROL_TOKEN_HEADER,
    ROW_REF_HEADER,
    Caller,
    Role,
    RoleError,
    check_control_token,
    issue_control_token,
)
from nemo_gym.contract.errors import (
    ConfigError,
    ContractError,
    FencedError,
    InvalidBodyError,
    NemoGymError,
    RowError,
    SandboxError,
    VerifierError,
)
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor, SessionEnvelope
from nemo_gym.contract.verdict import (
    NO_PROMPT,
    PARAMS_KEY,
    RESPONSE_KEY,
    SESSION_KEY,
    FailureKind,
    Finding,
    RowAccess,
    Verdict,
    dataset_fields,
    has_prompt,
    public_verdict,
    row_digest,
    verdict_of_error,
    verdict_of_reply,
)
from nemo_gym.environment.attempts import AttemptKey, AttemptStore, RowStore, Seed, StoredRow, StoredVerdict
from nemo_gym.environment.hooks import ALLOWED_TOOLS_SESSION_KEY, BASE_ROUTES, MCP_PATH, ReverifyMode, verify_reply
from nemo_gym.environment.judge import JudgeError, judge_failure_fields
from nemo_gym.environment.steps import StepRewards, is_stepped
from nemo_gym.http.client import encode_as_text
from nemo_gym.http.plugin_call import PluginCall, plain
from nemo_gym.http.requests import (
    JsonResponse,
    LazySession,
    caller_of,
    describe_request,
    parse_json_object,
    require_role,
    validated,
)
from nemo_gym.http.telemetry import Counter, step

if TYPE_CHECKING:
    from nemo_gym.environment.hooks import EnvironmentHooks
    from nemo_gym.environment.mcp.endpoint import McpEndpoint
    from nemo_gym.environment.owned_boxes import OwnedBoxes

T = TypeVar("T")
log = structlog.get_logger(__name__)

VERDICTS = Counter("nemo_gym_verdicts", "Verdicts by outcome: valid, or the kind of failure", ("outcome",))


def work_digest(response: Any, artifacts: Sequence[Artifact]) -> str:
    """A digest that identifies an attempt's work: its response and its artifacts."""
    digest = hashlib.sha256(orjson.dumps(response, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    for artifact in artifacts:
        content = artifact.sha256 or hashlib.sha256(artifact.data.encode()).hexdigest()
        digest.update(orjson.dumps([artifact.name, artifact.kind, content, artifact.truncated, artifact.error]))
    return digest.hexdigest()


def reply_fields(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a NeMo Gym ``verify`` reply, without the request it repeats and with its verdict made explicit. A
    remark in ``failure_kind`` stays beside a reward that counts."""
    fields = {key: value for key, value in reply.items() if key not in (PARAMS_KEY, RESPONSE_KEY)}
    verdict = verdict_of_reply(reply)
    remark = {"failure_kind": reply["failure_kind"]} if verdict.valid and reply.get("failure_kind") else {}
    return {**fields, **verdict.as_fields(), **remark}


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a verdict, with text in place of what JSON cannot carry: it must not cost the verdict."""
    try:
        orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        fields = orjson.loads(encode_as_text(fields))
    return fields


class Grader:
    """One environment's ``grade`` or ``verify``."""

    def __init__(self, server: EnvironmentHooks) -> None:
        self._server = server
        self.hook: PluginCall | None = None
        """What stands in for the server's ``verify``."""

    async def nemo_verify(self, request: Request, row: dict[str, Any]) -> dict[str, Any]:
        """The reply to a NeMo Gym caller that names no attempt: just what ``verify`` returns."""
        server = self._server
        if server.overrides("grade") and not server.overrides("verify"):
            response = row.pop(RESPONSE_KEY, None) or {}
            task_id = server.task_id(row) or "unnamed"
            rollout = RolloutIdentity(rollout_id="unnamed", task_id=task_id, group_id=task_id)
            return {**row, RESPONSE_KEY: response, **await self.grade(request, row, response, (), rollout)}
        judged = row
        if isinstance(response := row.get(RESPONSE_KEY), dict):
            judged = {**row, RESPONSE_KEY: server.with_own_tool_names(response)}
        try:
            return plain(await self._verify_hook()(request, judged))
        except JudgeError as error:
            return {**row, **judge_failure_fields(error)}

    def _verify_hook(self) -> PluginCall:
        if self.hook is None:
            self.hook = PluginCall(self._server.verify)
        return self.hook

    async def grade(
        self,
        request: Request,
        row: dict[str, Any],
        response: dict[str, Any],
        artifacts: Sequence[Artifact],
        rollout: RolloutIdentity,
    ) -> dict[str, Any]:
        """The verdict of an attempt as fields of its result row. Every error but a wrong body becomes an invalid
        verdict."""
        with step("verify", has_span=False) as grading:
            fields = _as_json(await self._grade_by_hook(request, row, response, artifacts, rollout))
            outcome = "valid" if fields["valid"] else str(fields.get("failure_kind") or "invalid")
            VERDICTS.add(outcome)
            if not fields["valid"]:
                grading.outcome = outcome
            span_attributes = {"valid": fields["valid"], "reward": fields.get("reward"), "task_id": rollout.task_id}
            describe_request(request.scope, "verify", span_attributes)
        return fields

    async def _grade_by_hook(
        self,
        request: Request,
        row: dict[str, Any],
        response: dict[str, Any],
        artifacts: Sequence[Artifact],
        rollout: RolloutIdentity,
    ) -> dict[str, Any]:
        server = self._server
        hook = "grade" if server.overrides("grade") else "verify"
        try:
            if hook == "grade":
                verdict: Any = await server.grade(row, response, artifacts, rollout)
                if not isinstance(verdict, Verdict):
                    raise VerifierError(
                        f"grade of '{server.config.name}' returned {type(verdict).__name__}, not a Verdict;"
                        " return Verdict.of(reward)"
                    )
                # Once more, because a plugin may have changed it since it was made.
                return type(verdict).model_validate(dict(verdict)).as_fields()
            return reply_fields(await verify_reply(server, self._verify_hook(), request, row, response))
        except JudgeError as error:
            return judge_failure_fields(error)
        except NemoGymError as error:
            log.warning("no verdict", rollout_id=rollout.rollout_id, code=error.code, error=error.message)
            if isinstance(error, InvalidBodyError):
                raise
            return verdict_of_error(error).as_fields()
        except HTTPException as error:  # of the plugin, which raised it or returned a response with its status
            said = orjson.loads(encode_as_text(error.detail))
            said = said if isinstance(said, str) else orjson.dumps(said).decode()
            log.warning("no verdict", rollout_id=rollout.rollout_id, status=error.status_code, error=said)
            reason = f"{hook} answered status {error.status_code}: {said}"
            return Verdict.invalid(FailureKind.VERIFIER_FAILED, reason).as_fields()
        except (Exception, SystemExit) as error:
            if isinstance(error, ValidationError) and error.title in (Verdict.__name__, Finding.__name__):
                log.warning("no verdict", rollout_id=rollout.rollout_id, error=str(error))
                reason = f"{hook} made no {error.title}: {validation_problems(error, whole=error.title)}"
                return Verdict.invalid(FailureKind.VERIFIER_FAILED, reason).as_fields()
            # The boundary of plugin code: no error of a grader may become a reward.
            log.exception("verify failed", rollout_id=rollout.rollout_id)
            reason = f"{hook} raised {type(error).__name__}; the environment's log has the traceback"
            return Verdict.invalid(FailureKind.VERIFIER_FAILED, reason).as_fields()


ATTEMPT_SESSION_KEY = "_ng_attempt"
ROW_REF_SESSION_KEY = "_ng_row_ref"
RESOURCES_SESSION_KEY = "resources_session_id"
"""The session id in bodies of NeMo Gym's session protocol."""
CONTROL_SUBJECT = "environment"


@dataclass(slots=True)
class _Call:
    """A resolved request: its caller, its attempt and its row."""

    caller: Caller | None
    envelope: SessionEnvelope | None
    row: dict[str, Any]
    seeded_row: Mapping[str, Any]
    """The row as given to its attempt, without fields that an agent added."""
    access: RowAccess = RowAccess.FULL


class EnvironmentRoutes:
    """One environment's routes and the state of its attempts."""

    def __init__(self, server: EnvironmentHooks, attempts: AttemptStore) -> None:
        self._server = server
        self.attempts = attempts
        self.rows = RowStore(attempts)
        self._control_key = server.derive_key("control-token")
        self._seed_hook = PluginCall(server.seed_session) if server.overrides("seed_session") else None
        overridden = server.overrides("close_resources_session")
        self._close_session_hook = PluginCall(server.close_resources_session) if overridden else None
        self._grader = Grader(server)
        self._running: dict[tuple[str, str, str, int], asyncio.Task[Any]] = {}
        self._apps: list[FastAPI] = []
        self._mcp: McpEndpoint | None = None
        self._steps: StepRewards | None = None
        # If nothing has to be released when an attempt ends, its valid verdict may close it.
        self._closes = not any(map(server.overrides, ("close_session", "owned_boxes")))

    def install(self, app: FastAPI) -> None:
        self._apps.append(app)
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/seed_session": self.seed,
            "/heartbeat": self.heartbeat,
            "/harvest": self.harvest,
            "/verify": self.verify,
            "/close": self.close,
            "/close_session": self.close_session,
            "/rows": self.add_row,
            "/row_prompts": self.row_prompts,
            "/verdict": self.verdict,
            "/aggregate_metrics": self.aggregate_metrics,
        }
        for path, handler in handlers.items():
            app.router.routes.append(Route(path, handler, methods=["POST"]))
        app.router.routes.append(Route("/reverify_mode", self.reverify_mode, methods=["GET"]))
        if self._server.exposes_mcp():
            from nemo_gym.environment.mcp.endpoint import McpEndpoint

            self._mcp = McpEndpoint(self._server, self.attempts, app)

    def complete(self, app: FastAPI) -> None:
        """Look at the routes that a plugin added: its tools must be ones, and the endpoint that it put in place of
        ``/verify`` becomes the hook of this route."""
        self.mcp_tool_names()
        replaced = next((route for route in app.routes if isinstance(route, Route) and route.path == "/verify"), None)
        if replaced is not None and replaced.endpoint != self.verify:
            self._grader.hook = PluginCall(replaced.endpoint)
            app.router.routes.insert(0, Route("/verify", self.verify, methods=["POST"]))

    def around(self, app: FastAPI) -> ASGIApp:
        """Wrap an application that a plugin built itself: a stepped one gets its rewards counted."""
        self._apps.append(app)
        if not is_stepped(app.routes):
            return app
        self._steps, self._closes = StepRewards(app, self.rows), False
        return self._steps

    def mcp_tool_names(self) -> Collection[str]:
        return () if self._mcp is None else self._mcp.tools.keys()

    def authenticates_itself(self, scope: Scope) -> bool:
        """Whether the request's route checks another kind of token than callers' credentials."""
        return bool(scope["path"] == MCP_PATH) and self._server.exposes_mcp()

    async def guard(self, path: str, session: Mapping[str, Any]) -> None:
        """Refuse a tool call whose attempt is over, or was seeded by an earlier process, as `AttemptStore.session_of`
        does. The base routes check this themselves."""
        if path not in BASE_ROUTES and (attempt := session.get(ATTEMPT_SESSION_KEY)):
            await self.attempts.session_of(*attempt)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _resolve(self, request: Request, *roles: Role) -> _Call:
        caller = require_role(request, *roles)
        body = await parse_json_object(request)
        envelope_data = body.pop(SESSION_KEY, None)
        envelope = None if envelope_data is None else validated(SessionEnvelope, envelope_data, f"'{SESSION_KEY}'")
        if caller is not None and caller.role is Role.AGENT:
            envelope, stored = await self._row_of_agent(request, envelope)
        elif envelope is not None and envelope.row_ref is not None:
            stored = await self._stored_row(envelope.row_ref, envelope.rollout)
        else:
            return _Call(caller, envelope, row=body, seeded_row=body)
        return _Call(caller, envelope, row={**body, **stored.row}, seeded_row=stored.row, access=stored.access)

    async def _row_of_agent(
        self, request: Request, envelope: SessionEnvelope | None
    ) -> tuple[SessionEnvelope, StoredRow]:
        # An agent that rebuilds bodies from typed fields drops the reference, but its client's header and its seed's
        # cookie still carry it.
        ref = envelope.row_ref if envelope is not None else None
        ref = ref or request.headers.get(ROW_REF_HEADER) or request.session.get(ROW_REF_SESSION_KEY)
        if ref is None:
            raise RoleError(
                f"{request.url.path}: an agent needs the row reference that the pipeline made for its attempt",
                route=request.url.path,
            )
        stored = await self.rows.get(ref)
        if envelope is None:
            return SessionEnvelope(rollout=stored.rollout, row_ref=ref), stored
        if envelope.rollout != stored.rollout:
            raise RoleError("the row reference belongs to another attempt", route=request.url.path)
        return envelope.model_copy(update={"row_ref": ref, "validation": None, "close": False}), stored

    async def _stored_row(self, ref: str, rollout: RolloutIdentity) -> StoredRow:
        stored = await self.rows.get(ref)
        if stored.rollout != rollout:
            raise ContractError("the row reference belongs to another attempt", rollout_id=rollout.rollout_id)
        return stored

    def _check_control(self, request: Request, caller: Caller | None, rollout: RolloutIdentity) -> None:
        token = request.headers.get(CONTROL_TOKEN_HEADER)
        if caller is None and token is None:
            return  # unsecured
        if caller is None or caller.role is Role.PIPELINE:
            check_control_token(self._control_key, CONTROL_SUBJECT, rollout, token)

    async def _once(self, kind: str, rollout: RolloutIdentity, digest: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` once for concurrent requests with the same key. It continues when a requester disconnects, so
        that a repeated request gets its result, until its attempt ends. Then it is cancelled, and its requesters get
        a `FencedError`.

        A requester that found nothing in the store joins the running work. The store runs its operations in order, so
        it looked for this requester before that work stored its result, and the work is still registered here.
        """
        key = (kind, digest, f"{rollout.run_id}/{rollout.rollout_id}", rollout.attempt)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(without_exit(work))
            task.add_done_callback(lambda done: self._finished(key, done))
        try:
            result: T = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelling():
                raise FencedError(f"{rollout} has ended", rollout_id=rollout.rollout_id) from None
            raise
        return result

    def _finished(self, key: tuple[str, str, str, int], task: asyncio.Task[Any]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # mark it as retrieved, in case the requester has disconnected

    # -- seed ----------------------------------------------------------------------------------------------------

    async def seed(self, request: Request) -> Response:
        call = await self._resolve(request, Role.PIPELINE, Role.AGENT)
        session: LazySession = request.scope["session"]
        session.get("session_id")  # a seed always sets the cookie
        envelope = call.envelope
        if envelope is None:
            return JsonResponse(await self._nemo_seed(request, call.row))
        rollout = envelope.rollout
        if envelope.validation is not None and call.caller is not None and call.caller.role is not Role.PIPELINE:
            raise RoleError("only a pipeline may ask for a task's solution", route="/seed_session")
        digest = row_digest(call.seeded_row)
        stored = await self.attempts.seed_of(rollout, digest)
        if stored is None:
            stored = await self._once("seed", rollout, digest, lambda: self._seed(request, call, digest))
        session.replace(stored.session)
        reply = dict(stored.reply)
        if call.caller is not None and call.caller.role is Role.AGENT:
            session[ROW_REF_SESSION_KEY] = envelope.row_ref
            return JsonResponse(reply)
        reply["control_token"] = issue_control_token(self._control_key, CONTROL_SUBJECT, rollout)
        reply["public_row"] = self._server.public_row(call.row)
        reply["closes_with_verdict"] = self._closes
        if envelope.validation is not None:
            reply["validation"] = await self._solution(call.row, envelope.validation)
        return JsonResponse(reply)

    async def _seed(self, request: Request, call: _Call, digest: str) -> Seed:
        assert call.envelope is not None
        rollout = call.envelope.rollout
        replaced = await self.attempts.enter(rollout)
        if replaced is not None:  # once begun, it goes on although this seed may be cancelled
            await self._once("close", replaced, "", lambda: self._close_hook(replaced))
        session: LazySession = request.scope["session"]
        session[ATTEMPT_SESSION_KEY] = [rollout.run_id, rollout.rollout_id, rollout.attempt]
        reply = await self._nemo_seed(request, call.row)
        descriptor: Any = await self._server.open_session(call.row, rollout)
        if not isinstance(descriptor, SessionDescriptor):
            raise ContractError(
                f"open_session of '{self._server.config.name}' returned {type(descriptor).__name__}, not a"
                " SessionDescriptor"
            )
        if descriptor.rollout != rollout:
            raise ContractError(f"open_session of '{self._server.config.name}' returned another attempt's descriptor")
        descriptor = descriptor.placed(call.envelope.topology).model_copy(
            update={"limits": call.envelope.limits.over(descriptor.limits)}
        )
        if self._mcp is not None:
            session.pop(ALLOWED_TOOLS_SESSION_KEY, None)
            if (names := self._server.mcp_allowed_tools_for_session(call.row)) is not None:
                session[ALLOWED_TOOLS_SESSION_KEY] = [*names]
            descriptor = self._mcp.offered(descriptor)
            reply.setdefault("mcp", self._mcp.nemo_metadata(rollout))
        for_pipeline = call.caller is None or call.caller.role is Role.PIPELINE
        if for_pipeline:  # a plugin's own field of this name asks for no heartbeats
            reply.pop("heartbeat_s", None)
        needs = call.envelope.box_needs  # a pipeline that states none will send no heartbeats for a box
        boxes = self._server.owned_boxes()
        if needs is not None and boxes is not None and for_pipeline:
            descriptor = await boxes.lend(descriptor, needs)
            if boxes.owns(rollout):
                reply["heartbeat_s"] = boxes.heartbeat_s
                try:
                    await self.attempts.require_live(*AttemptKey.of(rollout))
                except FencedError:
                    await boxes.release(rollout)
                    raise
        reply["descriptor"] = descriptor.model_dump(mode="json")
        seed = Seed(digest, reply, session.copy())
        await self.attempts.keep_seed(rollout, seed)
        return seed

    async def _nemo_seed(self, request: Request, row: dict[str, Any]) -> dict[str, Any]:
        if self._seed_hook is None:
            return {key: row[key] for key in (RESOURCES_SESSION_KEY,) if key in row}
        return plain(await self._seed_hook(request, row), hook="seed_session")

    async def close_session(self, request: Request) -> Response:
        """Close a session that a caller of NeMo Gym's session protocol seeded under its own id."""
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        body = await parse_json_object(request)
        if self._close_session_hook is not None:
            return JsonResponse(plain(await self._close_session_hook(request, body)))
        if not isinstance(body.get(RESOURCES_SESSION_KEY), str):
            raise InvalidBodyError(f"/close_session needs '{RESOURCES_SESSION_KEY}': the id that the seed named")
        return JsonResponse({RESOURCES_SESSION_KEY: body[RESOURCES_SESSION_KEY]})

    async def _solution(self, row: dict[str, Any], validation: str) -> dict[str, Any]:
        if validation == "nothing":
            return {}
        solution = await self._server.gold_solution(row)
        if solution is None:
            raise ConfigError(
                f"environment '{self._server.config.name}' has no gold solution for this task; validate it with"
                " oracle=nothing only, or implement gold_solution()",
                key="oracle",
            )
        return solution

    # -- boxes lent to agents ------------------------------------------------------------------------------------

    async def heartbeat(self, request: Request) -> Response:
        """Handle a pipeline's heartbeat for an attempt whose box this environment owns."""
        rollout, boxes = await self._box_attempt(request)
        await boxes.renew(rollout)
        return JsonResponse({"heartbeat_s": boxes.heartbeat_s})

    async def harvest(self, request: Request) -> Response:
        """Take the box back from the agent, which has ended, and return its artifacts. The harvest goes on if the
        caller disconnects, and a repeated request gets its result."""
        rollout, boxes = await self._box_attempt(request)
        artifacts = await self._once("harvest", rollout, "", lambda: boxes.harvest(rollout))
        return JsonResponse({"artifacts": [artifact.model_dump() for artifact in artifacts]})

    async def _box_attempt(self, request: Request) -> tuple[RolloutIdentity, OwnedBoxes]:
        rollout = await self._read_rollout(request, Role.PIPELINE)
        self._check_control(request, caller_of(request), rollout)
        await self.attempts.require_current(rollout)
        if (boxes := self._server.owned_boxes()) is None:
            raise ContractError("this environment makes no boxes for agents")
        return rollout, boxes

    # -- verify --------------------------------------------------------------------------------------------------

    async def verify(self, request: Request) -> Response:
        call = await self._resolve(request, Role.PIPELINE, Role.OPERATOR, Role.AGENT)
        envelope, caller = call.envelope, call.caller
        if envelope is None:
            if caller is not None:
                raise InvalidBodyError(f"/verify needs '{SESSION_KEY}.rollout': which attempt is to be judged")
            return JsonResponse(await self._grader.nemo_verify(request, call.row))
        rollout, response = envelope.rollout, call.row.pop(RESPONSE_KEY, None)
        if not isinstance(response, dict):
            raise InvalidBodyError("/verify needs 'response': the Responses object of this attempt")
        if caller is not None and (caller.role is Role.OPERATOR) is not envelope.reverify:
            raise RoleError(
                f"'{SESSION_KEY}.reverify' is reserved for operators, and an operator's request must set it",
                route="/verify",
            )
        self._check_control(request, caller, rollout)
        if envelope.reverify:
            reply = await self._reverify(request, call, response, envelope)
        else:
            reply = await self._first_verdict(request, call, response, envelope)
        if caller is not None and caller.role is Role.AGENT and call.access is not RowAccess.FULL:
            public_reply = {**self._server.public_row(call.row), RESPONSE_KEY: response, **public_verdict(reply)}
            return JsonResponse(public_reply)
        if call.access is RowAccess.FULL and envelope.row_ref is not None:
            reply = {**reply, "row_access": RowAccess.FULL.value}
        return JsonResponse({**dataset_fields(call.row), RESPONSE_KEY: response, **reply})

    async def _first_verdict(
        self, request: Request, call: _Call, response: dict[str, Any], envelope: SessionEnvelope
    ) -> Mapping[str, Any]:
        rollout, digest = envelope.rollout, work_digest(response, envelope.artifacts)
        closes = envelope.close and self._closes

        async def judge() -> StoredVerdict:
            reply = await self._grader.grade(request, call.row, response, envelope.artifacts, rollout)
            return await self.attempts.keep_verdict(
                rollout, StoredVerdict(digest, bool(reply["valid"]), reply), closes=closes
            )

        stored = await self.attempts.admit_verdict(
            rollout, row_digest(call.seeded_row), digest, needs_session=self._needs_session
        )
        if stored is None:
            stored = await self._once("verify", rollout, digest, judge)
        elif closes:
            await self.attempts.close(rollout)
        return stored.reply

    def _needs_session(self) -> bool:
        """Whether a verdict may depend on what seeds and tools left in this process's memory."""
        mode = self._server.reverify_mode()
        if mode != ReverifyMode.UNKNOWN:
            return mode == ReverifyMode.UNSUPPORTED
        return self._has_own_routes() or any(map(self._server.overrides, ("seed_session", "open_session")))

    def _has_own_routes(self) -> bool:
        return any(
            isinstance(route, Route) and "POST" in (route.methods or ()) and route.path not in {*BASE_ROUTES, MCP_PATH}
            for app in self._apps
            for route in app.routes
        )

    async def _reverify(
        self, request: Request, call: _Call, response: dict[str, Any], envelope: SessionEnvelope
    ) -> Mapping[str, Any]:
        """Grade stored work once more, for an operator; the first verdict is not changed."""
        await self.attempts.require_row(envelope.rollout, row_digest(call.seeded_row))
        if self._server.reverify_mode().value == "unsupported":
            raise ContractError(
                f"environment '{self._server.config.name}' cannot verify again: its reward needs state of the live"
                " session"
            )
        reply = await self._grader.grade(request, call.row, response, envelope.artifacts, envelope.rollout)
        return {**reply, "reverified": True}

    # -- the rest ------------------------------------------------------------------------------------------------

    async def close(self, request: Request) -> Response:
        caller = require_role(request, Role.PIPELINE, Role.AGENT)
        body = await parse_json_object(request)
        if caller is not None and caller.role is Role.AGENT:
            # An attempt of an agent's own `/run` is closed by nobody else.
            if not isinstance(ref := body.get("row_ref"), str):
                raise RoleError("/close: an agent needs the row reference of its attempt", route="/close")
            rollout = validated(RolloutIdentity, body.get("rollout"), "'rollout'")
            await self._stored_row(ref, rollout)
        else:
            rollout = validated(RolloutIdentity, body.get("rollout"), "'rollout'")
            self._check_control(request, caller, rollout)
        closed = await self.attempts.close(rollout)
        if closed:
            await self._close_hook(rollout)
        return JsonResponse({"closed": True, "already_closed": not closed})

    async def _close_hook(self, rollout: RolloutIdentity) -> None:
        attempt = (f"{rollout.run_id}/{rollout.rollout_id}", rollout.attempt)
        for key, task in self._running.items():
            if key[2:] == attempt and task is not asyncio.current_task():
                task.cancel()  # nobody waits for its result, and a hook that hangs would keep its boxes for ever
        if self._steps is not None:
            self._steps.forget(rollout)
        if (boxes := self._server.owned_boxes()) is not None:
            try:
                await boxes.release(rollout)
            except SandboxError as error:  # its lease ends it
                log.warning("owned_box_not_released", rollout_id=rollout.rollout_id, error=str(error))
        await self._server.close_session(rollout)

    async def add_row(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        body = await parse_json_object(request)
        row, access = body.get("row"), body.get("access", RowAccess.PUBLIC)
        if not isinstance(row, dict):
            raise RowError("/rows needs 'row': a dataset row as a JSON object")
        if access not in (RowAccess.PUBLIC, RowAccess.FULL):
            raise InvalidBodyError(f"/rows: 'access' is 'public' or 'full', not {access!r}")
        rollout = validated(RolloutIdentity, body.get("rollout"), "'rollout'")
        await self.attempts.require_current(rollout)
        ref = await self.rows.put(StoredRow(row, rollout, RowAccess(access)))
        return JsonResponse({"row_ref": ref, "public_row": self._server.public_row(row)})

    async def row_prompts(self, request: Request) -> Response:
        """Report which of these rows give their agents no prompt: ``{"without": {"<position>": reason}}``."""
        require_role(request, Role.PIPELINE, Role.OPERATOR)
        rows = (await parse_json_object(request)).get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidBodyError("/row_prompts needs 'rows': a list of dataset rows")
        without = {}
        for position, row in enumerate(rows):
            try:
                params = self._server.public_row(row).get(PARAMS_KEY)
            except NemoGymError as error:
                without[str(position)] = error.message
                continue
            if not has_prompt(params):
                without[str(position)] = NO_PROMPT
        return JsonResponse({"without": without})

    async def verdict(self, request: Request) -> Response:
        """Return the stored verdict of an attempt whose agent had it verified itself."""
        rollout = await self._read_rollout(request, Role.PIPELINE, Role.OPERATOR)
        stored = await self.attempts.verdict_of(rollout)
        if stored is None and self._steps is not None and (episode := self._steps.episode_of(rollout)) is not None:
            return JsonResponse(reply_fields(episode.as_fields()))
        if stored is None:
            raise ContractError(f"{rollout} has no verdict", code_hint="no_verdict")
        return JsonResponse(dict(stored.reply))

    async def aggregate_metrics(self, request: Request) -> Response:
        require_role(request, Role.PIPELINE, Role.OPERATOR, Role.AGENT)
        responses = (await parse_json_object(request)).get("verify_responses")
        if not isinstance(responses, list):
            raise InvalidBodyError("/aggregate_metrics needs 'verify_responses': a list of result rows")
        body = AggregateMetricsRequest.model_construct(verify_responses=responses)
        return JsonResponse(plain(await self._server.aggregate_metrics(body)))

    async def reverify_mode(self, request: Request) -> Response:
        return JsonResponse(self._server.reverify_mode().value)

    async def _read_rollout(self, request: Request, *roles: Role) -> RolloutIdentity:
        require_role(request, *roles)
        return validated(RolloutIdentity, (await parse_json_object(request)).get("rollout"), "'rollout'")

    async def finish(self) -> None:
        """Cancel running work and close the stores, at shutdown."""
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._mcp is not None:
            await self._mcp.aclose()
        await self.attempts.aclose()


def attempt_of(request: Request) -> AttemptKey:
    """The attempt in whose session a tool is called. Raises `ContractError` if the session belongs to no attempt."""
    if not (attempt := request.session.get(ATTEMPT_SESSION_KEY)):
        raise ContractError(f"{request.url.path} needs the session of an attempt: the cookies of its seed")
    return AttemptKey(*attempt)
