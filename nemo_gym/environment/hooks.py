"""The hooks of an environment: what a plugin overrides and the routes call, what helps to write them, and the tools
among an environment's routes: ``POST /<tool>`` whose body is one pydantic model or dict, or empty."""

from __future__ import annotations

import asyncio
import inspect
import posixpath
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel, PrivateAttr
from starlette.requests import Request

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest, BaseRunServerInstanceConfig, CommandPath
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError, VerifierError
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor
from nemo_gym.contract.verdict import (
    DECIDING_FIELDS,
    PARAMS_KEY,
    RESPONSE_KEY,
    Verdict,
    public_row,
    verdict_of_reply,
    without,
)
from nemo_gym.http.plugin_call import PluginCall, plain
from nemo_gym.http.server import BaseServer, SimpleServer
from nemo_gym.reward_profile import AggregateMetricsMixin, compute_aggregate_metrics

if TYPE_CHECKING:
    from nemo_gym.environment.owned_boxes import OwnedBoxes
    from nemo_gym.http.environment_bodies import (
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        ResourcesCloseSessionRequest,
        ResourcesCloseSessionResponse,
        ResourcesSeedSessionRequest,
        ResourcesSeedSessionResponse,
    )
    from nemo_gym.sandbox.base import SandboxProvider
    from nemo_gym.sandbox.facade import AsyncSandbox, SandboxOwner

