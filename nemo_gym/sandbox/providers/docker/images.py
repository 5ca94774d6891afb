"""Images that boxes start from: pulled, committed, or built from this host's own system."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nemo_gym._util.lazy import lazily
from nemo_gym.contract.errors import SandboxCreateError, SandboxError
from nemo_gym.sandbox.linux import locked
from nemo_gym.sandbox.providers.docker.engine import (
    IMAGE_LABELS,
    DockerConfig,
    Engine,
    explain,
    image_reference,
    sdk_errors,
    status_of,
    translate,
)

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")


class Images:
    """Images in the engine. Methods that are no coroutines block; call them through the engine's threads."""

    def __init__(self, engine: Engine, config: DockerConfig) -> None:
        self._engine = engine
        self._config = config
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(config.max_concurrent_creates)

    async def reference(self, image: str | None) -> str:
        """The engine's name for an image named in a spec. Builds the ``host`` image if it is requested and missing.

        Raises:
            SandboxCreateError: the ``host`` image cannot be built here.
        """
        name = image or self._config.default_image
        if name != HOST_IMAGE:
            return image_reference(name)
        built = _host_images.get(self._engine.url)
        return await self._engine.transfer(ensure_host_image, self._engine) if built is None else built

    async def pull(self, reference: str) -> None:
        """Pull an image from a registry, within ``pull_timeout_s``. Concurrent calls for one image share one pull. It
        goes on if its callers are cancelled, until the provider is closed: a later create finds the image.

        Raises:
            SandboxCreateError: the pull failed. The message names the image and suggests remedies.
        """
        if (pull := self._pulls.get(reference)) is None:
            pull = self._pulls[reference] = asyncio.create_task(self._pull(reference))
            pull.add_done_callback(lambda _: self._pulls.pop(reference))
        await asyncio.shield(pull)

    def is_pulling(self, reference: str) -> bool:
        return reference in self._pulls

    async def cancel_pulls(self) -> None:
        pulls = [*self._pulls.values()]
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)

    async def _pull(self, reference: str) -> None:
        try:
            async with self._places, asyncio.timeout(self._config.pull_timeout_s):
                problem = await self._ask_registry(reference)
        except TimeoutError as error:
            why = f"pulling it took longer than pull_timeout_s={self._config.pull_timeout_s:g} seconds"
            raise self.missing(reference, why) from error
        except sdk_errors(aiohttp.ClientError, ValueError) as error:
            raise self.missing(reference, f"asking the registry failed: {explain(error)}") from error
        if problem:
            raise self.missing(reference, f"asking the registry failed: {problem}")

    async def _ask_registry(self, reference: str) -> str:
        """Let the engine pull an image; return its error text, which is empty if it has the image now.

        The SDK's own pull has no time limit. The engine ends a pull whose connection is closed.
        """
        repository, tag = _split(reference)

        def request() -> tuple[str, dict[str, str]]:
            from docker.auth import get_config_header, resolve_repository_name

            client = self._engine.client
            credentials = get_config_header(client, resolve_repository_name(repository)[0])
            headers = {"X-Registry-Auth": credentials.decode()} if credentials else {}
            return f"/v{client.api_version}/images/create", headers

        path, headers = await self._engine.transfer(request)
        problem = ""
        async with (
            self._engine.session() as session,
            session.post(path, params={"fromImage": repository, "tag": tag}, headers=headers) as response,
        ):
            async for line in response.content:
                with contextlib.suppress(ValueError):
                    report = json.loads(line)
                    # Of a refused pull, and of one that failed after the engine had begun to report its progress.
                    problem = str(report.get("message" if response.status >= 400 else "error") or problem)
            return problem or ("" if response.status < 400 else f"status {response.status}")

    def missing(self, reference: str, why: str) -> SandboxCreateError:
        """Build the error for an image that the engine lacks."""
        return SandboxCreateError(
            f"docker: there is no image '{reference}' in the engine at {self._engine.url}, and {why}. Prepare it "
            "first (ng_prepare for a benchmark's environments, 'docker load' or 'docker pull' for others), or name an "
            "image that exists; 'host' is built from this machine's own packages",
            image=reference,
        )

    def commit(self, container_id: str, image: str, labels: Mapping[str, str]) -> None:
        """Store a container's files as ``image``, without the box's own labels and idle command. The box's labels are
        set to empty strings, because the engine cannot remove them.

        Raises:
            SandboxError: the engine refused, or its disk is full.
            SandboxLostError: the box is gone.
        """
        if image == HOST_IMAGE:
            raise SandboxError(f"docker: a box cannot be committed as '{HOST_IMAGE}', which names the base image")
        reference = image_reference(image)
        client = self._engine.client
        try:
            container = client.inspect_container(container_id)
            base = client.inspect_image(container["Image"])["Config"] or {}
            blank = dict.fromkeys(container["Config"].get("Labels") or {}, "")
            stored = {**blank, **(base.get("Labels") or {}), IMAGE_LABELS: json.dumps(dict(labels))}
            conf: dict[str, Any] = {
                # The engine replaces an empty list by the box's own entry point, but keeps a blank string.
                "Entrypoint": base.get("Entrypoint") or [""],
                "Cmd": base.get("Cmd") or ["/bin/sh"],
                "Labels": stored,
                "WorkingDir": base.get("WorkingDir") or "/",
                "User": base.get("User") or "",
                "Env": base.get("Env") or [],
                "OpenStdin": False,
            }
            repository, tag = _split(reference)
            client.commit(container_id, repository=repository, tag=tag, conf=conf)
        except sdk_errors() as error:
            raise translate(error, f"committing the image '{image}'") from error

    def labels(self, image: str) -> dict[str, str] | None:
        """The labels given to `commit`; ``None`` if there is no such image."""
        reference = image_reference(image)
        try:
            inspection: dict[str, Any] = self._engine.client.inspect_image(reference)
        except sdk_errors() as error:
            if status_of(error) == 404:
                return None
            raise translate(error, f"looking for the image '{reference}'") from error
        labels: dict[str, str] = (inspection.get("Config") or {}).get("Labels") or {}
        if IMAGE_LABELS in labels:
            return {str(key): str(value) for key, value in json.loads(labels[IMAGE_LABELS]).items()}
        return {key: value for key, value in labels.items() if value}

    def remove(self, image: str) -> None:
        try:
            self._engine.client.remove_image(image_reference(image), force=True)
        except sdk_errors() as error:
            if status_of(error) != 404:
                raise translate(error, f"removing the image '{image}'") from error
        # An image that a box still uses has only lost its name. Delete such images of earlier removals, but none that
        # is younger than 10 minutes: an image that is being committed has no name for a moment either.
        unused = {"dangling": True, "label": [IMAGE_LABELS], "until": ["10m"]}
        with contextlib.suppress(*sdk_errors()):
            self._engine.client.prune_images(filters=unused)


