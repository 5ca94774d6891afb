"""``ng env init`` and ``ng agent init``: write plugin folders that run and pass their own tests at once."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym.cli import command
from nemo_gym.cli.scaffold_more import (
    JUDGE_APP,
    JUDGE_POLICY,
    JUDGE_ROWS,
    JUDGE_TEST,
    STEP_APP,
    STEP_POLICY,
    STEP_ROWS,
    STEP_TEST,
)
from nemo_gym.contract.errors import ConfigError

_RUN = """
    export NEMO_GYM_EXTRA_ROOTS=$root
    ng env test $name
    ng_run $words input=resources_servers/$name/data/example.jsonl output=results/$name.jsonl
"""

QA_APP = '''"""$Title: a question in, an answer out."""

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer


class Request(BaseVerifyRequest):
    answer: str


class $Class(SimpleResourcesServer):
    async def verify(self, body: Request) -> BaseVerifyResponse:
        said = body.response.output_text
        return BaseVerifyResponse(**body.model_dump(), reward=float(body.answer.lower() in said.lower()))


if __name__ == "__main__":
    $Class.run_webserver()
'''
QA_TEST = '''"""What $name grades how, without a server."""

from nemo_gym.testing.environments import make_environment, reply
from resources_servers.$name.app import $Class, Request


async def grade(text: str) -> float:
    body = {"responses_create_params": {"input": "?"}, "answer": "Paris", "response": reply(text)}
    return (await make_environment($Class).verify(Request.model_validate(body))).reward


async def test_right_answer_is_rewarded() -> None:
    assert await grade("It is Paris.") == 1.0


async def test_wrong_answer_is_not() -> None:
    assert await grade("It is Rome.") == 0.0
'''
QA_ROWS = (
    '{"id": "france", "answer": "Paris", "responses_create_params": {"input": "What is the capital of France?"}}\n'
    '{"id": "italy", "answer": "Rome", "responses_create_params": {"input": "What is the capital of Italy?"}}\n'
)
QA_POLICY = """model: scripted-policy
tasks:
  - name: france
    when: {user: 'capital of France'}
    turns: [{ends: true, text: It is Paris.}]
  - name: italy
    when: {user: 'capital of Italy'}
    turns: [{ends: true, text: It is Milan.}]
"""

MCP_APP = '''"""$Title: the answer is behind a tool."""

from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import BaseModel

from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.contract.session import Topology
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.mcp.answers import answered_text


class Pair(BaseModel):
    a: int
    b: int


class $Class(SimpleResourcesServer):
    topologies: ClassVar = (Topology.NONE, Topology.ENV_SANDBOXED)
    tool_access: ClassVar = ("mcp", "http")

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/secret_sum")(self.secret_sum)
        return app

    async def secret_sum(self, body: Pair) -> dict[str, int]:
        """The sum of two numbers, and one more."""
        return {"sum": body.a + body.b + 1}

    async def grade(self, row: dict[str, Any], response: dict[str, Any], artifacts: Any, rollout: Any) -> Verdict:
        return Verdict.of(float(str(row["expected"]) in answered_text(response)))


if __name__ == "__main__":
    $Class.run_webserver()
'''
MCP_TEST = '''"""What $name grades how, without a server."""

from typing import Any

from nemo_gym.testing.environments import attempt, make_environment, reply
from resources_servers.$name.app import $Class

ROW: dict[str, Any] = {"expected": 8}


async def grade(said: str) -> float | None:
    environment = make_environment($Class)
    return (await environment.grade(ROW, reply(said), (), attempt())).reward


async def test_right_work_is_rewarded() -> None:
    assert await grade("It is 8.") == 1.0


async def test_wrong_work_is_not() -> None:
    assert await grade("It is 7.") == 0.0
'''
MCP_ROWS = (
    '{"id": "small", "expected": 8, "responses_create_params": {"input": "What is the secret sum of 3 and 4?"}}\n'
    '{"id": "large", "expected": 71, "responses_create_params": {"input": "What is the secret sum of 30 and 40?"}}\n'
)
MCP_POLICY = """model: scripted-policy
tasks:
  - name: small
    when: {user: 'secret sum of 3 and 4'}
    turns:
      - tool_calls: [{tool: secret_sum, arguments: {a: 3, b: 4}}]
      - {ends: true, text: It is 8.}
  - name: large
    when: {user: 'secret sum of 30 and 40'}
    turns: [{ends: true, text: It is 70.}]
