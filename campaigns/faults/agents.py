#!/usr/bin/env python3
"""Run real agent CLIs in real boxes through every fault: each must end in time with a typed outcome and leave nothing.

    python -m campaigns.faults.agents [--json] [--sandbox local docker] [--clis claude_code …]
        [--faults NAME …] [--workers 3] [--list]

Each case is one attempt through the CLI's own agent server, with a scripted policy. It must end with the outcome of
its fault, within its wall clock and the grace for stopping, with the work done before the fault in its patch. After
it, no box, process, mount, cgroup, container, door socket or temporary file of the case may be left.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.faults.agent_faults import FAULTS, KEPT, MARKS, Fault, Seen
from campaigns.faults.leftovers import Scope, foreign_sockets, leftovers
from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.provision import installed
from nemo_gym.agent.harness.run import STOP_TIMEOUT_S
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    InferenceEndpoint,
    Limits,
    McpServer,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    Topology,
)
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from responses_api_agents.codex_agent.app import CodexAgent
from responses_api_agents.opencode_agent.app import OpencodeAgent
from responses_api_agents.openhands_agent.app import OpenHandsAgent
from responses_api_agents.qwen_code_agent.app import QwenCodeAgent
from responses_api_models.scripted_model.app import ScriptedModel
from tests.harness import stage
from tests.servers.stack import Stack, running_stack

ROOT = Path(__file__).resolve().parents[2]
SANDBOXES = ("local", "docker")
ALL, LEFT = "all", "left:"
MAX_MODEL_FAILURES = 5
GONE_WITHIN_S = 15.0
"""Time after the act's response in which the kernel and the engine may finish their own cleanup."""
HARVEST_S = 15.0
"""Time added to the grace for stopping: to harvest the patch on a machine that is busy with other cases."""


