"""From a spec to a running container; blocking, called through `Engine.call`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import (
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxError,
    reject_unknown_keys,
)
from nemo_gym.contract.sandbox import DEFAULT_TTL_S, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.providers.docker import first_process, seccomp
from nemo_gym.sandbox.providers.docker.archives import files_archive
from nemo_gym.sandbox.providers.docker.config import DockerConfig
from nemo_gym.sandbox.providers.docker.engine import Engine, explain, sdk_errors, status_of, translate
from nemo_gym.sandbox.providers.docker.images import Images
from nemo_gym.sandbox.providers.docker.names import (
    SPEC_KEY,
    container_labels,
    container_name,
    key_digest,
)

# For an engine of another machine, which has no program of ours: `sleep` where the image has it, else a read that
# never ends, as standard input is held open. Ten days are far beyond any lease, and end a box that everybody forgot.
# It is not the box's first process, so the box's contents can kill it.
_IDLE = ["/bin/sh", "-c", "command -v sleep >/dev/null 2>&1 && exec sleep 864000; while read -r _; do :; done"]
_FIRST_PROCESS = "/.nemo-gym-init"
"""Where the box sees `first_process.program_path`, its entry point with a local engine."""
_MIB = 1024 * 1024
_ULIMITS = {"sigpending": 4096, "msgqueue": 204_800}
"""Kernel objects of one user, which user 0 of every box and the engine's host are together: a share of what the host
may hold, so that something is left to it when boxes hold all that they may."""
_NAME_TAKEN_PATIENCE_S = 30.0
_FIRST_MOMENTS_S = 0.5
"""How long an entry point of the spec's must have gone on before the box counts as started."""


