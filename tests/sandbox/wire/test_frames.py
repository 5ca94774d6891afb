"""Output survives any cutting of the stream, and nothing else is taken for it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.wire.frames import (
    MAX_PAYLOAD_BYTES,
    PING,
    Frame,
    FrameError,
    FrameKind,
    FrameParser,
    encode,
    encode_end,
    encode_event,
    encode_output,
)
from nemo_gym.sandbox.wire.models import ExecEndModel

END = ExecEndModel(outcome=ExecOutcome.EXITED, return_code=3, output_bytes=5, truncated=("stdout",))
EXIT = Frame(FrameKind.EXIT, END.model_dump_json().encode())
output = st.builds(Frame, st.sampled_from([FrameKind.STDOUT, FrameKind.STDERR]), st.binary(min_size=1, max_size=40))
streams = st.lists(output | st.just(Frame(FrameKind.PING)), max_size=12).map(lambda frames: [*frames, EXIT])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    stops = sorted(place % (len(data) + 1) for place in places)
    return [data[start:stop] for start, stop in zip([0, *stops], [*stops, len(data)], strict=True)]


def joined(frames: list[Frame]) -> list[Frame]:
    """Neighbours of one stream as one frame: where they are cut means nothing."""
    out: list[Frame] = []
    for frame in frames:
        if out and frame.output and out[-1].kind is frame.kind:
            frame = Frame(frame.kind, out.pop().payload + frame.payload)
        out.append(frame)
    return out


@given(streams, st.lists(st.integers(0, 10**6), max_size=20))
def test_output_and_end_come_back_however_the_bytes_are_cut(frames: list[Frame], places: list[int]) -> None:
    parser, seen = FrameParser(), []
    for piece in cut(b"".join(encode(frame.kind, frame.payload) for frame in frames), places):
        seen += parser.feed(piece)
    assert joined(seen) == joined(frames)
    assert parser.ended
    assert seen[-1].end == END


def test_output_is_handed_on_before_its_frame_is_complete() -> None:
    parser = FrameParser()
    data = encode(FrameKind.STDOUT, b"x" * 1000)
    assert [frame.payload for frame in parser.feed(data[:105])] == [b"x" * 100]
    assert [frame.payload for frame in parser.feed(data[105:])] == [b"x" * 900]


@given(streams)
def test_events_hold_their_frames_whole_with_their_offsets(frames: list[Frame]) -> None:
    offset, data, wanted = 0, b"", []
    for frame in frames:
        offset += len(frame.payload) if frame.output else 0
        data += encode_event(frame, offset)
        wanted.append((frame, offset))
    *events, rest = data.split(b"\n\n")
    seen = []
    for event in events:
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        kind = FrameKind[fields[b"event"].decode().upper()]
        payload = fields[b"data"] if kind is FrameKind.EXIT else base64.b64decode(fields[b"data"], validate=True)
        seen.append((Frame(kind, payload), int(fields[b"id"])))
    assert (seen, rest) == (wanted, b"")


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_arbitrary_bytes_are_frames_or_refused_and_never_hang(pieces: list[bytes]) -> None:
    parser = FrameParser()
    try:
        frames = [frame for piece in pieces for frame in parser.feed(piece)]
    except FrameError:
        return
    assert sum(len(frame.payload) for frame in frames) <= sum(map(len, pieces))


@given(streams, st.integers(0, 10**6))
def test_stream_that_was_cut_off_never_seems_ended(frames: list[Frame], place: int) -> None:
    data = b"".join(encode(frame.kind, frame.payload) for frame in frames)
    parser = FrameParser()
    list(parser.feed(data[: place % len(data)]))
    assert not parser.ended


def test_output_of_any_size_becomes_frames_of_bounded_size() -> None:
    data = bytes(range(256)) * 10_000
    pieces = list(encode_output("stderr", data))
    assert len(pieces) == 3
    assert max(map(len, pieces)) <= MAX_PAYLOAD_BYTES + 5
    frames = [frame for piece in pieces for frame in FrameParser().feed(piece)]
    assert b"".join(frame.payload for frame in frames) == data
    assert {frame.output.stream for frame in frames if frame.output} == {"stderr"}
    assert list(encode_output("stdout", b"")) == []
    with pytest.raises(ValueError, match="encode_output"):
        encode(FrameKind.STDOUT, data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x04\x00\x00\x00\x00",
        b"\x01\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x00",
        b"\x03\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x01x",
        b'{"detail":"not found"}',
        encode_end(END) + b"\x01",
        encode_end(END) + PING,
        encode_end(END) + encode_end(END),
    ],
)
def test_what_is_no_stream_of_frames_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameParser().feed(data))


def test_anything_after_the_end_is_refused_later_too() -> None:
    parser = FrameParser()
    list(parser.feed(encode_end(END)))
    with pytest.raises(FrameError):
        list(parser.feed(PING))


@pytest.mark.parametrize("payload", [b" ", b"{}", b'{"outcome":"lost","return_code":0,"output_bytes":0}', b"\xff"])
def test_end_that_cannot_be_read_is_an_error_and_no_code(payload: bytes) -> None:
    (frame,) = FrameParser().feed(encode(FrameKind.EXIT, payload))
    with pytest.raises(FrameError):
        _ = frame.end
