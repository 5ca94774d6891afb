"""Creation of one container for one spec, and its reversal: system call filter, first process and watchdog."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from nemo_gym._util.files import replace_file
from nemo_gym.contract.errors import (
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxError,
    reject_unknown_keys,
)
from nemo_gym.contract.sandbox import DEFAULT_TTL_S, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.linux import CLONE_NEWUSER, SOCKET_FAMILIES, elf_image
from nemo_gym.sandbox.providers.docker import watchdog
from nemo_gym.sandbox.providers.docker.archives import files_archive
from nemo_gym.sandbox.providers.docker.engine import (
    SPEC_KEY,
    DockerConfig,
    Engine,
    container_labels,
    container_name,
    explain,
    key_digest,
    sdk_errors,
    status_of,
    tls_certificates,
    translate,
)
from nemo_gym.sandbox.providers.docker.images import Images

# -- System call filter --------------------------------------------------------------------------------------------
# The system call profile of boxes: it denies what dropped capabilities and namespaces do not.
#
# The engine's own profile differs by release; before release 23 it permits VM sockets, which reach the machine's
# hypervisor from any network namespace. This profile is the same on every engine. It need not list the calls that
# require a capability: the kernel refuses those, because boxes have no capabilities.

OLDEST_ENGINE = (20, 10, 10)
"""Earlier engines cannot return an error code chosen by the profile, which recent C libraries rely on."""

_FAMILIES = 64
"""More than the kernel's number of address families. One rule refuses all families from this number on."""
_ABSENT = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3", "socketcall")
"""Calls that fail with ENOSYS, as if the kernel lacked them. Programs then fall back to older calls, whose arguments a
filter can inspect."""
_REFUSED = (
    *("add_key", "request_key", "keyctl"),  # the host session's keyrings are in no namespace
    *("bpf", "perf_event_open", "userfaultfd", "lookup_dcookie", "kcmp", "process_vm_readv", "process_vm_writev"),
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsmount"),
    *("fsconfig", "fspick", "mount_setattr", "open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd"),
    *("init_module", "finit_module", "delete_module", "create_module", "query_module", "get_kernel_syms"),
    *("kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "nfsservctl", "iopl", "ioperm"),
    *("settimeofday", "stime", "clock_settime", "clock_settime64", "clock_adjtime", "adjtimex", "vm86", "vm86old"),
    *("uselib", "ustat", "sysfs", "_sysctl", "syslog", "vhangup", "fanotify_init", "move_pages", "mbind"),
    *("set_mempolicy", "migrate_pages", "set_mempolicy_home_node", "bdflush"),
)


@cache
def profile() -> str:
    """The profile in the engine's JSON format."""
    rules = [_rule(_REFUSED, errno.EPERM), _rule(_ABSENT, errno.ENOSYS)]
    rules.append(_rule(("clone",), errno.EPERM, op="SCMP_CMP_MASKED_EQ", value=CLONE_NEWUSER, valueTwo=CLONE_NEWUSER))
    calls = ("socket", "socketpair")
    families = [family for family in range(_FAMILIES) if family not in {*map(int, SOCKET_FAMILIES)}]
    rules += [_rule(calls, errno.EAFNOSUPPORT, op="SCMP_CMP_EQ", value=family) for family in families]
    rules.append(_rule(calls, errno.EAFNOSUPPORT, op="SCMP_CMP_GE", value=_FAMILIES))
    architectures = [
        {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "archMap": architectures, "syscalls": rules})


def supports_profile(version: str) -> bool:
    """Whether an engine of this release supports the profile."""
    parts = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return parts is not None and tuple(int(part or 0) for part in parts.groups()) >= OLDEST_ENGINE


def _rule(names: tuple[str, ...], error: int, **first_argument: Any) -> dict[str, Any]:
    """A rule that lets calls fail with ``error``: all of them, or those whose first argument compares as given."""
    arguments = [{"index": 0, **first_argument}] if first_argument else []
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": arguments}


# -- First process -------------------------------------------------------------------------------------------------
# The first process of a local engine's boxes: the local provider's program, as a file that boxes mount.
#
# A box lives as long as its first process. An idle command from the image would be an ordinary process of the box:
# `kill -9 -1` would end the box, which would then be taken for lost through no fault of its contents, and be retried.
# Only process 1 itself is safe from signals of its own box, and only an unreadable program from being traced there.


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "nemo-gym"


def program_path() -> Path | None:
    """The path of the program, which is written if it is missing; ``None`` if this type of processor has no program.

    Raises:
        SandboxCreateError: the cache directory is not writable.
    """
    try:
        image = elf_image(platform.machine())
    except NotImplementedError:
        return None
    path = _cache() / f"box-init-{hashlib.sha256(image).hexdigest()[:16]}"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, image, 0o111)
    except OSError as error:
        raise SandboxCreateError(
            f"docker: cannot write the first process of boxes to {path}: {error.strerror}; set XDG_CACHE_HOME to a "
            "directory that can be written"
        ) from error
    return path


# -- Watchdog ------------------------------------------------------------------------------------------------------


