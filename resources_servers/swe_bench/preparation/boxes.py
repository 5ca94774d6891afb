"""Build boxes, in which images are made. Nothing that only the build needs stays in the image, such as this machine's
access to the package registries."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from nemo_gym._util.tasks import finish
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxRole, SandboxSpec
from nemo_gym.sandbox.base import ExecOutcome, SandboxHandle, SandboxProvider, box_labels
from resources_servers.swe_bench.preparation.plan import PreparationError
from resources_servers.swe_bench.preparation.shims import Files

BUILD_DIR = "/var/tmp/ng-prepare"
"""The scratch directory of a build box, removed before its files become an image. It is not below /tmp, which a
provider may keep in memory."""
CA_FILE = f"{BUILD_DIR}/ca-certificates.pem"

_CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_CA_DEFAULTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "default-timeout", "retries")


@dataclass(frozen=True)
class RegistryAccess:
    """Environment variables for pip and npm in a build box, and the host's CA bundle, which goes to `CA_FILE`."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_bundle: Path | None = None


def _run(*command: str) -> str:
    """Return the command's standard output, or nothing if the tool is missing or fails, so that its defaults apply."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def pip_settings(listing: str) -> dict[str, str]:
    """Return the settings that ``pip config list`` shows, by bare name. If a setting is repeated, the environment's
    value wins, then the user's, as in pip."""
    settings: dict[str, str] = {}
    from_environment: dict[str, str] = {}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        if not separator:
            continue
        try:
            text = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
        section, _, key = name.strip().rpartition(".")
        (from_environment if section == ":env:" else settings)[key] = text
    return {**settings, **from_environment}


def _remote(value: str) -> str:
    """Return the HTTP(S) URLs of a list. A box cannot use others, because it does not see this host's directories."""
    return " ".join(part for part in value.split() if urlsplit(part).scheme in ("http", "https"))


def registry_access(environ: Mapping[str, str] | None = None) -> RegistryAccess:
    """Read the registry access from this host's pip and npm configuration and the environment."""
    environ = os.environ if environ is None else environ
    settings = pip_settings(_run(sys.executable, "-m", "pip", "config", "list"))
    env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    env |= {"PIP_PROGRESS_BAR": "off", "PIP_NO_CACHE_DIR": "1", "PIP_NO_INPUT": "1"}
    for key in _PIP_SETTINGS:
        value = _remote(settings.get(key, "")) if key.endswith("index-url") else settings.get(key, "")
        if value:
            env[f"PIP_{key.upper().replace('-', '_')}"] = value
    if shutil.which("npm"):
        registry = _run("npm", "config", "get", "registry").strip()
        if urlsplit(registry).scheme in ("http", "https"):
            env["NPM_CONFIG_REGISTRY"] = registry
    env |= {"NPM_CONFIG_AUDIT": "false", "NPM_CONFIG_FUND": "false", "NPM_CONFIG_UPDATE_NOTIFIER": "false"}
    env |= {"NPM_CONFIG_CACHE": f"{BUILD_DIR}/npm", "NPM_CONFIG_LOGS_MAX": "0"}
    # Do not download browsers: they have hundreds of megabytes, and unit tests never start them.
    env |= {"PUPPETEER_SKIP_DOWNLOAD": "true", "PUPPETEER_SKIP_CHROMIUM_DOWNLOAD": "true"}
    env |= {"PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD": "1"}
    env |= {name: environ[name] for name in _PROXY_VARIABLES if environ.get(name)}
    ca_bundle = _ca_bundle(environ, settings.get("cert", ""))
    if ca_bundle is not None:
        env |= dict.fromkeys((*_CA_VARIABLES, "NPM_CONFIG_CAFILE", "GIT_SSL_CAINFO"), CA_FILE)
    return RegistryAccess(env, ca_bundle)


def _ca_bundle(environ: Mapping[str, str], pip_cert: str) -> Path | None:
    candidates = [environ.get(name, "") for name in _CA_VARIABLES]
    for candidate in (*candidates, pip_cert, *_CA_DEFAULTS):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


BUILD_TTL_S = 2 * 3600.0
STEP_TIMEOUT_S = 3600.0
_CHUNK_BYTES = 1024 * 1024
_HEAD_CHARS, _TAIL_CHARS = 600, 900
_ERROR_LINE = re.compile(r"^\W*(npm (ERR!|error)|[\w.]*error\b|fatal:|E:|Traceback \()", re.IGNORECASE)
_NPM_HELP = re.compile(
    r"^npm (?:ERR!|error) *Usage:\n.*?^npm (?:ERR!|error) *Run \"npm help[^\n]*\n?", re.MULTILINE | re.DOTALL
)
_MAX_OUTPUT_BYTES = 4 * 1024 * 1024

WriteTar = Callable[[tarfile.TarFile], None]