class Creation:
    """Creates the container of one spec. `discard` removes it again, whatever stage it reached."""

    def __init__(self, engine: Engine, images: Images, config: DockerConfig, spec: SandboxSpec) -> None:
        self._engine = engine
        self._images = images
        self._config = config
        self._spec = spec
        self.name = container_name(spec.idempotency_key)
        self._image = ""
        self._first_process: Path | None = None
        self.created = False
        """Whether this call made the container (another may have, for the same idempotency key)."""

    def check(self) -> None:
        """Refuse what can be refused without the engine.

        Raises:
            ConfigError: an unknown provider option.
            SandboxCreateError: a mount's source does not exist.
        """
        reject_unknown_keys(self._spec.provider_options, ["runtime", "platform"], where="docker provider_options")
        for mount in self._spec.mounts:
            if self._engine.url.startswith("unix://") and not Path(mount.source).exists():
                raise SandboxCreateError(f"docker: the mount source '{mount.source}' does not exist on this host")
        files_archive(self._spec.files)
        if self._spec.entrypoint is None and self._engine.is_local():
            self._first_process = first_process.program_path()

    def prepare_image(self) -> None:
        """Resolve the image's name, and ask a registry for it where the pull policy says so."""
        self._image = self._images.reference(self._spec.image)
        if self._config.pull == "always" and not self._image.startswith("nemo-gym/"):
            self._images.pull(self._image)

    def pull_missing(self) -> None:
        """The image was not there: pull it or say what is missing."""
        if self._config.pull == "never":
            raise self._images.missing(self._image, "this provider is configured with pull: never")
        if self._image.startswith("nemo-gym/"):
            raise self._images.missing(self._image, "images of this name are only made on this machine")
        self._images.pull(self._image)

    def find_existing(self) -> dict[str, Any] | None:
        """The running container that an earlier create with the same idempotency key made."""
        if not self._spec.idempotency_key:
            return None
        label = f"{SPEC_KEY}={key_digest(self._spec.idempotency_key)}"
        try:
            for found in self._engine.client.containers(all=True, filters={"label": [label]}):
                return self._adopt(found["Id"])
        except sdk_errors() as error:
            raise translate(
                error, "looking for a box with the same idempotency key", kind=SandboxCreateError
            ) from error
        return None

    def _adopt(self, container_id: str) -> dict[str, Any] | None:
        """A container another create made, started if that one has not come to it; ``None`` when it has died."""
        client = self._engine.client
        deadline = time.monotonic() + _NAME_TAKEN_PATIENCE_S
        while True:
            try:
                found = dict(client.inspect_container(container_id))
                state = found["State"]
                if state["Running"]:
                    return found
                if state["Status"] != "created" or time.monotonic() > deadline:
                    client.remove_container(container_id, force=True, v=True)
                    return None
            except sdk_errors() as error:
                if status_of(error) not in (404, 409):
                    raise
                if status_of(error) == 404:
                    return None
            time.sleep(0.05)

    def run(self) -> dict[str, Any]:
        """Create, fill and start the container; the engine's description of it.

        Raises:
            SandboxCreateError: with the reason; the container is removed.
        """
        client = self._engine.client
        deadline = time.monotonic() + _NAME_TAKEN_PATIENCE_S
        pulled = False
        while True:
            try:
                container_id = self._create()
                break
            except sdk_errors() as error:
                said = explain(error).lower()
                if status_of(error) == 404 and not pulled and ("no such image" in said or "not found" in said):
                    self.pull_missing()
                    pulled = True
                elif status_of(error) == 409 and self._spec.idempotency_key and time.monotonic() < deadline:
                    try:
                        found = self._adopt(self.name)
                    except sdk_errors() as inner:
                        raise translate(inner, "waiting for the same box", kind=SandboxCreateError) from inner
                    if found is not None:
                        return found
                    # The name is taken a moment before the container can be found by it, and freed one after.
                    time.sleep(0.05)
                else:
                    raise translate(
                        error, "creating a container", kind=SandboxCreateError, image=self._image
                    ) from error
        try:
            if self._spec.files:
                client.put_archive(container_id, "/", files_archive(self._spec.files))
            client.start(container_id)
            found = self._settled(container_id)
            if not found["State"]["Running"]:
                raise SandboxCreateVerificationError(
                    f"docker: the box stopped at once with exit code {found['State'].get('ExitCode')}; its "
                    f"entry point {list(self._spec.entrypoint or _IDLE)} must go on for as long as the box lives"
                )
            return found
        except sdk_errors() as error:
            self.discard()
            said = explain(error)
            if self._spec.entrypoint is None and "/bin/sh" in said:
                raise SandboxCreateError(
                    f"docker: the image '{self._image}' has no /bin/sh, which an idle box needs; give the spec an "
                    "entrypoint that waits, or use another image",
                    image=self._image,
                ) from error
            raise translate(error, "starting a box", kind=SandboxCreateError, image=self._image) from error
        except SandboxError:
            self.discard()
            raise

    def _settled(self, container_id: str) -> dict[str, Any]:
        """The engine's description of a started container; of one whose entry point ends at once, after its end."""
        deadline = time.monotonic() + (0 if self._spec.entrypoint is None else _FIRST_MOMENTS_S)
        while True:
            found = dict(self._engine.client.inspect_container(container_id))
            if not found["State"]["Running"] or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def discard(self) -> None:
        """Remove the container this call made, if any."""
        if not self.created:
            return
        try:
            self._engine.client.remove_container(self.name, force=True, v=True)
        except sdk_errors() as error:
            # Gone, or going: the engine removes it while it answers this.
            if status_of(error) not in (404, 409):
                raise translate(error, "removing a box that was not wanted any more") from error

    def _security_options(self) -> list[str]:
        options = ["no-new-privileges:true"]
        if self._config.seccomp == "suite" and seccomp.supports_profile(self._engine.release):
            options.append(f"seccomp={seccomp.profile()}")
        return options

    def _create(self) -> str:
        spec, config, client = self._spec, self._config, self._engine.client
        limits = spec.resources
        options: dict[str, Any] = {}
        if limits.memory_mib is not None:
            # Both the same: no swap on top.
            options["mem_limit"] = options["memswap_limit"] = int(limits.memory_mib) * _MIB
        if limits.cpu is not None:
            options["nano_cpus"] = int(limits.cpu * 1e9)
        if runtime := spec.provider_options.get("runtime", config.runtime):
            options["runtime"] = runtime
        builds = spec.network is NetworkPolicy.OPEN
        idle = spec.entrypoint is None
        program = self._first_process if idle else None
        mounts = [(mount.source, mount.target) for mount in spec.mounts]
        if program is not None:
            mounts.append((str(program), _FIRST_PROCESS))
        host_config = client.create_host_config(
            init=program is None,
            network_mode="bridge" if builds else "none",
            cap_drop=["ALL"],
            cap_add=list(config.build_capabilities if builds else config.capabilities) or None,
            security_opt=self._security_options(),
            pids_limit=limits.pids,
            ulimits=[{"Name": name, "Soft": limit, "Hard": limit} for name, limit in _ULIMITS.items()],
            log_config={"Type": "none", "Config": {}},
            mounts=[
                {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True} for source, target in mounts
            ],
            **options,
        )
        expires_at = time.time() + (DEFAULT_TTL_S if spec.ttl_s is None else spec.ttl_s)
        # From here on it may exist, also when the answer never reaches us.
        self.created = True
        try:
            made = client.create_container(
                self._image,
                command=[],
                entrypoint=[_FIRST_PROCESS] if program is not None else list(spec.entrypoint or _IDLE),
                name=self.name,
                user=spec.user or None,
                working_dir=spec.workdir or None,
                environment=None if idle else dict(spec.env),
                labels=container_labels(
                    spec.metadata,
                    expires_at=expires_at,
                    env=spec.env,
                    idempotency_key=spec.idempotency_key,
                    disk_bytes=None if limits.disk_gib is None else int(limits.disk_gib * 1024**3),
                ),
                stdin_open=idle and program is None,
                host_config=host_config,
                platform=spec.provider_options.get("platform"),
            )
        except sdk_errors() as error:
            # An answer of the engine, other than its own failure, says that nothing was made by this request.
            status = status_of(error)
            self.created = status is None or status >= 500
            if self.created:
                self.discard()
            raise
        return str(made["Id"])
