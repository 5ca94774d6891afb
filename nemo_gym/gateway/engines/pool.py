"""The engines of one gateway: their connections and probes, and adding and removing engines while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, Literal
from urllib.parse import urlsplit

import orjson
import structlog

from nemo_gym._util.files import write_private
from nemo_gym.contract.errors import ConfigError, ModelError
from nemo_gym.gateway.engines import EngineConfig, EngineConnections, HttpEngine, OpenAIEngine, TokenEngine
from nemo_gym.gateway.engines.calls import EngineCalls, RetryConfig, TokenCalls
from nemo_gym.gateway.engines.router import E, HealthState, Replica, Router, RoutingConfig
from nemo_gym.gateway.engines.types import (
    EngineCheck,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
    TokenizerProbe,
)

# Probes engines that are out of service, and those without an answered call for a while.


class Prober(Generic[E]):
    """Sends one probe per interval to each engine that is silent, or out of service and so gets no other request."""

    def __init__(self, router: Router[E]) -> None:
        self._router = router
        self._being_probed: set[Replica[E]] = set()
        self.first_round_done = False
        """Whether the first probe of every initial engine has succeeded or failed."""

    async def run(self) -> None:
        """Probe until cancelled. A slow engine does not delay the others' next probe."""
        async with asyncio.TaskGroup() as group:
            self._router.ask_now = lambda replica: self._probe_now(group, replica)
            group.create_task(self._first_round(self._probe_due(group)))
            while True:
                await asyncio.sleep(self._router.config.probe_interval_s)
                self._probe_due(group)

    async def round(self) -> None:
        """Probe once every engine that is due, and wait for all probes."""
        async with asyncio.TaskGroup() as group:
            self._probe_due(group)

    async def _first_round(self, probes: list[asyncio.Task[None]]) -> None:
        if probes:
            await asyncio.wait(probes)
        self.first_round_done = True

    def _probe_due(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        probes = []
        for replica in self._router.replicas:
            silent = not replica.heard_from
            replica.heard_from = False
            replica.silent_checks = replica.silent_checks + bool(replica.in_flight) if silent else 0
            if replica.health.rests:
                replica.health.rests -= 1
            elif replica not in self._being_probed and (silent or replica.health.state is not HealthState.UP):
                probes.append(group.create_task(self._probe(replica)))
        return probes

    def _probe_now(self, group: asyncio.TaskGroup, replica: Replica[E]) -> None:
        if replica not in self._being_probed:
            self._being_probed.add(replica)
            replica.heard_from = False  # from now on
            group.create_task(self._probe(replica))

    async def _probe(self, replica: Replica[E]) -> None:
        before = replica.health.state
        self._being_probed.add(replica)
        try:
            await replica.engine.probe()
            hangs = self._is_silent(replica) and not await self._speaks(replica)
        except EngineError as error:
            if error.fatal or not replica.heard_from:  # else calls were answered meanwhile, which proves more
                self._router.probe_failed(replica, error)
        except Exception as error:
            log.exception("unexpected error in an engine probe", engine=replica.name)
            failure = EngineFailedError(f"probing engine '{replica.name}' failed: {type(error).__name__}")
            self._router.probe_failed(replica, failure)
        else:
            if hangs:
                self._router.fell_silent(replica)
            else:
                self._router.probe_succeeded(replica)
        finally:
            self._being_probed.discard(replica)
        if replica.health.state is not before:
            log.info(
                "engine changed its state",
                engine=replica.name,
                state=replica.health.state,
                error=replica.health.last_error,
            )

    def _is_silent(self, replica: Replica[E]) -> bool:
        config = self._router.config
        return not replica.heard_from and replica.silent_checks * config.probe_interval_s >= config.silence_s

    async def _speaks(self, replica: Replica[E]) -> bool:
        """Ask for one token, and return whether the engine says anything to anybody meanwhile. Raises `EngineError`
        for a broken connection."""
        try:
            async with asyncio.timeout(self._router.config.silence_s):
                await replica.engine.sample_one()
        except (TimeoutError, EngineTimeoutError):
            return not self._is_silent(replica)
        except (EngineLostError, EngineUnreachableError):
            raise
        except EngineError:
            pass  # it speaks; whether it serves is for its calls to find out
        replica.heard_from = True
        return True


EngineKind = Literal["token", "text"]
log = structlog.get_logger(__name__)


class EnginePool:
    """The engines of one gateway. ``async with pool:`` opens the connections and starts the probes.

    All engines of a pool are of one kind: they take token ids (``vllm``, ``sglang``) or text (``openai``). An engine
    that is added at run time is lost with the process: after a restart there are only the configured engines, and the
    trainer, which started the others and knows their addresses, adds them again.
    """

    def __init__(
        self,
        configs: Iterable[EngineConfig] = (),
        *,
        kind: EngineKind | None = None,
        routing: RoutingConfig | None = None,
        retries: RetryConfig | None = None,
    ) -> None:
        """``kind`` is for a pool without configured engines; otherwise it follows from them. Raises `ConfigError` for
        engines of both kinds, for duplicate names, and if the kind is unknown."""
        self._configs = [*configs]
        self.kind: EngineKind = _kind_of(self._configs, kind)
        _refuse_duplicates(self._configs)
        self.router: Router[Any] = Router(routing)
        self._calls: EngineCalls[Any] = EngineCalls(self.router, retries)
        self._token_calls: TokenCalls[Any] = TokenCalls(self._calls)
        self._facts: dict[str, dict[str, Any]] = {}
        self._versions_file: Path | None = None
        self._versions: dict[str, list[str | None]] = {}
        """By engine: the configured weights version, the one that was set, and what the server reported until then."""
        self._http: EngineConnections | None = None
        self._prober = Prober(self.router)
        self._probing: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, versions_file: Path | None = None) -> None:
        """Open the pool for calls, with the configured engines. Does not wait for them: see `ready`.
        ``versions_file`` keeps the weights versions that are set, for the configured engines of the next process."""
        if self._http is not None:
            return
        self._http = EngineConnections()  # without a limit: the router limits the calls
        for config in self._configs:
            self._put(config)
        self._versions_file = versions_file
        self._restore_versions()
        self._probing = asyncio.create_task(self._prober.run(), name="engine probes")

    async def aclose(self) -> None:
        """End the probes and close every connection; running calls fail as lost."""
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
            self._probing = None
        if self._http is not None:
            await self._http.aclose()

    async def __aenter__(self) -> EnginePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- calls ---------------------------------------------------------------------------------------------------

    @property
    def token_calls(self) -> TokenCalls[TokenEngine]:
        """Calls with token ids in and out, each on an engine that the router chooses."""
        if self.kind != "token":
            raise ConfigError("the engines of this gateway take text, not token ids")
        return self._token_calls

    @property
    def text_calls(self) -> EngineCalls[OpenAIEngine]:
        """Calls with OpenAI bodies in and out, each on an engine that the router chooses."""
        if self.kind != "text":
            raise ConfigError("the engines of this gateway take token ids, not text")
        return self._calls

    def forget(self, session_id: str) -> None:
        """Drop the data of a session, which has ended."""
        self.router.end(session_id)
        self._calls.forget(session_id)

    # -- membership ----------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [*self._facts]

    def __contains__(self, name: object) -> bool:
        return name in self._facts

    def add(self, config: EngineConfig) -> dict[str, Any]:
        """Put an engine into service at once, without waiting for a probe, and return its status. Raises `ConfigError`
        for a name in use and for an engine of the other kind."""
        _kind_of([config], self.kind)
        self._put(config)
        # The prober would leave an engine alone that answers calls, and its context would stay unknown.
        self.router.ask_now(self.router.replica(config.engine_name))
        return self.engine_status(config.engine_name)

    async def remove(self, name: str, drain_timeout_s: float | None = None) -> None:
        """Remove an engine. With ``drain_timeout_s`` its calls have so many seconds to finish. Calls that still run
        are broken off: token answers continue on another engine after the tokens they have, text calls start again
        there. Raises `ConfigError` for an unknown name."""
        replica = self.router.replica(name)
        if drain_timeout_s is not None:
            await self.router.drain(name, timeout_s=drain_timeout_s)
        if not replica.removed:  # by another caller meanwhile
            self.router.remove(name)
            del self._facts[name]
            log.info("engine removed", engine=name)

    def set_weights_version(self, version: str, names: Sequence[str] | None = None) -> None:
        """Set the version of the weights that engines sample with from now on, for all engines or for ``names``.
        Raises `ConfigError` for an unknown name, and `ModelError` if the version cannot be kept for a restart, and
        then changes nothing."""
        replicas = self.router.replicas if names is None else [self.router.replica(name) for name in names]
        configured = {config.engine_name: config.weights_version for config in self._configs}
        versions = {
            **self._versions,
            **{
                replica.name: [configured[replica.name], version, replica.engine.reported_version]
                for replica in replicas
                if replica.name in configured
            },
        }
        if self._versions_file is not None:
            try:
                write_private(self._versions_file, orjson.dumps(versions).decode())
            except OSError as error:
                raise ModelError(
                    f"the weights version could not be written to '{self._versions_file}' ({error}); set it again",
                    retryable=True,
                ) from error
        self._versions = versions
        for replica in replicas:
            replica.engine.weights_version = version

    # -- what operators see --------------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int | None:
        """The smallest limit of prompt and answer together that an engine reported; ``None`` if none did."""
        limits = [replica.engine.context_tokens for replica in self.router.replicas if replica.engine.context_tokens]
        return min(limits, default=None)

    async def check(self, probe: TokenizerProbe | None = None) -> list[EngineCheck]:
        """Check every engine once: API key, model name, context, and whether its tokenizer is the policy's."""
        return list(await asyncio.gather(*(_checked(replica.engine, probe) for replica in self.router.replicas)))

    def status(self) -> dict[str, Any]:
        """Return plain data: ``kind``, ``engines``, ``waiting`` (calls without an engine), ``retries_saved``."""
        return {
            "kind": self.kind,
            "engines": [{**self._facts[status.name], **asdict(status)} for status in self.router.status()],
            "waiting": self.router.waiting,
            "retries_saved": round(self._calls.budget.saved, 2),
        }

    def engine_status(self, name: str) -> dict[str, Any]:
        """Return one engine's part of `status`."""
        self.router.replica(name)
        return next(engine for engine in self.status()["engines"] if engine["name"] == name)

    def ready(self) -> dict[str, Any] | None:
        """Return ``None`` if a call would find an engine; otherwise plain data with the reason why not."""
        if self._http is None or not self._prober.first_round_done:
            return {"reason": "the engines have not been probed yet"}
        states = {status.name: status for status in self.router.status()}
        if any(self.router.in_service(name) for name in states):
            return None
        if not states:
            return {"reason": "there is no engine; list some under 'engines', or POST /engines"}
        return {
            "reason": "no engine is in service",
            "engines": {
                name: status.last_error or ("draining" if status.draining else str(status.state))
                for name, status in states.items()
            },
        }

    def _restore_versions(self) -> None:
        try:
            versions = orjson.loads(self._versions_file.read_bytes()) if self._versions_file is not None else {}
        except FileNotFoundError:
            return
        except (OSError, orjson.JSONDecodeError) as error:
            log.warning("the engines' weights versions are lost; set them again", error=str(error))
            return
        for config in self._configs:
            configured, version, reported = versions.get(config.engine_name, (None, None, None))
            if version is not None and configured == config.weights_version:  # else the configuration is newer
                engine = self.router.replica(config.engine_name).engine
                engine.weights_version, engine.reported_version = version, reported
                self._versions[config.engine_name] = [configured, version, reported]

    def _put(self, config: EngineConfig) -> None:
        if self._http is None:
            raise RuntimeError("the pool is not started")
        engine: HttpEngine = config.make(self._http)
        self.router.add(engine, weight=config.weight, max_in_flight=config.max_in_flight)
        self._facts[engine.name] = {"type": config.type, "base_url": config.base_url, "model": config.model}
        log.info("engine added", engine=engine.name, type=config.type, at=urlsplit(config.base_url).netloc)


