"""Integrates the framework into verl, as its ``agent_loop_manager_class``.

    actor_rollout_ref:
      rollout:
        agent:
          agent_loop_manager_class: nemo_gym.framework.verl.AgentFrameworkRolloutAdapter

The adapter, in the trainer's process, owns the gateways and the bridge to verl's inference servers. The framework
runs in a Ray actor on the same node and writes to TransferQueue, from which the trainer reads. The bridge serves
verl's ``LLMServerClient``, which takes and returns token ids and chooses among its servers by itself, as an engine of
type ``sglang``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import orjson
import structlog
from aiohttp import web

from nemo_gym._util.tasks import LoopThread
from nemo_gym.contract.errors import ConfigError, ServerError, VerifierError
from nemo_gym.framework.batch import CARRIED, PromptSample
from nemo_gym.framework.config import framework_block, plain
from nemo_gym.framework.framework import AgentFramework, AllSessionsFailedError, OpenAICompatibleAgentFramework
from nemo_gym.framework.gateways import GatewayPool
from nemo_gym.framework.launch import GatewaysConfig, OwnGateways
from nemo_gym.framework.runners import imported
from nemo_gym.framework.samples import RewardScorer
from nemo_gym.framework.transfer_queue import TrajectoryArchive, TransferQueueSink
from nemo_gym.gateway.tokens.trajectories import Trajectory
from nemo_gym.stack.endpoints import StackEntry
from nemo_gym.stack.stack import pipeline_client

_SCORER_COLUMNS = tuple(name for name in CARRIED if name != "uid")
log = structlog.get_logger(__name__)
START_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 256 << 20
_PASSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos")


def build_agent_framework(
    *,
    config: Any,
    gateways: GatewayPool,
    sink: Any = None,
    processor: Any = None,
    reward_loop_worker_handles: Sequence[Any] | None = None,
) -> AgentFramework:
    """Build the framework of a trainer's configuration, of class ``framework_class_fqn``, over running gateways."""
    block, _ = framework_block(config)
    kind: Any = OpenAICompatibleAgentFramework
    if block.framework_class_fqn is not None:
        kind = imported(block.framework_class_fqn, "framework_class_fqn")
    scorer = RewardLoopScorer(reward_loop_worker_handles) if reward_loop_worker_handles else None
    framework: AgentFramework = kind.from_config(
        config=config, gateways=gateways, sink=sink or TransferQueueSink(), processor=processor, scorer=scorer
    )
    return framework


class RewardLoopScorer(RewardScorer):
    """verl's reward workers: Ray actors with ``compute_score``."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    async def __call__(
        self, trajectory: Trajectory, sample: PromptSample, reward_info: Mapping[str, Any]
    ) -> tuple[float, Mapping[str, Any]]:
        """Score a trajectory. Fields that the runner posted override ``extra_info``. Raises `VerifierError`."""
        worker = random.choice(self._handles)
        result = await worker.compute_score.remote(_as_data_proto(trajectory, sample, reward_info))
        if not isinstance(result, Mapping) or "reward_score" not in result:
            raise VerifierError(f"the reward worker answered without 'reward_score' for uid {sample.uid!r}")
        return float(result["reward_score"]), result.get("reward_extra_info") or {}


def _as_data_proto(trajectory: Trajectory, sample: PromptSample, reward_info: Mapping[str, Any]) -> Any:
    """Return one trajectory in the form that verl's reward managers take."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.protocol import DataProto

    prompts = torch.tensor([list(trajectory.prompt_ids)], dtype=torch.long)
    responses = torch.tensor([list(trajectory.response_ids)], dtype=torch.long)
    ids = torch.cat([prompts, responses], dim=1)
    tensors = {"prompts": prompts, "responses": responses, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    fields = {name: sample.fields[name] for name in _SCORER_COLUMNS if name in sample.fields}
    if reward_info:
        fields["extra_info"] = {**dict(fields.get("extra_info") or {}), **reward_info}
    non_tensors: dict[str, Any] = {}
    for name, value in fields.items():
        non_tensors[name] = np.empty(1, dtype=object)
        non_tensors[name][0] = value
    non_tensors["__num_turns__"] = np.array([trajectory.message_count + 1])
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=non_tensors)


