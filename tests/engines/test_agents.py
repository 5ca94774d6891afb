"""Agent CLIs before a real vLLM and a real llama.cpp, with a policy that learnt to call each CLI's shell.

Nobody forces what it samples.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.agent.harness.provision import INSTALL_COMMAND
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym.rollouts.trajectories import trajectories_of_rows
from nemo_gym_testing.gateway.real import (
    Demonstration,
    llama_server,
    make_real_policy,
    recomputed_logprobs,
    vllm_server,
    warm_start,
    write_gguf,
)
from tests.engines.conftest import count_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "fern" / "pages").glob("*.md"))
TOLERANCE = 1e-3
"""Of a logprob, between two programs that compute in float32."""
POSITIONS, TURNS, REPEATS = 131_072, 10, 2
OPENING, END = "<|im_start|>assistant\n", "<|im_end|>"
WINDOW = 512
"""Tokens that the policy's attention sees: a CLI's conversation has tens of thousands, and demonstrations hundreds."""
DEMONSTRATIONS = 3_200

SHELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "claude_code": ("Bash", {"command": "", "description": "Say a number"}),
    "codex": ("exec_command", {"cmd": ""}),
    "mini_swe_agent": ("bash", {"command": ""}),
    "opencode": ("bash", {"command": "", "description": "Say a number"}),
    "openhands": ("terminal", {"command": ""}),
    "qwen_code": ("run_shell_command", {"command": "", "is_background": False}),
}
"""Each CLI's tool that runs a command: the empty argument is the command."""


def call_of(cli: str, draw: random.Random) -> dict[str, Any]:
    """A command that is another one each time: some CLIs stop a policy that repeats itself."""
    name, arguments = SHELLS[cli]
    command = f"echo {draw.randrange(1000, 10_000)}"
    filled = {key: command if value == "" else value for key, value in arguments.items()}
    return {"id": "call", "type": "function", "function": {"name": name, "arguments": json.dumps(filled)}}


def demonstrations(cli: str, policy: PolicyTokenizer, seed: int = 0) -> Iterator[Demonstration]:
    """Whatever stands before it, the policy calls the shell."""
    draw = random.Random(f"{cli}:{seed}")
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)

    def text(most: int = 1_500) -> str:
        length = int(most ** draw.random())
        start = draw.randrange(len(pages) - length)
        return pages[start : start + length]

    for _ in range(DEMONSTRATIONS):
        messages: list[dict[str, Any]] = [{"role": "user", "content": text()}]
        for _ in range(draw.randint(0, 2)):
            messages.append({"role": "assistant", "content": "", "tool_calls": [call_of(cli, draw)]})
            said = draw.choice([str(draw.randrange(1000, 10_000)), text(300)])
            messages.append({"role": "tool", "tool_call_id": "call", "content": said})
        messages.append({"role": "assistant", "content": "", "tool_calls": [call_of(cli, draw)]})
        # It does not think; the template writes that for the last answer alone.
        conversation = policy.render(messages, add_generation_prompt=False).replace("<think>\n\n</think>\n\n", "")
        yield _tokens(conversation, policy)


def _tokens(conversation: str, policy: PolicyTokenizer) -> Demonstration:
    given, *answers = conversation.split(OPENING)
    ids = policy.encode(given + OPENING)
    said = [0] * len(ids)
    for number, answer in enumerate(answers, 1):
        spoken, _, rest = answer.partition(END)
        mine = policy.encode(spoken + END)
        theirs = policy.encode(rest + OPENING) if number < len(answers) else []
        ids += mine + theirs
        said += [1] * len(mine) + [0] * len(theirs)
    return Demonstration(ids, said)


async def rollouts(cli: str, output: Path, *model: str) -> list[dict[str, Any]]:
    """The rows of a run of ten turns; ``model``: the words that choose it."""
    words = [f"agent={cli}", "environment=swe_bench", "sandbox=local", *model, "policy_model_name=tiny", "limit=1"]
    words += [f"num_repeats={REPEATS}", f"max_turns={TURNS}", "temperature=1.0", "top_p=0.95", f"output={output}"]
    # What is graded is not looked at here.
    words += ["++swe_bench.resources_servers.swe_bench.tamper_control=off"]
    run = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("ng_run"),
        *words,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await run.communicate()
    assert run.returncode == 0, f"{told.decode()}\nIf the CLI is missing: {INSTALL_COMMAND} agents={cli}"
    rows: list[dict[str, Any]] = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    assert len(rows) == REPEATS and all(row["valid"] for row in rows), told.decode()
    for row in rows:
        assert max(len(one["turns"]) for one in row["ng_trajectory"]) >= TURNS, row["ng_trajectory"]
    return rows


@pytest.fixture(scope="module", params=sorted(SHELLS))
def cli(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(cli: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that calls the shell of ``cli``."""
    made = make_real_policy(tmp_path_factory.mktemp(cli) / "policy", architecture="gemma3", window=WINDOW)
    warm_start(made, demonstrations(cli, PolicyTokenizer.load(made)))
    return made


async def test_cli_of_ten_tool_turns_has_every_token_that_vllm_sampled_once(
    cli: str, policy: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rollouts.jsonl"
    async with vllm_server(policy, tmp_path / "vllm.log", "--enable-scale-out", max_model_len=POSITIONS) as url:
        await rollouts(cli, output, "model=vllm", f"policy_base_url={url}", f"policy_path={policy}")
        sampled = await count_of(url, "vllm:generation_tokens_total")
    trajectories = [one for row in trajectories_of_rows(output) for one in row]
    assert sum(one.sampled_count for one in trajectories) == sampled
    logprobs = recomputed_logprobs(policy, [[*one.prompt_ids, *one.response_ids] for one in trajectories])
    for one, found in zip(trajectories, logprobs, strict=True):
        assert one.logprobs is not None
        kept = [value for value, mask in zip(one.logprobs, one.response_mask, strict=True) if mask]
        weights = [value for value, mask in zip(found[len(one.prompt_ids) :], one.response_mask, strict=True) if mask]
        assert kept == pytest.approx(weights, abs=TOLERANCE)


async def test_cli_of_ten_tool_turns_has_every_answer_of_llama_cpp_as_text(
    cli: str, policy: Path, tmp_path: Path
) -> None:
    file = await asyncio.to_thread(write_gguf, policy, tmp_path / "policy.gguf")
    async with llama_server(file, tmp_path / "llama.log", parallel=REPEATS) as url:
        rows = await rollouts(cli, tmp_path / "rollouts.jsonl", "model=gateway", f"policy_base_url={url}/v1")
        sampled = await count_of(url, "llamacpp:tokens_predicted_total")
    assert sum(row["ng_model_session"]["usage"]["output_tokens"] for row in rows) == sampled