"""

BOX_APP = '''"""$Title: numbers are in a file of the box, their sum must be in another."""

from typing import Any, ClassVar

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.session import SessionDescriptor, Topology
from nemo_gym.contract.verdict import Verdict


class Config(BaseResourcesServerConfig):
    sandbox_provider: str | dict[str, Any]


class $Class(SimpleResourcesServer):
    config: Config
    topologies: ClassVar = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED)

    async def open_session(self, row: dict[str, Any], rollout: Any) -> SessionDescriptor:
        return self.boxed_session(rollout, files={"numbers.txt": row["numbers"]}, collect=["sum.txt"])

    async def grade(self, row: dict[str, Any], response: Any, artifacts: Any, rollout: Any) -> Verdict:
        return Verdict.of(float((self.collected(artifacts, "sum.txt") or "").strip() == row["expected"]))

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any]:
        patch = f"--- /dev/null\\n+++ b/sum.txt\\n@@ -0,0 +1 @@\\n+{row['expected']}\\n"
        return {"git_patch": {"path": "/home/task", "patch": patch}}


if __name__ == "__main__":
    $Class.run_webserver()
'''
BOX_TEST = '''"""What $name grades how, without a server."""

from typing import Any

from nemo_gym.testing.environments import attempt, collected, make_environment, reply
from resources_servers.$name.app import $Class

ROW: dict[str, Any] = {"numbers": "3\\n5\\n", "expected": "8"}


async def grade(said: str) -> float | None:
    environment = make_environment($Class, sandbox_provider="local")
    return (await environment.grade(ROW, reply(""), collected({"sum.txt": said}), attempt())).reward


async def test_right_work_is_rewarded() -> None:
    assert await grade("8") == 1.0


async def test_wrong_work_is_not() -> None:
    assert await grade("7") == 0.0
'''
BOX_ROWS = (
    r'{"id": "small", "numbers": "3\n5\n8\n", "expected": "16", "responses_create_params": '
    '{"input": "Write the sum of numbers.txt to sum.txt."}}\n'
    r'{"id": "negative", "numbers": "4\n-9\n", "expected": "-5", "responses_create_params": '
    '{"input": "Write the sum of numbers.txt to sum.txt."}}\n'
)
BOX_POLICY = """model: scripted-policy
tasks:
  - name: sum
    when: {user: 'sum of numbers'}
    turns:
      - tool_calls: [{shell: "awk '{s += $$1} END {print s}' numbers.txt > sum.txt"}]
      - {ends: true, text: The sum is in sum.txt.}
"""

ENVIRONMENT_YAML = """$name:
  resources_servers:
    $name:
      entrypoint: app.py
      domain: other
"""
README = """# $Title

$what

The files: `app.py` grades, `configs/$name.yaml` configures, `data/example.jsonl` holds rows,
`data/scripted_policy.yaml` says what a scripted model does with them, `tests/` tries the grading without a server.
$run"""


AGENT_APP = '''"""$Title: asks the model once, and answers what it said."""

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status


class Config(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class $Class(SimpleResponsesAPIAgent):
    config: Config

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        reply = await self.server_client.post(self.config.model_server.name, "/v1/responses", json=body)
        await raise_for_status(reply)
        return NeMoGymResponse.model_validate(await get_response_json(reply))


if __name__ == "__main__":
    $Class.run_webserver()
'''
AGENT_YAML = """$name:
  responses_api_agents:
    $name:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: "$${composition.environment}"}
      model_server: {type: responses_api_models, name: "$${composition.model}"}
