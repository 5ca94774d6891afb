"""The steps that owners take with their boxes, and what the broker's responses promised them."""

from __future__ import annotations

import io
import random
import tarfile
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from campaigns.faults.broker.client import Client, RefusedError, Said
from campaigns.faults.broker.ledger import Ledger
from campaigns.faults.broker.stage import RunCounter, Stage

TAR = "application/x-tar"
LEASE_S = 1800.0
"""Longer than a campaign, so that only the leases that the step ``leave`` shortens expire."""
MIDDLE = ("run", "run", "run", "feed", "renew", "lend", "door", "archive", "fence", "signal")
WHOLE = ("create", "run", "feed", "renew", "lend", "door", "archive", "signal", "fence", "run", "destroy")
"""Every kind of step once."""


def script(draw: random.Random) -> tuple[str, ...]:
    """Draw the steps of one box: some boxes are destroyed, some kept, some left to expire, some taken back by key."""
    if draw.random() < 0.06:
        return ("take_back",)
    middle = draw.choices(MIDDLE, k=draw.randint(3, 7))
    end = draw.choices(("destroy", "keep", "leave"), (70, 20, 10))[0]
    return ("create", *middle, end)


@dataclass
class Promises:
    """What the broker's responses promised the clients of a campaign."""

    closed: set[str] = field(default_factory=set)
    """Boxes that are gone."""
    ended: dict[str, str] = field(default_factory=dict)
    """The outcome of each exec that ended."""
    outputs: list[tuple[str, str, Said]] = field(default_factory=list)
    """The path of each output, a token that may read it, and what was received of it."""


