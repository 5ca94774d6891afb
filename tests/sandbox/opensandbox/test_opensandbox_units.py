"""Labels as metadata, the helper's frames, and configuration."""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nemo_gym_boxtool
from nemo_gym.contract.errors import ConfigError, SandboxCreateError
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.opensandbox import connection
from nemo_gym.sandbox.providers.opensandbox.connection import Connection, OpenSandboxBox, OpenSandboxConfig
from nemo_gym.sandbox.providers.opensandbox.creation import helper_program
from nemo_gym.sandbox.providers.opensandbox.tool import STDOUT, Frame, FrameParser, ToolRun

_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(st.dictionaries(texts, texts, max_size=8))
def test_labels_survive_and_are_metadata_that_kubernetes_takes(given_labels: dict[str, str]) -> None:
    metadata = connection.labels_to_metadata(given_labels, key="k")
    assert connection.metadata_to_labels(metadata) == {**given_labels, BoxLabel.MANAGED: "true"}
    for name, value in metadata.items():
        assert _NAME.fullmatch(name)
        assert _VALUE.fullmatch(value)
    assert (
        connection.select(given_labels).items()
        <= metadata.items() | connection.select({BoxLabel.MANAGED: given_labels.get(BoxLabel.MANAGED, "")}).items()
    )


@pytest.mark.parametrize("metadata", [None, {}, {"app": "x"}, {"nemo-gym.data.0": "NOTBASE32!"}])
def test_metadata_of_others_is_no_box_of_ours(metadata: dict[str, str] | None) -> None:
    assert connection.metadata_to_labels(metadata) is None


@given(st.lists(st.tuples(st.sampled_from("soepx"), st.binary(max_size=300)), max_size=12), st.data())
def test_frames_come_whole_however_their_text_is_broken(frames: list[tuple[str, bytes]], data: st.DataObject) -> None:
    text = "\n".join(f"{kind}{base64.b64encode(content).decode()};" for kind, content in frames)
    parser, found, at = FrameParser(), [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 80))
        found += parser.feed(text[at : at + size] + data.draw(st.sampled_from(["", "\n"])))
        at += size
    assert found == [Frame(kind, content) for kind, content in frames]


def test_noise_between_frames_is_no_frame() -> None:
    parser = FrameParser()
    assert [*parser.feed("warning: something; ")] == []
    assert [*parser.feed("oaGk=;")] == [Frame("o", b"hi")]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"urll": "http://x"}, "urll.*url"),
        ({"url": "localhost:8080"}, "url"),
        ({"url": "http://host/v1"}, "url"),
        ({"limits": ["disk"]}, "limits.*disk"),
        ({"box_architecture": "amd"}, "box_architecture.*amd64"),
        ({"box_directory": "relative"}, "box_directory"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
def test_bad_option_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OpenSandboxConfig.from_mapping(options)


def test_key_is_never_shown() -> None:
    assert "secret" not in repr(OpenSandboxConfig(api_key="secret"))


@pytest.mark.parametrize("steps", range(4))
async def test_reader_that_is_cancelled_just_as_a_frame_comes_ends(steps: int) -> None:
    """One that went on would read heartbeats for ever, and whoever closes a door waits for it."""
    connection = Connection(OpenSandboxConfig(url="http://127.0.0.1:1"))
    running = ToolRun(OpenSandboxBox(connection, "box", "/box"), "relay")
    running._heard = asyncio.get_running_loop().time()
    reading = asyncio.create_task(running.next())
    await asyncio.sleep(0.01)
    running._frames.put_nowait(Frame(STDOUT, b"said"))
    for _ in range(steps):
        await asyncio.sleep(0)
    if not reading.done():
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled()


def test_missing_or_stale_helper_says_how_to_compile_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, stamp = tmp_path / "boxtool-amd64", tmp_path / "SOURCE"
    monkeypatch.setattr(nemo_gym_boxtool, "BINARIES", tmp_path)
    with pytest.raises(SandboxCreateError, match=r"scripts/build-boxtool"):
        helper_program("x86_64")
    binary.write_bytes(b"\x7fELF")
    stamp.write_text(nemo_gym_boxtool.source_digest())
    assert helper_program("amd64") == b"\x7fELF"
    stamp.write_text("of other sources")
    with pytest.raises(SandboxCreateError, match=r"scripts/build-boxtool"):
        helper_program("amd64")
    with pytest.raises(SandboxCreateError, match=r"amd64 and arm64, not for 'riscv64'"):
        helper_program("riscv64")


def test_missing_distribution_of_the_helper_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_gym_boxtool", None)
    with pytest.raises(SandboxCreateError, match=r"pip install 'nemo-gym-suite\[opensandbox\]'"):
        helper_program(None)
