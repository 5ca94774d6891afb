"""For each route of the broker: a request with a unique effect, and a check that the effect happened exactly once."""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from campaigns.faults.broker.client import Client, Said
from campaigns.faults.broker.stage import RunCounter, Stage
from resources_servers.sandbox.tests.api import Answer

Check = Callable[[Sequence[Answer]], Awaitable[str | None]]
"""Judges the final responses to all copies of a request. Returns what is wrong, or ``None``."""


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes | None = None


@dataclass
class Scene:
    """A box, and a client of the broker over an undisturbed network."""

    stage: Stage
    direct: Client
    box: str = ""
    token: str = ""
    gone: set[str] = field(default_factory=set)
    """Boxes that were destroyed."""

    async def ask(self, method: str, path: str, headers: Mapping[str, str], **options: Any) -> Answer:
        return await self.direct.ask(method, path, headers=headers, **options)

    async def create(self) -> tuple[str, str]:
        """Create a box; return its path and its owner's token."""
        headers = {**self.stage.broker.caller(), "Idempotency-Key": uuid.uuid4().hex}
        key = headers["Idempotency-Key"]
        body = {"spec": self.stage.spec(), "ttl_s": 1800, "labels": self.stage.labels(key)}
        made = (await self.ask("POST", "/v1/sandboxes", headers, body=body)).json
        return f"/v1/sandboxes/{made['sandbox']['sandbox_id']}", made["lease"]["token"]

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def on_box(self, method: str, below: str, body: Any = None, **headers: str) -> Call:
        data = None if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        kind = {"Content-Type": "application/json"} if data is not None and not isinstance(body, bytes) else {}
        return Call(method, self.box + below, {**self.bearer, **kind, **headers}, data)

    async def submit(self, command: str, **body: Any) -> str:
        mark = f"x-{uuid.uuid4().hex}"
        counted = f"{RunCounter.shell(mark)}; {command}"
        await self.ask("PUT", f"{self.box}/execs/{mark}", self.bearer, body={"command": counted, **body})
        return mark

    async def said(self, mark: str) -> Said:
        out = Said()
        await self.direct.read(f"{self.box}/execs/{mark}/output", self.token, out)
        return out

    async def told(self, command: str) -> str:
        """Run a command and return what it prints."""
        return (await self.said(await self.submit(command))).stdout.decode()

    async def ran_once(self, mark: str) -> str | None:
        """Return what is wrong unless the command ran once. Waits a moment, so that a second run is counted."""
        await asyncio.sleep(0.05)
        times = self.stage.counter.ran[mark]
        return None if times == 1 else f"{mark} ran {times} times"


Recipe = Callable[[Scene], Awaitable[tuple[Call, Check]]]
RECIPES: dict[str, Recipe] = {}
BOX = "/v1/sandboxes/{sandbox_id}"


def route(name: str) -> Callable[[Recipe], Recipe]:
    def add(recipe: Recipe) -> Recipe:
        RECIPES[name] = recipe
        return recipe

    return add


def only(*statuses: int) -> Check:
    async def check(answers: Sequence[Answer]) -> str | None:
        wrong = [answer for answer in answers if answer.status not in statuses]
        return f"{wrong[0].status} {wrong[0].body[:200]!r}" if wrong else None

    return check


def plain(name: str, call: Callable[[Scene], Call], *statuses: int) -> None:
    """Add a recipe for a route without an effect."""

    @route(name)
    async def recipe(scene: Scene) -> tuple[Call, Check]:
        return call(scene), only(*(statuses or (200,)))


def caller(scene: Scene) -> dict[str, str]:
    return scene.stage.broker.caller()


plain("GET /v1/sandboxes", lambda s: Call("GET", "/v1/sandboxes?limit=1000", caller(s)))
plain("GET /v1/capabilities", lambda s: Call("GET", "/v1/capabilities", caller(s)))
plain("GET /metrics", lambda s: Call("GET", "/metrics", caller(s)))
plain("GET /healthz", lambda s: Call("GET", "/healthz"))
plain("GET /readyz", lambda s: Call("GET", "/readyz"))
plain(f"GET {BOX}", lambda s: s.on_box("GET", ""))
plain(f"GET {BOX}/doors", lambda s: s.on_box("GET", "/doors"))
plain(f"GET {BOX}/archive/failure", lambda s: s.on_box("GET", "/archive/failure?request_id=none"), 404)
plain("GET /v1/images/{name}", lambda s: Call("GET", "/v1/images/none", caller(s)), 404)
plain("DELETE /v1/images/{name}", lambda s: Call("DELETE", "/v1/images/none", caller(s)), 204)


