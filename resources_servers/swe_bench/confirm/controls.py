"""The controls of one row: renderings of its tests and gold's answers, private to the environment."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from nemo_gym._util.files import replace_file
from nemo_gym.contract.errors import VerifierError
from resources_servers.swe_bench.confirm.runs import Rendering
from resources_servers.swe_bench.confirm.twins import Twin
from resources_servers.swe_bench.confirm.values import Check
from resources_servers.swe_bench.row import SweBenchRow, TestId, content_digest, image_slug
from resources_servers.swe_bench.signs import SCRIPT_SUFFIXES as JAVASCRIPT

CONTROLS_VERSION = 12
Strength = Literal["none", "weak", "strong"]
LEVELS: tuple[Strength, ...] = get_args(Strength)


@dataclass(frozen=True)
class ControlledRendering:
    """A rendering and the values that it must record."""

    rendering: Rendering
    tests: Mapping[str, tuple[tuple[Check, ...], ...]]
    """Test → its invocations. Each invocation is the checks of its records, in order."""


@dataclass(frozen=True)
class ControlledTest:
    """How well one test function is controlled."""

    ids: tuple[str, ...]
    fail_to_pass: bool
    strength: Strength


@dataclass(frozen=True)
class RowControls:
    """Everything that confirms attempts at one row."""

    instance_id: str
    image_content: str
    """The digest of the image on which the controls were made."""
    renderings: tuple[ControlledRendering, ...] = ()
    support: Mapping[str, bytes] = field(default_factory=dict)
    """Other files of the test patch that the renderings need."""
    tests: Mapping[str, ControlledTest] = field(default_factory=dict)
    twins: tuple[Twin, ...] = ()
    """Twins for tests that no rendering controls well."""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Controls that were not made because the time budget was used up."""
    seconds: float = 0.0
    """How long it took to make the controls."""

    @property
    def strength(self) -> Strength:
        """The strength of the weakest test that the patch has to fix."""
        found = [test.strength for test in self.tests.values() if test.fail_to_pass]
        return min(found, key=LEVELS.index) if found else "none"

    @property
    def plain_covers_all(self) -> bool:
        """Whether every test to be fixed is also confirmed without a test runner, and without a package of tests that
        may load one."""
        plain = {
            test for one in self.renderings if one.rendering.plain and not one.rendering.beside for test in one.tests
        }
        return all(name in plain for name, test in self.tests.items() if test.fail_to_pass)

    def leaves_out(self, ids: Collection[str]) -> bool:
        """Whether no rendering records a value in one of these tests. JavaScript ids do not name functions, so all of
        them count as recorded if anything is."""
        recorded: set[tuple[str, str]] = set()
        for one in self.renderings:
            for test, calls in one.tests.items():
                if any(len(checks) > 1 for checks in calls):  # the first check only says that the test began
                    path, _, name = test.partition("|test:")
                    recorded.add((path, name))
        if any(path.endswith(JAVASCRIPT) for path, _ in recorded):
            return False
        return not all(
            any(test.may_be_in(path) and test.may_be_called(name) for path, name in recorded)
            for test in map(TestId.parse, ids)
        )

    def counts(self) -> dict[str, int]:
        """Return how many of the tests to be fixed are ``strong``, ``weak`` and ``none``."""
        found = [test.strength for test in self.tests.values() if test.fail_to_pass]
        return {level: found.count(level) for level in ("strong", "weak", "none")}

    def to_json(self) -> dict[str, Any]:
        return {"version": CONTROLS_VERSION, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowControls:
        """Raises `ValueError` for data without one of the parts: what is missing must not count as "no control"."""
        if missing := {each.name for each in fields(cls)} - data.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return msgspec.convert(data, cls)


# msgspec prepares a type at its first use, and crashes when two threads do so at once. Threads read controls.
msgspec.json.Decoder(RowControls)


def default_controls_dir() -> Path:
    """Return ``$XDG_STATE_HOME/nemo-gym/swe-bench/controls``."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path("~").expanduser() / ".local" / "state")
    return Path(state) / "nemo-gym" / "swe-bench" / "controls"


class ControlStore:
    """Stores controls in files that only this user can read, one per instance and image."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_controls_dir()

    @classmethod
    def of(cls, directory: str | Path | None) -> ControlStore:
        return cls(Path(directory).expanduser() if directory else None)

    def require(self, row: SweBenchRow, image_content: str) -> RowControls:
        """Return the controls of a row.

        Raises:
            VerifierError: none were made for this image. The error names the command that makes them.
        """
        controls = self.load(row, image_content)
        if controls is None:
            raise VerifierError(
                f"there are no controls for {row.instance_id} in {self.directory}; make them with ng_prepare swe_bench"
                " (rows=, sandbox= and controls= as for this run), or set tamper_control: off and trust no reward"
            )
        return controls

    def path(self, row: SweBenchRow, image_content: str) -> Path:
        """Return the file of a row's controls. The name depends on the image and the row's tests and solution."""
        tests = [row.patch, row.test_patch, row.eval_script, row.fail_to_pass, row.pass_to_pass]
        key = content_digest([CONTROLS_VERSION, image_content, *tests])
        return self.directory / f"{image_slug(row.instance_id)}.{key[:16]}.json.gz"

    def save(self, row: SweBenchRow, controls: RowControls) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        packed = gzip.compress(json.dumps(controls.to_json()).encode("utf-8", "surrogatepass"), mtime=0)
        replace_file(self.path(row, controls.image_content), packed, 0o600)

    def load(self, row: SweBenchRow, image_content: str) -> RowControls | None:
        """Return the controls, or ``None`` if none were made for this image.

        Raises:
            VerifierError: the file is damaged. The error names the file and the command that makes it again.
        """
        path = self.path(row, image_content)
        try:
            return RowControls.from_json(json.loads(gzip.decompress(path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError) as error:
            raise VerifierError(
                f"the controls of {row.instance_id} in {path} cannot be read ({error}); make them again with"
                " ng_prepare swe_bench … force=true"
            ) from error