@dataclass
class BuildBox:
    """A box that becomes an image. Every command that fails raises `PreparationError` with its cause."""

    provider: SandboxProvider
    handle: SandboxHandle
    registries: RegistryAccess
    what: str
    """What is made, for errors."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        step: str,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        online: bool = False,
        check: bool = True,
    ) -> str:
        """Run one command to its end and return its output.

        Args:
            command: bash runs a string, and stops at the first command that fails.
            step: the name of the step, for the error "<step> failed".
            online: let it use the package registries; otherwise it cannot reach or find them.
            check: whether an exit code other than 0 is an error.
        """
        argv = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else list(command)
        result = await self.provider.exec(
            self.handle,
            argv,
            cwd=cwd,
            env={"HOME": "/root", **(self.registries.env if online else {}), **(env or {})},
            timeout_s=STEP_TIMEOUT_S,
            merge_stderr=True,
            max_output_bytes=_MAX_OUTPUT_BYTES,
        )
        output = result.stdout_bytes.decode("utf-8", "replace")
        if result.ok or (not check and result.outcome is ExecOutcome.EXITED):
            return output
        ending = f"exit code {result.return_code}" if result.outcome is ExecOutcome.EXITED else result.outcome.value
        raise PreparationError(
            f"{self.what}: {step} failed ({ending}): {cause_of(output) or 'no output'}",
            retryable=result.outcome is ExecOutcome.LOST,
        )

    async def put(self, path: str, write: WriteTar) -> None:
        """Call ``write`` with a tar file, and unpack the file below ``path`` in the box."""
        with tempfile.TemporaryFile() as spool:
            await asyncio.to_thread(_write_tar, spool, write)
            await self.provider.put_archive(self.handle, path, _chunks(spool))

    async def put_files(self, files: Files) -> None:
        """Write text files at absolute paths, owned by root."""
        if files:
            await self.put("/", lambda tar: _add_files(tar, files))

    async def open_registries(self) -> None:
        """Create the files that `online` commands need in addition to their environment variables."""
        await self.run(["mkdir", "-p", BUILD_DIR], step="making the build directory")
        bundle = self.registries.ca_bundle
        if bundle is not None:
            text = await asyncio.to_thread(bundle.read_text, encoding="utf-8", errors="surrogateescape")
            await self.put_files({CA_FILE: (text, 0o644)})

    async def clean(self) -> None:
        """Remove the files that only the build needed."""
        caches = ["/root/.npm", "/root/.cache"]
        await self.run(["rm", "-rf", BUILD_DIR, *caches], step="cleaning up")


def cause_of(output: str) -> str:
    """Return the part of a failed command's output that gives the cause, without npm's help texts. Long output starts
    at the first error line, and if it is still too long, only its beginning and end are returned."""
    text = _NPM_HELP.sub("", output).strip()
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        lines = text.splitlines(keepends=True)
        first_error = next((number for number, line in enumerate(lines) if _ERROR_LINE.match(line)), 0)
        text = "".join(lines[first_error:])
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        text = f"{text[:_HEAD_CHARS]}\n…\n{text[-_TAIL_CHARS:]}"
    return text


@contextlib.asynccontextmanager
async def build_box(
    provider: SandboxProvider,
    image: str | None,
    registries: RegistryAccess,
    *,
    run_id: str,
    what: str,
    online: bool = True,
) -> AsyncIterator[BuildBox]:
    """Start a box from ``image``. It is destroyed when the block ends, or at the end of its lease if this process is
    killed."""
    spec = SandboxSpec(
        image=image,
        ttl_s=BUILD_TTL_S,
        network=NetworkPolicy.OPEN if online else NetworkPolicy.NONE,
        metadata=box_labels(run=run_id, rollout=what, attempt=1, role=SandboxRole.BUILD),
    )
    handle = await provider.create(spec)
    try:
        yield BuildBox(provider, handle, registries, what)
    finally:
        await finish(provider.close(handle))


def add_tree(tar: tarfile.TarFile, source: Path, target: str, skip: Callable[[str], bool] | None = None) -> None:
    """Add a host file or directory at ``target`` (absolute), owned by root. ``skip`` gets paths relative to ``source``
    and excludes those for which it returns true."""
    arcname = target.lstrip("/")

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        below = member.name[len(arcname) :].lstrip("/")
        if below and skip is not None and skip(below):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    tar.add(source, arcname=arcname, filter=keep)


def add_link(tar: tarfile.TarFile, path: str, target: str) -> None:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
    tar.addfile(member)


def add_bytes(tar: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.size, member.mode = len(content), mode
    tar.addfile(member, io.BytesIO(content))


def _add_files(tar: tarfile.TarFile, files: Files) -> None:
    for path, (text, mode) in files.items():
        add_bytes(tar, path, text.encode("utf-8", "surrogateescape"), mode)


def _write_tar(spool: IO[bytes], write: WriteTar) -> None:
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
        write(tar)
    spool.seek(0, os.SEEK_SET)


async def _chunks(spool: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(spool.read, _CHUNK_BYTES):
        yield chunk
