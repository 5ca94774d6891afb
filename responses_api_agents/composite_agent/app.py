"""An agent server that runs any command, for agents of several processes and agents without a harness of their own."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_gym._util.files import cache_root
from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliHarness, CliPackage, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.prompt import resolve_path
from responses_api_agents.composite_agent.events import CompositeReader
from responses_api_agents.composite_agent.options import MCP_FILE, PROMPT_FILE, TASK_FILE, CompositeOptions, Words

EXAMPLE = Path(__file__).with_name("example")


class Composite(CliHarness):
    name = "composite"
    package = CliPackage(name="composite", version="1", command="planner.py", runtime="python", directory=EXAMPLE)
    options_class = CompositeOptions
    options: CompositeOptions

    def __init__(self, options: CompositeOptions) -> None:
        super().__init__(options)
        self.name = options.name
        self.package = CliPackage(
            name=options.name, version=options.version, command=".", runtime=options.runtime, directory=self._program()
        )

    def _program(self) -> Path:
        if self.options.program is None:
            # Every agent has a mount, so mount an empty directory. It lies where a broker allows agents' mounts.
            empty_directory = cache_root() / "agents" / ".nothing"
            try:
                empty_directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the cache {cache_root()} cannot be written to ({error.strerror}); set NEMO_GYM_CACHE_DIR",
                    key="NEMO_GYM_CACHE_DIR",
                ) from error
            return empty_directory
        directory = resolve_path(self.options.program)
        if not directory.is_dir():
            raise ConfigError(
                f"agent '{self.options.name}': harness.program: there is no directory {directory}",
                key="harness.program",
            )
        return directory

    def command(self, context: HarnessContext) -> HarnessCommand:
        words, options = Words(context), self.options
        task = {
            "prompt": context.prompt,
            "system": context.system,
            "model": context.model,
            "model_url": context.model_url,
            "api_key": context.api_key,
            "mcp": {server.name: server.url for server in context.mcp},
            "workdir": context.workdir,
            "home": context.home,
            "max_turns": context.max_turns,
            "wall_clock_s": context.wall_clock_s,
            "max_output_tokens": context.max_output_tokens,
            "session": context.session_uuid,
        }
        servers = {server.name: {"type": "http", "url": server.url} for server in context.mcp}
        prompt, task_json = context.prompt.encode(), json.dumps(task).encode()
        return HarnessCommand(
            argv=tuple(words.fill(part) for part in options.command),
            env={key: words.fill(value) for key, value in options.env.items()},
            files={
                f"{context.home}/{PROMPT_FILE}": prompt,
                f"{context.home}/{TASK_FILE}": task_json,
                f"{context.home}/{MCP_FILE}": json.dumps({"mcpServers": servers}).encode(),
                **{words.fill(path): words.fill(text).encode() for path, text in options.files.items()},
            },
            stdin={"prompt": prompt, "task": task_json, "nothing": None}[options.stdin],
        )

    def reader(self) -> CompositeReader:
        return CompositeReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, CompositeReader)
        if ended.return_code in self.options.outcomes:
            outcome = self.options.outcomes[ended.return_code]
        elif ended.ok:
            outcome = reader.claim or AgentOutcome.COMPLETED
        else:
            # A failed program may report that it gave up, but its report of success does not count.
            gave_up = reader.claim in (AgentOutcome.MAX_TURNS, AgentOutcome.REFUSED)
            outcome = reader.claim if gave_up and reader.claim else AgentOutcome.CRASHED
        return outcome, None if outcome is AgentOutcome.COMPLETED else reader.detail or ended.how


class CompositeAgent(CliAgent):
    harness_class = Composite


if __name__ == "__main__":
    CompositeAgent.run_webserver()
