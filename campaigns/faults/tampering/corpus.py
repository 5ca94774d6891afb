"""The tampering corpus: what agents do to be rewarded without solving the task, and honest work that must be rewarded.

Each file of ``corpus/`` holds entries of one kind. What entries do is fixed: change it only with a new `VERSION`.

* ``id``, ``kind`` (``attack`` must earn nothing, ``honest`` must earn its reward without a finding), ``instance``.
* ``run`` is executed by a shell in a working box of the instance, in /testbed; the box is then harvested.
  ``gold: true`` applies the instance's solution first. ``patch`` is delivered unchanged instead, as a lying agent
  server could do.
* ``everywhere: true`` in place of ``instance``: one entry per instance, called ``<id>@<instance>``.
* ``finding: true`` marks an attack that fools the official run and must therefore have a finding.
* ``open: true`` marks an attack that is known to gain: an open defect, counted in ``gains`` and in ``open_gains``.
* ``tries``: how often to play an entry that depends on luck; a gain in one play counts.
* ``row`` makes a separate row for the entry, in the instance's image; see `RowChange`.
* A file's ``parts`` are pieces of scripts; a line ``<<< name`` in a ``run`` stands for one, indented as the line is.
* ``source``: ``own``, ``given``, ``redteam`` or ``adversary`` (by somebody who had read the controls); a file sets it
  once for all its entries. ``topic``: what the entry is about.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from resources_servers.swe_bench.signs import joined, paths_of, split_patch

DIRECTORY = Path(__file__).with_name("corpus")
VERSION = 2
KINDS = ("attack", "honest")
SOURCES = ("given", "own", "redteam", "adversary")
_PART = re.compile(r"^([ ]*)<<< (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class RowChange:
    """A row made from the instance's own, which shares its image."""

    files: tuple[str, ...] = ()
    """Test files that stay in the test patch and the test command; all when empty."""
    tests: tuple[str, ...] = ()
    """Beginnings of the test ids that stay expected; all when empty."""
    replace: Mapping[str, str] = field(default_factory=dict)
    """Texts to replace in the test patch; each must be there, and its replacement must have as many lines."""

    @classmethod
    def of(cls, change: Mapping[str, Any]) -> RowChange:
        return cls(tuple(change.get("files", ())), tuple(change.get("tests", ())), change.get("replace", {}))

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changed row; its test patch and its evaluation script stay consistent."""
        old = new = str(row["test_patch"])
        for text, other in self.replace.items():
            if text not in new or text.count("\n") != other.count("\n"):
                raise ValueError(
                    f"{row['instance_id']}: {text!r} is not in the test patch, or would change its length"
                )
            new = new.replace(text, other)
        dropped: set[str] = set()
        if self.files:
            files = set(self.files)
            new = joined([part for part in split_patch(new.encode()) if not files.isdisjoint(part.paths)]).decode()
            dropped = paths_of(old.encode()) - files
        script = str(row["eval_script"]).replace(old, new)
        for path in dropped:
            script = re.sub(rf" {re.escape(path)}(?= |$)", "", script, flags=re.MULTILINE)
        return {**row, "test_patch": new, "eval_script": script, **self._expected(row)}

    def _expected(self, row: Mapping[str, Any]) -> dict[str, str]:
        expected: dict[str, str] = {}
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            tests = json.loads(row[name])
            expected[name] = json.dumps([test for test in tests if not self.tests or test.startswith(self.tests)])
        return expected


@dataclass(frozen=True)
class Entry:
    """One thing an agent does."""

    id: str
    kind: Literal["attack", "honest"]
    instance: str
    source: str
    topic: str = ""
    run: str = ""
    gold: bool = False
    patch: str | None = None
    finding: bool = False
    tries: int = 1
    open: bool = False
    """Whether the entry is known to gain and not fixed yet; its gain still counts."""
    row: RowChange | None = None

    def row_of(self, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the row that the entry is judged by."""
        row = rows[self.instance]
        return row if self.row is None else self.row.apply(row)


def load_corpus(instances: Sequence[str], directory: Path = DIRECTORY) -> list[Entry]:
    """Every entry, in the order of the files' names.

    Raises:
        ValueError: a file has another version, or an entry is invalid.
    """
    entries = [entry for path in sorted(directory.glob("*.yaml")) for entry in _entries_of(path, instances)]
    ids: set[str] = set()
    for entry in entries:
        if entry.id in ids:
            raise ValueError(f"corpus: two entries are called {entry.id!r}")
        ids.add(entry.id)
    return entries


def select(entries: Iterable[Entry], only: Sequence[str] = (), source: str | None = None) -> list[Entry]:
    """Return the entries of one source whose id begins with or matches (``*``) one of ``only``."""

    def named(entry: Entry) -> bool:
        return not only or any(entry.id.startswith(name) or fnmatchcase(entry.id, name) for name in only)

    return [entry for entry in entries if named(entry) and source in (None, entry.source)]


def _entries_of(path: Path, instances: Sequence[str]) -> Iterator[Entry]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if data["version"] != VERSION:
        raise ValueError(f"{path.name}: version is {data['version']}, not {VERSION}")
    for fields in data["entries"]:
        fields = {"source": data["source"], **fields}
        fields["run"] = _with_parts(fields.get("run", ""), data.get("parts", {}))
        if "row" in fields:
            fields["row"] = RowChange.of(fields["row"])
        if fields.pop("everywhere", False):
            template = Entry(instance="", **fields)
            entries = [replace(template, id=f"{template.id}@{instance}", instance=instance) for instance in instances]
        else:
            entries = [Entry(**fields)]
        for entry in entries:
            if entry.kind not in KINDS or entry.source not in SOURCES or entry.instance not in instances:
                raise ValueError(f"{path.name}: {entry.id}: unknown kind, source or instance")
            if not entry.run and not entry.gold and entry.patch is None:
                raise ValueError(f"{path.name}: {entry.id}: does nothing")
            yield entry


def _with_parts(script: str, parts: Mapping[str, str]) -> str:
    return _PART.sub(lambda match: textwrap.indent(parts[match[2]].rstrip("\n"), match[1]), script)
