"""The servers of the suite's own handlers: a composition that starts with the first job that needs it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import structlog

from nemo_gym._util.secrets import public_environment
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.overrides import word_of
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError, InvalidBodyError, ModelError
from nemo_gym.gateway.engines.types import pinned_sampling
from nemo_gym.http.client import get_global_aiohttp_client
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.routing import agent_instances, checked_servers, servers_of
from nemo_gym.stack import nursery
from nemo_gym.stack.endpoints import StackEntry, find_stack
from nemo_gym.stack.stack import pipeline_client, running_stack
from nemo_gym.stack.supervisor import stop_nursery

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "max_tokens", "max_completion_tokens", "max_output_tokens"),
)
"""Sampling parameters that the gateway enforces in every model call of a job."""
PROVIDERS = ("hosted_vllm/", "openai/")
"""LiteLLM's provider prefixes of model names."""
MODELS_FOR_S = 10.0
"""How long a list of an LLM server's models is used: the server may be restarted with another model."""
ANSWER_TIMEOUT_S = 10.0
"""How long an LLM server may take to list its models."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LlmAccess:
    """The LLM server of a job, with its model, credential and sampling parameters."""

    address: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """The names of parameters that are ignored."""

    @property
    def v1_url(self) -> str:
        return self.address if urlsplit(self.address).path else f"{self.address}/v1"

    @property
    def engine(self) -> str:
        """The LLM server's engine name at the gateway."""
        identity = orjson.dumps([self.address, self.model, self.api_key])
        return f"{urlsplit(self.address).netloc}-{hashlib.sha256(identity).hexdigest()[:8]}"


@dataclass(slots=True)
class Running:
    """Servers that are ready."""

    peers: Peers
    servers: Servers
    engine_type: str | None
    """The type of the gateway's engines; ``None`` if the model server is not a gateway."""
    ended: asyncio.Future[Any] | None = None
    """Resolves when the servers fail; ``None`` for servers that were started elsewhere."""
    engines: set[str] = field(default_factory=set)

    async def engine_for(self, llm: LlmAccess) -> str | None:
        """Return the gateway's engine for an LLM server, registering the server with the gateway if necessary."""
        if self.engine_type is None:
            return None
        if llm.engine not in self.engines:
            body = {"type": self.engine_type, "name": llm.engine, "base_url": llm.v1_url, "model": llm.model}
            if llm.api_key:
                body["api_key"] = llm.api_key
            try:
                await self.peers.post(self.servers.model or "", "/engines", body)
            except PeerError as error:
                if error.problem.get("code") != "engine_name_taken":
                    raise
            self.engines.add(llm.engine)
        return llm.engine


