"""The page on runs from Python says what the code does, and its programs run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil
import pytest

from nemo_gym import run, start_async
from nemo_gym._util.tasks import LoopThread
from nemo_gym.cli.program import FRAME_COLUMNS, AsyncStack, RunResult, Stack
from nemo_gym.contract.errors import ConfigError, RowError, ServerError
from nemo_gym.rollouts.pipeline import PIPELINE
from nemo_gym.stack.background import started_here
from nemo_gym.stack.endpoints import SCRAPE_TARGETS, SCRAPE_TOKEN_FILE, running_stacks
from tests.architecture.docs import PAGES, ROOT, example_files, table
from tests.rollouts.conftest import wait_until

PAGE = PAGES / "python-api.md"
PROGRAMS = example_files(PAGE)
CHOSEN = {"agent": "simple_agent", "environment": "mcqa", "model": "scripted"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_columns_and_members_are_documented() -> None:
    assert set(table(PAGE, "column")) >= {"task_id", "reward", "outcome", "turns"}
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in FRAME_COLUMNS)
    members = {name for name in vars(RunResult) if not name.startswith("_")} - {"collection", "data_frame"}
    assert set(table(PAGE, "member")) == members


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_of_the_page_runs(place: Path, name: str) -> None:
    (place / name).write_text(PROGRAMS[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    said = {
        "whole_run.py": "0.8 10 rollouts in results/",
        "own_rows.py": "planet    1.0      4",
        "several_runs.py": "3 1.0",
        "trainer.py": "4 4",
    }
    assert said[name] in done.stdout
    assert not running_stacks()


def test_import_of_the_package_loads_none_of_it() -> None:
    shown = "import sys, nemo_gym; print(sorted(name for name in sys.modules if name.startswith('nemo_gym')))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "['nemo_gym']"


async def test_run_works_beside_a_running_loop_and_shows_a_finished_run_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(**CHOSEN, limit=2, output="out.jsonl")
    assert capsys.readouterr().out == ""
    again = await asyncio.to_thread(lambda: run(**CHOSEN, limit=2, output=Path("out.jsonl"), show=True))
    assert "out.jsonl" in capsys.readouterr().out
    assert first.rows == again.rows
    assert (len(first.rows), first.collection.seconds is None, again.collection.seconds) == (2, False, None)


async def test_metrics_of_the_pipeline_are_served_while_the_stack_runs(place: Path) -> None:
    targets = place / "run" / SCRAPE_TARGETS
    chosen = {**CHOSEN, "run_dir": str(place / "run")}
    async with await start_async("observability.metrics_port=0", **chosen) as stack:
        await stack.run(limit=1, **chosen)  # as at the start
        (target,) = json.loads(next(targets.glob(f"{PIPELINE}-*.json")).read_text())
        token = (place / "run" / SCRAPE_TOKEN_FILE).read_text()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http,
            http.get(f"http://{target['targets'][0]}/metrics") as reply,
        ):
            assert (reply.status, "stage_seconds_count" in await reply.text()) == (200, True)
    assert not [*targets.glob(f"{PIPELINE}-*.json")]


def test_stack_that_was_stopped_says_so(place: Path) -> None:
    loop = LoopThread("test")
    stack = Stack(loop, AsyncStack([], None, AsyncExitStack()))  # type: ignore[arg-type]
    stack.close()
    with pytest.raises(ServerError, match="were stopped"):
        stack.run(limit=1)


async def test_start_that_is_cancelled_leaves_no_server(place: Path) -> None:
    def servers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "die_with_parent" in " ".join(child.cmdline())]

    starting = asyncio.create_task(start_async(**CHOSEN))
    await asyncio.to_thread(wait_until, servers, "the servers to start")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not servers() and started_here() is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"agent": "simple_agnt"}, "did you mean 'simple_agent'"),
        ({**CHOSEN, "num_repeat": 2}, "did you mean 'num_repeats'"),
        ({**CHOSEN, "num_repeats": 0}, "num_repeats"),
        ({**CHOSEN, "input": "none.jsonl"}, "none.jsonl' does not exist"),
        ({**CHOSEN, "input": 5}, "input must be the path of a JSONL file, or rows: an iterable of dicts; got int"),
        ({**CHOSEN, "input": [{"id": {1}}]}, "input: a row is not JSON"),
        (
            {**CHOSEN, "input": [{}], "output": "/proc/none/out.jsonl"},
            "output '/proc/none/out.jsonl': rows from memory",
        ),
        ({**CHOSEN, "input": [], "input_jsonl_fpath": "x.jsonl"}, "input is given twice"),
        ({**CHOSEN, "dataset": "nobody/nothing"}, "ng_prepare mcqa dataset=nobody/nothing"),
    ],
)
def test_what_is_wrong_is_refused_before_a_server_starts(place: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**keys)  # type: ignore[arg-type]


def test_rows_from_memory_replace_no_file_of_other_rows(place: Path) -> None:
    mine = place / "train_input.jsonl"
    mine.write_text("my rows\n")
    with pytest.raises(ConfigError, match=r"train_input\.jsonl beside it, which holds other rows.*overwrite=true"):
        run(**CHOSEN, input=[{}], output="train.jsonl")
    assert mine.read_text() == "my rows\n"


@pytest.mark.parametrize("wrong", [{}, {"agent_name": "none"}], ids=["after the start", "before the start"])
def test_refused_rows_from_memory_can_be_mended(place: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(RowError, match="unknown agent 'none'" if wrong else "has no prompt"):
        run(**CHOSEN, input=[{}], output="train.jsonl", **wrong)
    row = {"responses_create_params": {"input": "2 + 2?"}}
    with pytest.raises(RowError, match="unknown agent 'none'"):
        run(**CHOSEN, input=[row], output="train.jsonl", agent_name="none")


@pytest.mark.parametrize("key", ["model", "environment", "policy_base_url", "mcqa.resources_servers.x", "run_dir"])
async def test_setting_of_running_servers_is_refused(place: Path, key: str) -> None:
    stack = AsyncStack([f"{name}={value}" for name, value in CHOSEN.items()], None, AsyncExitStack())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{key} is no setting of a run.*; the servers already run"):
        await stack.run(limit=1, **{key: "other"})


def test_keys_stand_in_no_command_line(place: Path) -> None:
    """The servers' words go over a pipe; what a value holds does not matter."""
    key = {"policy_api_key": "it's {secret}, [k]=v\\"}
    result = run(**CHOSEN, **key, limit=1, output="out.jsonl", run_dir=str(place / "run"))
    assert len(result.rows) == 1
    assert "on the command line" not in (place / "run" / "ng_run.log").read_text()
    configuration = Path("out_config.yaml").read_text()
    assert "it's" not in configuration
    assert json.loads(Path("out.jsonl").read_text())["reward"] == 1.0
