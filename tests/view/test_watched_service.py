"""`ng_view URL`: the runs of a rollout service, live, over a real one with real rollouts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect

from nemo_gym.contract.errors import ConfigError
from nemo_gym.service.client import RolloutClient
from nemo_gym.view.runs import Runs
from nemo_gym.view.service import WatchedService
from tests.view.serving import DEADLINE_MS, ROOT, Look, browsing, viewing

TOKEN = "the-token-that-only-reads"
SCRIPT = r"""
model: learner
tasks:
  - name: slow
    when: {user: SLOW}
    turns: [{text: 'Answer: B', delay_s: 600}]
  - name: everything else
    when: {user: .}
    turns: [{text: 'I say \boxed{B}.'}]
"""


def question(number: int, text: str = "A or B?") -> dict[str, object]:
    prompt = {"input": [{"role": "user", "content": f"{number}. {text}"}]}
    options = [{"A": "No"}, {"B": "Yes"}]
    return {"id": f"task-{number}", "responses_create_params": prompt, "options": options, "expected_answer": "B"}


@contextmanager
def service(folder: Path, port: int = 0) -> Iterator[Path]:
    """A real service over a stack of its own; its run directory."""
    (folder / "policy.yaml").write_text(SCRIPT)
    run_dir = folder / "serve"
    command = [str(Path(sys.executable).with_name("ng_serve_rollouts")), "agent=simple_agent", "environment=mcqa"]
    command += ["model=scripted", f"script={folder / 'policy.yaml'}", f"run_dir={run_dir}", f"serve.port={port}"]
    command += [f"serve.store={folder / 'jobs.sqlite'}", "concurrency=4"]
    variables = {**os.environ, "NEMO_GYM_SERVICE_READ_TOKEN": TOKEN, "NEMO_GYM_SERVICE_OPERATE_TOKEN": TOKEN[::-1]}
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 90
            while not (run_dir / "service.json").exists():
                assert process.poll() is None and time.monotonic() < deadline, (folder / "said.txt").read_text()
                time.sleep(0.1)
            yield run_dir
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.full
def test_runs_of_a_service_are_followed_with_what_is_where(tmp_path: Path) -> None:
    with ExitStack() as undo:
        serving = ExitStack()
        undo.enter_context(serving)
        run_dir = serving.enter_context(service(tmp_path))
        address = json.loads((run_dir / "service.json").read_text())
        client = undo.enter_context(RolloutClient(run_dir=run_dir))
        client.submit({"job_id": f"a{n}", "run_id": "first", "row": question(n)} for n in range(3))
        client.wait(run="first")
        slow = {"job_id": "slow", "run_id": "second", "row": question(7, "SLOW")}
        client.submit([slow, {"job_id": "b", "run_id": "second", "row": question(8)}])
        # The token by environment; it stands nowhere on the command line, and in nothing that is printed.
        url = undo.enter_context(viewing(address["url"], env={**os.environ, "NEMO_GYM_SERVICE_TOKEN": TOKEN}))
        browser = undo.enter_context(browsing())
        look = Look.at(browser, url, viewport={"width": 1280, "height": 900})
        page = look.page
        page.wait_for_selector("table.rows tbody tr")
        assert set(look.runs()) == {"first", "second"}
        expect(page.locator(".service")).to_contain_text("simple_agent.0", timeout=DEADLINE_MS)
        assert "1 rollout under way" in page.locator(".service").inner_text()
        look.shot("service")
        assert look.faults() == []
        # What is running, where, and for how long.
        look.go(f"#/run/{look.runs()['second']}", ".running tbody tr")
        row = page.locator(".running tbody tr")
        expect(row).to_have_count(1, timeout=DEADLINE_MS)
        shown = row.inner_text()
        assert all(each in shown for each in ("task-7 #0", "run", "simple_agent", "http://127.0.0.1:")), shown
        expect(page.locator(".state.running")).to_have_count(1, timeout=DEADLINE_MS)
        expect(page.locator("table.rows tbody a")).to_have_text(["task-8"], timeout=DEADLINE_MS)
        look.shot("service-run")
        assert look.faults() == []
        # A job that comes, and one that is cancelled, appear by themselves.
        client.submit([{"job_id": "c", "run_id": "second", "row": question(9)}])
        expect(page.locator("table.rows tbody a")).to_have_count(2, timeout=DEADLINE_MS)
        client.cancel(job_ids=["slow"], reason="not needed")
        expect(page.locator(".reasons")).to_contain_text("Cancelled", timeout=DEADLINE_MS)
        expect(page.locator(".state.finished")).to_have_count(1, timeout=DEADLINE_MS)
        # One rollout of it is shown as any other.
        assert page.locator(".note").count() == 0
        first = look.runs()["first"]
        look.go(f"#/run/{first}/rollout?id=a1&tab=turns", ".turn")
        assert "I say" in page.locator(".turn").first.inner_text()
        # The service goes away: that is said, and what was read stays.
        look.go(f"#/run/{first}", "table.rows tbody tr")
        serving.close()
        expect(page.locator(".note")).to_contain_text("cannot be reached", timeout=DEADLINE_MS)
        assert page.locator("table.rows tbody a").count() == 3
        # Another process takes up its store and address; the page goes on.
        serving.enter_context(service(tmp_path, int(address["url"].rpartition(":")[2])))
        expect(page.locator(".note")).to_have_count(0, timeout=DEADLINE_MS)
        assert look.wrong == []
        assert TOKEN not in page.content()


def test_services_own_file_opens_it_and_its_logs(tmp_path: Path) -> None:
    with service(tmp_path) as run_dir:
        address = json.loads((run_dir / "service.json").read_text())
        with RolloutClient(run_dir=run_dir) as client:
            client.submit([{"job_id": "one", "row": question(1)}])
            client.wait()
        watched = WatchedService(address["url"], run_dir / "service.json")
        runs = Runs([], services=[watched])
        runs.start()
        try:
            (run,) = runs.all()
            assert run.log_folders({}) == [run_dir.resolve() / "logs"]
            deadline = time.monotonic() + 30
            while run.index is None or not runs.summary(run)["rollouts"]:
                assert time.monotonic() < deadline, run.problem
                time.sleep(0.1)
            described = runs.describe(run)
            assert (described["progress"]["ended"], described["summary"]["solved"]) == (1, 1)
        finally:
            runs.stop()
        (tmp_path / "token").write_text("not the token of this service\n")
        with pytest.raises(ConfigError, match="must hold one token"):
            WatchedService(address["url"], tmp_path / "token")
        (tmp_path / "token").write_text("not-the-token-of-this-service\n")
        with pytest.raises(ConfigError, match=r"refuses the token .* give one of role read") as refused:
            WatchedService(address["url"], tmp_path / "token").start()
        assert "not-the-token-of-this-service" not in str(refused.value)


@pytest.mark.parametrize("url", ["ftp://x/", "http://me:secret@host/", "http://host/?token=secret", "http://"])
def test_what_is_no_address_is_said_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a rollout service") as refused:
        WatchedService(url)
    assert "secret" not in str(refused.value)


def test_service_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.view.service.PATIENCE_S", 0.1)
    with pytest.raises(ConfigError, match=r"cannot be reached .*ng_serve_rollouts starts one"):
        WatchedService("http://127.0.0.1:9").start()
