"""The part of the double that acts as the daemon in each box: commands and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from typing import IO, Any

from aiohttp import BodyPartReader, web

from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecRequest, SandboxHandle, SandboxProvider
from nemo_gym.sandbox.tar_stream import END_OF_ARCHIVE, encode_header
from nemo_gym_testing.opensandbox.faults import CommandFault, Faults

_CHUNK = 256 * 1024
_ANY_OUTPUT = 1 << 50


def problem(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=status)


class _Events:
    """A response of events: bare JSON, each followed by an empty line."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._lines = {"stdout": bytearray(), "stderr": bytearray()}

    async def send(self, kind: str, **more: Any) -> None:
        event = {"type": kind, "timestamp": int(time.time() * 1000), **more}
        await self._response.write(json.dumps(event).encode() + b"\n\n")

    async def output(self, stream: str, data: bytes) -> None:
        """Send output line by line, as text; output that is not text is damaged, as by the real daemon."""
        self._lines[stream] += data
        *lines, rest = bytes(self._lines[stream]).split(b"\n")
        self._lines[stream] = bytearray(rest)
        for line in lines:
            await self.send(stream, text=line.decode("utf-8", "replace"))

    async def rest(self) -> None:
        for stream, line in self._lines.items():
            if line:
                await self.send(stream, text=line.decode("utf-8", "replace"))


async def command(
    request: web.Request, provider: SandboxProvider, handle: SandboxHandle, faults: Faults
) -> web.StreamResponse:
    """``POST /command``."""
    body = await request.json()
    fault: CommandFault | None = None
    if "run" in (body.get("argv") or ())[1:2]:
        faults.commands_seen += 1
        if faults.hold_commands is not None:
            await faults.hold_commands.wait()
        fault = faults.commands.pop(0) if faults.commands else None
    if fault == "refuse":
        return problem(502, "BACKEND_CONNECTION_FAILED", "could not connect to the backend sandbox")
    timeout_ms = body.get("timeout")
    order = ExecRequest(
        command=body.get("argv") or body["command"],
        cwd=body.get("cwd"),
        env=body.get("envs") or {},
        timeout_s=timeout_ms / 1000 if timeout_ms else None,
        max_output_bytes=_ANY_OUTPUT,
    )
    process = await provider.start_exec(handle, order)
    if fault == "answer_lost":
        # The command runs to its end without a client.
        async for _ in process.events():
            pass
        return problem(502, "BACKEND_RESPONSE_FAILED", "the backend sandbox dropped the connection")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    events = _Events(response)
    try:
        await events.send("init", text=uuid.uuid4().hex)
        async for event in process.events():
            if isinstance(event, ExecEnd):
                await events.rest()
                await _end(events, event, request)
            else:
                await events.output(event.stream, event.data)
                if fault in ("cut", "cut_politely"):
                    if fault == "cut" and request.transport is not None:
                        request.transport.abort()
                    return response
    except (asyncio.CancelledError, ConnectionError):
        # A client that disconnects ends its command.
        with contextlib.suppress(SandboxError):
            await asyncio.shield(process.kill())
        raise
    return response


async def _end(events: _Events, end: ExecEnd, request: web.Request) -> None:
    if end.outcome is ExecOutcome.EXITED and end.return_code == 0:
        await events.send("execution_complete", execution_time=int(end.duration_s * 1000))
    elif end.outcome is not ExecOutcome.LOST:
        code = end.return_code if end.outcome is ExecOutcome.EXITED else -1
        error = {"ename": "CommandExecError", "evalue": str(code), "traceback": [str(end.outcome)]}
        await events.send("error", error=error)
    # If the box died, there is no end event, and a proxy ends the response as if all were well.


async def upload(request: web.Request, provider: SandboxProvider, handle: SandboxHandle) -> web.Response:
    """``POST /files/upload``: pairs of a ``metadata`` and a ``file`` part."""
    entry: dict[str, Any] | None = None
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            continue
        if part.name == "metadata":
            entry = json.loads(await part.read())
        elif part.name == "file" and entry is not None:
            with tempfile.TemporaryFile() as spool:
                size = 0
                while chunk := await part.read_chunk(_CHUNK):
                    size += spool.write(chunk)
                spool.seek(0)
                directory, name = posixpath.split(str(entry["path"]))
                member = tarfile.TarInfo(name)
                # The number 644 means octal 0644.
                member.size, member.mode, member.mtime = size, int(str(entry.get("mode") or 644), 8), int(time.time())
                await provider.put_archive(handle, directory, _archive(member, spool))
    return web.Response()


async def _archive(member: tarfile.TarInfo, content: IO[bytes]) -> AsyncIterator[bytes]:
    yield encode_header(member)
    while chunk := content.read(_CHUNK):
        yield chunk
    yield bytes(-member.size % tarfile.BLOCKSIZE) + END_OF_ARCHIVE


async def info(request: web.Request, provider: SandboxProvider, handle: SandboxHandle) -> web.Response:
    """``GET /files/info``."""
    files = {}
    for path in request.query.getall("path", []):
        result = await provider.exec(handle, ["stat", "-c", "%s %Y %U %G %a", path])
        if not result.ok:
            return problem(404, "FILE_NOT_FOUND", f"there is nothing at {path}")
        size, changed, owner, group, mode = (result.stdout or "").split()
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(changed)))
        files[path] = {
            "path": path,
            "size": int(size),
            "modified_at": moment,
            "created_at": moment,
            "owner": owner,
            "group": group,
            "mode": int(mode),
        }
    return web.json_response(files)