async def _checked(engine: HttpEngine, probe: TokenizerProbe | None) -> EngineCheck:
    check = await engine.check()
    if probe is None or check.problem is not None or check.unreachable is not None:
        return check
    engine_ids = await engine.tokenize(probe.text)
    if engine_ids is None or engine_ids == probe.token_ids:
        return check
    problem = (
        f"engine '{engine.name}' at {engine.endpoint.base_url} tokenizes a probe text differently from the policy's"
        f" tokenizer ({len(engine_ids)} and {len(probe.token_ids)} of them): it serves another model; set policy_path"
        " (the gateway's 'policy.path') to the directory of the model that it serves"
    )
    return replace(check, problem=problem)


def _kind_of(configs: Sequence[EngineConfig], required: EngineKind | None) -> EngineKind:
    """Return the one kind of all engines."""
    kinds: list[EngineKind] = ["text" if config.type == "openai" else "token" for config in configs]
    distinct = {*kinds, *([required] if required is not None else [])}
    if len(distinct) == 1:
        return distinct.pop()
    if not distinct:
        raise ConfigError("engines: there are none, so their kind must be given", key="engines")
    listing = ", ".join(
        f"'{config.engine_name}' ({config.type}) takes {_TAKES[kind]}"
        for config, kind in zip(configs, kinds, strict=True)
    )
    hint = f"; this gateway's engines take {_TAKES[required]}" if required is not None else "; use one kind"
    raise ConfigError(f"engines: {listing}{hint}", key="engines")


_TAKES: dict[EngineKind, str] = {"token": "token ids", "text": "text"}


def _refuse_duplicates(configs: Sequence[EngineConfig]) -> None:
    twice = [name for name, count in Counter(config.engine_name for config in configs).items() if count > 1]
    if twice:
        raise ConfigError(
            f"engines: {Counter(c.engine_name for c in configs)[twice[0]]} engines have the name '{twice[0]}';"
            " give each its own 'name' (the default is host and port)",
            key="engines",
        )
