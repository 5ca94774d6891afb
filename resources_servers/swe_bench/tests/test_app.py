"""The environment as its callers see it: what a session tells, what it keeps to itself, how work is judged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import NemoGymError, VerifierError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import Artifact, RolloutIdentity, Topology
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox.base import ExecOutcome, SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.server_utils import ServerClient
from resources_servers.swe_bench import grading
from resources_servers.swe_bench.app import BoxResources, SweBenchConfig, SweBenchServer
from resources_servers.swe_bench.eval_box import EvalSite, exec_in, instrumented, split_script
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import SweBenchRow, read_rows, resolve_image
from resources_servers.swe_bench.verdicts import judge
from tests.servers.stack import Stack, response, rollout, running_stack

EXAMPLES = Path(__file__).parents[1] / "data" / "example.jsonl"
ROLLOUT = RolloutIdentity(rollout_id="r1", task_id="examples__slugline-1", group_id="g1")


def prepared(instance_id: str, *words: str) -> dict[str, Any]:
    row = next(row for _, row in read_rows(EXAMPLES) if row["instance_id"] == instance_id)
    asyncio.run(prepare(Options.parse([f"rows={EXAMPLES}", "sandbox=local", f"instances={instance_id}", *words])))
    return row


@pytest.fixture(scope="session")
def row() -> dict[str, Any]:
    return prepared(ROLLOUT.task_id)


@pytest.fixture(scope="session")
def django_row() -> dict[str, Any]:
    """One whose logs the official Django parser reads; nothing is confirmed."""
    return prepared("examples__spanwise-1", "controls=off")


@pytest.fixture
async def server() -> AsyncIterator[SweBenchServer]:
    config = SweBenchConfig(
        host="127.0.0.1", port=0, entrypoint="app.py", name="swe_bench", sandbox_provider={"local": {}}
    )
    made = SweBenchServer(config=config, server_client=ServerClient(global_config_dict={}))
    yield made
    await made.shutdown()


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    made = create_provider("local")
    yield made
    await made.aclose()


async def test_session_holds_no_grading_material(server: SweBenchServer, row: dict[str, Any]) -> None:
    descriptor = await server.open_session(row, ROLLOUT)
    public = json.dumps([descriptor.model_dump(mode="json"), server.public_row(row)])
    lines = [line[1:].strip() for line in (row["patch"] + row["test_patch"]).splitlines() if line.startswith("+")]
    assert not [line for line in lines if len(line) > 20 and line in public]
    for private in ("FAIL_TO_PASS", "PASS_TO_PASS", "test_patch", "eval_script"):
        assert private not in public
    assert descriptor.placement.topology is Topology.AGENT_IN_ENV
    assert [item.name for item in descriptor.harvest] == ["patch"]


def test_prompt_is_the_problem_statement_when_the_row_brings_none(server: SweBenchServer, row: dict[str, Any]) -> None:
    (message,) = server.public_row(row)["responses_create_params"]["input"]
    assert row["problem_statement"].strip() in message["content"]
    own = {"input": "do it", "temperature": 0.5, "metadata": {"instance_dict": "secret"}}
    public = server.public_row({**row, "responses_create_params": own})
    assert public["responses_create_params"] == {"input": "do it", "temperature": 0.5}


async def test_row_is_found_when_it_is_carried_as_metadata(server: SweBenchServer, row: dict[str, Any]) -> None:
    carried = {"responses_create_params": {"input": "x", "metadata": {"instance_dict": json.dumps(row)}}}
    assert server.task_id(carried) == ROLLOUT.task_id
    assert (await server.gold_solution(carried)) == {"git_patch": {"path": "/testbed", "patch": row["patch"]}}


async def test_verdicts_are_the_same_when_the_same_work_is_verified_again(
    server: SweBenchServer, row: dict[str, Any]
) -> None:
    gold = Artifact.of("patch", "git_diff", row["patch"].encode())
    nothing = Artifact.of("patch", "git_diff", b"")
    verdicts = [(await server.grade(row, {}, [artifact], ROLLOUT)) for artifact in (gold, nothing, gold, nothing)]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert all(verdict.valid and not verdict.findings for verdict in verdicts)
    assert verdicts[0].official == verdicts[2].official
    assert verdicts[1].official == verdicts[3].official


@pytest.mark.parametrize(
    "artifact",
    [
        Artifact.of("patch", "git_diff", b"", truncated=True, error="too large"),
        Artifact.of("patch", "git_diff", b"not a patch at all\n"),
        Artifact.of("patch", "git_diff", b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-no\n+yes\n"),
    ],
    ids=["truncated", "garbage", "does_not_apply"],
)
async def test_reward_is_zero_and_valid_when_the_patch_is_no_good(
    server: SweBenchServer, row: dict[str, Any], artifact: Artifact
) -> None:
    verdict = await server.grade(row, {}, [artifact], ROLLOUT)
    assert verdict.valid and verdict.reward == 0.0
    assert not verdict.official["patch_successfully_applied"]


async def test_verdict_is_given_when_its_log_cannot_be_kept(
    server: SweBenchServer, row: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    server.config.logs_dir = tmp_path / "logs"
    verdict = await server.grade(row, {}, [Artifact.of("patch", "git_diff", b"")], ROLLOUT)
    assert (verdict.valid, verdict.reward) == (True, 0.0)


async def test_verdict_is_refused_when_no_patch_was_delivered(server: SweBenchServer, row: dict[str, Any]) -> None:
    with pytest.raises(NemoGymError) as raised:
        await server.grade(row, {}, [], ROLLOUT)
    assert raised.value.details["kind"] is FailureKind.AGENT_CRASHED


HANG = b"""diff --git a/slugline/hang.py b/slugline/hang.py
new file mode 100644
--- /dev/null
+++ b/slugline/hang.py
@@ -0,0 +1,2 @@
+import time
+time.sleep(1000)
diff --git a/conftest.py b/conftest.py
new file mode 100644
--- /dev/null
+++ b/conftest.py
@@ -0,0 +1 @@
+import slugline.hang
"""


async def test_hanging_patch_is_a_valid_failure_when_the_gold_patch_does_not_hang(
    provider: SandboxProvider, row: dict[str, Any]
) -> None:
    image = await resolve_image(provider, row)
    site = EvalSite(provider, image.name, image.env, timeout_s=12)
    verdict = (await judge(site, SweBenchRow.from_mapping(row), Artifact.of("patch", "git_diff", HANG), None)).verdict
    assert verdict.valid and verdict.reward == 0.0
    assert verdict.official["timed_out"]


async def test_no_verdict_is_given_when_the_gold_patch_does_not_pass_in_time_either(
    provider: SandboxProvider, row: dict[str, Any]
) -> None:
    image = await resolve_image(provider, row)
    site = EvalSite(provider, image.name, image.env, timeout_s=0.05)
    with pytest.raises(NemoGymError) as raised:
        await judge(site, SweBenchRow.from_mapping(row), Artifact.of("patch", "git_diff", HANG), None)
    assert raised.value.details["kind"] is FailureKind.CONTROL_RUN_FAILED
    assert raised.value.details["evaluation_log"]


@pytest.mark.parametrize(
    ("resources", "kind"), [({}, None), ({"unlimited": ["memory_mib"]}, FailureKind.HOST_OUT_OF_MEMORY)]
)
async def test_running_out_of_memory_counts_against_the_patch_where_the_provider_limits_the_box(
    resources: dict[str, Any], kind: FailureKind | None
) -> None:
    provider = create_provider({"local": {"default_resources": {"memory_mib": 96}}})
    site = EvalSite(provider, "host", resources=BoxResources(**resources).to_resources())
    box = await provider.create(SandboxSpec(ttl_s=60, workdir="/testbed"))
    try:
        running = exec_in(site, box, ["python3", "-c", "x = bytearray(300_000_000)"], timeout_s=60)
        if kind is None:
            assert (await running).outcome is ExecOutcome.OUT_OF_MEMORY
        else:
            with pytest.raises(VerifierError) as raised:
                await running
            assert raised.value.details["kind"] is kind
    finally:
        await provider.close(box)
        await provider.aclose()


def test_script_returns_the_test_commands_exit_code_when_it_is_instrumented(row: dict[str, Any]) -> None:
    script = instrumented(row["eval_script"])
    assert script.rstrip().endswith("exit $SWEBENCH_TEST_EXIT_CODE\n}")
    assert split_script(script)[1].splitlines()[-1] == "SWEBENCH_TEST_EXIT_CODE=$?"


QUADRATIC = b"""diff --git a/spanwise/loud.py b/spanwise/loud.py
new file mode 100644
--- /dev/null
+++ b/spanwise/loud.py
@@ -0,0 +1,2 @@
+import sys
+sys.stderr.write("a ... Testing against Django installed in x\\n" * 40_000)
diff --git a/tests/__init__.py b/tests/__init__.py
new file mode 100644
--- /dev/null
+++ b/tests/__init__.py
@@ -0,0 +1 @@
+import spanwise.loud
"""


async def test_server_answers_others_while_it_parses_a_log_that_has_no_end(
    django_row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "PARSE_TIMEOUT_S", 6.0)
    with running_stack() as stack:
        stack.add("swe_bench", SweBenchServer, Role.ENVIRONMENT, sandbox_provider={"local": {}}, tamper_control="off")
        session: dict[str, Any] = {"rollout": rollout().model_dump()}
        seeded = await post(stack, "/seed_session", {**django_row, "_ng_session": session})
        session["artifacts"] = [Artifact.of("patch", "git_diff", QUADRATIC).model_dump()]
        work = {**django_row, "response": response(), "_ng_session": session}
        judging = asyncio.ensure_future(post(stack, "/verify", work, seeded["control_token"]))
        client = stack.client()
        read = False
        while not judging.done():
            reply = await asyncio.wait_for(client.get("swe_bench", "/health"), 20)
            assert reply.status == 200
            read = read or bool(reading_processes())
            await asyncio.wait([judging], timeout=0.1)
        verdict = await judging
        assert read
    assert (verdict["valid"], verdict["reward"]) == (True, 0.0), verdict
    assert verdict["details"]["grading"] == "the log could not be parsed within 6 s"
    assert not reading_processes(), "they end with the server"


async def post(stack: Stack, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
    headers = {} if token is None else {"X-NeMo-Gym-Control-Token": token}
    reply = await stack.client().post("swe_bench", path, json=body, headers=headers)
    answer: dict[str, Any] = await reply.json()
    assert reply.status == 200, answer
    return answer


def reading_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if any("read_log" in word for word in child.cmdline())]
