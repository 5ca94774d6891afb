"""Every page of the viewer over results of real runs, and over one that is under way; with screenshots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_gym.contract.verdict import ROLLOUT_ID_KEY
from tests.gateway.testing.processes import tiny_engine
from tests.view.serving import ROOT, Look, browsing, viewing

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]  # the first run builds five images

SCRIPT = """
rules:
  - name: weather
    steps:
      - {say: "Let me look at the weather there.", call: {name: get_weather, arguments: {city: Helsinki}}}
      - {say: "Helsinki: -1.4 °C."}
"""


def script_path(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run_words(folder: Path, name: str, *words: str) -> list[str]:
    return [
        script_path("ng_run"),
        *words,
        f"output={folder / name / 'rollouts.jsonl'}",
        f"run_dir={folder / name}-run",
    ]


def ng_run(folder: Path, name: str, *words: str) -> None:
    done = subprocess.run(
        run_words(folder, name, *words), cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walked")
    weather = "input=resources_servers/example_mcp_weather/data/example.jsonl"
    agent = ("agent=simple_agent", "environment=example_mcp_weather", "sandbox=local")
    ng_run(folder, "weather", *agent, "model=scripted", weather, "num_repeats=2")
    with tiny_engine(folder, SCRIPT) as url:
        words = (f"policy_base_url={url}", "policy_model_name=tiny", f"policy_path={folder / 'policy'}")
        limit = "++policy_model.responses_api_models.gateway.policy.max_context_tokens=8192"
        ng_run(folder, "tokens", *agent, "model=vllm", *words, limit, weather)
    rows = "resources_servers/swe_bench/data/example.jsonl"
    subprocess.run([script_path("ng_prepare"), "swe_bench", f"rows={rows}", "sandbox=local"], cwd=ROOT, check=True)
    swe = ("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted", f"input={rows}")
    ng_run(folder, "swe", *swe, "num_repeats=2")
    return folder


def test_every_page_over_real_runs(folder: Path) -> None:
    with viewing(folder) as url, browsing() as browser:
        look = Look.at(browser, url, viewport={"width": 1280, "height": 900})
        page = look.page
        page.wait_for_selector("table.rows tbody tr:nth-child(3) .interval")
        look.shot("runs")
        runs = look.runs()
        swe, weather, tokens = (runs[f"{name}/rollouts"] for name in ("swe", "weather", "tokens"))
        look.go(f"#/run/{swe}", "table.rows tbody tr")
        assert "Signs of tampering" in page.locator(".reasons").inner_text()
        look.shot("run")
        look.go(f"#/run/{swe}?by=task", "td.samples")
        look.shot("tasks")
        worst = look.ask(f"/api/runs/{swe}/table")["rows"][0]["rollout_id"]
        place = f"#/run/{swe}/rollout?id={worst}"
        expected = {
            "overview": ".finding",
            "turns": ".turn .call .result",
            "diff": ".diff .added",
            "grading": ".log .pass",
            "logs": "#tab-panel > *",
            "json": ".raw",
        }
        for tab, selector in expected.items():
            look.go(f"{place}&tab={tab}", selector)
            assert (tab, look.faults()) == (tab, [])
            look.shot(f"rollout-{tab}")
        assert "report.outcome" in page.locator(".raw").inner_text()
        called = look.ask(f"/api/runs/{weather}/table?sort=turns&descending=1")["rows"][0]["rollout_id"]
        look.go(f"#/run/{weather}/rollout?id={called}&tab=turns", ".turn .result")
        assert "get_weather" in page.locator(".turn").first.inner_text()
        look.shot("weather-turns")
        first = look.ask(f"/api/runs/{tokens}/table")["rows"][0]["rollout_id"]
        look.go(f"#/run/{tokens}/rollout?id={first}&tab=tokens", ".tokens.as-text .token.sampled")
        rows = map(json.loads, (folder / "tokens" / "rollouts.jsonl").read_text().splitlines())
        (row,) = (each for each in rows if each[ROLLOUT_ID_KEY] == first)
        (chain,) = row["ng_trajectory"]
        assert page.locator(".tokens.as-text .token.sampled").count() == sum(chain["response_mask"])
        assert page.locator(".tokens.as-text .token.prompt").count() == len(chain["prompt_ids"])
        assert "Let me look at the weather there." in page.locator(".tokens").inner_text()
        assert look.faults() == []
        look.shot("tokens")
        look.go(f"#/compare?a={weather}&b={tokens}", ".cards")
        look.shot("compare")
        for width, scheme in ((1280, "dark"), (390, "light")):
            other = Look.at(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800})
            for name, where in {"run": f"#/run/{swe}", "overview": place, "turns": f"{place}&tab=turns"}.items():
                other.go(where, "main h1")
                other.page.wait_for_timeout(500)
                other.shot(f"{name}-{scheme}-{width}")
            assert other.wrong == []
        assert look.wrong == []


def test_page_follows_a_run_that_is_under_way(folder: Path) -> None:
    rows = folder / "many.jsonl"
    given = (ROOT / "resources_servers/math/data/example.jsonl").read_text().splitlines()
    rows.write_text("".join(f"{line}\n" for line in given))
    words = ("agent=simple_agent", "environment=math", "model=scripted", f"input={rows}", "num_repeats=200")
    command = run_words(folder, "live", *words, "concurrency=1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ) as process:
        output = folder / "live" / "rollouts.jsonl"
        deadline = time.monotonic() + 60
        while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        with viewing(output) as url, browsing() as browser:
            look = Look.at(browser, url)
            (key,) = look.runs().values()
            look.go(f"#/run/{key}", ".state.running")
            page = look.page
            value = "document.querySelector('.progress progress').value"
            before = page.evaluate(value)
            look.shot("live")
            deadline = time.monotonic() + 60
            while page.evaluate(value) <= before and time.monotonic() < deadline:
                page.wait_for_timeout(300)
            assert page.evaluate(value) > before
            assert "per minute" in page.locator(".progress").inner_text()
            process.terminate()
            process.wait(60)
            page.wait_for_selector(".state.stopped, .state.finished", timeout=30_000)
            assert look.wrong == []