def _split(reference: str) -> tuple[str, str]:
    """Repository and tag (or digest) of a reference."""
    if "@" in reference:
        repository, _, digest = reference.partition("@")
        return repository, digest
    head, _, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    return (f"{head}/{name}" if head else name), tag or "latest"


# -- The image of this host ----------------------------------------------------------------------------------------
# The image ``host``: a root filesystem of this machine's own Debian packages, made without any registry.
#
# It contains the files of the packages below and of all their dependencies, and the files that their installation
# generated (the certificate store, alternatives, user tables). It contains nothing else: no home directories, no
# configuration of this machine's services, no Python from another source, and not this suite.

HOST_IMAGE = "host"
REPOSITORY = "nemo-gym/host"
_RECIPE = "1"
"""Part of the image's name. Increase it when the same packages give a different image."""

_WANTED = """
    base-files bash bsdutils bzip2 ca-certificates coreutils curl dash debianutils diffutils file findutils
    gawk git grep gzip hostname jq less libc-bin login make mawk netbase nodejs npm openssl patch perl-base
    procps python3 python3-pip python3-setuptools python3-venv python3-wheel sed tar time tzdata unzip
    util-linux xz-utils zip
"""
WANTED = tuple(_WANTED.split())
"""Packages of the image. Those that are not installed here are left out."""
REQUIRED = ("bash", "coreutils", "python3", "git", "tar", "patch", "sed", "grep", "findutils")
UNWANTED = {"perl", "perl-modules-5.36", "dpkg", "apt", "debconf", "systemd", "dbus"}
"""Packages left out although others depend on them: they are large, or only serve to install packages."""
_SKIPPED = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/")
_NPM = "/usr/lib/node_modules/npm"
"""Comes with the nodejs package, but is often updated separately."""
_GENERATED = ("/etc/ld.so.cache", "/etc/ssl/certs", "/usr/local/share/ca-certificates", "/etc/localtime", _NPM)
_USERS = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUPS = "root:x:0:\ntty:x:5:\nstaff:x:50:\nnogroup:x:65534:\n"
_DIRECTORIES = {
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "root": 0o700,
    "home": 0o755,
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "run": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "srv": 0o755,
    "usr/local/bin": 0o755,
}
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    # Python packages use their own certificates unless told to use the machine's, which may include a local authority.
    "SSL_CERT_FILE": _CERTIFICATES,
    "REQUESTS_CA_BUNDLE": _CERTIFICATES,
    "PIP_CERT": _CERTIFICATES,
    "NODE_EXTRA_CA_CERTS": _CERTIFICATES,
}


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout


def _installed() -> dict[str, tuple[str, list[list[str]]]]:
    """Package → its version, and its dependencies, each as a list of alternatives. Includes virtual packages."""
    fields = "${Package}\t${db:Status-Status}\t${Version}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    packages: dict[str, tuple[str, list[list[str]]]] = {}
    provided: dict[str, str] = {}
    for line in _run("dpkg-query", "-W", f"-f={fields}").splitlines():
        name, status, version, depends, provides = line.split("\t")
        if status != "installed":
            continue
        needs = [
            [option.split("(")[0].split(":")[0].strip() for option in clause.split("|")]
            for clause in depends.split(",")
            if clause.strip()
        ]
        packages[name] = (version, needs)
        for virtual in provides.split(","):
            if virtual.strip():
                provided[virtual.split("(")[0].strip()] = name
    for virtual, name in provided.items():
        packages.setdefault(virtual, ("", [[name]]))
    return packages


def closure() -> dict[str, str]:
    """The packages of the image with their versions: the installed packages of `WANTED`, and all their dependencies.

    Raises:
        SandboxCreateError: this machine has no Debian packages, or a required package is not installed.
    """
    hint = "set default_image to an image the engine has, or name one in the spec"
    try:
        packages = _installed()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxCreateError(
            f"docker: the image 'host' is made of Debian packages, and dpkg-query does not work here ({error}); {hint}"
        ) from error
    missing = [name for name in REQUIRED if name not in packages]
    if missing:
        raise SandboxCreateError(
            f"docker: the image 'host' needs the packages {', '.join(missing)}; install them with "
            f"'apt-get install {' '.join(missing)}', or {hint}"
        )
    chosen: dict[str, str] = {}
    pending = [name for name in WANTED if name in packages and name not in UNWANTED]
    while pending:
        name = pending.pop()
        if name in chosen or name in UNWANTED:
            continue
        version, needs = packages[name]
        chosen[name] = version
        pending += [next((o for o in options if o in packages), "") for options in needs]
        pending = [n for n in pending if n]
    return {name: version for name, version in sorted(chosen.items()) if version}


def reference(packages: dict[str, str]) -> str:
    """The image's name: a digest of the packages, their versions and the machine's certificates."""
    digest = hashlib.sha256(_RECIPE.encode())
    for name, version in packages.items():
        digest.update(f"{name}={version}\n".encode())
    with contextlib.suppress(OSError):
        digest.update(Path(_CERTIFICATES).read_bytes())
    return f"{REPOSITORY}:{digest.hexdigest()[:16]}"