"""
AGENT_TEST = '''"""What $name asks and answers, without servers."""

import json
from unittest.mock import AsyncMock, MagicMock

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import ServerClient
from nemo_gym.testing.environments import reply
from responses_api_agents.$name.app import $Class, Config


async def test_the_models_answer_is_the_agents() -> None:
    refs = {
        "resources_server": {"type": "resources_servers", "name": "e"},
        "model_server": {"type": "responses_api_models", "name": "m"},
    }
    config = Config.model_validate({"host": "", "port": 0, "entrypoint": "app.py", "name": "$name", **refs})
    client = MagicMock(spec=ServerClient)
    client.post.return_value = MagicMock(ok=True, read=AsyncMock(return_value=json.dumps(reply("hi")).encode()))
    agent = $Class(config=config, server_client=client)
    answer = await agent.responses(NeMoGymResponseCreateParamsNonStreaming(input="hello"))
    assert answer.output_text == "hi"
'''
_SCRIPTED: Final = {
    "data/scripted_tools.yaml": "# How a scripted policy's neutral words are spelled here.\n"
    "environment: {name: $$tool}\n"
}
_SCRIPTED_BASH: Final = {
    "data/scripted_tools.yaml": "# How a scripted policy's neutral words are spelled here.\n"
    "shell: {name: bash, arguments: {command: $$command}}\n"
}
COMMAND_YAML = """# $Title: the command below is the agent. Its task is in $$task_file, its model in the environment.
$name:
  responses_api_agents:
    composite_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: "$${composition.environment}"}
      model_server: {type: responses_api_models, name: "$${composition.model}"}
      sandbox_provider: sandbox
      scratch: {image: host, workdir: /tmp}
      harness:
        name: $name
        program: responses_api_agents/$name/program
        command: [python3, -B, $$program/agent.py, $$task_file]
        runtime: python
"""


@dataclass(frozen=True)
class _Kind:
    """The texts of one kind of environment."""

    what: str
    app: str
    test: str
    rows: str
    policy: str
    settings: str = ""
    """More lines of the environment's block."""
    words: str = "agent=simple_agent environment=$name model=scripted"


_KINDS: Final = {
    "qa": _Kind("A question and its answer.", QA_APP, QA_TEST, QA_ROWS, QA_POLICY),
    "mcp": _Kind("Tools over MCP and as routes.", MCP_APP, MCP_TEST, MCP_ROWS, MCP_POLICY),
    "box": _Kind(
        "Work in a box.",
        BOX_APP,
        BOX_TEST,
        BOX_ROWS,
        BOX_POLICY,
        settings="      sandbox_provider: sandbox\n",
        words="agent=mini_swe_agent environment=$name sandbox=local model=scripted",
    ),
    "step": _Kind("A state that tools change, step by step.", STEP_APP, STEP_TEST, STEP_ROWS, STEP_POLICY),
    "judge": _Kind(
        "An answer that another model judges.",
        JUDGE_APP,
        JUDGE_TEST,
        JUDGE_ROWS,
        JUDGE_POLICY,
        settings='      judge: {type: responses_api_models, name: "$${composition.model}"}\n',
    ),
}


def init_environment(argv: Sequence[str]) -> int:
    """Write ``resources_servers/NAME`` below the working directory, or below ``--search-dir``."""
    parser = command.parser("ng env init", "Write a new environment, which runs and passes its tests.", words="NAME")
    parser.set_defaults(kind="qa")
    kinds = parser.add_mutually_exclusive_group()
    for name, each in _KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=each.what)
    parser.add_argument("--search-dir", default=".", help="the folder above resources_servers (default: here)")
    parser.add_argument("--resources-server", help="NeMo Gym's way to say NAME")
    arguments = parser.parse_intermixed_args(argv)
    name = _name("resources_servers", arguments.settings, arguments.resources_server)
    kind = _KINDS[arguments.kind]
    root = Path(arguments.search_dir).expanduser().resolve()
    files = {
        "app.py": kind.app,
        f"configs/{name}.yaml": ENVIRONMENT_YAML + kind.settings,
        "tests/test_app.py": kind.test,
        "data/scripted_policy.yaml": kind.policy,
        "README.md": README,
    }
    fields = {**_fields(name, root), "what": kind.what}
    fields["run"] = Template(_RUN).substitute(fields, words=Template(kind.words).substitute(fields))
    folder = root / "resources_servers" / name
    written = {path: Template(text).substitute(fields) for path, text in files.items()}
    _write(folder, {**written, "data/example.jsonl": kind.rows})
    print(f"{folder}: try it{fields['run']}", end="")
    return command.EXIT_OK


