"""Waiting for the servers of other hosts, and what is said of those that do not come."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from nemo_gym.config.hosts import Hosts
from nemo_gym.config.visibility import Address
from nemo_gym.contract.credentials import StackKeys
from nemo_gym.contract.errors import ServerError
from nemo_gym.stack.endpoints import http_status
from nemo_gym.stack.ports import wait_for_others


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """One that is signed by itself, and its key."""
    certificate, key = tmp_path / "host.crt", tmp_path / "host.key"
    about = ["-days", "2", "-subj", "/CN=host", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(["openssl", "req", "-x509", *kind, *about, *files], check=True, capture_output=True)
    return certificate, key


async def test_server_whose_certificate_nobody_trusts_is_told_from_one_that_is_not_there(
    certificate: tuple[Path, Path],
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def nobody(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(nobody, "127.0.0.1", 0, ssl=context) as server:
        place = Address("127.0.0.1", server.sockets[0].getsockname()[1], "https")
        assert await http_status(place.url, "/health", timeout_s=5.0) is None
        hosts = Hosts("here", {"math": (place,)}, {}, StackKeys.generate())
        with pytest.raises(
            ServerError, match=rf"math at 127\.0\.0\.1:{place.port} \(the TLS connection failed: .*certificate"
        ):
            await wait_for_others(hosts, 1.0, lambda _: None)
    with pytest.raises(ServerError, match=rf"math at 127\.0\.0\.1:{place.port}; start ng_run on those hosts"):
        await wait_for_others(hosts, 0.2, lambda _: None)


async def test_servers_that_are_awaited_are_named_once_and_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nemo_gym.stack.ports.WORD_EVERY_S", 0.2)

    async def ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        absent = tuple(Address(f"127.0.0.{number}", later.getsockname()[1]) for number in range(1, 8))
        hosts = Hosts("here", {"math": absent}, {}, StackKeys.generate())
        said: list[str] = []
        waiting = asyncio.create_task(wait_for_others(hosts, 8.0, said.append))
        await asyncio.sleep(1.5)
        assert len(said) == 1
        assert said[0].startswith("waiting for math at 127.0.0.1:") and said[0].endswith(" and 2 more")
        async with await asyncio.start_server(ready, sock=later):
            await waiting
    assert said[1].startswith("waiting for math at 127.0.0.2:") and said[1].endswith(" and 1 more")
    assert len(said) == 3 and said[2].startswith("going on without math at 127.0.0.2:")
