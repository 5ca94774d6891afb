"""The requests that the supervisor serves. Each gets exactly one response while its connection is open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from nemo_gym._util.tasks import BackgroundTasks, finish
from nemo_gym.sandbox import linux
from nemo_gym.sandbox.cgroups import Cgroups
from nemo_gym.sandbox.providers.local import images
from nemo_gym.sandbox.providers.local.images import ImageError, ImageManifest, ImageStore
from nemo_gym.sandbox.providers.local.protocol import BASE_ENV, PROTOCOL_VERSION, Connection, Message, close_all
from nemo_gym.sandbox.providers.local.supervisor import construction, files, processes
from nemo_gym.sandbox.providers.local.supervisor.boxes import Box, RequestError, remove_files

Builder = Callable[[construction.BoxPlan], Awaitable[construction.BuiltBox]]

_REMEMBERED_DEAD = 4096
_DISK_PAUSE_S = 0.5
_DISK_IDLE_SHARE = 4
"""Pause after a measurement, as a multiple of its duration: measuring takes at most a fifth of the time."""


class Client:
    """One client's connection, its running commands and its unfinished requests."""

    def __init__(
        self,
        sock: socket.socket,
        answer: Callable[[Client, Message, list[int]], Coroutine[Any, Any, None]],
        on_disconnect: Callable[[Client], None],
    ) -> None:
        self.commands: set[tuple[str, str]] = set()
        self.tasks = BackgroundTasks()
        self.connection = Connection(
            sock,
            on_message=lambda message, descriptors: self.tasks.start(answer(self, message, descriptors)),
            on_close=lambda: on_disconnect(self),
        )