def init_agent(argv: Sequence[str]) -> int:
    """Write ``responses_api_agents/NAME``, or with ``--command`` a composition around the composite agent."""
    parser = command.parser("ng agent init", "Write a new agent, which runs at once.", words="NAME")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--python", dest="kind", action="store_const", const="python", help="a server (the default)")
    kinds.add_argument("--command", dest="kind", action="store_const", const="command", help="a program in a box")
    parser.add_argument("--search-dir", default=".", help="the folder above responses_api_agents (default: here)")
    arguments = parser.parse_intermixed_args(argv)
    name = _name("responses_api_agents", arguments.settings, None)
    root = Path(arguments.search_dir).expanduser().resolve()
    folder = root / "responses_api_agents" / name
    fields = _fields(name, root)
    if arguments.kind == "command":
        # Only a configuration and a program: the server is the composite agent's.
        texts = {f"configs/{name}.yaml": COMMAND_YAML, "program/agent.py": COMMAND_PROGRAM, **_SCRIPTED_BASH}
        tried = f"ng env init numbers --box --search-dir {root}\n    "
        tried += f"ng_run agent={name} environment=numbers sandbox=local model=scripted"
    else:
        texts = {"app.py": AGENT_APP, f"configs/{name}.yaml": AGENT_YAML, "tests/test_app.py": AGENT_TEST, **_SCRIPTED}
        tried = f"ng env test {name}\n    ng_run agent={name} environment=mcqa model=scripted"
    _write(folder, {path: Template(text).substitute(fields) for path, text in texts.items()})
    print(f"{folder}: try it\n\n    export NEMO_GYM_EXTRA_ROOTS={root}\n    {tried} output=results/{name}.jsonl")
    return command.EXIT_OK


COMMAND_PROGRAM = '''"""$Title: asks the model, runs the commands that it calls for, until it calls for none."""

import json
import subprocess
import sys
import urllib.request

task = json.load(open(sys.argv[1]))
parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": parameters}}]
messages = [{"role": "user", "content": task["prompt"]}]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
while True:
    body = json.dumps({"model": task["model"], "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(task["model_url"] + "/v1/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(said)
    print(json.dumps({"type": "answer", "text": said.get("content") or ""}))
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
'''


def _name(parent: str, words: Sequence[str], flag: str | None) -> str:
    """Return the new plugin's name, which may stand behind the folder that it goes to, as NeMo Gym writes it."""
    found = command.plugin_name(words, flag) or ""
    name = found.removeprefix("./").removeprefix(f"{parent}/").rstrip("/")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        elsewhere = "; for another folder use --search-dir" if "/" in name else ""
        raise ConfigError(
            f"a name of small letters, digits and underscores is needed, got '{found}'; it is a Python package"
            f"{elsewhere}",
            key="name",
        )
    if (own := INSTALL_ROOT / parent / name).is_dir():
        raise ConfigError(f"{own} exists already, and the new one would hide it; choose another name", key="name")
    return name


def _fields(name: str, root: Path) -> dict[str, str]:
    words = name.split("_")
    return {
        "name": name,
        "Class": "".join(word.title() for word in words if word),
        "Title": " ".join(words).capitalize(),
        "root": str(root),
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name, or remove it", key="name")
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
