"""The handlers, by data source, that prepare, run and evaluate the instances of a data set.

instance ──data_source──▶ handler: init → (runtime, metadata, config) → run → run_results → eval → report
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.contract.verdict import task_id_of

STAGES = ("init", "run", "eval")
DEFAULT_DATA_SOURCE = "swebench"
DEFAULT_MAX_ITERATIONS = 2


class UnknownDataSourceError(ConfigError):
    """No handler is registered for an instance's data source."""

    code = "data_source"


@dataclass(slots=True)
class JobDetails:
    """A job, to which each stage adds its results."""

    job_id: str
    instance: Any
    """The caller's instance, unchanged: a mapping, a pandas Series or an object."""
    max_iterations: int = DEFAULT_MAX_ITERATIONS
    llm_config: dict[str, Any] = field(default_factory=dict)
    """The caller's sampling parameters, and as ``base_url`` the LLM server for all turns of the job."""
    start_time: float = field(default_factory=time.time)
    """Unix seconds, like the other times."""
    event: threading.Event = field(default_factory=threading.Event)
    """Set when the job is complete."""
    runtime: Any = None
    """The runtime that `AgentHandler.init` returned; closed and reset to ``None`` as soon as run is over."""
    metadata: Any = None
    config: Any = None
    run_results: dict[str, Any] | None = None
    start_run_time: float | None = None
    eval_results: dict[str, Any] | None = None
    start_eval_time: float | None = None


class AgentHandler:
    """Base class of handlers. A handler must define ``name``, ``init``, ``run`` and ``eval``; the rest is optional.

    All methods run on the server's event loop, for many jobs at a time: use ``asyncio.to_thread`` for blocking work.
    An exception of ``init``, ``run`` or ``eval`` completes the job with that error.
    """

    @property
    def name(self) -> str:
        """The name of the data source."""
        raise NotImplementedError

    async def init(
        self, instance: Any, llm_config: Any = None, sid: str | None = None, max_iterations: int = 1
    ) -> tuple[Any, Any, Any]:
        """Return runtime, metadata and config. The runtime's ``close()``, sync or async, is called right after run."""
        raise NotImplementedError

    async def run(self, runtime: Any, metadata: Any, config: Any, instance: Any) -> dict[str, Any]:
        """Run the agent, and return its results: ``git_patch``, ``messages``, …"""
        raise NotImplementedError

    async def eval(self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True) -> dict[str, Any]:
        """Return the evaluation of ``job_details.run_results``, bare or as ``{"report": …}``. With ``allow_skip``, a
        run that produced nothing need not be evaluated."""
        raise NotImplementedError

    async def check(self, instance: Any, llm_config: Mapping[str, Any]) -> None:
        """Raise an error to refuse an instance at submission. Not in the original."""

    async def release(self, job_details: JobDetails) -> None:
        """Release what a job still holds, however it ended. Not in the original."""

    async def aclose(self) -> None:
        """Release the handler's resources when the server stops. Not in the original."""


async def call_optional(handler: Any, name: str, *given: Any) -> None:
    """Call a method of a handler, if the handler has it."""
    method = getattr(handler, name, None)
    if method is not None:
        await method(*given)


Stage = Callable[..., Awaitable[Any]]
_handlers: dict[str, AgentHandler] = {}


def register_agent_handler(handler: AgentHandler) -> None:
    """Register a handler for the data source ``handler.name``, replacing an earlier one. Raises `ConfigError` naming
    what the handler lacks, without any change."""
    if isinstance(handler, type):
        raise ConfigError(
            f"register_agent_handler takes a handler, not its class: register_agent_handler({handler.__name__}())",
            key="handler",
        )
    kind = type(handler)
    lacking = [name for name in ("name", *STAGES) if _is_lacking(kind, name)]
    if lacking:
        listed = ", ".join(lacking)
        raise ConfigError(
            f"handler {kind.__name__} lacks {listed}; see nemo_gym.prorl.registry.AgentHandler", key=listed
        )
    for stage in STAGES:
        if not inspect.iscoroutinefunction(getattr(handler, stage)):
            raise ConfigError(
                f"handler {kind.__name__}: '{stage}' is no coroutine function; write 'async def {stage}'", key=stage
            )
    name: Any = handler.name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"handler {kind.__name__}: 'name' must be text that is not empty, got {name!r}", key="name")
    _handlers[name] = handler