@dataclass(frozen=True)
class Cli:
    """A CLI, and how long it takes to get to a fault."""

    agent: type[CliAgent]
    patience_s: float
    """The wall clock of the cases that end by reaching it."""
    harness: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the harness."""


CLIS = {
    "claude_code": Cli(ClaudeCodeAgent, 20),
    "codex": Cli(CodexAgent, 20),
    "opencode": Cli(OpencodeAgent, 60),
    "qwen_code": Cli(QwenCodeAgent, 45),
    # Its shell waits ten seconds for output, and stuck detection would end the run at the fourth identical call.
    "openhands": Cli(OpenHandsAgent, 150, {"stuck_detection": False}),
}


@dataclass
class Campaign:
    """Servers, boxes, and the cases of one sandbox."""

    sandbox: str
    provider: SandboxProvider
    stack: Stack
    state_dir: Path
    mcp_url: str
    slots: asyncio.Semaphore
    boxes: set[str] = field(default_factory=set)
    """Every box that was seen."""
    most: Counter[str] = field(default_factory=Counter)
    """The highest count of each kind of thing at one moment: it shows that `look` can find what a case leaves."""

    async def run(self, number: int, cli: str, fault: Fault) -> Seen:
        async with self.slots:
            wall_clock_s = CLIS[cli].patience_s if fault.reaches_deadline else fault.wall_clock_s
            run_id = f"agent-faults-{os.getpid()}-{self.sandbox}-{number}"
            request = await self._request(run_id, number, cli, fault, wall_clock_s)
            began = time.monotonic()
            reply = await self.stack.client().post(cli, "/act", json=request.model_dump(mode="json"))
            seconds = time.monotonic() - began
            body = await reply.json()
            if reply.status != 200:
                failure = Seen(self.sandbox, cli, fault.name, f"HTTP {reply.status}", str(body)[:500], seconds, 0.0)
                return Seen(**{**asdict(failure), "problems": ["the act failed"]})
            response = ActResponse.model_validate(body)
            over_s = seconds - wall_clock_s
            problems = judged(fault, response, over_s)
            problems += await self._left(run_id, number)
        return Seen(
            self.sandbox,
            cli,
            fault.name,
            str(response.outcome),
            (response.outcome_detail or "")[:300],
            round(seconds, 2),
            round(over_s, 2),
            problems,
        )

    async def _request(self, run_id: str, number: int, cli: str, fault: Fault, wall_clock_s: float) -> ActRequest:
        rollout = RolloutIdentity(rollout_id=f"r{number}", task_id="t", group_id="g", run_id=run_id)
        resources = {"memory_mib": fault.memory_mib} if fault.memory_mib else {}
        spec = SandboxSpecModel.model_validate({"image": stage.IMAGE, "workdir": "/repo", "resources": resources})
        descriptor = stage.descriptor(
            Topology.AGENT_IN_ENV,
            rollout=rollout,
            sandbox=SandboxClause(spec=spec),
            limits=Limits(wall_clock_s=wall_clock_s, max_turns=fault.max_turns),
        )
        if fault.wrong_mcp_token:
            server = McpServer(name="weather", url=f"{self.mcp_url}/mcp", headers={"Authorization": "Bearer wrong"})
            descriptor = descriptor.model_copy(update={"mcp": (server,)})
        client = self.stack.client()
        policy = f"policy-{cli}"
        opened = await (await client.post(policy, "/sessions", json={"rollout": rollout.model_dump()})).json()
        # Nobody listens on this port.
        base_url = "http://127.0.0.1:9/v1" if fault.gone else opened["base_url"]
        return ActRequest(
            responses_create_params={"input": [{"role": "user", "content": fault.words(number)}]},
            descriptor=descriptor,
            inference=InferenceEndpoint(base_url=base_url, token=opened["inference_token"], model=opened["model"]),
        )

    async def _left(self, run_id: str, number: int) -> list[str]:
        """Return what a case left, after a moment in which the kernel and the engine may clean up."""
        marks = [mark.format(case=number) for mark in MARKS.values()]

        async def left() -> list[str]:
            boxes = [box.sandbox_id for box in await self.provider.list({BoxLabel.RUN: run_id})]
            running = await asyncio.to_thread(subprocess.check_output, ["ps", "-eo", "pid,args"], text=True)
            processes = [line.strip()[:120] for line in running.splitlines() if any(mark in line for mark in marks)]
            return [f"{LEFT} box {box}" for box in boxes] + [f"{LEFT} process {process}" for process in processes]

        return await settled(left)

    async def watch(self) -> None:
        """Record every box, so that `look` can search for its cgroups when the box is gone."""
        mark = f"agent-faults-{os.getpid()}-"
        while True:
            boxes = [box for box in await self.provider.list({}) if box.labels.get(BoxLabel.RUN, "").startswith(mark)]
            self.boxes |= {box.sandbox_id for box in boxes}
            state = await asyncio.to_thread(self.look)
            for kind, count in {"boxes": len(boxes), **{kind: len(things) for kind, things in state.items()}}.items():
                self.most[kind] = max(self.most[kind], count)
            await asyncio.sleep(0.5)

    def look(self) -> dict[str, list[str]]:
        """Return what exists of any box now, and the sockets of doors."""
        groups = [group for group, _, _ in os.walk("/sys/fs/cgroup") if any(box in group for box in self.boxes)]
        present = {**leftovers(Scope(self.state_dir, run_id="")), "doors": foreign_sockets()}
        return {**present, "cgroups": [*present.get("cgroups", []), *groups]}


async def settled(look: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Call ``look`` until it finds nothing or `GONE_WITHIN_S` has passed; return what it found last."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        found: list[str] = await look()
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


def judged(fault: Fault, answer: ActResponse, over_s: float) -> list[str]:
    """Return what is wrong with an act's response."""
    problems = []
    detail, observations = answer.outcome_detail or "", answer.observations
    if answer.outcome is not fault.outcome:
        problems.append(f"outcome {answer.outcome}, not {fault.outcome}")
    if fault.detail not in detail:
        problems.append(f"no '{fault.detail}' in the detail")
    if over_s > STOP_TIMEOUT_S + HARVEST_S:
        problems.append(f"{over_s:.1f} s over its wall clock")
    if answer.within_reach is not fault.within_reach:
        problems.append(f"within_reach is {answer.within_reach}")
    patch = answer.artifacts[0].content().decode() if answer.artifacts else ""
    if fault.works_first and f"+{KEPT}" not in patch:
        problems.append("the work before the fault is not in the patch")
    if patch and patch.count("diff --git") != 1:
        problems.append("the patch changes more than one file")
    stderr = observations.get("stderr", {"bytes": 0, "text": ""})
    if stderr["bytes"] < fault.stderr_bytes or len(stderr["text"]) > 20_000:
        problems.append(f"{stderr['bytes']} bytes of stderr, {len(stderr['text'])} characters kept")
    return problems


async def everything_left(campaign: Campaign, temporary: Path) -> list[str]:
    """Return what all cases of a sandbox together left."""

    async def left() -> list[str]:
        present = await asyncio.to_thread(campaign.look)
        present["temporary files"] = [path.name for path in temporary.iterdir()]
        return [f"{kind}: {thing}" for kind, things in present.items() for thing in things]

    return await settled(left)


@contextmanager
def servers(sandbox: dict[str, Any], cases: Sequence[tuple[int, str, Fault]], folder: Path) -> Iterator[Stack]:
    """A policy and an agent server for each CLI."""
    with running_stack() as running:
        for cli in {cli for _, cli, _ in cases}:
            script = folder / f"{cli}.json"
            tasks = [fault.task(number) for number, name, fault in cases if name == cli]
            script.write_text(json.dumps({"model": "scripted", "tasks": tasks}))
            tools = ROOT / "responses_api_agents" / f"{cli}_agent" / "data" / "scripted_tools.yaml"
            running.add(f"policy-{cli}", ScriptedModel, Role.MODEL, script=str(script), tools=str(tools))
            running.add(
                cli,
                CLIS[cli].agent,
                Role.AGENT,
                (f"policy-{cli}",),
                resources_server={"type": "resources_servers", "name": "env"},
                model_server={"type": "responses_api_models", "name": f"policy-{cli}"},
                sandbox_provider=sandbox,
                max_model_failures=MAX_MODEL_FAILURES,
                harness=dict(CLIS[cli].harness),
            )
        yield running


