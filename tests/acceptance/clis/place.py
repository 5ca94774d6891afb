"""Where one CLI runs: a home of its own, a small git repository to work in, and an environment without the outside."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DEAD_PROXY = "http://127.0.0.1:9"
"""Nobody listens there: whatever a CLI wants from another host fails at once."""
FILES = {
    "README.md": "# Temperatures\n\nConverts temperatures.\n",
    "convert.py": "def to_celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9\n",
    "test_convert.py": "from convert import to_celsius\n\nassert to_celsius(212) == 100\nprint('passed')\n",
}


@dataclass(frozen=True)
class Endpoint:
    """What a CLI is pointed at."""

    base_url: str
    """Without ``/v1``."""
    token: str
    model: str


@dataclass(frozen=True)
class Place:
    """Directories of one CLI's runs; they stay for a resumed one."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @classmethod
    def make(cls, root: Path) -> Place:
        """The directories, and a committed repository in ``work``."""
        place = cls(root)
        for directory in (place.home, place.work, place.scratch):
            directory.mkdir(parents=True)
        for name, text in FILES.items():
            (place.work / name).write_text(text)
        for arguments in (
            ("init", "-q", "-b", "main"),
            ("add", "-A"),
            ("-c", "user.name=Someone", "-c", "user.email=someone@example.org", "commit", "-qm", "Start"),
        ):
            subprocess.run(["git", *arguments], cwd=place.work, check=True, env=place.environment())
        return place

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's environment but where programs and certificates are."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TMPDIR": str(self.scratch),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTP_PROXY": DEAD_PROXY,
            "HTTPS_PROXY": DEAD_PROXY,
            "NO_PROXY": "127.0.0.1,localhost",
        }


def installed(name: str) -> Path:
    """The directory of a CLI. Installs it on first use; raises with the script's own words when that fails."""
    script = REPOSITORY / "scripts" / "install-clis"
    done = subprocess.run([script, name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"scripts/install-clis {name}: {done.stderr.strip()}")
    where = subprocess.run([script, "--dir", name], capture_output=True, text=True, check=True)
    return Path(where.stdout.strip())