def _is_lacking(kind: type, name: str) -> bool:
    member = inspect.getattr_static(kind, name, None)
    return member is None or member is inspect.getattr_static(AgentHandler, name)


def registered_handlers() -> list[str]:
    """Return the data sources that have a handler."""
    return sorted(_handlers)


def handler_of(data_source: str) -> AgentHandler:
    """Return the handler of a data source. Raises `UnknownDataSourceError` listing the registered names."""
    if data_source not in _handlers:
        raise UnknownDataSourceError(
            f"no handler is registered for data_source '{data_source}'{nearest(data_source, _handlers)}; registered:"
            f" {', '.join(registered_handlers()) or 'none'}",
            key="data_source",
        )
    return _handlers[data_source]


def get_registered_functions(stage: str, data_source: str) -> Stage:
    """Return the handler's method for ``init``, ``run`` or ``eval``. Raises `ConfigError` for another stage, and
    `UnknownDataSourceError`."""
    if stage not in STAGES:
        raise ConfigError(f"unknown stage '{stage}'{nearest(stage, STAGES)}; stages: {', '.join(STAGES)}", key="stage")
    function: Stage = getattr(handler_of(data_source), stage)
    return function


# Instances: mappings, pandas Series, and objects.


def data_source_of(instance: Any) -> str:
    """Return an instance's data source, by default ``swebench``. Raises `RowError` if it is no text."""
    value = _member(instance, "data_source")
    if value is None:
        return DEFAULT_DATA_SOURCE
    if not isinstance(value, str):
        raise RowError(f"instance: 'data_source' must be text, got {value!r}", field="data_source")
    return value


def instance_id_of(instance: Any) -> str:
    """Return the instance's own name, with characters that ids do not allow replaced, or ``instance``."""
    candidates = (plain_number(_member(instance, name)) for name in ("instance_id", "task_id", "id", "uuid"))
    first = next((value for value in candidates if value is not None), None)
    name = task_id_of({"task_id": first}, -1)
    return "instance" if name == "-1" else name


def row_of(instance: Any) -> dict[str, Any]:
    """Return the instance as a JSON object, with NaN as null. Raises `RowError` if it is no instance."""
    if isinstance(instance, Mapping):
        members = dict(instance)
    elif callable(to_dict := getattr(instance, "to_dict", None)):
        members = to_dict()
    else:
        members = _attributes(instance)
    if not members or not all(isinstance(key, str) for key in members):
        raise RowError(
            f"an instance is a mapping, a pandas Series or an object with named fields, not {type(instance).__name__}"
        )
    try:
        row: dict[str, Any] = orjson.loads(orjson.dumps(members, default=_encoded, option=orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, orjson.JSONEncodeError) as error:
        raise RowError(f"instance '{instance_id_of(instance)}' cannot be written as JSON: {error}") from None
    return row


def _attributes(instance: Any) -> dict[str, Any]:
    slots = (name for kind in type(instance).__mro__ for name in getattr(kind, "__slots__", ()))
    slotted = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    return {name: value for name, value in {**slotted, **getattr(instance, "__dict__", {})}.items() if name[:1] != "_"}


def _member(instance: Any, name: str) -> Any:
    """Return a key or an attribute; ``None`` if it is missing, or NaN as in a table's empty cells."""
    get = getattr(instance, "get", None)
    value = get(name) if callable(get) else getattr(instance, name, None)
    return None if isinstance(value, float) and value != value else value


def plain_number(value: Any) -> Any:
    """Convert a numpy number to a Python number."""
    return value.item() if callable(getattr(value, "item", None)) else value


def _encoded(value: Any) -> Any:
    if type(value).__name__ in ("NaTType", "NAType"):  # a table's empty cells, like NaN
        return None
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(iso := getattr(value, "isoformat", None)):
        return iso()
    raise TypeError(f"a {type(value).__name__} is no JSON")
