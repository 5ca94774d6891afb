"""The page on rollouts as a service says what the code does, and its commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_gym.config.pipeline import PipelineConfig, ServiceConfig
from nemo_gym.service.submission import JobBody
from tests.architecture.docs import PAGES, ROOT, command_lines, table, write_examples

PAGE = PAGES / "rollouts-as-a-service.md"
LINES = [line for line in command_lines(PAGE) if not line.has_gaps]
PORT = "8210"


def test_every_key_of_the_service_is_documented() -> None:
    own = set(ServiceConfig.model_fields) - set(PipelineConfig.model_fields)
    assert set(table(PAGE, "key of `serve`")) == own
    assert set(table(PAGE, "member of a job")) == set(JobBody.model_fields)


def test_every_command_of_the_page_is_one_that_these_tests_run() -> None:
    shown = [line for line in command_lines(PAGE) if line.program != "pip"]
    assert [line for line in shown if line.has_gaps] == []
    assert {line.program for line in shown} == {"ng_serve_rollouts", "ng_jobs", "ng_run"}


def test_block_of_the_page_makes_ng_run_serve(place: Place) -> None:
    place = place.without_token()
    (shown,) = (block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "serve:" in block)
    (place.directory / "serve.yaml").write_text(shown.replace(PORT, "0"))
    (serve,) = (line for line in LINES if line.program == "ng_serve_rollouts")
    words = [word for word in serve.words[1:] if not word.startswith(("serve.", "run_id="))]
    start = [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words, "+config_paths=[serve.yaml]"]
    with running(place, [*start, "run_id=block"], "block.txt", "rollouts are served at"):
        status = json.loads(place.run(*place.command(("ng_jobs", "status", "--json", "run_id=block"))))
        assert {each["capacity"] for each in status["servers"] if each["instance"] == "simple_agent"} == {64}


@pytest.mark.full
def test_service_attaches_to_a_stack_and_leaves_it_running(place: Place) -> None:
    place = place.without_token()
    (serve,) = (line for line in LINES if line.program == "ng_serve_rollouts")
    words = [word for word in serve.words[1:] if not word.startswith(("serve.", "run_id="))]
    stack = [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words, "run_dir=stack"]
    attach = place.command(("ng_serve_rollouts", "attach=stack", "serve.port=0"))
    submit = ("ng_jobs", "submit", "input=resources_servers/mcqa/data/example.jsonl", "run=one", "run_dir=stack")
    with running(place, stack, "stack.txt", "servers ready") as servers:
        for said in ("5 done; ", "5 done; "):  # the second service finds the first one's jobs
            with running(place, attach, "attached.txt", "rollouts are served at"):
                assert said in place.run(*place.command((*submit, "--watch")))
            assert servers.poll() is None


@contextmanager
def running(place: Place, start: list[str], log: str, says: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command from when it says that until the block ends; a signal then ends it in order."""
    path = place.directory / log
    with path.open("w") as said:
        process = subprocess.Popen(start, cwd=place.directory, env=place.variables, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 90
            while says not in path.read_text():
                assert process.poll() is None and time.monotonic() < deadline, path.read_text()
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 0


@dataclass
class Place:
    directory: Path
    variables: dict[str, str]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self.variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def without_token(self) -> Place:
        """For services with tokens of their own, which commands find in the run's directory."""
        left = {key: value for key, value in self.variables.items() if key != "NEMO_GYM_SERVICE_TOKEN"}
        return Place(self.directory, left)

    def command(self, words: tuple[str, ...]) -> list[str]:
        module, main = {"ng_serve_rollouts": ("run", "main_serving"), "ng_jobs": ("jobs", "main")}[words[0]]
        return [sys.executable, "-c", f"from nemo_gym.cli.{module} import {main}; {main}()", *words[1:]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A directory with the page's examples, in which its service runs; on a free port."""
    directory = tmp_path_factory.mktemp("service")
    write_examples(PAGE, directory)
    (directory / "resources_servers").symlink_to(ROOT / "resources_servers")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "NEMO_GYM_CACHE_DIR": str(directory / "cache")}
    made = Place(directory, variables)
    (serve,) = (line for line in LINES if line.program == "ng_serve_rollouts")
    words = tuple(word.replace(PORT, "0") for word in serve.words)
    with (directory / "said.txt").open("w") as said:
        service = subprocess.Popen(made.command(words), cwd=directory, env=variables, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 90
            while "rollouts are served at" not in (directory / "said.txt").read_text():
                assert service.poll() is None and time.monotonic() < deadline, (directory / "said.txt").read_text()
                time.sleep(0.05)
            address = json.loads((directory / "cache" / "runs" / "serve" / "service.json").read_text())
            variables["NEMO_GYM_SERVICE_TOKEN"] = address["tokens"]["operate"]
            for script in directory.glob("*.sh"):
                script.write_text(script.read_text().replace(f"http://127.0.0.1:{PORT}", address["url"]))
            yield made
        finally:
            service.terminate()
            assert service.wait(60) == 0


def test_commands_of_the_page_submit_watch_and_tell(place: Place) -> None:
    for line in LINES:
        if line.program == "ng_jobs":
            said = place.run(*place.command(line.words))
            if "--watch" in line.words:
                assert said.startswith("10 done; simple_agent: reward ")
    assert len((place.directory / "first.jsonl").read_text().splitlines()) == 10


def test_stack_of_the_page_lends_its_servers_until_it_is_stopped(place: Place) -> None:
    (line,) = (line for line in LINES if line.program == "ng_run")
    url = json.loads((place.directory / "cache" / "runs" / "serve" / "service.json").read_text())["url"]
    words = [word.replace(f"http://127.0.0.1:{PORT}", url) for word in line.words[1:]]
    start = [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words]
    with (place.directory / "lent.txt").open("w") as said:
        lender = subprocess.Popen(start, cwd=place.directory, env=place.variables, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 90
            while "lent to" not in (place.directory / "lent.txt").read_text():
                assert lender.poll() is None and time.monotonic() < deadline, (
                    place.directory / "lent.txt"
                ).read_text()
                time.sleep(0.05)
            submit = ("ng_jobs", "submit", "input=resources_servers/mcqa/data/example.jsonl", "run=lent")
            said_of = place.run(*place.command((*submit, "num_repeats=4", "--watch", "run_id=serve")))
            assert said_of.startswith("20 done; ")
            status = json.loads(place.run(*place.command(("ng_jobs", "status", "--json", "run_id=serve"))))
            done = {server["server_id"]: server["done"] for server in status["servers"]}
            assert min(done["simple_agent.1"], done["mcqa.1"]) > 0
        finally:
            lender.terminate()
            assert lender.wait(60) == 0
    status = json.loads(place.run(*place.command(("ng_jobs", "status", "--json", "run_id=serve"))))
    assert "simple_agent.1" not in {server["server_id"] for server in status["servers"]}


def test_program_of_the_page_submits_and_waits(place: Place) -> None:
    said = place.run(sys.executable, "submit.py").splitlines()
    assert said[0].startswith("5 [('odd', ") and "the row has no prompt" in said[0]
    assert said[1] == "5 known before"
    assert said[-1] == "{'done': 5}"


def test_requests_of_the_page_are_answered(place: Place) -> None:
    (submit,) = (line for line in LINES if line.words[:2] == ("ng_jobs", "submit"))
    place.run(*place.command(submit.words))
    said = place.run("bash", "-e", "read.sh")
    assert said.count("event: result") == 10
    status = json.loads(said[said.rindex('{"store"') :])
    agent = next(server for server in status["servers"] if server["instance"] == "simple_agent")
    place.variables["URL"] = agent["url"]
    told = json.loads(place.run("bash", "-e", "add.sh"))
    assert (told["server_id"], told["capacity"]) == ("simple_agent.0", 32)