class ComposedServers:
    """Starts and stops a composition's servers, in one event loop.

    Args:
        words: a composition, as for ``ng_run``. Its gateway gets the jobs' LLM servers as engines.
        run_dir: the directory of servers that already run; replaces ``words``.
    """

    def __init__(self, words: Sequence[str], run_dir: str | None = None) -> None:
        self._words, self._run_dir = tuple(words), run_dir
        self._changing = asyncio.Lock()
        self._startup: asyncio.Task[Running] | None = None
        self._closing = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._answering: dict[str, tuple[asyncio.Future[list[str]], float]] = {}
        """The latest request for the models of each LLM server, and when it was sent."""
        self._models_of: dict[str, list[str]] = {}

    async def running(self, llm: LlmAccess) -> Running:
        """Return the servers, starting them if they do not run or have failed. Raises the error of a failed start."""
        async with self._changing:
            if (why := self._restart_reason()) is not None:
                log.warning("servers failed, starting them again", error=why)
                await self._stop()
            if self._startup is None:
                # In its own task: the job that starts it may be cancelled while others wait for the same servers.
                self._startup = asyncio.create_task(self._start(llm) if self._run_dir is None else self._join())
            startup = self._startup
        return await asyncio.shield(startup)

    def _restart_reason(self) -> str | None:
        """Return why the servers must be started again, or ``None``."""
        startup = self._startup
        if startup is None or not startup.done():
            return None
        if startup.cancelled() or (error := startup.exception()) is not None:
            return "cancelled" if startup.cancelled() else str(error)
        ended = startup.result().ended
        return str(ended.result()) if ended is not None and ended.done() else None

    async def access(self, llm_config: Mapping[str, Any]) -> LlmAccess:
        """Return how to reach a job's LLM server. Raises `InvalidBodyError` for invalid parameters or if no model is
        named or listed, and `ModelError` if the LLM server does not answer."""
        address = str(llm_config["base_url"])
        sampling = {name: llm_config[name] for name in SAMPLING if llm_config.get(name) is not None}
        pinned_sampling({}, sampling, room_tokens=1)
        models = await self._models(address, llm_config.get("api_key"))
        model = llm_config.get("model") or next(iter(models), None)
        if not isinstance(model, str):
            raise InvalidBodyError(
                f"sampling_params: LLM server {address} lists no model; name one as 'model'", param="model"
            )
        for provider in PROVIDERS:
            model = model.removeprefix(provider)
        used = {*SAMPLING, "base_url", "model", "api_key"}
        unused = tuple(sorted(name for name in llm_config if name not in used))
        return LlmAccess(address, model, llm_config.get("api_key"), sampling, unused)

    async def aclose(self) -> None:
        async with self._changing:
            await self._stop()

    # Inside

    async def _models(self, address: str, api_key: str | None) -> list[str]:
        """Return the models that the LLM server lists. Jobs share a request for `MODELS_FOR_S`; a failed request is
        repeated. If a server that has listed its models does not answer, they are taken to be the same."""
        now = asyncio.get_running_loop().time()
        request, since = self._answering.get(address, (None, now))
        if request is None or (request.done() and now - since > MODELS_FOR_S):
            request = asyncio.ensure_future(_listed_models(address, api_key))
            self._answering[address] = (request, now)
        try:
            self._models_of[address] = await asyncio.shield(request)
        except ModelError:
            if self._answering.get(address, (None,))[0] is request:
                del self._answering[address]
            if address not in self._models_of:
                raise
        return self._models_of[address]

    async def _join(self) -> Running:
        return await self._checked(find_stack(self._run_dir), None)

    async def _start(self, llm: LlmAccess) -> Running:
        words = [*self._words, word_of("policy_base_url", llm.v1_url), word_of("policy_model_name", llm.model)]
        composition = await asyncio.to_thread(_composed, words)
        ready: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        self._closing.clear()
        self._serving = asyncio.create_task(self._serve(composition, ready), name="prorl servers")
        return await ready

    async def _serve(self, composition: Composition, ready: asyncio.Future[Running]) -> None:
        process = nursery.spawn(public_environment(os.environ))
        try:
            async with running_stack(composition, process, _say) as supervisor:
                running = await self._checked(supervisor.stack(), composition)
                running.ended = supervisor.failure
                log.info("servers are ready", run_dir=supervisor.run_dir, agent=running.servers.agent)
                if not ready.done():
                    ready.set_result(running)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
            ready.exception()  # mark it as retrieved, because the waiting job may have been cancelled
        finally:
            stop_nursery(process[0])

    async def _checked(self, stack: StackEntry, composition: Composition | None) -> Running:
        client = pipeline_client(stack)
        peers = Peers(client)
        agents = agent_instances(client.global_config_dict)
        chosen = stack.chosen.get("agent") or (agents[0] if len(agents) == 1 else None)
        if chosen is None:
            raise ConfigError(f"choose an agent with agent=; there are: {', '.join(agents) or 'none'}", key="agent")
        # Every job limits its turns, so check that the agent can enforce such a limit.
        run = RolloutRunConfig.parse({"input": "unused", "output": "unused.jsonl", "max_turns": 1})
        servers = await checked_servers(client, peers, chosen, run)
        return Running(peers, servers, await _engine_type(peers, servers, stack))

    async def _stop(self) -> None:
        startup, self._startup = self._startup, None
        serving, self._serving = self._serving, None
        if startup is not None:
            startup.cancel()
            await asyncio.wait({startup})
        if serving is not None:
            self._closing.set()
            with contextlib.suppress(Exception):  # the servers are stopped, whatever they raised
                await serving


async def _engine_type(peers: Peers, servers: Servers, stack: StackEntry) -> str | None:
    if servers.model is None:
        return None
    if stack.server(servers.model).implementation != "gateway":
        return None
    engines = (await peers.get(servers.model, "/engines")).json()["engines"]
    return str(engines[0]["type"]) if engines else "openai"


async def _listed_models(address: str, api_key: str | None) -> list[str]:
    url = f"{LlmAccess(address, '').v1_url}/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    failed = f"LLM server {address} does not answer"
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            async with get_global_aiohttp_client().get(url, headers=headers) as reply:
                if reply.status == 404:
                    return []
                if reply.status >= 400:
                    raise ModelError(f"{failed}: {url} says {reply.status}", retryable=reply.status >= 500)
                listed = orjson.loads(await reply.read())
        return [str(model["id"]) for model in listed["data"]]
    except TimeoutError:
        raise ModelError(f"{failed} within {ANSWER_TIMEOUT_S:g} s: {url}", retryable=True) from None
    except aiohttp.ClientError as error:
        raise ModelError(f"{failed}: {error}", retryable=True) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{failed} as an OpenAI-compatible server: {url} lists no models") from error


def _composed(words: Sequence[str]) -> Composition:
    composition = compose(words)
    check_everything(composition)
    if "agent" in composition.chosen:
        servers_of(composition.values, composition.chosen["agent"])
    return composition


def _say(text: str) -> None:
    log.info("servers", said=text)