class Supervisor:
    """All boxes of one state directory."""

    def __init__(
        self,
        state_dir: Path,
        cgroups: Cgroups,
        *,
        user_overlays: bool,
        linger_s: float,
        build: Builder,
        moves_ids: bool,
    ) -> None:
        self._state_dir = state_dir
        self._boxes_dir = state_dir / "boxes"
        self._cgroups = cgroups
        self._user_overlays = user_overlays
        self._xattrs = "user" if user_overlays else "trusted"
        self._linger_s = linger_s
        self._builder = build
        self._moves_ids = moves_ids
        self._boxes: dict[str, Box] = {}
        self._creating: dict[str, asyncio.Task[Box]] = {}
        self._by_key: dict[str, str] = {}
        self._dead: OrderedDict[str, str] = OrderedDict()
        self._clients: set[Client] = set()
        self._background = BackgroundTasks()
        self._building_skeleton = asyncio.Lock()
        self._linger: asyncio.TimerHandle | None = None
        self._disk: asyncio.Task[bool] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ids = processes.IdRanges()
        self.finished = asyncio.Event()
        self._max_uid = processes.highest_id()

    # ------------------------------------------------------------------------------------------- connections

    def accept(self, sock: socket.socket) -> None:
        """Serve a new client."""
        self._clients.add(Client(sock, self._answer, self._on_disconnect))
        self.consider_leaving()

    def _on_disconnect(self, client: Client) -> None:
        """Kill the commands of a client that disconnected: nobody can read their output or learn how they end."""
        self._clients.discard(client)
        for box_id, exec_id in client.commands:
            box = self._boxes.get(box_id)
            if box is not None and exec_id in box.commands:
                box.commands[exec_id].kill()
        self.consider_leaving()

    def consider_leaving(self) -> None:
        """Start the timer that ends the supervisor if there are neither clients nor boxes; else stop the timer."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if not (self._clients or self._boxes or self._creating):
            self._linger = asyncio.get_running_loop().call_later(self._linger_s, self.finished.set)

    async def _answer(self, client: Client, message: Message, descriptors: list[int]) -> None:
        answer: Message = {"id": message.get("id")}
        sent: list[int] = []
        try:
            operation = getattr(self, f"do_{message.get('op')}", None)
            if operation is None:
                raise RequestError("sandbox", f"the supervisor does not know the request '{message.get('op')}'")
            answer.update(await operation(client, message, descriptors, sent) or {})
        except RequestError as error:
            answer["error"] = {"kind": error.kind, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - one failing request must not end every box
            answer["error"] = {"kind": "sandbox", "message": f"the supervisor failed: {type(error).__name__}: {error}"}
            traceback.print_exc()
        finally:
            close_all(descriptors)
        client.connection.send(answer, sent)

    def _box(self, message: Message) -> Box:
        box_id = str(message["box"])
        box = self._boxes.get(box_id)
        if box is None or box.termination_reason is not None:
            reason = (
                self._dead.get(box_id) or (box.termination_reason if box else None) or "unknown to this supervisor"
            )
            raise RequestError("lost", f"sandbox {box_id} is gone: {reason}")
        return box

    # -------------------------------------------------------------------------------------------- operations
    # `do_<op>` serves the request ``op``. It gets the client, the message, the descriptors that came with it, and a
    # list for those to send back. It returns the fields of the response.

    async def do_hello(self, *_: Any) -> Message:
        return {
            "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024**2,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "limits": self._cgroups.enforced,
            "reasons": self._cgroups.reasons,
            "max_uid": self._max_uid,
        }

    async def do_create(self, client: Client, message: Message, _d: list[int], _s: list[int]) -> Message:
        spec: Message = message["spec"]
        box_id, key = str(spec["box"]), spec.get("idempotency_key")
        if key is not None and key in self._by_key:
            box_id = self._by_key[key]
        if box_id in self._boxes and self._boxes[box_id].termination_reason is None:
            return {"box": box_id, "env": dict(self._boxes[box_id].env)}
        task = self._creating.get(box_id)
        if task is None:
            if key is not None:
                self._by_key[key] = box_id
            task = asyncio.create_task(self._build(box_id, spec))
            self._creating[box_id] = task
            self.consider_leaving()
        try:
            box = await asyncio.shield(task)
        except BaseException:
            if key is not None and self._by_key.get(key) == box_id:
                del self._by_key[key]
            raise
        finally:
            if task.done():
                self._creating.pop(box_id, None)
            self.consider_leaving()
        if client.connection.closed and key is None:
            await self._destroy(box, "its creator left before it was ready")
        return {"box": box_id, "env": dict(box.env)}

    async def _build(self, box_id: str, spec: Message) -> Box:
        store = ImageStore(Path(spec["image_dir"]))
        directory = self._boxes_dir / box_id
        locks: list[int] = []
        groups = None
        first_id = None
        try:
            with store.locked(exclusive=False):
                manifest = store.resolve(spec["image"], self._xattrs)
                locks = store.hold_layers(manifest)
            overlays = [construction.Overlay("root", await self._lowers(store, manifest, "root"))]
            if manifest.host_base:
                for part in images.system_directories():
                    overlays.append(construction.Overlay(part, await self._lowers(store, manifest, part)))
            directory.mkdir(mode=0o700)
            limits: Message = spec["limits"]
            memory, disk_bytes = limits["memory_mib"], limits["disk_bytes"]
            groups = self._cgroups.create_box(box_id, memory_mib=memory, pids=limits["pids"], cpu=limits["cpu"])
            has_disk = disk_bytes is not None and await self._makes_disks()
            lowers = [lower for overlay in overlays for lower in overlay.lowers if lower.startswith("/")]
            if self._moves_ids and await self._ids.can_move([str(self._boxes_dir), str(store.layers), *lowers]):
                first_id = self._ids.take()
            plan = construction.BoxPlan(
                directory=directory,
                layers=store.layers,
                overlays=overlays,
                program=spec["program"],
                hostname=spec["hostname"],
                open_network=spec["open_network"],
                mounts=[(m[0], m[1]) for m in spec["mounts"]],
                hidden=[h for h in spec["hidden"] if manifest.host_base and os.path.lexists(h)],
                memory_bytes=memory * 1024 * 1024 if memory else None,
                disk_bytes=disk_bytes if has_disk else None,
                user_overlays=self._user_overlays,
                identity=f"0 0 {self._max_uid + 1}",
                first_id=first_id,
                stage=processes.stage_for(directory),
                network_files=_network_files() if spec["open_network"] else {},
            )
            built = await self._builder(plan)
            if not plan.open_network:
                linux.permit_low_ports(f"/proc/self/fd/{built.network_fd}")
            box = Box(
                box_id,
                plan,
                built,
                manifest=manifest,
                layer_locks=locks,
                groups=groups,
                labels=spec["labels"],
                max_uid=self._max_uid if first_id is None else processes.COUNT - 1,
                on_expired=lambda expired: self._background.start(self._destroy(expired, "its lease ended")),
            )
        except BaseException as error:
            self._ids.give_back(first_id)
            if groups is not None:
                groups.remove()
            close_all(locks)
            await finish(remove_files(directory))
            if isinstance(error, ImageError | construction.BuildError):
                raise RequestError("create", str(error)) from error
            if isinstance(error, OSError):
                where = f" ({error.filename})" if error.filename else ""
                error_text = f"making the box failed: {error.strerror or error}{where}"
                raise RequestError("create", error_text + self._hint(error.errno, store)) from error
            raise
        self._boxes[box_id] = box
        box.renew(spec["ttl_s"])
        self._background.start(self._remove_when_dead(box))
        if disk_bytes is not None and not has_disk:
            box.watched_disk_bytes = disk_bytes
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch_disks())
        if spec["files"] or spec["workdir"]:
            problem = await files.write_files(box.init_fd, spec["files"], spec["workdir"])
            if problem is not None:
                await self._destroy(box, "its files could not be written")
                error_text = f"{problem['step']} failed: {problem['message']}"
                raise RequestError("create", error_text + self._hint(problem["errno"], store))
        if spec.get("entrypoint"):
            await self._start_entrypoint(box, spec["entrypoint"])
        return box

    async def _makes_disks(self) -> bool:
        """Whether boxes can have disks of limited size. The first call finds out by creating one."""
        if self._disk is None:
            self._disk = asyncio.create_task(files.can_make_disks(self._boxes_dir))
        return await asyncio.shield(self._disk)

    async def _watch_disks(self) -> None:
        """Measure what boxes without such disks have written, repeatedly, and end those that exceed their limit."""
        while watched := [box for box in self._boxes.values() if box.watched_disk_bytes is not None]:
            began = time.monotonic()
            sizes = await files.measure([str(box.upper) for box in watched])
            for box in watched:
                limit = box.watched_disk_bytes or 0
                if sizes.get(str(box.upper), 0) > limit:
                    reason = f"it wrote more than the {limit / 1024**3:g} GiB that its limit disk_gib allows"
                    self._background.start(self._destroy(box, reason))
            await asyncio.sleep(max(_DISK_PAUSE_S, _DISK_IDLE_SHARE * (time.monotonic() - began)))

    async def _lowers(self, store: ImageStore, manifest: ImageManifest, part: str) -> list[str]:
        layers = reversed(manifest.layers)
        lowers = [f"{layer}/{part}" for layer in layers if (store.layers / layer / part).is_dir()]
        if manifest.base_dir is not None:
            lowers.append(manifest.base_dir)
        if manifest.host_base:
            lowers.append(str(await self._skeleton()) if part == "root" else f"/{part}")
        return lowers

    async def _skeleton(self) -> Path:
        """The lowest layer of the host image, built on first use."""
        path = self._state_dir / "host"

        def job(report: processes.Report) -> None:
            report.step = "building the host image"
            images.build_skeleton(path)

        async with self._building_skeleton:
            if not path.exists():
                path.mkdir(mode=0o755)
                try:
                    if (problem := await processes.run(job)) is not None:
                        raise RequestError("create", f"{problem['step']} failed: {problem['message']}")
                except BaseException:
                    shutil.rmtree(path, ignore_errors=True)  # an unfinished one would be every later box's root
                    raise
        return path

    async def _start_entrypoint(self, box: Box, command: Message) -> None:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            with_image = {**command, "env": {**BASE_ENV, **box.env, **command["env"]}}
            await box.start_command("entrypoint", with_image, (null, null, null), lambda _: None)
        except RequestError as error:
            await self._destroy(box, "its entry point could not be started")
            raise RequestError("create", f"the entry point could not be started: {error}") from error
        finally:
            os.close(null)

    async def _remove_when_dead(self, box: Box) -> None:
        await box.died()
        await self._destroy(box, "its first process was killed from outside")

    async def _destroy(self, box: Box, reason: str) -> None:
        await box.destroy(reason)
        if self._boxes.pop(box.box_id, None) is None:
            return
        self._ids.give_back(box.plan.first_id)
        for key in [key for key, box_id in self._by_key.items() if box_id == box.box_id]:
            del self._by_key[key]
        self._dead[box.box_id] = box.termination_reason or reason
        while len(self._dead) > _REMEMBERED_DEAD:
            self._dead.popitem(last=False)
        self.consider_leaving()

    async def do_exec(self, client: Client, message: Message, descriptors: list[int], _s: list[int]) -> None:
        box = self._box(message)
        exec_id = str(message["exec"])
        expected = 2 if message["merge_stderr"] else 3
        if len(descriptors) != expected:
            raise RequestError("sandbox", f"a command came with {len(descriptors)} descriptors instead of {expected}")
        stdin, stdout, stderr = descriptors[0], descriptors[1], descriptors[-1]

        def on_end(end: dict[str, Any]) -> None:
            client.commands.discard((box.box_id, exec_id))
            if box.termination_reason is not None or (end.get("signal") == signal.SIGKILL and box.is_dying()):
                reason = box.termination_reason or "the box ended"
                end = {"outcome": "lost", "duration_s": end["duration_s"], "reason": reason}
            client.connection.send({"event": "end", "exec": exec_id, **end})

        client.commands.add((box.box_id, exec_id))
        try:
            await box.start_command(exec_id, message, (stdin, stdout, stderr), on_end)
        except BaseException:
            client.commands.discard((box.box_id, exec_id))
            raise
        if client.connection.closed and exec_id in box.commands:
            box.commands[exec_id].kill()

    async def do_signal(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> None:
        box = self._boxes.get(str(message["box"]))
        command = box.commands.get(str(message["exec"])) if box is not None else None
        if command is None:
            return
        if message["signal"] == 9:
            command.kill()
        else:
            command.signal(int(message["signal"]))

    async def do_put(self, _c: Client, message: Message, descriptors: list[int], _s: list[int]) -> None:
        box = self._box(message)
        _raise_for(await files.put_archive(box.init_fd, message["path"], descriptors[0]))

    async def do_get(self, _c: Client, message: Message, descriptors: list[int], _s: list[int]) -> None:
        box = self._box(message)
        _raise_for(
            await files.get_archive(
                box.init_fd, message["path"], descriptors[0], message["exclude"], message["max_bytes"]
            )
        )

    async def do_status(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> Message:
        box_id = str(message["box"])
        if box_id in self._creating:
            return {"status": "starting"}
        box = self._boxes.get(box_id)
        if box is not None and box.termination_reason is None:
            return {"status": "running", **_info(box)}
        reason = self._dead.get(box_id) if box is None else box.termination_reason
        return {"status": "stopped", "termination_reason": reason}

    async def do_renew(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> None:
        self._box(message).renew(float(message["ttl_s"]))

    async def do_close(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> None:
        box_id = str(message["box"])
        if box_id in self._creating:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._creating[box_id])
        box = self._boxes.get(box_id)
        if box is not None:
            await self._destroy(box, "it was closed")

    async def do_list(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> Message:
        return {"boxes": [_info(box) for box in self._matching(message["labels"])]}

    async def do_reap(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> Message:
        matching = self._matching(message["labels"])
        await asyncio.gather(*(self._destroy(box, "it was reaped by its labels") for box in matching))
        return {"boxes": [box.box_id for box in matching]}

    def _matching(self, labels: dict[str, str]) -> list[Box]:
        return [
            box
            for box in self._boxes.values()
            if box.termination_reason is None and labels.items() <= box.labels.items()
        ]

    async def do_listen(self, _c: Client, message: Message, _d: list[int], sent: list[int]) -> None:
        port = int(message["port"])
        try:
            with self._box(message).listen(port) as listener:
                sent.append(os.dup(listener.fileno()))
        except OSError as error:
            raise RequestError("sandbox", f"cannot listen on port {port} of the box: {error.strerror}") from error

    async def do_commit(self, _c: Client, message: Message, _d: list[int], _s: list[int]) -> None:
        box = self._box(message)
        store = ImageStore(Path(message["image_dir"]))
        with store.staging() as staged:
            try:
                box.groups.freeze(True)
                try:
                    parts = [overlay.part for overlay in box.plan.overlays]
                    problem = await files.copy_upper(box.monitor_fd, box.upper, parts, staged)
                finally:
                    box.groups.freeze(False)
                if problem is None:
                    arguments = (message["image"], box.manifest, staged, message["labels"], self._xattrs)
                    problem = await files.publish(store, *arguments)
                if problem is not None:
                    error_text = f"{problem['step']} failed: {problem['message']}"
                    raise RequestError("sandbox", error_text + self._hint(problem["errno"], store))
            finally:
                await finish(remove_files(staged))

    def _hint(self, number: int | None, store: ImageStore) -> str:
        """Advice on a system error, to append to its message; empty if there is none."""
        if number in (errno.ENOSPC, errno.EDQUOT):
            return f"; free some on the disks of state_dir {self._state_dir} and image_dir {store.root}, or set others"
        return ""

    async def close_everything(self) -> None:
        """Destroy all boxes and close all connections."""
        for client in list(self._clients):
            client.connection.close()
        await asyncio.gather(*(box.destroy("the supervisor was stopped") for box in list(self._boxes.values())))


def _info(box: Box) -> Message:
    return {
        "box": box.box_id,
        "labels": box.labels,
        "expires_at": time.time() + box.expires_in_s,
        "created_at": box.created_at,
    }


def _raise_for(problem: processes.Problem | None) -> None:
    if problem is not None:
        raise RequestError(problem["kind"], f"{problem['step']}: {problem['message']}")


def _network_files() -> dict[str, bytes]:
    """The host's files for name resolution, for boxes that share its network."""
    contents = {}
    for path in ("/etc/resolv.conf", "/etc/hosts"):
        with contextlib.suppress(OSError):
            contents[path] = Path(path).read_bytes()
    return contents
