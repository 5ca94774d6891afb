"""The files of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.rollouts.results import replaced


def test_file_is_hidden_until_it_is_whole(tmp_path: Path) -> None:
    """As `examples/prorl/one_server_per_node.sh` relies on, which counts the files of its servers."""
    with replaced(tmp_path / "0") as file:
        file.write(b"http://")
        assert [path.name[0] for path in tmp_path.iterdir()] == ["."]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    with pytest.raises(ZeroDivisionError), replaced(tmp_path / "0") as file:
        raise ZeroDivisionError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("0", b"http://")]