@route("POST /v1/sandboxes")
async def create(scene: Scene) -> tuple[Call, Check]:
    key = uuid.uuid4().hex
    headers = {**caller(scene), "Idempotency-Key": key, "Content-Type": "application/json"}
    body = {"spec": scene.stage.spec(), "ttl_s": 1800, "labels": scene.stage.labels(key)}

    async def check(answers: Sequence[Answer]) -> str | None:
        if wrong := await only(200, 201)(answers):
            return wrong
        promised = {(answer.json["sandbox"]["sandbox_id"], answer.json["lease"]["token"]) for answer in answers}
        made = [box for box in await scene.stage.inventory.boxes() if box.key == key]
        await scene.ask("DELETE", f"/v1/sandboxes?idempotency_key={key}", caller(scene))
        scene.gone |= {box.sandbox_id for box in made}
        return None if len(made) == len(promised) == 1 else f"key {key}: {made}, told {promised}"

    return Call("POST", "/v1/sandboxes", headers, orjson.dumps(body)), check


async def _destroying(scene: Scene, call: Callable[[str, str], Call]) -> tuple[Call, Check]:
    path, token = await scene.create()
    sandbox_id = path.rsplit("/", 1)[1]

    async def check(answers: Sequence[Answer]) -> str | None:
        left = [box for box in await scene.stage.inventory.boxes() if box.sandbox_id == sandbox_id]
        scene.gone.add(sandbox_id)
        return await only(200, 204)(answers) or (f"{left} is still there" if left else None)

    return call(path, token), check


@route(f"DELETE {BOX}")
async def destroy(scene: Scene) -> tuple[Call, Check]:
    return await _destroying(scene, lambda path, token: Call("DELETE", path, {"Authorization": f"Bearer {token}"}))


@route("DELETE /v1/sandboxes")
async def reap(scene: Scene) -> tuple[Call, Check]:
    label = uuid.uuid4().hex
    headers = {**caller(scene), "Idempotency-Key": label}
    body = {"spec": {}, "ttl_s": 1800, "labels": {"reap": label, **scene.stage.labels(label)}}
    made = (await scene.ask("POST", "/v1/sandboxes", headers, body=body)).json["sandbox"]["sandbox_id"]

    async def check(answers: Sequence[Answer]) -> str | None:
        left = [box for box in await scene.stage.inventory.boxes() if box.key == label]
        scene.gone.add(made)
        return await only(200)(answers) or (f"{left} is still there" if left else None)

    return Call("DELETE", f"/v1/sandboxes?label=reap%3D{label}", caller(scene)), check


@route(f"PUT {BOX}/lease")
async def renew(scene: Scene) -> tuple[Call, Check]:
    async def check(answers: Sequence[Answer]) -> str | None:
        return await only(200)(answers) or (
            None if all(1600 < answer.json["ttl_s"] <= 1700 for answer in answers) else "the lease has the wrong ttl_s"
        )

    return scene.on_box("PUT", "/lease", {"ttl_s": 1700}), check


@route(f"POST {BOX}/leases")
async def mint(scene: Scene) -> tuple[Call, Check]:
    async def check(answers: Sequence[Answer]) -> str | None:
        if wrong := await only(201)(answers):
            return wrong
        for answer in answers:  # a lease whose response was lost does no harm: it ends with the box
            await scene.ask("GET", scene.box, {"Authorization": f"Bearer {answer.json['token']}"})
        return None

    return scene.on_box("POST", "/leases", {"scope": "read"}), check


async def _fencing(scene: Scene, below: Callable[[str], str]) -> tuple[Call, Check]:
    lease = (await scene.ask("POST", f"{scene.box}/leases", scene.bearer, body={"scope": "operate"})).json

    async def check(answers: Sequence[Answer]) -> str | None:
        response = await scene.direct.once("GET", scene.box, {"Authorization": f"Bearer {lease['token']}"})
        fenced = response is not None and response.status == 409
        return await only(204)(answers) or (None if fenced else "the broker still accepts the revoked lease")

    return scene.on_box("DELETE", below(lease["lease_id"])), check


@route(f"DELETE {BOX}/leases")
async def fence(scene: Scene) -> tuple[Call, Check]:
    return await _fencing(scene, lambda lease_id: "/leases")


@route(f"DELETE {BOX}/leases/{{lease_id}}")
async def revoke(scene: Scene) -> tuple[Call, Check]:
    return await _fencing(scene, lambda lease_id: f"/leases/{lease_id}")


@route(f"PUT {BOX}/execs/{{exec_id}}")
async def submit(scene: Scene) -> tuple[Call, Check]:
    mark = f"x-{uuid.uuid4().hex}"

    async def check(answers: Sequence[Answer]) -> str | None:
        out = await scene.said(mark)
        wrong = None if (out.stdout, out.end and out.end["return_code"]) == (b"ran\n", 3) else f"{mark}: {out}"
        return await only(200, 201)(answers) or wrong or await scene.ran_once(mark)

    return scene.on_box("PUT", f"/execs/{mark}", {"command": f"{RunCounter.shell(mark)}; echo ran; exit 3"}), check


@route(f"PUT {BOX}/execs/{{exec_id}}/stdin")
async def feed(scene: Scene) -> tuple[Call, Check]:
    mark, data = await scene.submit("cat", stdin="attached"), uuid.uuid4().bytes * 3000

    async def check(answers: Sequence[Answer]) -> str | None:
        wrong = await only(200)(answers)
        out = await scene.said(mark)
        return (
            wrong
            or (None if out.stdout == data else "the command did not receive the input that was sent")
            or await scene.ran_once(mark)
        )

    return scene.on_box("PUT", f"/execs/{mark}/stdin", data, **{"Content-Type": "application/octet-stream"}), check


