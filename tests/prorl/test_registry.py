"""Handlers are refused by what they lack, and instances go to the handler that their data source names."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.prorl.async_server import OpenHandsServer
from nemo_gym.prorl.registry import (
    AgentHandler,
    UnknownDataSourceError,
    data_source_of,
    get_registered_functions,
    instance_id_of,
    register_agent_handler,
    registered_handlers,
    row_of,
)
from tests.prorl.conftest import Echo


def test_registered_handler_has_its_functions_by_stage() -> None:
    handler = Echo("mine")
    register_agent_handler(handler)
    assert get_registered_functions("init", "mine") == handler.init
    assert get_registered_functions("run", "mine") == handler.run
    assert get_registered_functions("eval", "mine") == handler.eval
    assert {"mine", "swebench", "math"} <= set(registered_handlers())


def test_handler_registered_later_takes_the_place_of_the_first() -> None:
    first, second = Echo("mine"), Echo("mine")
    register_agent_handler(first)
    register_agent_handler(second)
    assert get_registered_functions("run", "mine") == second.run


def test_handler_that_lacks_a_method_is_refused_by_name_and_changes_nothing() -> None:
    class Half(AgentHandler):
        @property
        def name(self) -> str:
            return "half"

        async def init(self, *args: Any, **options: Any) -> Any: ...

    class Foreign:
        name = "foreign"

        async def init(self) -> None: ...

        async def run(self) -> None: ...

    before = registered_handlers()
    with pytest.raises(ConfigError, match="handler Half lacks run, eval;"):
        register_agent_handler(Half())
    with pytest.raises(ConfigError, match="handler Foreign lacks eval;"):
        register_agent_handler(Foreign())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not its class: register_agent_handler\(Echo\(\)\)"):
        register_agent_handler(Echo)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'name' must be text that is not empty, got ''"):
        register_agent_handler(Echo(""))
    assert registered_handlers() == before


def test_method_that_is_no_coroutine_function_is_refused_by_name() -> None:
    class Plain(Echo):
        def run(self, *args: Any) -> Any:  # type: ignore[override]
            return {}

    with pytest.raises(ConfigError, match="handler Plain: 'run' is no coroutine function; write 'async def run'"):
        register_agent_handler(Plain())


def test_stage_or_data_source_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"unknown stage 'evaluate'.*stages: init, run, eval"):
        get_registered_functions("evaluate", "swebench")
    with pytest.raises(UnknownDataSourceError, match=r"data_source 'r2e-gym'; registered: math, swebench"):
        get_registered_functions("run", "r2e-gym")


@dataclasses.dataclass(slots=True)
class Slotted:
    instance_id: str
    data_source: str


@pytest.mark.parametrize(
    ("instance", "source", "name"),
    [
        ({"instance_id": "a__b-1", "data_source": "math"}, "math", "a__b-1"),
        ({"instance_id": "a/b 1"}, "swebench", "a-b-1"),
        (SimpleNamespace(task_id="t", data_source="math"), "math", "t"),
        (Slotted("s", "math"), "math", "s"),
        ({"data_source": float("nan"), "id": 7}, "swebench", "7"),
        ({"question": "?"}, "swebench", "instance"),
    ],
)
def test_instance_says_its_data_source_and_its_name(instance: Any, source: str, name: str) -> None:
    assert (data_source_of(instance), instance_id_of(instance)) == (source, name)
    assert isinstance(row_of(instance), dict)


class Series:
    """What a pandas Series is to a server: keys, ``get``, attributes and ``to_dict``."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


def test_series_is_an_instance() -> None:
    series = Series(instance_id="x", data_source=float("nan"), score=float("nan"))
    assert (data_source_of(series), instance_id_of(series)) == ("swebench", "x")
    assert row_of(series) == {"instance_id": "x", "data_source": None, "score": None}


@pytest.mark.parametrize("instance", [7, "text", None, [], {1: 2}, object(), {"f": object()}])
def test_what_is_no_instance_is_refused(instance: Any) -> None:
    with pytest.raises(RowError, match="instance"):
        row_of(instance)


def test_data_source_that_is_no_text_is_refused() -> None:
    with pytest.raises(RowError, match="'data_source' must be text, got 7"):
        data_source_of({"data_source": 7})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_init_workers": 0}, "max_init_workers must be a whole number from 1, got 0"),
        ({"max_run_workers": True}, "max_run_workers must be a whole number from 1, got True"),
        ({"max_eval_workers": -1}, "max_eval_workers must be a whole number from 1, got -1"),
        ({"allow_skip_eval": "no"}, "allow_skip_eval must be True or False, got 'no'"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
        ({"llm_server_addresses": "http://a"}, r"llm_server_addresses is a list: \['http://a'\]"),
        ({"llm_server_addresses": ["a:8000"]}, "'a:8000' is no address of a server; give for example"),
        ({"llm_server_addresses": [("http://a", 0)]}, "the weight of http://a must be a number above 0, got 0"),
        ({"llm_server_addresses": [{}]}, "an address is a URL or a pair"),
    ],
)
def test_option_that_cannot_be_meant_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OpenHandsServer(**options)


def test_eval_workers_are_as_many_as_run_workers() -> None:
    server = OpenHandsServer(max_run_workers=3)
    assert (server.max_run_workers, server.max_eval_workers) == (3, 3)
    assert server.status() == dict.fromkeys(
        ("init_queue", "run_queue", "eval_queue", "active_init", "active_run", "active_eval", "total"), 0
    )