@dataclass
class Life:
    """One box and its owner."""

    stage: Stage
    client: Client
    ledger: Ledger
    promises: Promises
    draw: random.Random
    steps: tuple[str, ...]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    path: str = ""
    token: str = ""

    async def play(self) -> None:
        try:
            for step in self.steps:
                kind: Callable[[], Coroutine[Any, Any, None]] = getattr(self, step)
                await kind()
        except RefusedError as error:
            self.ledger.unexpected.append(f"{self.key} {self.path}: {error}")

    # -- steps ---------------------------------------------------------------------------------------------------

    async def create(self) -> None:
        created = (await self._create()).json
        self.path, self.token = f"/v1/sandboxes/{created['sandbox']['sandbox_id']}", created["lease"]["token"]

    async def run(self) -> None:
        await self._run(self.token, "")

    async def feed(self) -> None:
        await self._run(self.token, "".join(self.draw.choices("abcdef", k=self.draw.choice((10, 60_000)))))

    async def renew(self) -> None:
        await self._ask("PUT", "/lease", body={"ttl_s": LEASE_S}, copies=self._copies())

    async def lend(self) -> None:
        lease = (await self._ask("POST", "/leases", body={"scope": "operate"})).json
        await self._run(lease["token"], "")

    async def fence(self) -> None:
        lease = (await self._ask("POST", "/leases", body={"scope": "read"})).json
        await self._ask("DELETE", "/leases")
        try:
            await self._ask("GET", "", token=lease["token"])
        except RefusedError as error:
            if error.code == "fenced":
                return
            raise
        self.ledger.revived.append(f"{self.path} {lease['lease_id']}")

    async def door(self) -> None:
        door = {"name": "d", "port": 8123, "target": "http://127.0.0.1:9", "allow": ["GET /"]}
        await self._ask("PUT", "/doors/d", body=door, copies=self._copies())
        if self.draw.random() < 0.7:
            await self._ask("DELETE", "/doors/d", copies=self._copies())

    async def archive(self) -> None:
        name, content = f"f{uuid.uuid4().hex[:8]}", self.draw.randbytes(self.draw.choice((100, 200_000)))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        await self._ask("PUT", "/archive?path=/srv", data=buffer.getvalue(), headers={"Content-Type": TAR})
        answer = await self._ask("GET", f"/archive?path=/srv/{name}")
        with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
            file = tar.extractfile(name)
            if file is None or file.read() != content:
                self.ledger.wrong_output.append(f"{self.path} archive {name}")

    async def signal(self) -> None:
        mark = f"x-{uuid.uuid4().hex}"
        command = f"{RunCounter.shell(mark)}; echo {mark}; exec sleep 300"
        await self._ask("PUT", f"/execs/{mark}", body={"command": command})
        await self._ask("POST", f"/execs/{mark}/signal", body={"signal": 9}, copies=self._copies())
        await self._read(mark, self.token, {"stdout": f"{mark}\n".encode(), "stderr": b""}, whole=False)

    async def destroy(self) -> None:
        await self._ask("DELETE", "", copies=self._copies())
        self.promises.closed.add(self.path.rsplit("/", 1)[1])

    async def keep(self) -> None:
        await self._ask("GET", "")

    async def leave(self) -> None:
        """Leave the box to its lease, which is shortened to two seconds."""
        try:
            await self._ask("PUT", "/lease", body={"ttl_s": 2})
        except RefusedError as error:
            if error.code != "sandbox_gone":  # the response was lost, and the lease has expired since
                raise
        self.promises.closed.add(self.path.rsplit("/", 1)[1])

    async def take_back(self) -> None:
        """Take back a create by its key, before or after the create arrived."""
        created_ids = set()
        if self.draw.random() < 0.5:
            created_ids.add((await self._create()).json["sandbox"]["sandbox_id"])
        await self.client.ask(
            "DELETE", f"/v1/sandboxes?idempotency_key={self.key}", headers=self.stage.broker.caller(), copies=2
        )
        self.promises.closed |= created_ids
        try:
            await self._create()
        except RefusedError as error:
            if error.code == "sandbox_gone":
                return
            raise
        self.ledger.doubled.append(f"{self.key} was created although it had been cancelled by key")

    # -- parts ---------------------------------------------------------------------------------------------------

    async def _create(self) -> Any:
        headers = {**self.stage.broker.caller(), "Idempotency-Key": self.key}
        body = {"spec": self.stage.spec(), "ttl_s": LEASE_S, "labels": self.stage.labels(self.key)}
        return await self.client.ask("POST", "/v1/sandboxes", headers=headers, body=body, copies=self._copies())

    async def _run(self, token: str, stdin: str) -> None:
        mark, lines = f"x-{uuid.uuid4().hex}", self.draw.choice((1, 5, 40, 3000))
        pause = "sleep 0.05; " if 1 < lines <= 40 and self.draw.random() < 0.6 else ""
        command = (
            f"{RunCounter.shell(mark)}; i=0; while [ $i -lt {lines} ]; do echo {mark} $i; {pause}i=$((i+1)); done;"
            f" {'cat; ' if stdin else ''}echo {mark} >&2; exit 3"
        )
        body = {"command": command, **({"stdin": "attached"} if stdin else {})}
        await self._ask("PUT", f"/execs/{mark}", token=token, body=body, copies=self._copies())
        if stdin:
            headers = {"Content-Type": "application/octet-stream"}
            await self._ask("PUT", f"/execs/{mark}/stdin", token=token, data=stdin.encode(), headers=headers)
        stdout = "".join(f"{mark} {i}\n" for i in range(lines)) + stdin
        await self._read(mark, token, {"stdout": stdout.encode(), "stderr": f"{mark}\n".encode()}, whole=True)

    async def _read(self, mark: str, token: str, expected: Mapping[str, bytes], *, whole: bool) -> None:
        """Read an output to its end and check it. ``whole``: the command must exit by itself, unless it is lost."""
        output = Said()
        place = f"{self.path}/execs/{mark}/output"
        try:
            await self.client.read(place, token, output)
        except RefusedError as error:
            if error.code in ("offset_out_of_range", "output_gone", "exec_not_found"):
                self.ledger.lost_output.append(str(error))
                return
            raise
        assert output.end is not None
        self.promises.ended[mark] = output.end["outcome"]
        # With the owner's token: a borrower's may be fenced before `reread` uses it.
        self.promises.outputs.append((place, self.token, output))
        for stream, all_of_it in expected.items():
            received = getattr(output, stream)
            is_right = received == all_of_it if output.end["outcome"] == "exited" else all_of_it.startswith(received)
            if not is_right or (whole and output.end["outcome"] not in ("exited", "lost")):
                self.ledger.wrong_output.append(f"{place} {stream}: {len(received)} bytes, {output.end}")
        if output.end["outcome"] == "exited" and output.end["return_code"] != 3:
            self.ledger.wrong_output.append(f"{place}: {output.end}")

    async def _ask(
        self, method: str, below: str, *, token: str = "", headers: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        headers = {"Authorization": f"Bearer {token or self.token}", **(headers or {})}
        return await self.client.ask(method, f"{self.path}{below}", headers=headers, **options)

    def _copies(self) -> int:
        return 1 if self.draw.random() < 0.7 else self.draw.randint(2, 4)


async def reread(client: Client, promises: Promises, ledger: Ledger) -> None:
    """Read every received output again: it must not have changed."""
    for place, token, output in promises.outputs:
        again = Said()
        try:
            await client.read(place, token, again)
        except RefusedError as error:
            ledger.lost_output.append(str(error))
            continue
        if (again.end, again.stderr, again.stdout) != (output.end, output.stderr, output.stdout):
            ledger.lost_output.append(
                f"{place}: {output.offset} bytes and {output.end} became {again.offset}, {again.end}"
            )
