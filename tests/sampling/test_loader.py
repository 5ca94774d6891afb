"""Data loaders: handed over once, gone on with from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.sampling.loader import LoaderCursor, RowFile


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(5)))
    return path


class Batches:
    """A loader in the manner of torchdata's ``StatefulDataLoader``: lists of rows, and its own state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        while self.at < 6:
            self.at += 2
            yield [{"id": self.at - 2}, {"id": self.at - 1}]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def ids(cursor: LoaderCursor, count: int) -> list[Any]:
    taken = [cursor.next_row() for _ in range(count)]
    return [row["id"] if row is not None else None for row in taken]


def test_a_row_ends_at_a_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"id": "a\u2028b",\r "b": 1}\r\n{"id": 2}'.encode())
    assert ids(LoaderCursor(RowFile(path), 1), 3) == ["a\u2028b", 2, None]


def test_epochs_follow_each_other_and_end_where_a_number_is_set(rows: Path) -> None:
    assert ids(LoaderCursor(RowFile(rows), None), 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert ids(LoaderCursor(RowFile(rows), 2), 12)[9:] == [4, None, None]
    assert ids(LoaderCursor([{"id": 1}], 2), 3) == [1, 1, None]
    assert ids(LoaderCursor(iter([{"id": 1}]), None), 2) == [1, None]


def test_each_epoch_is_shuffled_anew_and_the_same_way_for_one_seed(rows: Path) -> None:
    first, again, other = (ids(LoaderCursor(RowFile(rows, shuffle_seed=seed), None), 10) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first[:5]) == sorted(first[5:]) == [0, 1, 2, 3, 4]
    assert first[:5] != first[5:]


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7, 10, 13])
@pytest.mark.parametrize("kind", ["file", "batches", "list"])
def test_restored_loader_goes_on_with_the_next_row(rows: Path, kind: str, taken: int) -> None:
    def make() -> LoaderCursor:
        loaders = {
            "file": lambda: RowFile(rows, shuffle_seed=3),
            "batches": Batches,
            "list": lambda: [{"id": number} for number in range(5)],
        }
        return LoaderCursor(loaders[kind](), 4)

    whole = ids(make(), 22)
    first, second = make(), make()
    assert ids(first, taken) == whole[:taken]
    second.restore(first.state_dict())
    assert ids(second, 22 - taken) == whole[taken:]


def test_shorter_loader_than_before_is_named() -> None:
    with pytest.raises(ConfigError, match="ended after 1 rows, but this run has already taken more"):
        LoaderCursor(iter([{"id": 1}]), None).pass_over(3)


def test_items_that_are_no_rows_are_named() -> None:
    with pytest.raises(RowError, match="yields a int after 0 rows"):
        LoaderCursor([1, 2], None).next_row()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no rows"),
        ('{"a": 1}\n[1]\n', r"rows\.jsonl:2:1: a row is one JSON object, this is a list"),
        ("{", r"rows\.jsonl:1:2: not a JSON value"),
        ('{"a": 100000000000000000000}', "'a' is an integer of over 64 bits"),
    ],
)
def test_file_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises((ConfigError, RowError), match=said):
        RowFile(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RowFile(tmp_path / "none.jsonl")
