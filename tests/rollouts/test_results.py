"""The files of a run."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.collection import RunOutlook, check_run
from nemo_gym.rollouts.results import RunFiles, replaced
from nemo_gym.rollouts.store import SqliteJobStore

ROW = json.dumps({"responses_create_params": {"input": "?"}}) + "\n"


async def checked(directory: Path, *, configurations: tuple[Path, ...] = (), **keys: Any) -> RunOutlook:
    """A run with the output ``train.jsonl``, checked as before any server starts."""
    if "input" not in keys:
        keys["input"] = directory / "rows.jsonl"
        keys["input"].write_text(ROW)
    config = RolloutRunConfig.parse({"output": directory / "train.jsonl", **keys})
    servers: dict[str, Any] = {"solver": {"responses_api_agents": {"solver": {}}}}
    return await check_run(config, servers, keep=False, configurations=configurations)


def test_file_is_hidden_until_it_is_whole(tmp_path: Path) -> None:
    """As `examples/prorl/one_server_per_node.sh` relies on, which counts the files of its servers."""
    with replaced(tmp_path / "0") as file:
        file.write(b"http://")
        assert [path.name[0] for path in tmp_path.iterdir()] == ["."]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    with pytest.raises(ZeroDivisionError), replaced(tmp_path / "0") as file:
        raise ZeroDivisionError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("0", b"http://")]


@pytest.mark.parametrize(
    "name",
    [
        *("train_failures.jsonl", "train_materialized_inputs.jsonl", "train_aggregate_metrics.json"),
        *("train_config.yaml", "train_reverified.jsonl", "train_running.json", "train_store_sampler.sqlite"),
        "train_logs/monday.txt",
    ],
)
async def test_files_beside_the_output_that_no_run_wrote_are_not_replaced_unasked(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious\n")
    with pytest.raises(ConfigError, match=rf"'{name.split('/')[0]}'.*another 'output'.*overwrite=true") as caught:
        await checked(tmp_path)
    assert caught.value.details["key"] == "output"
    assert (await checked(tmp_path, overwrite=True)).recorded is None
    assert path.read_text() == "precious\n"


async def test_what_holds_nothing_is_in_no_runs_way(tmp_path: Path) -> None:
    (tmp_path / "train_logs").mkdir()
    (tmp_path / "train_failures.jsonl").touch()
    (tmp_path / "train.lock").write_text("123\n")
    (tmp_path / "train_index.sqlite").write_text("its readers mend it")
    assert (await checked(tmp_path)).recorded is None


async def test_start_that_was_killed_before_its_run_was_recorded_can_be_repeated(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "train.jsonl")
    store = SqliteJobStore(files.store)
    await store.counts()
    await store.aclose()
    files.materialized_inputs.write_text(ROW)
    assert (await checked(tmp_path)).recorded is None
    files.store.write_bytes(b"")
    assert (await checked(tmp_path)).recorded is None
    files.output.write_text("precious\n")
    with pytest.raises(ConfigError, match="is not empty"):
        await checked(tmp_path)


async def test_database_of_another_program_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (text)")
    before = path.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"notes\.sqlite' is another program's database: choose another 'store'"):
            await checked(tmp_path, store=path, overwrite=overwrite)
    assert path.read_bytes() == before


async def test_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train_failures.jsonl").mkdir()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"train_failures\.jsonl' is a directory"):
            await checked(tmp_path, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("train_failures.jsonl", "train_materialized_inputs.jsonl", "train_reverified.jsonl", "train.lock"),
        "train_logs/rows.jsonl",
    ],
)
async def test_input_that_is_a_file_of_the_run_is_refused(tmp_path: Path, name: str, overwrite: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(ROW)
    with pytest.raises(ConfigError, match=rf"'input' '{path}' is a file that the run itself.*another 'output'"):
        await checked(tmp_path, input=path, overwrite=overwrite)
    assert path.read_text() == ROW


async def test_input_that_is_the_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match="choose another 'store'"):
        await checked(tmp_path, store=path, overwrite=True)
    assert path.read_text() == ROW


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
async def test_output_that_is_the_input_is_refused(tmp_path: Path, link: str | None, overwrite: bool) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(ROW)
    rows = path
    if link is not None:
        rows = tmp_path / "rows.jsonl"
        getattr(rows, link)(path)
    with pytest.raises(ConfigError, match=r"train\.jsonl' is the input itself: choose another 'output'$"):
        await checked(tmp_path, input=rows, overwrite=overwrite)
    assert path.read_text() == ROW


@pytest.mark.parametrize("overwrite", [False, True])
async def test_configuration_that_is_a_file_of_the_run_is_refused(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "train_config.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"the configuration '.*train_config\.yaml' is a file.*another 'output'"):
        await checked(tmp_path, configurations=(path,), overwrite=overwrite)
