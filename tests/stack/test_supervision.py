"""Servers as processes: they start, crash, are restarted, and end, each for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nemo_gym._util.secrets import public_environment
from nemo_gym.config.compose import compose
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
from nemo_gym.stack import nursery
from nemo_gym.stack.stack import running_stack
from nemo_gym.stack.supervisor import stop_nursery

from .stacks import GROUPS, children_of, command, is_alive, ng_run, no_traceback, none_ignored, until, write

SUMS = "environment=sums"


def get(url: str | urllib.request.Request) -> int:
    with urllib.request.urlopen(url, timeout=20) as response:
        return int(response.status)


def test_unseen_environment_is_started_from_a_foreign_root(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        server = stack.server("sums")
        assert get(f"{server['url']}/health") == 200
        assert "All 1 / 1 servers ready" in stack.stdout
        assert server["url"] in stack.stdout
        assert "print from the plugin" in stack.log("sums")


OWN_APP = """
from fastapi import FastAPI

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer


class Game(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/reset")(self.reset)
        return app

    async def reset(self) -> dict:
        return {"observation": "a board"}


if __name__ == "__main__":
    Game.run_webserver()
"""


def test_application_that_a_plugin_built_itself_is_served_behind_the_checks_of_all_servers(root: Path) -> None:
    write(root / "resources_servers/game/app.py", OWN_APP)
    write(root / "resources_servers/game/configs/game.yaml", "game: {resources_servers: {game: {entrypoint: app.py}}}")
    with ng_run(root, "environment=game") as stack:
        stack.wait_ready()
        url = stack.server("game")["url"]
        assert get(f"{url}/ready") == 200
        keys = StackKeys.from_hex(stack.entry["root_key"])
        for headers, status in (({}, 401), ({CREDENTIAL_HEADER: keys.caller(Role.PIPELINE, "me", "game")}, 200)):
            asked = urllib.request.Request(f"{url}/reset", b"{}", headers, method="POST")
            try:
                assert get(asked) == status
            except urllib.error.HTTPError as error:
                assert error.code == status


def test_log_lines_are_json_with_the_servers_name(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        lines = [json.loads(line) for line in stack.log("sums").splitlines() if line.startswith("{")]
        starting = next(line for line in lines if line["event"] == "starting")
        assert starting["server"] == "sums"
        assert starting["level"] == "info"


def test_stack_file_is_private_and_gone_afterwards(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        path = stack.run_dir / "stack.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        stack.signal(signal.SIGTERM)
        assert stack.wait_end() == 0
        assert not path.exists()
        assert (stack.run_dir / "logs" / "sums.log").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything_in_order(root: Path, number: signal.Signals) -> None:
    with none_ignored(), ng_run(root, SUMS) as stack:
        stack.wait_ready()
        processes = children_of(stack.process.pid)
        assert len(processes) == 2  # the nursery and the server
        stack.signal(number)
        assert stack.wait_end() == 0
        assert not any(map(is_alive, processes))
        assert no_traceback(stack.stderr + stack.log("sums"))


def test_run_under_nohup_goes_on_when_its_terminal_closes(root: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the command inherits it
    try:
        with ng_run(root, SUMS) as stack:
            stack.wait_ready()
            stack.signal(signal.SIGHUP)
            stack.signal(signal.SIGINT)
            assert stack.wait_end() == 0  # the second signal that it handles ends it with 130
    finally:
        signal.signal(signal.SIGHUP, before)


def test_server_is_restarted_and_a_signal_obeyed_although_stderr_has_lost_its_reader(root: Path) -> None:
    reader, writer = os.pipe()
    with ng_run(root, SUMS, streams={"stderr": writer}) as stack:
        os.close(writer)
        stack.wait_ready()
        os.close(reader)
        os.kill(stack.server("sums")["pid"], signal.SIGKILL)
        until(lambda: stack.server("sums")["restarts"] == 1, "the restart", 30)
        stack.signal(signal.SIGINT)
        assert stack.wait_end() == 0


def test_signal_during_start_leaves_nothing(root: Path) -> None:
    with ng_run(root, SUMS, "sums.resources_servers.sums.slow_start_s=60", "shutdown_timeout_s=1") as stack:
        until(lambda: len(children_of(stack.process.pid)) == 2, "the server's process")
        processes = children_of(stack.process.pid)
        stack.signal(signal.SIGINT)
        assert stack.wait_end() == 0
        until(lambda: not any(map(is_alive, processes)), "everything to end")
        assert no_traceback(stack.stderr)


def test_second_signal_kills_a_server_that_does_not_stop(root: Path) -> None:
    with ng_run(root, SUMS, "sums.resources_servers.sums.hang_at_stop=true", "shutdown_timeout_s=600") as stack:
        stack.wait_ready()
        processes = children_of(stack.process.pid)
        stack.signal(signal.SIGINT)
        until(lambda: "once more to kill" in stack.stderr, "the first signal's message")
        assert stack.process.poll() is None
        stack.signal(signal.SIGINT)
        assert stack.wait_end() == 130
        until(lambda: not any(map(is_alive, processes)), "everything to end")


def test_server_that_does_not_stop_is_killed_after_the_timeout(root: Path) -> None:
    with ng_run(root, *GROUPS, "sums.resources_servers.sums.hang_at_stop=true", "shutdown_timeout_s=0.5") as stack:
        stack.wait_ready()
        processes = children_of(stack.process.pid)
        stack.signal(signal.SIGTERM)
        assert stack.wait_end() == 0
        assert "killing what did not stop in 0.5 s: sums (and policy_model, whose turn" in stack.stderr
        until(lambda: not any(map(is_alive, processes)), "everything to end")


def test_kill_9_of_ng_run_leaves_no_server(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        processes = children_of(stack.process.pid)
        port = int(stack.server("sums")["url"].rpartition(":")[2])
        stack.signal(signal.SIGKILL)
        until(lambda: not any(map(is_alive, processes)), "nursery and server to end")
        with socket.socket() as probe:
            # A listener would still be in the way; connections that linger after their end are not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def test_kill_9_of_the_nursery_ends_the_servers_and_the_run(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        nursery = int(Path(f"/proc/{stack.process.pid}/task/{stack.process.pid}/children").read_text())
        processes = children_of(stack.process.pid)
        os.kill(nursery, signal.SIGKILL)
        assert stack.wait_end() == 1
        assert "the process that forks servers has ended" in stack.stderr
        until(lambda: not any(map(is_alive, processes)), "the servers to end")


def test_crashed_server_is_restarted_on_the_same_port(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        before = stack.server("sums")
        os.kill(before["pid"], signal.SIGKILL)
        # The socket stays open meanwhile: a request now waits for the new process instead of being refused.
        assert get(f"{before['url']}/health") == 200
        until(lambda: stack.server("sums")["restarts"] == 1, "the stack file to tell of the restart")
        after = stack.server("sums")
        assert after["url"] == before["url"]
        assert after["pid"] != before["pid"]
        assert "server 'sums' ended with signal SIGKILL; restart 1 of 5" in stack.stderr


async def test_stack_fails_when_its_servers_can_no_longer_be_watched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(text: str) -> None:
        raise RuntimeError("nobody listens")

    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(root))
    process = nursery.spawn(public_environment(os.environ))
    try:
        composition = compose([SUMS, f"run_dir={root / 'run'}"])
        async with running_stack(composition, process, say) as supervisor:
            os.kill(supervisor.stack().servers[0].pid or 0, signal.SIGKILL)
            async with asyncio.timeout(30):
                error = await supervisor.failure
        assert "the servers can no longer be watched: RuntimeError: nobody listens" in error.message
    finally:
        stop_nursery(process[0])


def test_server_that_crashes_too_often_ends_the_run_with_its_log(root: Path) -> None:
    with ng_run(root, SUMS, "max_restarts=1") as stack:
        stack.wait_ready()
        first = stack.server("sums")["pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: stack.server("sums")["pid"] not in (first, None), "the restart")
        os.kill(stack.server("sums")["pid"], signal.SIGKILL)
        assert stack.wait_end() == 1
        assert "after 1 restarts (max_restarts=)" in stack.stderr
        assert "print from the plugin" in stack.stderr


def test_server_that_cannot_start_ends_the_run_with_its_log(root: Path) -> None:
    with ng_run(root, SUMS, "sums.resources_servers.sums.crash_at_start=true") as stack:
        assert stack.wait_end() == 1
        assert "server 'sums' ended with exit code 1: RuntimeError: the plugin is broken on purpose" in stack.stderr
        assert "  | " in stack.stderr


def test_plugin_that_does_not_serve_is_told_what_its_file_must_call(root: Path) -> None:
    app = root / "resources_servers/sums/app.py"
    app.write_text(app.read_text().replace("SumServer.run_webserver()", "pass"))
    with ng_run(root, SUMS) as stack:
        assert stack.wait_end() == 1
        assert "server 'sums' ended with exit code 0: its entrypoint ended without serving" in stack.stderr
        assert "it must call run_webserver()" in stack.stderr
        assert not stack.stderr.endswith("\n\n")


def test_wrong_value_in_a_server_block_is_one_line_and_exit_code_2(root: Path) -> None:
    with ng_run(root, SUMS, "sums.resources_servers.sums.bonus=much") as stack:
        assert stack.wait_end() == 2
        assert "bonus" in stack.stderr and "sums" in stack.stderr
        assert no_traceback(stack.stderr)


def test_server_that_is_not_ready_in_time_ends_the_run(root: Path) -> None:
    with ng_run(root, SUMS, "sums.resources_servers.sums.slow_start_s=60", "startup_timeout_s=0.5") as stack:
        assert stack.wait_end() == 1
        assert "not ready after 0.5 s: sums" in stack.stderr


def test_wait_for_a_server_says_what_is_missing(root: Path) -> None:
    waits = 'sums.resources_servers.sums.waits_for="the database is locked"'
    with ng_run(root, SUMS, waits, "startup_timeout_s=12") as stack:
        assert stack.wait_end() == 1
        assert "waiting for server 'sums': the database is locked" in stack.stderr
        assert "not ready after 12 s: sums (the database is locked)" in stack.stderr


def test_wrong_value_that_a_server_finds_when_asked_whether_it_is_ready_ends_the_run(root: Path) -> None:
    with ng_run(root, SUMS, 'sums.resources_servers.sums.finds_wrong="pull must be never"') as stack:
        assert stack.wait_end() == 2
        assert "ng_run: error: server 'sums': pull must be never; see " in stack.stderr


def test_configured_port_is_used(root: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ng_run(root, SUMS, f"sums.resources_servers.sums.port={port}") as stack:
        stack.wait_ready()
        assert stack.server("sums")["url"] == f"http://127.0.0.1:{port}"


def test_port_in_use_is_one_error_that_names_the_fix(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ng_run(root, SUMS, f"sums.resources_servers.sums.port={port}") as stack:
            assert stack.wait_end() == 2
            assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()}" in stack.stderr
            assert "choose another with sums.resources_servers.sums.port=<port>, or 0 for a free one" in stack.stderr
            assert no_traceback(stack.stderr)


def test_two_servers_on_one_port_are_named(root: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    block = f"{{resources_servers: {{sums: {{entrypoint: app.py, port: {port}}}}}}}"
    write(root / "two.yaml", f"one: {block}\ntwo: {block}\n")
    with ng_run(root, "+config_paths=[two.yaml]") as stack:
        assert stack.wait_end() == 2
        assert (
            f"two.yaml: two.resources_servers.sums: port {port} on 127.0.0.1 is in use by server 'one'" in stack.stderr
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost.example.com"])
def test_host_off_loopback_is_refused(root: Path, host: str) -> None:
    with ng_run(root, SUMS, f"default_host={host}") as stack:
        assert stack.wait_end() == 2
        assert "is not a loopback address" in stack.stderr


def test_run_directory_that_is_in_use_is_refused(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        second = command(root, "run", SUMS, f"run_dir={stack.run_dir}")
        assert second.returncode == 2
        assert f"a stack runs in {stack.run_dir} already (process {stack.process.pid})" in second.stderr
        assert get(f"{stack.server('sums')['url']}/health") == 200


def test_server_needs_a_credential_and_its_config_is_on_no_endpoint(root: Path) -> None:
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        url = stack.server("sums")["url"]
        for path in ("/global_config_dict_yaml", "/server_instances", "/reverify_mode"):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(url + path)
            assert error.value.code in (401, 403, 404)


def test_secrets_are_in_no_argument_environment_log_or_file(root: Path) -> None:
    secrets = {"yaml-secret-1234", "word-secret-1234", "environ-secret-1234"}
    write(root / "env.yaml", "judge_api_key: yaml-secret-1234\nother_api_key: ${oc.env:MY_API_KEY}\n")
    words = [SUMS, "sums.resources_servers.sums.judge_api_key='${judge_api_key}'", "+third_api_key=word-secret-1234"]
    words.append("pass_env=[MY_API_KEY]")
    with ng_run(root, *words, MY_API_KEY="environ-secret-1234") as stack:
        stack.wait_ready()
        processes = children_of(stack.process.pid)
        assert len(processes) == 2
        for pid in processes:
            for file in ("cmdline", "environ"):
                text = Path(f"/proc/{pid}/{file}").read_text(errors="replace")
                assert not [secret for secret in secrets if secret in text], (pid, file)
        stack.signal(signal.SIGTERM)
        assert stack.wait_end() == 0
        assert '"key_in_use": "(secret)"' in stack.log("sums")
        assert "passed on: True" in stack.log("sums")
        for path in (*stack.run_dir.rglob("*"), stack.output, stack.errors):
            if path.is_file():
                assert not [secret for secret in secrets if secret in path.read_text(errors="replace")], path
        assert "third_api_key on the command line can be read by other users" in stack.stderr


def test_stack_writes_to_its_run_directory_and_cache_only(root: Path) -> None:
    before = {path for path in root.rglob("*") if "cache" not in path.parts}
    with ng_run(root, SUMS) as stack:
        stack.wait_ready()
        stack.signal(signal.SIGTERM)
        assert stack.wait_end() == 0
    new = {path for path in root.rglob("*") if "__pycache__" not in str(path)} - before
    outside = [
        path for path in new if not path.is_relative_to(root / "run") and not path.is_relative_to(root / "cache")
    ]
    assert sorted(path.name for path in outside) == ["stderr.txt", "stdout.txt"]
