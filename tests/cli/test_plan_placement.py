"""Plans of agent servers and engines over nodes, by the command."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.plan_placement import Node, plan, plan_placement
from nemo_gym.contract.errors import ConfigError


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_engines_of_a_node_with_gpus_belong_to_its_own_agent_server(tp_size: int) -> None:
    placement = plan_placement([Node("a", 8), Node("b", 16), Node("c")], tp_size)
    count = Counter(engine.node for engine in placement.engines)
    assert (count["a"], count["b"], count["c"]) == (8 // tp_size, 16 // tp_size, 0)
    for server in placement.agent_servers[:2]:
        assert server.local
        assert server.engines == tuple(engine.name for engine in placement.engines if engine.node == server.node)
    gpus = [(engine.node, gpu) for engine in placement.engines for gpu in engine.gpus]
    assert len(set(gpus)) == len(gpus) == 24
    assert len({engine.url for engine in placement.engines}) == len(placement.engines)


@pytest.mark.parametrize("without_gpus", [1, 2, 3, 5, 12, 31])
@pytest.mark.parametrize("with_gpus", [(8,), (8, 4), (2, 2, 2)])
def test_agent_servers_without_gpus_share_all_engines_evenly(with_gpus: tuple[int, ...], without_gpus: int) -> None:
    nodes = [Node(f"g{n}", gpus) for n, gpus in enumerate(with_gpus)] + [Node(f"c{n}") for n in range(without_gpus)]
    placement = plan_placement(nodes, 2)
    shared = [server.engines for server in placement.agent_servers if not server.local]
    assert len(shared) == without_gpus
    sizes = [len(engines) for engines in shared]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    served = Counter(name for engines in shared for name in engines)
    load = [served[engine.name] for engine in placement.engines]
    assert min(load) >= 1
    assert max(load) - min(load) <= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a:7", "tp_size=2"], "node 'a' has 7 GPUs, which tp_size=2 does not divide: 1 would stay idle"),
        (["a:8", "a:8", "tp_size=2"], "node 'a' is named twice"),
        (["tp_size=2"], "no nodes"),
        (["a", "b", "tp_size=2"], "no node has GPUs"),
        (["a:8"], "tp_size= is missing"),
        (["a:8", "tp_size=0"], "tp_size=0 must be at least 1"),
        (["a:8", "tp_size=two"], "tp_size=two must be a whole number"),
        (["a:eight", "tp_size=2"], "'a:eight' is not a node"),
        (
            ["a:8", "tp_size=2", "agent_port=8103"],
            r"agent_port=8103 is also the port of an engine of node 'a' \(8100 to 8103\)",
        ),
        (["a:8", "tp_size=2", "agent_port=99999"], "agent_port=99999: ports are 1 to 65535"),
        (["a:8", "tp_size=2", "engine_port=65533"], "ports are 1 to 65535, and 4 engines take 65533 to 65536"),
        (["a:8", "tp_size=2", "engine_port=0"], "engine_port=0: ports"),
        (["a:8", "tp=2"], "unknown key 'tp'"),
        (["nodes=none.yaml", "tp_size=2"], "nodes='none.yaml' cannot be read"),
    ],
)
def test_nodes_that_cannot_be_planned_are_named_with_what_to_do(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("3", "nodes must be a list"),
        ("[{name: a, gpu: 8}]", "a node is"),
        ("[{name: a, gpus: -8}]", "gpus must be a whole number from 0"),
        ("[{name: a, gpus: true}]", "gpus must be a whole number from 0"),
        ("[{name: 7}]", "must be a text"),
        ("[{", "neither YAML nor JSON"),
    ],
)
def test_file_that_lists_no_nodes_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "nodes.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        plan([f"nodes={tmp_path / 'nodes.yaml'}", "tp_size=2"])


@pytest.mark.parametrize(
    "content", ["- {name: a, gpus: 4}\n- b\n", "a: 4\nb: 0\n", '[{"name": "a", "gpus": 4}, {"name": "b"}]']
)
def test_file_and_words_give_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "nodes.yaml").write_text(content)
    found: list[Any] = []
    for words in ([f"nodes={tmp_path / 'nodes.yaml'}"], ["a:4", "b"]):
        assert plan([*words, "tp_size=2", "engine_port=9000", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert [engine["url"] for engine in found[0]["engines"]] == ["http://a:9000", "http://a:9001"]
    assert found[0]["agent_servers"][1]["engines"] == ["a/engine-0", "a/engine-1"]
