"""Data sets by name: from a mirror over HTTP, which the real client of the hub speaks to, and from a directory."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.cli.collect_rollouts import collect_command
from nemo_gym.config.datasets import DataSet
from nemo_gym.contract.errors import ConfigError
from tests.cli.hub import Mirror, mirror
from tests.stack.stacks import GROUPS, command, ng_run, no_traceback

NAME = "adders/small-sums"
NOWHERE = "http://127.0.0.1:9"


def sums(*numbers: int) -> bytes:
    rows = [{"prompt": f"What is {n} + {n}?", "sum": str(2 * n), "label": f"sum-{n}"} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def hub() -> Iterator[Mirror]:
    with mirror() as served:
        yield served


@pytest.fixture
def place(root: Path, hub: Mirror) -> Path:
    hub.publish(NAME, {"README.md": b"# Sums\n", "train.jsonl": sums(1, 2, 3), "test.jsonl": sums(7, 8)})
    hub.asked.clear()
    return root


def fetch(root: Path, url: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {"HF_ENDPOINT": url, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    return command(root, "prepare", "sums", *words, **known)


def name_fields(root: Path, **entry: str) -> None:
    folder = root / "resources_servers" / "sums" / "data"
    folder.mkdir(exist_ok=True)
    extra = "".join(f"  {key}: {value}\n" for key, value in entry.items())
    text = f"small:\n  repo: {NAME}\n  split: test\n  rename: {{expected: sum, id: label}}\n{extra}"
    (folder / "datasets.yaml").write_text(text)


def test_rows_of_a_mirror_are_fetched_once_and_pinned(place: Path, hub: Mirror) -> None:
    done = fetch(place, hub.url, f"dataset={NAME}", "split=test")
    assert done.returncode == 0, done.stderr
    rows = Path(done.stdout.strip())
    assert [json.loads(line)["sum"] for line in rows.read_text().splitlines()] == ["14", "16"]
    record = json.loads(rows.with_suffix(".json").read_text())
    assert record["commit"] == hub.branches[f"{NAME}@main"]
    assert record["sha256"] == hashlib.sha256(rows.read_bytes()).hexdigest()
    assert not any(path.endswith(".py") for path in hub.asked)
    again = fetch(place, NOWHERE, f"dataset={NAME}", "split=test")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_short_name_brings_its_split_and_the_environments_names_of_fields(place: Path, hub: Mirror) -> None:
    name_fields(place)
    done = fetch(place, hub.url, "dataset=small")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path(done.stdout.strip()).read_text().splitlines()]
    assert [(row["id"], row["expected"]) for row in rows] == [("sum-7", "14"), ("sum-8", "16")]
    name_fields(place, sha256="0" * 64)
    done = command(place, "validate", *GROUPS, "dataset=small")
    assert "'small.sha256' must be text; put it in quotes" in done.stderr
    name_fields(place, sha256=f"'{'0' * 64}'")
    done = command(place, "validate", *GROUPS, "dataset=small")
    assert "is pinned to sha256 000" in done.stderr


def test_whole_command_runs_a_data_set_into_results_named_by_the_time(place: Path, hub: Mirror) -> None:
    row = {"responses_create_params": {"input": "What is 4 + 5?"}, "expected": "9", "id": "four"}
    hub.publish("adders/rows", {"data.jsonl": (json.dumps(row) + "\n").encode()})
    assert fetch(place, hub.url, "dataset=adders/rows").returncode == 0
    with ng_run(place, *GROUPS, "dataset=adders/rows") as stack:
        assert stack.wait_end() == 0, stack.stderr
    (output,) = place.glob("results/*/rollouts.jsonl")
    assert [json.loads(line)["reward"] for line in output.read_text().splitlines()] == [1.0]


def test_environments_own_rows_make_a_choice_of_parts_a_whole_command(place: Path) -> None:
    folder = place / "resources_servers" / "sums" / "data"
    folder.mkdir(exist_ok=True)
    row = {"responses_create_params": {"input": "What is 1 + 1?"}, "expected": "2", "id": "one"}
    (folder / "example.jsonl").write_text(json.dumps(row) + "\n")
    done = command(place, "run", *GROUPS)
    assert done.returncode == 0, done.stderr
    (output,) = place.glob("results/*/rollouts.jsonl")
    assert json.loads(output.read_text())["reward"] == 1.0
    with ng_run(place, *GROUPS) as stack:  # named by run_dir: others are to find it
        stack.wait_ready()


def test_revisions_stand_side_by_side(place: Path, hub: Mirror) -> None:
    old = hub.branches[f"{NAME}@main"]
    hub.publish(NAME, {"test.jsonl": sums(9)})
    kept = [fetch(place, hub.url, f"dataset={NAME}@{revision}", "split=test") for revision in (old, "main")]
    assert [Path(done.stdout.strip()).read_text().count("\n") for done in kept] == [2, 1]


def test_directory_is_asked_before_the_network(place: Path, hub: Mirror) -> None:
    copy = place / "copies" / NAME
    copy.mkdir(parents=True)
    (copy / "test.jsonl").write_bytes(sums(5))
    done = fetch(place, NOWHERE, f"dataset={NAME}", "split=test", NEMO_GYM_DATASETS=str(place / "copies"))
    assert done.returncode == 0, done.stderr
    assert json.loads(Path(done.stdout.strip()).read_text())["sum"] == "10"
    refused = fetch(place, NOWHERE, f"dataset={NAME}@v1", "split=test", NEMO_GYM_DATASETS=str(place / "copies"))
    assert "small-sums@v1" in refused.stderr


def test_what_cannot_be_fetched_is_one_error_with_the_way_out(place: Path, hub: Mirror) -> None:
    name_fields(place)
    cases = [
        (
            NOWHERE,
            ["dataset=nobody/nothing"],
            "name a mirror with HF_ENDPOINT, or a directory that holds nobody/nothing",
        ),
        (hub.url, ["dataset=nobody/nothing"], "has no data set 'nobody/nothing'"),
        (hub.url, [f"dataset={NAME}@v9"], "has no revision 'v9'"),
        (hub.url, [f"dataset={NAME}"], "has train, test; say which with split="),
        (hub.url, [f"dataset={NAME}", "split=tset"], "did you mean 'test'"),
        (hub.url, ["dataset=smal"], "did you mean 'small'"),
        (hub.url, [f"dataset={NAME}", "split=test", f"sha256={'0' * 64}"], "as pinned"),
    ]
    for url, words, message in cases:
        done = fetch(place, url, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert message in done.stderr
        assert no_traceback(done.stderr)
        assert not list((place / "cache").glob("datasets/*/*/*.jsonl"))


def test_damage_is_seen_on_the_way_and_on_the_disk(place: Path, hub: Mirror) -> None:
    hub.damaged = True
    try:
        done = fetch(place, hub.url, f"dataset={NAME}", "split=test")
    finally:
        hub.damaged = False
    assert done.returncode == 2
    assert "damaged" in done.stderr or "cannot be fetched" in done.stderr
    assert fetch(place, hub.url, f"dataset={NAME}", "split=test").returncode == 0
    (rows,) = (place / "cache").glob("datasets/*/*/test.jsonl")
    rows.write_bytes(rows.read_bytes() + b"{}\n")
    done = command(place, "validate", *GROUPS, f"dataset={NAME}", "split=test")
    assert "was changed after" in done.stderr
    assert "refresh=true" in done.stderr


def test_absent_data_set_is_refused_at_start_with_the_command(place: Path) -> None:
    done = command(place, "validate", *GROUPS, f"dataset={NAME}", "split=test")
    assert done.returncode == 2
    assert f"fetch it: ng_prepare sums dataset={NAME} split=test" in done.stderr
    done = command(place, "validate", *GROUPS, "split=test", "output=o.jsonl", "input=rows.jsonl")
    assert "split= is a part of a data set" in done.stderr


def test_download_writes_a_copy_with_nemo_gyms_words(place: Path, hub: Mirror) -> None:
    known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(place / "hf")}
    words = [f"+repo_id={NAME}", "+split=train", "+output_fpath=copy/train.jsonl"]
    done = command(place, "gym", "dataset", "download", *words, **known)
    assert (done.returncode, done.stdout) == (0, "copy/train.jsonl\n"), done.stderr
    assert (place / "copy" / "train.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b/c", "a/b@", "small-sums"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="data set"):
        DataSet.parse(name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dataset=small", "input=rows.jsonl"], "dataset= and input= both name rows"),
        (["dataset=small", "input_jsonl_fpath=rows.jsonl"], "dataset= and input= both name rows"),
        (["input=rows.jsonl", "split=test"], "split= is a part of a data set"),
    ],
)
def test_rows_that_are_named_twice_or_by_half_are_refused_by_both_commands(
    place: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        collect_command([*words, "output=out.jsonl"])
    assert said in command(place, "validate", *GROUPS, *words, "output=out.jsonl").stderr