BASE_ROUTES = frozenset(
    {
        "/seed_session",
        "/heartbeat",
        "/harvest",
        "/verify",
        "/close",
        "/close_session",
        "/rows",
        "/row_prompts",
        "/verdict",
        "/aggregate_metrics",
        "/reverify_mode",
    }
)
MCP_PATH = "/mcp"
ALLOWED_TOOLS_SESSION_KEY = "_ng_mcp_tools"
"""The session key for the names of the tools that may be called over MCP; absent if all may."""
_COLLECTED = "collected"
"""The name of the harvest item of `EnvironmentHooks.boxed_session`."""
GRADING_LEASE_S = 120.0
"""How long a box of `EnvironmentHooks.grading_box` outlives a killed server."""
_TOOL_PATH = re.compile(r"/[A-Za-z][A-Za-z0-9_-]{0,63}")
_CATCH_ALL_PATH = re.compile(r"/\{\w+(:path)?\}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


class ReverifyMode(StrEnum):
    """Whether stored work can be graded again."""

    STATELESS = "stateless"
    """Grading needs only the row, the response and the artifacts."""
    UNSUPPORTED = "unsupported"
    """The reward needs state of the live session."""
    UNKNOWN = "unknown"


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    """Configuration of an environment."""

    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN
    """A property of the implementation, declared here because NeMo Gym's plugins set it on their configuration."""

    expose_tools_over_mcp: bool = False
    """Serve the tools (typed ``POST /<tool>`` routes) at ``/mcp`` as well, even if the class's ``tool_access`` does
    not name ``mcp``. Needs the extra ``mcp``."""
    state_dir: CommandPath | None = None
    """The directory that keeps verdicts across restarts; default: the run's directory, else a temporary file."""


class BaseResourcesServer(BaseServer):
    config: BaseResourcesServerConfig


def normalize_tool_name(name: str, server_name: str | None = None) -> str:
    """Strip the prefix of an MCP server (by default of any) from a tool's name: ``mcp__<server>__<tool>``."""
    if server_name is not None:
        return name.removeprefix(f"mcp__{server_name}__")
    prefix, _, tool = name.removeprefix("mcp__").partition("__")
    return tool if prefix and tool and name.startswith("mcp__") else name


async def verify_reply(
    server: EnvironmentHooks, hook: PluginCall, request: Request, row: dict[str, Any], response: dict[str, Any]
) -> dict[str, Any]:
    """Call a plugin's ``verify``, and return its reply without the fields that only repeat the row.

    It gets a copy of the response with the environment's own names of its tools.

    A failure that the row tells of is not passed on, because a reply that repeats it would look like one that declares
    it. Only a plugin whose request model declares such a field, as part of its dataset, gets it.
    """
    body = without(row, DECIDING_FIELDS - hook.declared)
    judged = {**body, RESPONSE_KEY: server.with_own_tool_names(response)}
    reply = plain(await hook(request, judged), exclude={PARAMS_KEY, RESPONSE_KEY}, hook="verify")
    # What it repeats of the row is no part of its verdict; an equal reward may be an earlier run's.
    return without(reply, {key for key, value in reply.items() if key in body and body[key] == value} - {"reward"})


class EnvironmentHooks(BaseResourcesServer, AggregateMetricsMixin, SimpleServer):
    """The hooks of `nemo_gym.environment.server.SimpleResourcesServer`, with their defaults."""

    config: BaseResourcesServerConfig

    ROLE: ClassVar[Role] = Role.ENVIRONMENT
    REVERIFY_MODE: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN
    public_metadata_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of ``responses_create_params.metadata`` that an agent may see."""
    _box_owner: SandboxOwner | None = PrivateAttr(default=None)

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether a subclass implements ``hook`` itself."""
        return getattr(cls, hook) is not getattr(EnvironmentHooks, hook)

    # -- hooks of new environments -------------------------------------------------------------------------------

    def task_id(self, row: dict[str, Any]) -> str:
        """The task's public id for a caller that names no attempt; default: the row's ``task_id``, ``instance_id`` or
        ``id``. A run names its tasks itself: `nemo_gym.contract.verdict.task_id_of`."""
        for key in ("task_id", "instance_id", "id"):
            if isinstance(row.get(key), str | int):
                return str(row[key])
        return ""

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The part of a row that an agent may see: ``responses_create_params`` without ``metadata`` (except for
        allow-listed keys) and the run's numbering."""
        return public_row(row, self.public_metadata_keys)

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        """Return what the agent of this attempt may know. Default: no world (topology ``none``).

        Called once per attempt, however often it is seeded. Raise `RowError` for a row that is not a task of this
        environment, and another `NemoGymError` for other failures; a failed seed may be requested again.
        """
        return SessionDescriptor(environment=self.config.name, task_id=rollout.task_id, rollout=rollout)

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        """Judge the work of one attempt, without state from its seed. Default: the verdict of ``verify``.

        Raised errors become invalid verdicts: `SandboxError` and its like by their kind, anything else as a failure of
        the verifier. A failure that the work itself can cause must be graded, not raised.
        """
        request = Request({"type": "http", "session": {}, "headers": []})
        return verdict_of_reply(await verify_reply(self, PluginCall(self.verify), request, row, response))

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The task's known solution for the validation mode, or ``None``."""
        return None

    def owned_boxes(self) -> OwnedBoxes | None:
        """The boxes that this environment creates for its attempts and lends to their agents. Default ``None``: agents
        create the boxes that descriptors specify."""
        return None

    async def close_session(self, rollout: RolloutIdentity) -> None:
        """Release what belongs to an attempt. Called once, when the attempt is closed or fenced. If no class overrides
        this, a valid verdict ends the attempt."""

    # -- what hooks may use --------------------------------------------------------------------------------------

    def boxed_session(
        self, rollout: RolloutIdentity, *, collect: Sequence[str] = (), workdir: str = "/home/task", **spec: Any
    ) -> SessionDescriptor:
        """A descriptor for work in a box, for `open_session`. The class's ``topologies`` are supported, the first is
        the default.

        Args:
            rollout: the attempt.
            collect: files to harvest for `collected`; relative paths are below ``workdir``.
            workdir: the agent's working directory; relative paths of ``files`` (path → text) are below it too.
            spec: further fields of `SandboxSpecModel`: ``image``, ``files``, ``env``, ``resources``, …
        """
        from nemo_gym.contract.session import FilesHarvest, Placement, SandboxClause, SandboxSpecModel, Topology

        supported = tuple(getattr(type(self), "topologies", None) or (Topology.AGENT_IN_ENV,))
        files = {posixpath.join(workdir, path): text for path, text in spec.pop("files", {}).items()}
        paths = tuple(posixpath.join(workdir, path) for path in collect)
        return SessionDescriptor(
            environment=self.config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=supported[0], supported=supported),
            sandbox=SandboxClause(spec=SandboxSpecModel(workdir=workdir, files=files, **spec)),
            harvest=(FilesHarvest(name=_COLLECTED, paths=paths),) if paths else (),
        )

    def collected(self, artifacts: Sequence[Artifact], path: str, *, workdir: str = "/home/task") -> str | None:
        """The text of a file that `boxed_session` collected; ``None`` if it does not exist. Untrusted."""
        from nemo_gym.sandbox.harvest import harvested_file

        content = harvested_file(artifacts, _COLLECTED, posixpath.join(workdir, path))
        return None if content is None else content.decode("utf-8", "replace")

    def box_provider(self) -> SandboxProvider:
        """The provider that the configuration's ``sandbox_provider`` names, closed with this server.

        Raises:
            ConfigError: the configuration has no usable ``sandbox_provider``.
        """
        if self._box_owner is None:
            from nemo_gym.sandbox.facade import SandboxOwner

            configured = getattr(self.config, "sandbox_provider", None)
            if configured is None:
                raise ConfigError(
                    f"environment '{self.config.name}' makes boxes, but its configuration class has no"
                    " 'sandbox_provider'; add `sandbox_provider: str | dict[str, Any]`",
                    key="sandbox_provider",
                )
            self._box_owner = SandboxOwner(configured, self.server_client)
        return self._box_owner.provider()

    @asynccontextmanager
    async def grading_box(self, rollout: RolloutIdentity, **spec: Any) -> AsyncIterator[AsyncSandbox]:
        """A fresh box for `grade`, destroyed when the block ends. If this server is killed, the box's lease expires.

        Args:
            rollout: the attempt that is graded; the box is labelled with it.
            spec: fields of `SandboxSpec`. The network is ``none`` by default.

        Raises:
            ConfigError: see `box_provider`.
            SandboxError: the box could not be created. Raised out of `grade`, it makes the verdict invalid.
        """
        from nemo_gym.contract.sandbox import SandboxRole, SandboxSpec
        from nemo_gym.sandbox.base import box_labels
        from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed

        labels = box_labels(
            run=rollout.run_id, rollout=rollout.rollout_id, attempt=rollout.attempt, role=SandboxRole.EVAL
        )
        merged = SandboxSpec(**{"ttl_s": GRADING_LEASE_S, **spec, "metadata": {**spec.get("metadata", {}), **labels}})
        provider = self.box_provider()
        async with AsyncSandbox(provider, merged) as box:
            async with keep_renewed(provider, box.handle, merged.ttl_s or GRADING_LEASE_S):
                yield box

    # -- hooks of NeMo Gym plugins -------------------------------------------------------------------------------

    async def seed_session(
        self, body: ResourcesSeedSessionRequest | BaseSeedSessionRequest
    ) -> ResourcesSeedSessionResponse | BaseSeedSessionResponse:
        """Prepare a session; an override may also take the ``Request``. The reply goes to the agent."""
        from nemo_gym.http.environment_bodies import (
            BaseSeedSessionResponse,
            ResourcesSeedSessionRequest,
            ResourcesSeedSessionResponse,
        )

        if isinstance(body, ResourcesSeedSessionRequest):
            return ResourcesSeedSessionResponse(resources_session_id=body.resources_session_id)
        return BaseSeedSessionResponse()

    async def close_resources_session(self, body: ResourcesCloseSessionRequest) -> ResourcesCloseSessionResponse:
        """Release what a `ResourcesSeedSessionRequest` opened. Default: nothing is kept."""
        from nemo_gym.http.environment_bodies import ResourcesCloseSessionResponse

        return ResourcesCloseSessionResponse(resources_session_id=body.resources_session_id)

    async def verify(self, body: Any) -> Any:
        """Judge a response: a `BaseVerifyRequest`, to a `BaseVerifyResponse`. An override may also take the
        ``Request``."""
        # `PluginCall` resolves the annotations of the default too, and these models are imported only by plugins.
        raise VerifierError(f"{type(self).__name__} implements neither grade() nor verify()")

    def mcp_tools(self, harvested: list[RouteTool], catchall: CatchAll | None) -> list[RouteTool] | None:
        """The tools to serve over MCP. Default: ``harvested``, the tools of the typed routes.

        An override may omit some, add tools of a catch-all route (``catchall.tool(name, input_schema, description)``),
        or return ``None`` to serve none. ``catchall`` is ``None`` unless there is exactly one route ``POST /{name}``.
        """
        return harvested

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None:
        """The names of the tools that this row's attempt may call over MCP. Default ``None``: all."""
        return None

    def reverify_mode(self) -> ReverifyMode:
        """The mode declared by the class or by its configuration class; without one, an environment with ``grade`` is
        stateless."""
        for declared in (self.REVERIFY_MODE, self.config.REVERIFY_MODE):
            if (mode := ReverifyMode(declared)) is not ReverifyMode.UNKNOWN:  # a plugin may declare it as a string
                return mode
        return ReverifyMode.STATELESS if self.overrides("grade") else ReverifyMode.UNKNOWN

    async def get_reverify_mode(self) -> ReverifyMode:
        return self.reverify_mode()

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Metrics over all results; see `AggregateMetricsMixin` for what to override."""
        return await asyncio.to_thread(
            compute_aggregate_metrics,
            body.verify_responses,
            compute_metrics_fn=self.compute_metrics,
            compute_repeat_metrics_fn=self.compute_repeat_metrics,
            get_key_metrics_fn=self.get_key_metrics,
        )

    def normalize_tool_name(self, name: str) -> str:
        """Translate a harness's name for one of this environment's MCP tools to the environment's own."""
        return normalize_tool_name(name, self.config.name or type(self).__name__)

    def with_own_tool_names(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the response for ``verify``. Harnesses prefix the names of MCP tools, and expected calls in
        rows have the environment's own names."""
        output = response.get("output")
        if not self.exposes_mcp() or not isinstance(output, list):
            return response
        return {**response, "output": [self._with_own_tool_name(item) for item in output]}

    def _with_own_tool_name(self, item: Any) -> Any:
        is_call = isinstance(item, dict) and item.get("type") == "function_call" and isinstance(item.get("name"), str)
        return {**item, "name": self.normalize_tool_name(item["name"])} if is_call else item

    def exposes_mcp(self) -> bool:
        """Whether the tools are served over MCP, by the class's ``tool_access`` or by the configuration."""
        return self.config.expose_tools_over_mcp or "mcp" in (getattr(type(self), "tool_access", None) or ())


@dataclass(frozen=True, slots=True)
class RouteTool:
    """One tool as declared by its route."""

    name: str
    path: str
    description: str
    """The handler's docstring."""
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    """``None`` if the route declares no response model."""


@dataclass(frozen=True, slots=True)
class CatchAll:
    """A route that serves many tools by name (``POST /{tool}``) and so declares none of them."""

    route: APIRoute

    def tool(self, name: str, input_schema: dict[str, Any], description: str | None = None) -> RouteTool:
        """Declare the tool ``name`` of this route. Raises `ConfigError` for an invalid name."""
        if not _TOOL_PATH.fullmatch(f"/{name}"):
            raise ConfigError(
                f"'{name}' cannot be the name of a tool: a letter, then up to 63 letters, digits, '_' or '-'",
                key="mcp_tools",
            )
        return RouteTool(name, f"/{name}", description or "", dict(input_schema), None)


def catch_all_of(routes: Iterable[Any]) -> CatchAll | None:
    """The application's only catch-all route; ``None`` if it has none or several."""
    catch_alls = [
        route
        for route in routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and _CATCH_ALL_PATH.fullmatch(route.path)
    ]
    return CatchAll(catch_alls[0]) if len(catch_alls) == 1 else None


def tools_of(routes: Iterable[Any], *, strict: bool) -> dict[str, RouteTool]:
    """The tools among an application's routes, by name, in the order they were added. The suite's own routes, also
    those that a plugin replaced, and routes with path, query or header parameters or with several body parameters, are
    not tools.

    Raises:
        ConfigError: ``strict``, and a route with the path of a tool cannot be one.
    """
    tools: dict[str, RouteTool] = {}
    for route in routes:
        if not isinstance(route, APIRoute) or "POST" not in (route.methods or ()) or not route.include_in_schema:
            continue
        if not _TOOL_PATH.fullmatch(route.path) or route.path in BASE_ROUTES:
            continue
        if (tool := _tool(route)) is not None:
            tools.setdefault(tool.name, tool)
        elif strict:
            raise ConfigError(
                f"POST {route.path} ({route.name}) cannot be a tool: beside a Request, a tool takes one pydantic model"
                " or dict as its body. Give a route that is none include_in_schema=False",
                key="tool_access",
            )
    return tools


def _tool(route: APIRoute) -> RouteTool | None:
    dependant = route.dependant
    if dependant.path_params or dependant.query_params or dependant.header_params or len(dependant.body_params) > 1:
        return None
    schema = _NO_ARGUMENTS
    if dependant.body_params:
        model: Any = dependant.body_params[0].field_info.annotation
        if _is_model(model):
            schema = model.model_json_schema()
        elif (get_origin(model) or model) is dict:
            schema = _ANY_ARGUMENTS
        else:
            return None
    return RouteTool(
        name=route.path[1:],
        path=route.path,
        description=inspect.cleandoc(route.description or ""),
        input_schema=schema,
        output_schema=_output_schema(route.response_model),
    )


def _output_schema(response_model: Any) -> dict[str, Any] | None:
    return response_model.model_json_schema(mode="serialization") if _is_model(response_model) else None


def _is_model(annotation: Any) -> Any:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
