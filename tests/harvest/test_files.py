"""Files of a harvest, read by an environment: whoever made the archive, it is a file's content or nothing."""

from __future__ import annotations

import tarfile

import pytest

from nemo_gym.contract.session import Artifact
from nemo_gym.sandbox.archive import encode_header, pack_bytes
from nemo_gym.sandbox.harvest import harvested_file

PATH = "/home/task/sum.txt"


def artifact(data: bytes, **fields: object) -> list[Artifact]:
    return [
        Artifact.of("other", "files", pack_bytes("home/task/sum.txt", b"0")),
        Artifact.of("sum", "files", data, **fields),
    ]


def link() -> bytes:
    member = tarfile.TarInfo("home/task/sum.txt")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return encode_header(member)


def extended(records: bytes) -> bytes:
    member = tarfile.TarInfo("extended")
    member.type, member.size = tarfile.XHDTYPE, len(records)
    return member.tobuf(tarfile.GNU_FORMAT) + records + bytes(-len(records) % tarfile.BLOCKSIZE)


@pytest.mark.parametrize("name", ["home/task/sum.txt", "./home/task/sum.txt"])
def test_content_of_a_file_is_found_by_its_path_in_the_box(name: str) -> None:
    assert harvested_file(artifact(pack_bytes(name, b"16\n")), "sum", PATH) == b"16\n"
    assert harvested_file(artifact(pack_bytes(name, b"")), "sum", PATH) == b""
    big = b"x" * 1_000_000
    assert harvested_file(artifact(pack_bytes(name, big)), "sum", PATH) == big


@pytest.mark.parametrize(
    "found",
    [
        [],
        artifact(pack_bytes("home/task/other.txt", b"16")),
        artifact(b"no archive"),
        artifact(pack_bytes("home/task/sum.txt", b"16" * 1000)[:-1500]),
        artifact(pack_bytes("../home/task/sum.txt", b"16")),
        artifact(link() + bytes(1024)),
        artifact(extended(b"9" * 5000 + b" a=b\n") + pack_bytes("home/task/sum.txt", b"16")),
        artifact(extended(b"30 uid=" + b"9" * 22 + b"\n") + pack_bytes("home/task/sum.txt", b"16")),
        artifact(pack_bytes("home/task/sum.txt", b"16"), error="cannot harvest"),
        artifact(pack_bytes("home/task/sum.txt", b"16"), truncated=True),
        [artifact(pack_bytes("home/task/sum.txt", b"16"))[1].model_copy(update={"sha256": "0" * 64})],
    ],
)
def test_what_is_no_such_file_is_nothing_and_no_error(found: list[Artifact]) -> None:
    assert harvested_file(found, "sum", PATH) is None
