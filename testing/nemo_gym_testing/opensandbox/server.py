"""The double's lifecycle interface, and the routing of requests to boxes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from nemo_gym.contract.errors import SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym_testing.opensandbox import execd
from nemo_gym_testing.opensandbox.execd import problem
from nemo_gym_testing.opensandbox.faults import Faults, Seen
from nemo_gym_testing.opensandbox.go_build import build_boxtool

KEY_HEADER = "OPEN-SANDBOX-API-KEY"
_OWNER_LABEL = "opensandbox.fake"
_SHORTEST_TIMEOUT_S = 60
_EXECD_PORT, _EGRESS_PORT = 44772, 18080
_UNSERVED = ("snapshotId", "templateId", "platform", "credentialProxy", "secureAccess", "lifecycle")


@dataclass
class _Box:
    handle: SandboxHandle
    metadata: dict[str, str]
    entrypoint: list[str]
    image: str
    created_at: float
    expires_at: float | None
    policy: dict[str, Any] | None
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self, reason: str) -> dict[str, Any]:
        paused = not self.resumed.is_set()
        view: dict[str, Any] = {
            "id": self.handle.sandbox_id,
            "status": {"state": "Paused" if paused else "Running", "reason": reason, "message": "of the double"},
            "metadata": self.metadata,
            "entrypoint": self.entrypoint,
            "image": {"uri": self.image},
            "createdAt": _moment(self.created_at),
        }
        if self.expires_at is not None:
            view["expiresAt"] = _moment(self.expires_at)
        return view


class FakeOpenSandbox:
    """An OpenSandbox server over boxes of ``provider``, which manages their leases.

    Args:
        provider: where the boxes come from; its capabilities bound what a create may ask for.
        api_key: the key that requests must carry.
    """

    def __init__(self, provider: SandboxProvider, api_key: str) -> None:
        self.faults = Faults()
        self.seen: list[Seen] = []
        """Every request that was received."""
        self._provider = provider
        self._api_key = api_key
        self._name = uuid.uuid4().hex
        self._boxes: dict[str, _Box] = {}
        self._making: set[asyncio.Task[web.StreamResponse]] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/sandboxes", self._create)
        app.router.add_get("/v1/sandboxes", self._list)
        app.router.add_get("/v1/sandboxes/{id}", self._get)
        app.router.add_delete("/v1/sandboxes/{id}", self._delete)
        app.router.add_post("/v1/sandboxes/{id}/renew-expiration", self._renew)
        app.router.add_post("/v1/sandboxes/{id}/pause", self._pause)
        app.router.add_post("/v1/sandboxes/{id}/resume", self._resume)
        app.router.add_get("/v1/sandboxes/{id}/endpoints/{port}", self._endpoint)
        app.router.add_route("*", "/v1/sandboxes/{id}/proxy/{port}/{path:.*}", self._handle_in_box)
        app.router.add_route("*", "/box/{id}/proxy/{port}/{path:.*}", self._handle_in_box)
        return app

    async def aclose(self) -> None:
        """Destroy every box."""
        if self._making:
            await asyncio.wait(self._making)
        await self._provider.reap({_OWNER_LABEL: self._name})

    # ---------------------------------------------------------------------------------------------- requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = request.headers.get(KEY_HEADER)
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        self.seen.append(Seen(request.method, request.path, key is not None, peer[1] if peer else 0))
        if request.path.startswith("/v1/") and not hmac.compare_digest((key or "").encode(), self._api_key.encode()):
            return problem(401, "UNAUTHORIZED", "the key is missing or wrong")
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except KeyError as error:
            return problem(404, "DOCKER::SANDBOX_NOT_FOUND", f"sandbox {error} not found")
        except SandboxLostError as error:
            return problem(502, "BACKEND_CONNECTION_FAILED", str(error))
        except SandboxError as error:
            return problem(500, "RUNTIME_ERROR", str(error))

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.faults.refuse_creates:
            self.faults.refuse_creates -= 1
            refusal = problem(429, "KUBERNETES::POOL_CAPACITY_EXHAUSTED", "no capacity became available")
            refusal.headers["Retry-After"] = "1"
            return refusal
        # Like the real server, complete a create even if its client has disconnected.
        making = asyncio.create_task(self._make(body))
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        answer = await asyncio.shield(making)
        if self.faults.lose_creates and answer.status < 300:
            self.faults.lose_creates -= 1
            if request.transport is not None:
                request.transport.abort()
        return answer

    async def _make(self, body: Mapping[str, Any]) -> web.StreamResponse:
        if named := [name for name in _UNSERVED if body.get(name)]:
            return problem(400, "DOCKER::INVALID_PARAMETER", f"the double does not serve {', '.join(named)}")
        timeout_s = body.get("timeout")
        if timeout_s is not None and timeout_s < _SHORTEST_TIMEOUT_S:
            return problem(422, "INVALID_REQUEST", f"timeout must be at least {_SHORTEST_TIMEOUT_S}")
        if bad := [k for k, v in (body.get("metadata") or {}).items() if len(v) > 63 or not v.isalnum()]:
            return problem(400, "SANDBOX::INVALID_METADATA_LABEL", f"metadata {', '.join(bad)} is no label")
        requested_at = time.time()
        await asyncio.sleep(self.faults.create_takes_s)
        policy = body.get("networkPolicy")
        spec = SandboxSpec(
            image=body["image"]["uri"],
            ttl_s=timeout_s or 86400,
            env=body.get("env") or {},
            metadata={_OWNER_LABEL: self._name},
            resources=_resources(body.get("resourceLimits") or {}),
            entrypoint=body.get("entrypoint"),
            network=NetworkPolicy.NONE if policy else NetworkPolicy.OPEN,
            mounts=[Mount(v["host"]["path"], v["mountPath"]) for v in body.get("volumes") or ()],
        )
        try:
            handle = await self._provider.create(spec)
        except SandboxCreateError as error:
            return problem(500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED", str(error))
        now = time.time()
        box = _Box(
            handle=handle,
            metadata=dict(body.get("metadata") or {}),
            entrypoint=list(body.get("entrypoint") or []),
            image=str(spec.image),
            created_at=now,
            expires_at=None if timeout_s is None else requested_at + timeout_s,
            policy=policy,
        )
        box.resumed.set()
        self._boxes[handle.sandbox_id] = box
        return web.json_response(box.view(self.faults.status_reason), status=202)

    async def _box(self, request: web.Request) -> _Box:
        await self._forget_ended()
        return self._boxes[request.match_info["id"]]

    async def _forget_ended(self) -> None:
        before = set(self._boxes)
        alive = {info.sandbox_id for info in await self._provider.list({_OWNER_LABEL: self._name})}
        for gone in before - alive:
            self._boxes.pop(gone, None)

    async def _list(self, request: web.Request) -> web.Response:
        await self._forget_ended()
        labels = dict(parse_qsl(request.query.get("metadata", ""), keep_blank_values=True))
        boxes = [box for box in self._boxes.values() if labels.items() <= box.metadata.items()]
        boxes.sort(key=lambda box: box.created_at, reverse=True)
        page, size = int(request.query.get("page", 1)), int(request.query.get("pageSize", 20))
        pages = -(-len(boxes) // size)
        while self.faults.end_after_page:
            await self._provider.close(self._boxes[self.faults.end_after_page.pop()].handle)
        return web.json_response(
            {
                "items": [box.view(self.faults.status_reason) for box in boxes[(page - 1) * size : page * size]],
                "pagination": {
                    "page": page,
                    "pageSize": size,
                    "totalItems": len(boxes),
                    "totalPages": pages,
                    "hasNextPage": page < pages,
                },
            }
        )

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response((await self._box(request)).view(self.faults.status_reason))

    async def _delete(self, request: web.Request) -> web.Response:
        box = await self._box(request)
        await self._provider.close(box.handle)
        self._boxes.pop(box.handle.sandbox_id, None)
        return web.Response(status=204)

    async def _renew(self, request: web.Request) -> web.Response:
        box = await self._box(request)
        expires_at = datetime.fromisoformat((await request.json())["expiresAt"])
        left_s = expires_at.timestamp() - time.time()
        if left_s <= 0:
            return problem(400, "DOCKER::INVALID_EXPIRATION", "the new expiration is in the past")
        await self._provider.renew(box.handle, left_s)
        box.expires_at = expires_at.timestamp()
        return web.json_response({"expiresAt": _moment(box.expires_at)})

    async def _pause(self, request: web.Request) -> web.Response:
        (await self._box(request)).resumed.clear()
        return web.Response(status=202)

    async def _resume(self, request: web.Request) -> web.Response:
        (await self._box(request)).resumed.set()
        return web.Response(status=202)

    async def _endpoint(self, request: web.Request) -> web.Response:
        box_id = (await self._box(request)).handle.sandbox_id
        through = request.query.get("use_server_proxy", "").lower() == "true"
        root = "v1/sandboxes" if through else "box"
        return web.json_response({"endpoint": f"{request.host}/{root}/{box_id}/proxy/{request.match_info['port']}"})

    async def _handle_in_box(self, request: web.Request) -> web.StreamResponse:
        """Respond as a box's daemon or its egress sidecar. A paused box does not respond until it is resumed."""
        box = self._boxes[request.match_info["id"]]
        await box.resumed.wait()
        port, path = int(request.match_info["port"]), request.match_info["path"]
        if port == _EGRESS_PORT and path == "policy" and box.policy is not None:
            policy = {"defaultAction": "allow", "egress": []} if self.faults.open_sidecars else box.policy
            enforcement = "dns" if self.faults.dns_sidecars else "dns+nft"
            return web.json_response({"status": "ok", "enforcementMode": enforcement, "policy": policy})
        if port != _EXECD_PORT:
            return problem(502, "BACKEND_CONNECTION_FAILED", f"nothing listens on port {port}")
        match request.method, path:
            case "GET", "ping":
                return web.Response()
            case "POST", "command":
                return await execd.command(request, self._provider, box.handle, self.faults)
            case "POST", "files/upload":
                return await execd.upload(request, self._provider, box.handle)
            case "GET", "files/info":
                return await execd.info(request, self._provider, box.handle)
        return problem(404, "NOT_FOUND", f"the double does not serve {request.method} /{path}")


def _resources(limits: Mapping[str, str]) -> SandboxResources:
    cpu, memory = limits.get("cpu"), limits.get("memory")
    return SandboxResources(
        cpu=None if cpu is None else float(cpu.removesuffix("m")) / (1000 if cpu.endswith("m") else 1),
        memory_mib=None if memory is None else _mebibytes(memory),
    )


def _mebibytes(text: str) -> int:
    return int(text.removesuffix("Gi")) * 1024 if text.endswith("Gi") else int(text.removesuffix("Mi"))


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@contextlib.asynccontextmanager
async def serving(fake: FakeOpenSandbox, *, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback, on a free port for 0; yield the URL. Destroy the boxes at the end. The helper program that
    the provider puts into boxes is compiled first, if its sources changed."""
    await asyncio.to_thread(build_boxtool)
    runner = web.AppRunner(fake.application(), handler_cancellation=True, shutdown_timeout=1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await fake.aclose()
