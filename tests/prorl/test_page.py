"""The page for those who come from the ProRL Agent Server says what the code does, and its programs run."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.cli.prorl_server import KEYS
from nemo_gym.prorl.async_server import OpenHandsServer
from nemo_gym.prorl.handlers import MathHandler, SweBenchHandler
from tests.architecture.docs import PAGES, ROOT, command_lines, table, write_examples
from tests.prorl.fleet import prorl_server
from tests.prorl.llm import llm_server

PAGE = PAGES / "prorl.md"
SCRIPT = ROOT / "resources_servers/math/data/scripted_policy.yaml"
TOOLS = ROOT / "responses_api_agents/simple_agent/data/scripted_tools.yaml"


def run(program: str, place: Path, **variables: str) -> list[str]:
    write_examples(PAGE, place)
    env = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, program], cwd=place, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_tables_of_the_page_are_complete() -> None:
    options = set(inspect.signature(OpenHandsServer.__init__).parameters) - {"self"}
    named = table(PAGE, "option of `OpenHandsServer`")
    assert {"max_init_workers", "max_eval_workers"} <= set(named) and options == set(named)
    assert set(table(PAGE, "setting of ng_prorl_server")) == set(KEYS) - {"insecure"}
    text = PAGE.read_text(encoding="utf-8")
    for handler in (SweBenchHandler(), MathHandler()):
        assert f"| `{handler.name}` | `{' '.join(handler.WORDS)}` |" in text


def test_server_of_the_page_is_driven_by_process(tmp_path: Path) -> None:
    with llm_server(str(SCRIPT), str(TOOLS)) as (url, model):
        said = run("drive.py", tmp_path, LLM_SERVER=url)
        assert any(line.startswith("1.0 ") and "\\boxed{6/36}" in line for line in said), said
        assert [body["temperature"] for body in model.asked] == [0.7]


def test_handler_of_the_page_is_registered_and_routed_to(tmp_path: Path) -> None:
    assert run("own_handler.py", tmp_path) == ["eval", "the desk is cleared", "1.0 {'resolved': True}"]


def test_trainer_of_the_page_gets_groups_from_the_server_of_the_page(tmp_path: Path) -> None:
    (command,) = [line for line in command_lines(PAGE) if line.program == "ng_prorl_server"]
    words = [word for word in command.words[1:] if not word.startswith("port=")]
    write_examples(PAGE, tmp_path)
    with prorl_server(tmp_path, *words) as server:
        lines = run("train_prorl.py", tmp_path, PRORL_SERVER_URLS=server.url)
    said = [words for line in lines if len(words := line.split()) == 3]  # others are the log's: of a slow server, say
    for step in ("0", "1"):
        # A batch has the groups that are asked for, and one more that was finished at the same moment.
        assert sum(at == step for at, *_ in said) in (2 * 4, 3 * 4)
        for name in {name for at, name, _ in said if at == step}:
            assert {reward for at, other, reward in said if (at, other) == (step, name)} == {"0.0", "1.0"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "prorl").iterdir()), ids=lambda path: path.name)
def test_example_script_is_a_program(path: Path) -> None:
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