@asynccontextmanager
async def campaign(
    sandbox: str, cases: Sequence[tuple[int, str, Fault]], workers: int, folder: Path
) -> AsyncIterator[Campaign]:
    """Everything that the cases of one sandbox use."""
    state_dir = folder / "state"
    settings: dict[str, Any] = {"state_dir": str(state_dir), "image_dir": str(folder / "images"), "linger_s": 1}
    if sandbox == "docker":
        from tests.docker_engine import start_engine

        settings = {"base_url": await asyncio.to_thread(start_engine)}
    provider = create_provider({sandbox: settings})
    try:
        if await provider.image_labels(stage.IMAGE) is None:  # type: ignore[attr-defined]
            await stage.commit_image(provider)
        async for mcp_url in stage.weather_server([]):
            with servers({sandbox: settings}, cases, folder) as stack:
                yield Campaign(sandbox, provider, stack, state_dir, mcp_url, asyncio.Semaphore(workers))
    finally:
        await provider.aclose()
        await close_global_aiohttp_client()


async def run(sandbox: str, clis: Sequence[str], faults: Sequence[str], workers: int, folder: Path) -> list[Seen]:
    """Run all cases of one sandbox. Return their results, and one more for what all of them left."""
    # Servers get a separate directory for temporary files, so that anything left in it is theirs.
    temporary = folder / "tmp"
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    order = [(name, cli) for name in faults for cli in clis]
    cases = [(number, cli, FAULTS[name]) for number, (name, cli) in enumerate(order, 1)]
    results: list[Seen] = []
    async with campaign(sandbox, cases, workers, folder) as running:
        watching = asyncio.create_task(running.watch())

        async def run_case(number: int, cli: str, fault: Fault) -> None:
            result = await running.run(number, cli, fault)
            results.append(result)
            heading = f"{'ok  ' if result.ok else 'MISS'} {sandbox:6} {cli:11} {result.fault:31} {result.outcome:17}"
            details = "; ".join(result.problems) or result.detail
            print(f"{heading} {result.seconds:6.1f} s  {details}"[:260], file=sys.stderr, flush=True)

        await asyncio.gather(*(run_case(*case) for case in cases))
        watching.cancel()
        await asyncio.wait({watching})
        left = await everything_left(running, temporary)
        most = ", ".join(f"{kind}: {count}" for kind, count in sorted(running.most.items()))
        results.append(Seen(sandbox, ALL, "left in the end", "", most, 0.0, 0.0, left))
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sandbox", nargs="+", default=list(SANDBOXES), choices=SANDBOXES)
    parser.add_argument("--clis", nargs="+", default=list(CLIS), choices=CLIS)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    parser.add_argument("--workers", type=int, default=3, help="cases at once")
    parser.add_argument("--list", action="store_true", help="only say which faults there are")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        print("\n".join(FAULTS))
        return 0
    faulthandler.dump_traceback_later(5400, exit=True)  # a campaign that hangs prints where
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs each broken response
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for cli in chosen.clis:
        installed(CLIS[cli].agent.harness_class.package)
    results: list[Seen] = []
    for sandbox in chosen.sandbox:
        old_tmpdir = os.environ.get("TMPDIR")
        with tempfile.TemporaryDirectory(prefix="agent-faults-", ignore_cleanup_errors=True) as name:
            try:
                results += asyncio.run(run(sandbox, chosen.clis, chosen.faults, chosen.workers, Path(name)))
                time.sleep(2)  # until the supervisor has exited
            finally:
                tempfile.tempdir = None
                os.environ.pop("TMPDIR")
                if old_tmpdir is not None:
                    os.environ["TMPDIR"] = old_tmpdir
    return print_report(*report(results, chosen.sandbox, chosen.clis), as_json=chosen.json)


def report(seen: Sequence[Seen], sandboxes: Sequence[str], clis: Sequence[str]) -> tuple[dict[str, Any], list[Bar]]:
    figures: dict[str, Any] = {"misses": [asdict(case) for case in seen if not case.ok]}
    bars: list[Bar] = []
    for sandbox in sandboxes:
        group = [case for case in seen if case.sandbox == sandbox]
        for cli in clis:
            cases = [case for case in group if case.cli == cli]
            wrong = [case for case in cases if any(not problem.startswith(LEFT) for problem in case.problems)]
            figures[f"{sandbox}/{cli}"] = {
                "cases": len(cases),
                "act_s": Samples([case.seconds for case in cases]).summary(1),
                "most_over_wall_clock_s": max(case.over_s for case in cases),
                "outcomes": {case.fault: case.outcome for case in cases},
            }
            bars.append(Bar.at_most(f"{sandbox}/{cli}: cases of {len(cases)} with another outcome", len(wrong), 0))
        (final,) = (case for case in group if case.cli == ALL)
        figures[f"{sandbox}/seen_at_most_at_once"] = final.detail
        left = [problem for case in group for problem in case.problems if case is final or problem.startswith(LEFT)]
        bars.append(Bar.at_most(f"{sandbox}: things left behind", len(left), 0))
    return figures, bars


if __name__ == "__main__":
    sys.exit(main())