class AgentFrameworkWorker:
    """The framework in a Ray actor."""

    def __init__(
        self,
        config: Any,
        entry: StackEntry,
        names: Sequence[str],
        reward_loop_worker_handles: Sequence[Any] | None = None,
    ) -> None:
        self._config = config
        self._entry = entry
        self._names = list(names)
        self._handles = reward_loop_worker_handles
        self._framework: AgentFramework | None = None
        self._sink: TransferQueueSink | None = None

    async def open(self) -> None:
        """Build the framework. Raises `ConfigError`, for example for a runner that cannot be imported."""
        # Not in the constructor, because connections and locks belong to the loop that uses them.
        block, _ = framework_block(self._config)
        archive = TrajectoryArchive(Path(self._entry.run_dir) / "trajectories.sqlite")
        self._sink = TransferQueueSink(archive)
        self._framework = build_agent_framework(
            config=self._config,
            gateways=GatewayPool(pipeline_client(self._entry), self._names, patience_s=block.gateway_patience_s),
            sink=self._sink,
            processor=_model_config(self._config).processor,
            reward_loop_worker_handles=self._handles,
        )

    async def generate_sequences(self, prompts: Any) -> None:
        assert self._sink is not None and self._framework is not None, "open() comes first"
        try:
            await self._sink.forget_consumed()
        except Exception as error:  # noqa: BLE001 - without a state of its prompts, the trainer would wait for ever
            log.warning("consumed trajectories stay in the archive until the next batch", error=str(error))
        await self._framework.generate_sequences(prompts)


class AgentFrameworkRolloutAdapter:
    """The interface that verl calls."""

    def __init__(self, worker: Any, gateways: OwnGateways, bridge: EngineBridge) -> None:
        self._worker = worker
        self._gateways = gateways
        self._bridge = bridge
        self._running: list[Any] = []

    @classmethod
    def create(
        cls,
        *,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
        **_: Any,
    ) -> AgentFrameworkRolloutAdapter:
        """Start the gateways and the worker. Raises `ConfigError` for an invalid configuration, and leaves nothing
        running then."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if teacher_client is not None:
            raise ConfigError("teacher_client: distillation is not supported; disable the teacher policy")
        block, _rollout = framework_block(config)
        gateways_of(config, block.gateway_count, []).blocks()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=here)(AgentFrameworkWorker)
        with ExitStack() as started:
            bridge = EngineBridge(llm_client)
            started.callback(bridge.stop)
            engine = {"type": "sglang", "base_url": bridge.start(), "name": "verl"}
            gateways = OwnGateways(gateways_of(config, block.gateway_count, [engine]))
            started.callback(gateways.stop)
            worker = actor.remote(config, gateways.entry, gateways.config.names, reward_loop_worker_handles)
            started.callback(ray.kill, worker)
            # Not with the first batch: the trainer would poll the states of its prompts, and not see the error.
            ray.get(worker.open.remote())
            started.pop_all()
        return cls(worker, gateways, bridge)

    def generate_sequences(self, prompts: Any) -> None:
        """Start a batch, and return at once: the trainer reads the results from TransferQueue. Raises the error of an
        earlier batch, unless all of its sessions failed: the states of its prompts show that."""
        import ray

        done: list[Any] = []
        if self._running:
            done, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
        for reference in done:
            try:
                ray.get(reference)
            except AllSessionsFailedError as error:
                log.warning("every session of a batch failed", error=str(error))
        self._running.append(self._worker.generate_sequences.remote(prompts))

    def generate_sequences_and_wait(self, prompts: Any) -> None:
        """Run a batch to its end, and raise its error."""
        import ray

        ray.get(self._worker.generate_sequences.remote(prompts))

    def shutdown(self) -> None:
        """Stop the worker, the gateways and the bridge; idempotent."""
        import ray

        ray.kill(self._worker)
        self._gateways.stop()
        self._bridge.stop()


def gateways_of(config: Any, count: int, engines: Sequence[Mapping[str, Any]]) -> GatewaysConfig:
    """Return the configuration of the gateways for a trainer's configuration."""
    rollout = config.actor_rollout_ref.rollout
    lengths = [rollout.get("prompt_length"), rollout.get("response_length")]
    variables = plain((config.get("data") or {}).get("apply_chat_template_kwargs")) or {}
    return GatewaysConfig(
        count,
        engines,
        _model_config(config).local_path,
        max_context_tokens=sum(map(int, lengths)) if all(lengths) else None,
        policy={"template_variables": dict(variables)} if variables else {},
    )


