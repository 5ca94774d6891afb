"""A real ``opensandbox-server`` on a real Docker Engine, with a stand-in for the daemon that it puts into boxes.

The stand-in is compiled from ``execd/``; the real one is only to be had from registries of images.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound

from nemo_gym.sandbox.providers.docker.engine import Engine
from nemo_gym.sandbox.providers.docker.images import ensure_host_image
from nemo_gym_testing.opensandbox.go_build import build, build_boxtool
from tests.sandbox.opensandbox.double import API_KEY

HERE = Path(__file__).parent
INSTALL = HERE.parents[2] / "scripts" / "install-opensandbox-server"
_START_S = 120.0

CONFIG = """
[server]
host = "127.0.0.1"
port = {port}
api_key = "{key}"
[log]
level = "INFO"
[runtime]
type = "docker"
execd_image = "{execd}"
[docker]
network_mode = "bridge"
publish_host = "127.0.0.1"
port_range_min = {first_port}
port_range_max = {last_port}
[egress]
image = "{egress}"
mode = "{egress_mode}"
[storage]
allowed_host_paths = {mounts}
[ingress]
mode = "direct"
[store]
type = "sqlite"
path = "{store}"
"""


@dataclass
class Server:
    """A server that runs, or was killed and can be started again with the same state."""

    url: str
    image: str
    """The engine's name of the image that boxes start from."""
    argv: list[str]
    environment: dict[str, str]
    log: Path
    engine: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.log.parent
            )
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                try:
                    urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                except urllib.error.HTTPError:
                    pass
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"opensandbox-server does not serve: {self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def provider(self, **options: Any) -> dict[str, Any]:
        """The provider's configuration for this server."""
        given = {"url": self.url, "api_key": API_KEY, "engine": self.engine, "egress_policy": True}
        return {"opensandbox": {**given, **options}}


def execd_image(client: docker.DockerClient, engine_url: str) -> str:
    """The image the server takes the daemon and its start script from, made when the engine does not have it."""
    # Begun with `tail` by the server, so it needs one: the machine's own image with two files more.
    files = {"execd": build(HERE / "execd", "execd"), "bootstrap.sh": HERE / "execd" / "bootstrap.sh"}
    return image_with(client, engine_url, "nemo-gym/test-execd", files)


def egress_image(client: docker.DockerClient, engine_url: str) -> str:
    """The image of the sidecar that keeps boxes from the network, with this machine's iptables."""
    iptables = shutil.which("iptables-nft") or shutil.which("iptables")
    assert iptables is not None, "the egress sidecar of the tests needs iptables: apt-get install iptables"
    files = {"egress/main": build(HERE / "egress", "egress"), "egress/iptables": Path(iptables).resolve()}
    linked = subprocess.run(["ldd", iptables], capture_output=True, text=True, check=True).stdout
    for line in linked.splitlines():
        found = line.partition("=>")[2].split()
        if found and found[0].startswith("/"):
            files[found[0].lstrip("/")] = Path(found[0]).resolve()
    (standard,) = Path("/usr/lib").glob("*/xtables/libxt_standard.so")
    for path in (standard, standard.with_name("libxt_conntrack.so")):
        files[str(path).lstrip("/")] = path.resolve()
    return image_with(client, engine_url, "nemo-gym/test-egress", files, command=["/egress/main"])


def image_with(
    client: docker.DockerClient,
    engine_url: str,
    repository: str,
    files: Mapping[str, Path],
    command: Sequence[str] = ("true",),
) -> str:
    """The machine's own image with programs added; made when the engine does not have it."""
    base = ensure_host_image(Engine(engine_url, request_timeout_s=120))
    seen = hashlib.sha256(repr((base, sorted(files), [*command])).encode())
    for name in sorted(files):
        seen.update(files[name].read_bytes())
    tag = seen.hexdigest()[:16]
    try:
        client.images.get(f"{repository}:{tag}")
    except ImageNotFound:
        container = client.containers.create(base, command=[*command])
        try:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for inside, path in files.items():
                    info = tar.gettarinfo(str(path), inside)
                    info.mode, info.uid, info.gid = 0o755, 0, 0
                    with path.open("rb") as content:
                        tar.addfile(info, content)
            container.put_archive("/", buffer.getvalue())
            container.commit(repository=repository, tag=tag)
        finally:
            container.remove(force=True)
    return f"{repository}:{tag}"


@contextlib.contextmanager
def opensandbox_server(
    directory: Path, engine_url: str, *, mounts: Sequence[Path] = (), egress_mode: str = "dns+nft"
) -> Iterator[Server]:
    """A server whose state is in ``directory``. Boxes may mount what is beside it, and below ``mounts``."""
    build_boxtool()
    installed = subprocess.run([str(INSTALL)], capture_output=True, text=True, timeout=900)
    assert installed.returncode == 0, f"scripts/install-opensandbox-server: {installed.stderr[-2000:]}"
    client = docker.DockerClient(base_url=engine_url, timeout=120)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first_port = 41000 + os.getpid() % 40 * 400
    config = directory / "server.toml"
    config.write_text(
        CONFIG.format(
            port=port,
            key=API_KEY,
            execd=execd_image(client, engine_url),
            first_port=first_port,
            last_port=first_port + 399,
            mounts=json.dumps([str(path) for path in (directory.parent, *mounts)]),
            egress=egress_image(client, engine_url),
            egress_mode=egress_mode,
            store=directory / "server.db",
        )
    )
    server = Server(
        url=f"http://127.0.0.1:{port}",
        image=ensure_host_image(Engine(engine_url, request_timeout_s=120)),
        argv=[installed.stdout.strip().splitlines()[-1], "--config", str(config)],
        environment={**os.environ, "DOCKER_HOST": engine_url, "HOME": str(directory)},
        log=directory / "server.log",
        engine=engine_url,
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
        client.close()
