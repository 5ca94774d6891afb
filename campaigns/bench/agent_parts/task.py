"""The measured agent's task: a repository of a few hundred files, and one scripted conversation of many turns."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxProvider

IMAGE = "agents-bench"
WORKDIR = "/repo"
FILES = 300
TURNS = (1, 12)
"""Model responses per run; the bar is on the longest run."""

# The same repository on the host and in the image.
REPOSITORY = f"""
set -e
mkdir -p "$1" && cd "$1" && mkdir src
for n in $(seq {FILES}); do
  seq $n $((n + 400)) | sed "s/^/value_$n = /" > src/module_$n.py
done
printf 'hello wrld\\n' > greeting.txt
git init -q -b main . && git add -A
git -c user.name=t -c user.email=t@example.invalid commit -q -m first
"""
_STEPS = (
    "ls src | head -n 20; cat greeting.txt",
    "grep -rn 'value_7 = 77' src | head",
    "git log --oneline | head; git status --short",
    "sed -n 1,40p src/module_42.py",
    "python3 - <<'EOF'\nimport pathlib\nprint(sum(len(p.read_text()) for p in pathlib.Path('src').iterdir()))\nEOF",
    "sed -i s/wrld/world/ greeting.txt && git diff",
    "find . -name '*.py' -size +3k | wc -l",
    "printf 'assert open(\"greeting.txt\").read() == \"hello world\\\\n\"\\n' > test_greeting.py",
    "python3 test_greeting.py && echo passed",
    "wc -l src/*.py | tail -n 1",
)  # fmt: skip
_FIX = "sed -i s/wrld/world/ greeting.txt"
_FIX_WORDS = "+hello world"


def prompt(turns: int) -> str:
    return f"Please fix the greeting, in {turns} answers."


def expected_in_patch(turns: int) -> str | None:
    """Return text that the harvested patch must hold; a run of one model response changes nothing."""
    return None if turns == 1 else _FIX_WORDS


def script(path: Path, turns: Sequence[int] = TURNS) -> Path:
    """Write the policy's script: Claude Code's Bash calls, without any delay."""
    path.write_text(json.dumps({"model": "scripted", "tasks": [_task(count) for count in turns]}))
    return path


def _task(turns: int) -> dict[str, Any]:
    steps = [_STEPS[number % len(_STEPS)] for number in range(turns - 1)]
    if steps and "wrld" not in "".join(steps):
        steps[-1] = _FIX
    calls = [
        {"text": f"Step {number + 1}.", "tool_calls": [{"name": "Bash", "arguments": {"command": step}}]}
        for number, step in enumerate(steps)
    ]
    return {"name": f"turns-{turns}", "when": {"user": prompt(turns)}, "turns": [*calls, {"text": "All done."}]}


def make_repository(directory: Path) -> None:
    subprocess.run(["/bin/sh", "-s", str(directory)], input=REPOSITORY, text=True, check=True)


async def make_image(provider: SandboxProvider) -> None:
    """Make an image of the repository, unless there is one."""
    if await provider.image_labels(IMAGE) is not None:  # type: ignore[attr-defined]
        return
    box = await provider.create(SandboxSpec(image="host"))
    try:
        result = await provider.exec(box, ["/bin/sh", "-s", WORKDIR], stdin=REPOSITORY.encode())
        if not result.ok:
            raise RuntimeError(f"the repository could not be made: {result.stderr}")
        await provider.commit(box, IMAGE, {})  # type: ignore[attr-defined]
    finally:
        await provider.close(box)
