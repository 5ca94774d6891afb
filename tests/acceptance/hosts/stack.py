"""One composition over several hosts: what runs where, and what became of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.config.compose import compose
from tests.acceptance.hosts.network import NETWORK, ROOT, Host

SECRET_VARIABLE = "NG_STACK_SECRET"
RUN_DIR = "/var/lib/stack"
TLS_DIR = f"{RUN_DIR}/tls"
READY_WITHIN_S = 240.0
RUN_WITHIN_S = 900.0
FIRST_PORT = 8100
_BROKER, _AGENT, _MODEL = "sandbox", "responses_api_agents", "responses_api_models"


@dataclass
class Process:
    """A command on a host, in the background."""

    host: Host
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, within_s: float) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.host.name} is still at it after {within_s:g} s: {self.said[-3000:]}"
            ) from None

    def stop(self) -> None:
        """As Ctrl-C does; it ends its servers in order."""
        # What was started enters the host and waits there; the command itself is its child.
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        if self.process.poll() is None and self.host.is_up:
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class Stack:
    """A composition's servers, each on every host that is named after its role."""

    hosts: Mapping[str, Host]
    words: Sequence[str]
    directory: Path
    tls: bool = False
    """Whether servers have certificates, of an authority that each host trusts."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def __post_init__(self) -> None:
        composition = compose([*self.words, "model=scripted"], roots=[ROOT])
        self.places: dict[str, list[str]] = {}
        for server in composition.servers.values():
            if server.implementation == _BROKER:
                role = "broker"
            else:
                role = {_AGENT: "agent", _MODEL: "model"}.get(server.server_type, "world")
            self.places[server.instance] = [name for name in self.hosts if name.startswith(f"{role}-")]
        self.agent, self.environment = composition.chosen["agent"], composition.chosen["environment"]

    def port(self, instance: str) -> int:
        return FIRST_PORT + [*self.places].index(instance)

    def configuration(self) -> dict[str, Any]:
        machines: dict[str, Any] = {
            name: {"address": host.address, "servers": {}} for name, host in self.hosts.items()
        }
        for instance, names in self.places.items():
            for name in names:
                machines[name]["servers"][instance] = self.port(instance)
        secret = f"${{oc.env:{SECRET_VARIABLE}}}"
        block = {"network": NETWORK, "plain_http": True, "stack_secret": secret, "machines": machines}
        if self.tls:
            del block["plain_http"]
            block["tls"] = {"certificate_file": f"{TLS_DIR}/host.crt", "key_file": f"{TLS_DIR}/host.key"}
        return {"hosts": block}

    def start(self, name: str, words: Sequence[str] = ()) -> Process:
        """``ng_run`` on a host, with these words more."""
        host = self.hosts[name]
        host.write(f"{RUN_DIR}/hosts.yaml", yaml.safe_dump(self.configuration()).encode())
        common = [f"+config_paths=[{RUN_DIR}/hosts.yaml]", "model=scripted", f"host={name}", f"run_dir={RUN_DIR}/run"]
        log = self.directory / f"{name}.log"
        environment = {SECRET_VARIABLE: self.secret}
        if self.tls:
            self._certify(host)
            environment["SSL_CERT_FILE"] = f"{TLS_DIR}/authority.crt"
        return Process(host, host.start(["ng_run", *self.words, *common, *words], log, environment=environment), log)

    def _certify(self, host: Host) -> None:
        """A certificate for a host's address; the authority's key stays here."""
        authority = [self.directory / f"authority.{end}" for end in ("crt", "key")]
        own = [self.directory / f"{host.name}.{end}" for end in ("crt", "key")]
        if not authority[0].exists():
            _certificate(*authority, "/CN=authority of a test", "basicConstraints=critical,CA:TRUE")
        if not own[0].exists():
            signed = ["-CA", str(authority[0]), "-CAkey", str(authority[1])]
            _certificate(*own, f"/CN={host.name}", f"subjectAltName=IP:{host.address}", *signed)
        for path, name in ((authority[0], "authority.crt"), (own[0], "host.crt"), (own[1], "host.key")):
            host.write(f"{TLS_DIR}/{name}", path.read_bytes())

    @contextmanager
    def running(self) -> Iterator[dict[str, Process]]:
        """Every host that has servers; stopped with the block, those who have boxes last."""
        started: dict[str, Process] = {}
        names = sorted({name for names in self.places.values() for name in names}, key=_stop_order)
        try:
            for name in reversed(names):
                started[name] = self.start(name)
            until(
                lambda: all("servers ready" in each.said for each in alive(started.values())),
                "all servers are ready",
                within_s=READY_WITHIN_S,
            )
            yield started
        finally:
            for name in names:
                if name in started:
                    started[name].stop()

    def rows(self, pipeline: str) -> list[dict[str, Any]]:
        """What a pipeline's host has as results."""
        return [json.loads(line) for line in self.hosts[pipeline].read(f"{RUN_DIR}/rollouts.jsonl").splitlines()]

    def collect(self, pipelines: Mapping[str, Sequence[str]], data: Path) -> dict[str, Process]:
        """A pipeline on each of these hosts, with its own words, over the same rows."""
        running = {}
        for name, words in pipelines.items():
            self.hosts[name].write(f"{RUN_DIR}/input.jsonl", data.read_bytes())
            run = [f"input={RUN_DIR}/input.jsonl", f"output={RUN_DIR}/rollouts.jsonl", "run_id=shared", *words]
            running[name] = self.start(name, run)
        return running


def _certificate(certificate: Path, key: Path, subject: str, extension: str, *signed: str) -> None:
    files = ["-out", str(certificate), "-keyout", str(key)]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    argv = ["openssl", "req", "-x509", "-days", "2", *curve, *files, "-subj", subject, "-addext", extension, *signed]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _stop_order(name: str) -> int:
    return ("agent", "world", "model", "broker").index(name.partition("-")[0])


def alive(processes: Iterable[Process]) -> list[Process]:
    """All of them; one that has ended by itself is an error."""
    found = list(processes)
    for each in found:
        assert each.process.poll() is None, f"{each.host.name} ended: {each.said[-3000:]}"
    return found


def until(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"within {within_s:g} s: {what}"
        time.sleep(0.2)