def _model_config(config: Any) -> Any:
    """Return verl's model configuration: the model's directory on this host, tokenizer and processor."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.model)


class TokenClient(Protocol):
    """The part of verl's client that is used here."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any: ...


class EngineBridge:
    """Serves on loopback from a thread with its own loop, so that a runner that blocks the framework's loop does not
    block the engine it waits for."""

    def __init__(self, client: TokenClient) -> None:
        self._client = client
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> str:
        """Start serving. Return the address, for gateways to use as an engine of type ``sglang``."""
        self._thread = LoopThread("engine-bridge")
        try:
            self._thread.run(self._start(), timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            raise ServerError(f"the engine bridge did not start within {START_TIMEOUT_S:g} s") from None
        return self.url

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.run(self._stop(), timeout_s=START_TIMEOUT_S)
            self._thread.close()
            self._thread = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        params = body["sampling_params"]
        max_tokens = int(params["max_new_tokens"])
        sampling = {name: params[name] for name in _PASSED if params.get(name) is not None}
        kwargs = {"image_data": body["image_data"]} if body.get("image_data") else {}
        try:
            output = await self._client.generate(
                body["rid"],
                prompt_ids=body["input_ids"],
                sampling_params={**sampling, "logprobs": True, "max_tokens": max_tokens},
                **kwargs,
            )
            reply = _reply(output, max_tokens)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if not body.get("stream"):
            return web.Response(body=orjson.dumps(reply), content_type="application/json")
        events = b"data: " + orjson.dumps(reply) + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=events, content_type="text/event-stream")


def _reply(output: Any, max_tokens: int) -> Mapping[str, Any]:
    """Convert verl's ``TokenOutput`` to SGLang's response. Raises `ValueError` if it has no logprobs."""
    ids, logprobs = list(output.token_ids), output.log_probs
    if logprobs is None or len(logprobs) != len(ids):
        count = "no" if logprobs is None else str(len(logprobs))
        raise ValueError(f"the inference client gave {count} logprobs for {len(ids)} tokens; the gateway keeps both")
    reason = "abort" if output.stop_reason in ("aborted", "abort") else "stop"
    if reason == "stop" and (output.stop_reason == "length" or len(ids) >= max_tokens):
        reason = "length"
    extra = getattr(output, "extra_fields", None) or {}
    last = extra.get("max_global_steps", extra.get("global_steps"))
    first = extra.get("min_global_steps")
    weights: dict[str, Any] = {}
    if last is not None:
        spans = [{"version": str(last), "start": 0, "end": len(ids)}]
        if first not in (None, last):
            # Without it, the gateway takes the version of the answer before as the first. The client does not say
            # which tokens it sampled.
            spans.insert(0, {"version": str(first), "start": 0, "end": 0})
        weights = {"weight_version": str(last), "weight_versions": spans}
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids),
            "finish_reason": {"type": reason},
            "output_token_logprobs": [
                [float(logprob), int(token), None] for token, logprob in zip(ids, logprobs, strict=True)
            ],
            **weights,
        },
    }
