"""A harness's own directory in the box: fresh, outside of the work directory and of what is harvested."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from nemo_gym.contract.errors import AgentError
from nemo_gym.contract.session import CommandHarvest, FilesHarvest, GitDiffHarvest, HarvestItem

# /tmp comes last: some CLIs distrust it.
CANDIDATES = ("/var/tmp/nemo-gym-agent", "/tmp/nemo-gym-agent", "/run/nemo-gym-agent", "/nemo-gym-agent")
"""The same in every box, because CLIs tell the model their paths, and samples of one task should see one prompt."""


def home_candidates(workdir: str, harvest: Iterable[HarvestItem]) -> Iterator[str]:
    """Paths that nothing harvested contains. Raises `AgentError` when there are none."""
    taken = [PurePosixPath(path) for path in _harvested(harvest)]
    if workdir != "/":
        taken.append(PurePosixPath(workdir))
    free = [path for path in CANDIDATES if not any(PurePosixPath(path).is_relative_to(other) for other in taken)]
    if not free:
        raise AgentError(
            f"there is no place in the box for the agent's own files: all of {', '.join(CANDIDATES)} are harvested"
        )
    yield from free


def _harvested(harvest: Iterable[HarvestItem]) -> Iterator[str]:
    for item in harvest:
        match item:
            case GitDiffHarvest():
                yield item.path
            case FilesHarvest():
                yield from item.paths
            case CommandHarvest():
                pass


def setup_script(home: str, files: Mapping[str, bytes]) -> bytes:
    """A POSIX shell script (for standard input) that makes ``home``, which must not exist, and writes ``files``."""
    lines = ["set -e", "umask 077", f"mkdir -p {shlex.quote(str(PurePosixPath(home).parent))}"]
    lines.append(f"mkdir {shlex.quote(home)} {shlex.quote(home + '/tmp')}")
    for path, content in files.items():
        lines.append(f"mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}")
        lines.append(f"printf {_printf_arguments(content)} > {shlex.quote(path)}")
    return ("\n".join(lines) + "\n").encode()


def _printf_arguments(content: bytes) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return f"%s {shlex.quote(text)}"
    return "'" + "".join(f"\\{byte:03o}" for byte in content) + "'"