@route(f"GET {BOX}/execs/{{exec_id}}")
async def look(scene: Scene) -> tuple[Call, Check]:
    mark = await scene.submit("sleep 0.05; exit 4")

    async def check(answers: Sequence[Answer]) -> str | None:
        ended = all(answer.json["end"]["return_code"] == 4 for answer in answers if answer.status == 200)
        return (
            await only(200)(answers)
            or (None if ended else "the response does not contain the exec's end")
            or await scene.ran_once(mark)
        )

    return scene.on_box("GET", f"/execs/{mark}?wait_s=30"), check


@route(f"GET {BOX}/execs/{{exec_id}}/output")
async def output(scene: Scene) -> tuple[Call, Check]:
    mark = await scene.submit("echo out; echo err >&2")

    async def check(answers: Sequence[Answer]) -> str | None:
        # A truncated body does not count: the client repeated the request until a body arrived whole.
        whole = all(answer.body.count(b"event: exit") == 1 for answer in answers)
        return (
            await only(200)(answers)
            or (None if whole else "the response does not contain the exec's end")
            or await scene.ran_once(mark)
        )

    return scene.on_box("GET", f"/execs/{mark}/output"), check


@route(f"POST {BOX}/execs/{{exec_id}}/signal")
async def signal(scene: Scene) -> tuple[Call, Check]:
    mark = await scene.submit("exec sleep 300")

    async def check(answers: Sequence[Answer]) -> str | None:
        out = await scene.said(mark)
        wrong = None if out.end and out.end["outcome"] == "signaled" else f"{mark}: {out.end}"
        return await only(204)(answers) or wrong

    return scene.on_box("POST", f"/execs/{mark}/signal", {"signal": 9}), check


@route(f"PUT {BOX}/archive")
async def put(scene: Scene) -> tuple[Call, Check]:
    name, content = uuid.uuid4().hex, uuid.uuid4().bytes * 2000
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))

    async def check(answers: Sequence[Answer]) -> str | None:
        size = await scene.told(f"stat -c %s /srv/{name}")
        return await only(204)(answers) or (None if size == f"{len(content)}\n" else f"{size!r} bytes arrived")

    path = "/archive?path=/srv"
    return scene.on_box("PUT", path, buffer.getvalue(), **{"Content-Type": "application/x-tar"}), check


@route(f"GET {BOX}/archive")
async def get(scene: Scene) -> tuple[Call, Check]:
    await scene.told("head -c 50000 /dev/urandom > /srv/out")

    async def check(answers: Sequence[Answer]) -> str | None:
        return await only(200)(answers) or (
            None if all(len(answer.body) > 50_000 for answer in answers) else "the client accepted a truncated archive"
        )

    return scene.on_box("GET", "/archive?path=/srv/out"), check


@route(f"PUT {BOX}/doors/{{name}}")
async def open_door(scene: Scene) -> tuple[Call, Check]:
    name = uuid.uuid4().hex
    port = 20_000 + int(name[:4], 16) % 20_000
    door = {"name": name, "port": port, "target": "http://127.0.0.1:9", "allow": ["GET /"]}

    async def check(answers: Sequence[Answer]) -> str | None:
        doors = (await scene.ask("GET", f"{scene.box}/doors", scene.bearer)).json["doors"]
        await scene.ask("DELETE", f"{scene.box}/doors/{name}", scene.bearer)
        return await only(204)(answers) or (None if name in doors else "no such door")

    return scene.on_box("PUT", f"/doors/{name}", door), check


@route(f"DELETE {BOX}/doors/{{name}}")
async def close_door(scene: Scene) -> tuple[Call, Check]:
    name = uuid.uuid4().hex
    door = {"name": name, "port": 50_001, "target": "http://127.0.0.1:9", "allow": ["GET /"]}
    await scene.ask("PUT", f"{scene.box}/doors/{name}", scene.bearer, body=door)

    async def check(answers: Sequence[Answer]) -> str | None:
        doors = (await scene.ask("GET", f"{scene.box}/doors", scene.bearer)).json["doors"]
        return await only(204)(answers) or ("the door is open" if name in doors else None)

    return scene.on_box("DELETE", f"/doors/{name}"), check


@route(f"POST {BOX}/images")
async def commit(scene: Scene) -> tuple[Call, Check]:
    name = f"faults-{uuid.uuid4().hex}"

    async def check(answers: Sequence[Answer]) -> str | None:
        response = await scene.direct.once("GET", f"/v1/images/{name}", caller(scene))
        await scene.ask("DELETE", f"/v1/images/{name}", caller(scene))
        there = response is not None and response.status == 200 and response.json["labels"] == {"a": "b"}
        return await only(201)(answers) or (None if there else f"no image: {response}")

    return scene.on_box("POST", "/images", {"image": name, "labels": {"a": "b"}}), check