def lock_path(engine_url: str) -> Path:
    """The file that an engine's watchdog keeps locked. The name contains a digest of the watchdog's code, so watchdogs
    of several releases can run side by side: each does what its release requires and removes no box too early."""
    digest = hashlib.sha256(engine_url.encode() + b"\0" + Path(watchdog.__file__).read_bytes())
    return _cache() / "watchdogs" / f"docker-{digest.hexdigest()[:16]}.lock"


def watchdog_command(lock: Path, engine_url: str) -> list[str]:
    """The command that starts an engine's watchdog, which finds its certificates only by their directory."""
    certificates = tls_certificates(engine_url)
    arguments = [lock, engine_url, *([] if certificates is None else [certificates])]
    return [sys.executable, "-I", "-S", watchdog.__file__, *map(str, arguments)]


def ensure_watchdog(engine_url: str) -> None:
    """Start the watchdog of an engine unless it runs; that check is cheap.

    Raises:
        SandboxCreateError: the watchdog cannot be started, so nothing would enforce leases.
    """
    path = lock_path(engine_url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = watchdog.try_lock(str(path))
        if lock is None:
            return
        os.close(lock)
        with path.with_suffix(".log").open("ab") as log:
            subprocess.run(
                watchdog_command(path, engine_url),
                check=True,
                timeout=60,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxCreateError(
            f"docker: the watchdog that removes boxes when their lease ends could not be started ({error}); "
            f"see {path.with_suffix('.log')}"
        ) from error


def overrun(engine_url: str, container_id: str) -> str | None:
    """Return the watchdog's log line if it removed this box because the box exceeded its disk limit."""
    with contextlib.suppress(OSError), lock_path(engine_url).with_suffix(".log").open(errors="replace") as lines:
        return next((line.strip() for line in lines if line.startswith(f"removing box {container_id[:12]}:")), None)
    return None


# -- Container -----------------------------------------------------------------------------------------------------

# For an engine on another machine, which cannot mount our program: `sleep` if the image has it, else a read that never
# ends, because standard input is held open. Ten days are far longer than any lease, and end a box that was forgotten.
# This command is not the box's first process, so the box's contents can kill it.
_IDLE = ["/bin/sh", "-c", "command -v sleep >/dev/null 2>&1 && exec sleep 864000; while read -r _; do :; done"]
_FIRST_PROCESS = "/.nemo-gym-init"
"""Path in the box of the file `program_path`, which is the box's entry point on a local engine."""
_MIB = 1024 * 1024
_ULIMITS = {"sigpending": 4096, "msgqueue": 204_800}
"""Limits of kernel objects that are counted per user. User 0 of every box and of the engine's host are one user to the
kernel, so each limit is a share of the host's: the host has some left when boxes use all that they may."""
_NAME_TAKEN_PATIENCE_S = 30.0
_FIRST_MOMENTS_S = 0.5
"""How long the spec's entry point must have run before the box counts as started."""


class Creation:
    """Creates the container of one spec. `discard` removes the container at any stage of its creation."""

    def __init__(self, engine: Engine, images: Images, config: DockerConfig, spec: SandboxSpec) -> None:
        self._engine = engine
        self._images = images
        self._config = config
        self._spec = spec
        self.name = container_name(spec.idempotency_key)
        self.image = ""
        """The engine's name for the image, see `Images.reference`."""
        self._first_process: Path | None = None
        self.created = False
        """Whether this object created the container. Another call with the same idempotency key may have done so."""

    def prepare(self) -> None:
        """Check what can be checked without a container.

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
            self._first_process = program_path()

    @property
    def pulls_always(self) -> bool:
        """Whether to ask a registry for the image although the engine may have it."""
        return self._config.pull == "always" and not self._is_made_here

    @property
    def _is_made_here(self) -> bool:
        return self.image.startswith("nemo-gym/")

    def _check_may_pull(self) -> None:
        """Raise `SandboxCreateError` if an image that the engine lacks may not be pulled."""
        if self._config.pull == "never":
            raise self._images.missing(self.image, "this provider is configured with pull: never")
        if self._is_made_here:
            raise self._images.missing(self.image, "images of this name are only made on this machine")

    def find_existing(self) -> dict[str, Any] | None:
        """The running container that an earlier create with the same idempotency key made, or ``None``."""
        if not self._spec.idempotency_key:
            return None
        label = f"{SPEC_KEY}={key_digest(self._spec.idempotency_key)}"
        try:
            for container in self._engine.client.containers(all=True, filters={"label": [label]}):
                return self._adopt(container["Id"])
        except sdk_errors() as error:
            raise translate(
                error, "looking for a box with the same idempotency key", kind=SandboxCreateError
            ) from error
        return None

    def _adopt(self, container_id: str) -> dict[str, Any] | None:
        """Wait for a container that another create made to run, and describe it. If it died, remove it: ``None``."""
        client = self._engine.client
        deadline = time.monotonic() + _NAME_TAKEN_PATIENCE_S
        while True:
            try:
                inspection = dict(client.inspect_container(container_id))
                state = inspection["State"]
                if state["Running"]:
                    return inspection
                if state["Status"] != "created" or time.monotonic() > deadline:
                    client.remove_container(container_id, force=True, v=True)
                    return None
            except sdk_errors() as error:
                if status_of(error) == 404:
                    return None
                if status_of(error) != 409:
                    raise
            time.sleep(0.05)

    def run(self, *, pulled: bool) -> dict[str, Any] | None:
        """Create the container, write its files and start it; return the engine's description of it.

        Args:
            pulled: whether the image was pulled already. Unless it was, ``None`` is returned if the engine lacks it.

        Raises:
            SandboxCreateError: a step failed, and the container is removed again. The message gives the reason.
        """
        client = self._engine.client
        deadline = time.monotonic() + _NAME_TAKEN_PATIENCE_S
        while True:
            try:
                container_id = self._create()
                break
            except sdk_errors() as error:
                reason = explain(error).lower()
                if status_of(error) == 404 and not pulled and ("no such image" in reason or "not found" in reason):
                    self._check_may_pull()
                    return None
                elif status_of(error) == 409 and self._spec.idempotency_key and time.monotonic() < deadline:
                    try:
                        inspection = self._adopt(self.name)
                    except sdk_errors() as inner:
                        raise translate(inner, "waiting for the same box", kind=SandboxCreateError) from inner
                    if inspection is not None:
                        return inspection
                    # The engine reserves a name shortly before, and frees it shortly after, the name can be looked up.
                    time.sleep(0.05)
                else:
                    raise translate(
                        error, "creating a container", kind=SandboxCreateError, image=self.image
                    ) from error
        try:
            if self._spec.files:
                client.put_archive(container_id, "/", files_archive(self._spec.files))
            client.start(container_id)
            inspection = self._inspect_when_settled(container_id)
            if not inspection["State"]["Running"]:
                raise SandboxCreateVerificationError(
                    f"docker: the box stopped at once with exit code {inspection['State'].get('ExitCode')}; its "
                    f"entry point {list(self._spec.entrypoint or _IDLE)} must go on for as long as the box lives"
                )
            return inspection
        except sdk_errors() as error:
            self.discard()
            reason = explain(error)
            if self._spec.entrypoint is None and "/bin/sh" in reason:
                raise SandboxCreateError(
                    f"docker: the image '{self.image}' has no /bin/sh, which an idle box needs; give the spec an "
                    "entrypoint that waits, or use another image",
                    image=self.image,
                ) from error
            raise translate(error, "starting a box", kind=SandboxCreateError, image=self.image) from error
        except SandboxError:
            self.discard()
            raise

    def _inspect_when_settled(self, container_id: str) -> dict[str, Any]:
        """The description of a started container, taken late enough to show an entry point that ended at once."""
        deadline = time.monotonic() + (0 if self._spec.entrypoint is None else _FIRST_MOMENTS_S)
        while True:
            inspection = dict(self._engine.client.inspect_container(container_id))
            if not inspection["State"]["Running"] or time.monotonic() >= deadline:
                return inspection
            time.sleep(0.05)

    def discard(self) -> None:
        """Remove the container if this object created it."""
        if not self.created:
            return
        try:
            self._engine.client.remove_container(self.name, force=True, v=True)
        except sdk_errors() as error:
            # 404: the container is gone. 409: another request is removing it.
            if status_of(error) not in (404, 409):
                raise translate(error, "removing a box that was not wanted any more") from error
        self.created = False

    def _create(self) -> str:
        spec, config, client = self._spec, self._config, self._engine.client
        limits = spec.resources
        options: dict[str, Any] = {}
        if limits.memory_mib is not None:
            # Equal limits mean that the box may use no swap.
            options["mem_limit"] = options["memswap_limit"] = int(limits.memory_mib) * _MIB
        if limits.cpu is not None:
            options["nano_cpus"] = int(limits.cpu * 1e9)
        if runtime := spec.provider_options.get("runtime", config.runtime):
            options["runtime"] = runtime
        filtered = config.seccomp == "suite" and supports_profile(self._engine.release)
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
            cap_add=[*dict.fromkeys((*config.capabilities, *(config.build_capabilities if builds else ())))] or None,
            security_opt=["no-new-privileges:true", *([f"seccomp={profile()}"] if filtered else [])],
            pids_limit=limits.pids,
            ulimits=[{"Name": name, "Soft": limit, "Hard": limit} for name, limit in _ULIMITS.items()],
            log_config={"Type": "none", "Config": {}},
            mounts=[
                {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True} for source, target in mounts
            ],
            **options,
        )
        expires_at = time.time() + (DEFAULT_TTL_S if spec.ttl_s is None else spec.ttl_s)
        # From here on the container may exist, even if the engine's response is lost.
        self.created = True
        try:
            response = client.create_container(
                self.image,
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
            # A response with a status below 500 means that this request created nothing.
            self.created = (status_of(error) or 500) >= 500
            self.discard()
            raise
        return str(response["Id"])
