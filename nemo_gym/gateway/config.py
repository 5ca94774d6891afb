"""A gateway as configuration."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym.config_types import CommandPath
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.backend import CallLimits
from nemo_gym.gateway.capture import CaptureConfig
from nemo_gym.gateway.engines import EngineConfig
from nemo_gym.gateway.inference import FIRST_EVENT_GRACE_S, PING_INTERVAL_S
from nemo_gym.gateway.journal_log import Durability
from nemo_gym.gateway.model_server import BaseResponsesAPIModelConfig
from nemo_gym.gateway.routing.calls import RetryConfig
from nemo_gym.gateway.routing.pool import EnginePool
from nemo_gym.gateway.routing.router import RoutingConfig
from nemo_gym.gateway.sessions import KEEP_CLOSED_S
from nemo_gym.gateway.tokens import History

if TYPE_CHECKING:
    from nemo_gym.gateway.token_backend import TokenBackend


_LIMITS = CallLimits()
_ABSURD_CONTEXT = 10**8
"""A ``model_max_length`` from here on means no limit: tokenizers without one write a number of thirty digits."""


class PolicyConfig(BaseModel):
    """The policy's tokenizer and chat template; needed by engines that take token ids."""

    model_config = ConfigDict(extra="forbid")

    path: CommandPath
    """The model's local directory: ``tokenizer.json``, ``tokenizer_config.json``, a chat template. Nothing is
    downloaded, and no weights are read."""
    chat_template: CommandPath | None = None
    """A Jinja file in place of the directory's own template."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Tokens that end a turn, in addition to those that the directory names."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables passed to every rendering of the template, for example ``enable_thinking: true``."""
    special_tokens_in_content: Literal["text", "control"] = "text"
    """How the spelling of a special token (``<|im_end|>``) in a message is encoded: as the letters it is made of, or
    as the token itself, with which a tool's output can end its message and start another."""
    tool_parser: str = "auto"
    """The parser of tool calls in sampled text; ``auto`` chooses by what the chat template writes."""
    reasoning_parser: str = "auto"
    history: History = History.VERBATIM
    """How to treat earlier reasoning that the chat template would leave out: ``verbatim`` keeps it, and the
    conversation stays one trajectory; ``template`` follows the template, and the conversation splits."""
    max_context_tokens: int | None = Field(None, gt=0)
    """Limit of prompt and answer together. Default: the one in ``config.json`` or ``tokenizer_config.json``."""
    max_answer_tokens: int | None = Field(None, gt=0)
    """Limit of one answer. Default: what the prompt leaves of the context. A request may ask for less."""

    def backend(self, pool: EnginePool, *, model: str) -> TokenBackend:
        """Return the backend for this policy and a pool of token engines. Raises `ConfigError` for a directory, a
        template or a parser that cannot be used."""
        from nemo_gym.gateway.parsing import answer_parser
        from nemo_gym.gateway.token_backend import TokenBackend
        from nemo_gym.gateway.tokens import PolicyTokenizer

        policy = PolicyTokenizer.load(
            self.path,
            chat_template=_read(self.chat_template) if self.chat_template is not None else None,
            stop_tokens=self.stop_tokens,
            template_variables=self.template_variables,
            special_tokens_in_content=self.special_tokens_in_content,
        )
        parser = answer_parser(policy, tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
        return TokenBackend(
            policy,
            parser,
            pool,
            model=model,
            max_context_tokens=self._context_tokens(),
            max_answer_tokens=self.max_answer_tokens,
            history=self.history,
        )

    def _context_tokens(self) -> int:
        if self.max_context_tokens is not None:
            return self.max_context_tokens
        for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
            try:
                config = orjson.loads((self.path / file).read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            inner = config.get("text_config") or config
            value = inner.get(key)
            if isinstance(value, int | float) and 0 < value < _ABSURD_CONTEXT:
                return int(value)
        raise ConfigError(
            f"policy: '{self.path}' does not define the policy's context length; set max_context_tokens",
            key="policy.max_context_tokens",
        )


class GatewayConfig(BaseResponsesAPIModelConfig):
    """Configuration of a gateway."""

    model: str = "policy"
    """The model name in every reply, whatever name a harness asks for."""
    engines: list[EngineConfig] = Field(default_factory=list)
    """The engines that run the policy: all of them take token ids (``vllm``, ``sglang``), or all of them text
    (``openai``). More can be added while the gateway runs."""
    policy: PolicyConfig | None = None
    """Needed with engines that take token ids."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """For text engines: parameters added to every request that does not set them itself."""
    remote_images: bool = False
    """Whether a session's requests may name images by http(s) address, which the engine then fetches from its own
    network: also for a harness in a box that reaches nothing but its model. Needed for rows that hold addresses."""
    return_token_ids: bool = False
    """Whether replies carry the exact tokens: ``prompt_token_ids``, ``generation_token_ids``,
    ``generation_log_probs``."""
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    retries: RetryConfig = Field(default_factory=RetryConfig)
    journal_dir: CommandPath | None = None
    """The directory of the journal, which stores sessions and turns. Default: in the run's directory; for a gateway
    started by hand, ``gateway-journal`` in the working directory."""
    durability: Durability = "process"
    """What a committed turn survives: the death of the ``process``, or a ``power_loss`` as well, for which every
    commit waits for the disk."""
    max_session_messages: int = Field(_LIMITS.max_session_messages, gt=0)
    """Limit of messages in all conversations of one session; a message that later requests repeat counts once. A
    session above the limit gets no further answer (413)."""
    max_session_bytes: int = Field(_LIMITS.max_session_bytes, gt=0)
    """Limit of bytes that one session's turns hold in memory; 413 as well."""
    max_session_in_flight_bytes: int = Field(_LIMITS.max_session_in_flight_bytes, gt=0)
    """Limit of the request bodies of one session's unanswered calls, and of its replies that nobody has read; a call
    that would exceed it is refused with 429. A body whose length is not announced counts as ``max_body_bytes``."""
    keep_closed_s: float = Field(KEEP_CLOSED_S, ge=0)
    """How long a closed session answers a repeated finalize. The oldest are forgotten sooner when more than 1,024
    sessions, or more than 256 MiB of their conversations, are kept."""
    ping_interval_s: float = Field(PING_INTERVAL_S, gt=0)
    """How long a stream is silent before a keep-alive ping."""
    first_event_grace_s: float = Field(FIRST_EVENT_GRACE_S, ge=0)
    """How long a stream's headers wait for the answer; a failure within that time becomes an HTTP status."""
    capture: CaptureConfig | None = None
    """Record every call for observers, with secrets removed. By default no call is recorded."""
    path_tokens: bool = False
    """Also accept the inference token in the path (``/sessions/<id>/token/<token>/v1``), and a completion token
    (``…/complete``), for trusted runners that can set a URL but no header."""

    def limits(self) -> CallLimits:
        return CallLimits(**{limit.name: getattr(self, limit.name) for limit in fields(CallLimits)})

    @property
    def kind(self) -> Literal["text", "token"]:
        """The kind of the engines."""
        return "text" if self.policy is None else "token"

    @model_validator(mode="after")
    def _engines_fit(self) -> GatewayConfig:
        kinds = {"text" if engine.type == "openai" else "token" for engine in self.engines}
        if len(kinds) > 1:
            raise ValueError("engines: 'openai' takes text, 'vllm' and 'sglang' take token ids; use one kind")
        if kinds == {"token"} and self.policy is None:
            raise ValueError("policy: is missing; engines that take token ids need the policy's local directory")
        if kinds == {"text"} and self.policy is not None:
            raise ValueError(
                "policy: is for engines that take token ids; an 'openai' engine renders and encodes by itself"
            )
        return self


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        key = "policy.chat_template"
        raise ConfigError(f"{key}: '{file}' cannot be read ({error})", key=key) from error