def _alternatives(files: set[str]) -> Iterable[str]:
    """Yield links such as /usr/bin/awk, which installation points at one of several programs, and their targets."""
    for directory in ("/usr/bin", "/usr/sbin"):
        for entry in os.scandir(directory):
            if not entry.is_symlink():
                continue
            middle = str(Path(entry.path).readlink())
            if middle.startswith("/etc/alternatives/") and os.path.realpath(entry.path) in files:
                yield entry.path
                yield middle


def _real_place(path: str) -> str:
    """Resolve links in a path's directories, but not its last part (``/bin/sh`` becomes ``/usr/bin/sh``)."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120


def image_files(packages: dict[str, str]) -> list[str]:
    """All paths that are copied from this machine into the image; directories precede their contents."""
    package_files = _run("dpkg", "-L", *packages).splitlines()
    places = {_real_place(p) for p in package_files if p.startswith("/") and p != "/." and not p.startswith(_SKIPPED)}
    places |= set(_alternatives(places))
    for generated in _GENERATED:
        if Path(generated).exists():
            places.add(generated)
            places |= {str(p) for p in Path(generated).rglob("*")} if Path(generated).is_dir() else set()
    for path in list(places):
        places |= {str(parent) for parent in Path(path).parents}
    # Packages still name their files by way of links in the root directory (/bin -> usr/bin).
    places |= {str(entry) for entry in Path("/").iterdir() if entry.is_symlink()}
    return sorted(p for p in places if p != "/" and os.path.lexists(p))


def write_root(packages: dict[str, str], out: IO[bytes]) -> None:
    """Write the image's root filesystem as a tar stream."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        written = set()
        for path in image_files(packages):
            name = path.lstrip("/")
            info = tar.gettarinfo(path, name)
            if info is None or name in _DIRECTORIES:
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mode &= 0o1777
            written.add(name)
            if info.isreg():
                with open(path, "rb") as content:  # noqa: PTH123
                    tar.addfile(info, content)
            elif info.isdir() or info.issym() or info.islnk():
                tar.addfile(info)
        for name, mode in _DIRECTORIES.items():
            for parent in reversed([str(p) for p in Path(name).parents if str(p) != "."]):
                if parent not in written:
                    written.add(parent)
                    _add(tar, parent, tarfile.DIRTYPE, 0o755)
            if name not in written:
                _add(tar, name, tarfile.DIRTYPE, mode)
        for name, text in (
            ("etc/passwd", _USERS),
            ("etc/group", _GROUPS),
            ("etc/nsswitch.conf", "hosts: files dns\n"),
        ):
            if name not in written:
                _add(tar, name, tarfile.REGTYPE, 0o644, text.encode())


def _add(tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, len(data)
    tar.addfile(info, io.BytesIO(data))


def ensure_host_image(engine: Engine) -> str:
    """Return the reference of the ``host`` image, and build the image if the engine lacks it, which takes seconds. If
    several processes call this at once, one of them builds.

    Raises:
        SandboxCreateError: see `closure`; or the engine refused, or a disk is full.
    """
    if (cached := _host_images.get(engine.url)) is not None:
        return cached
    packages = closure()
    image = reference(packages)
    with locked(Path(tempfile.gettempdir()) / f"nemo-gym-host-image-{os.getuid()}.lock"):
        try:
            try:
                engine.client.inspect_image(image)
            except sdk_errors() as error:
                if status_of(error) != 404:
                    raise
                with tempfile.TemporaryFile() as root:
                    write_root(packages, root)
                    root.seek(0)
                    changes = [f"ENV {key}={value}" for key, value in _ENV.items()]
                    name, _, tag = image.partition(":")
                    engine.client.import_image(src=root, repository=name, tag=tag, changes=[*changes, "CMD /bin/bash"])
                    # The engine reports a failed import inside a successful response, so check that the image exists.
                    engine.client.inspect_image(image)
        except sdk_errors() as error:
            raise translate(error, "building the image 'host'", kind=SandboxCreateError) from error
    _host_images[engine.url] = image
    return image


_host_images: dict[str, str] = {}
"""Engine URL → reference of its ``host`` image, so that not every create runs dpkg."""
