"""Data sets by name: which one a name means, where its rows are kept, and whether they are as fetched.

``dataset=NAME[:SUBSET][@REVISION]``: ``NAME`` is ``owner/name`` as on the Hugging Face hub, or a short name from the
environment's ``data/datasets.yaml``. Nothing here fetches; `nemo_gym.cli.dataset` does.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nemo_gym._util.files import cache_root
from nemo_gym._util.suggest import nearest
from nemo_gym.config.files import read_yaml
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys

SHORT_NAMES: Final = Path("data", "datasets.yaml")
"""A file in an environment's folder that maps each short name to `DataSet`'s ``repo``, ``subset``, ``revision``,
``split``, ``rename`` and ``sha256``."""
_ENTRY_KEYS: Final = ("repo", "subset", "revision", "split", "rename", "sha256")
_NAME = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(:(?P<subset>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class DataSet:
    """A data set of the hub, one split of it, and how its fields are renamed."""

    asked: str
    """The name as the user wrote it."""
    repo: str
    subset: str | None = None
    revision: str = "main"
    split: str | None = None
    """``None`` means the only split."""
    rename: dict[str, str] = field(default_factory=dict)
    """Field of the environment's rows → field of the data set."""
    sha256: str | None = None
    """The pinned digest of the rows, if any."""
    environment: str | None = None

    @classmethod
    def parse(cls, text: str, split: object = None, environment: Path | None = None) -> DataSet:
        """Parse a name as a user writes it, with the short names of the environment's folder. Raises `ConfigError`."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            raise ConfigError(
                f"'{text}' is not a valid data set name; write owner/name, owner/name@revision or owner/name:subset",
                key="dataset",
            )
        names = short_names(environment)
        entry = dict(names.get(match["repo"], {}))
        if not entry and "/" not in match["repo"]:
            raise ConfigError(
                f"there is no data set '{match['repo']}'{nearest(match['repo'], names)}; short names here:"
                f" {', '.join(names) or 'none'}; a data set of the hub is written owner/name",
                key="dataset",
            )
        if match["revision"]:
            entry |= {"revision": match["revision"]}
            entry.pop("sha256", None)
        if match["subset"]:
            entry["subset"] = match["subset"]
        if split:
            if entry.get("split") != str(split):
                entry.pop("sha256", None)
            entry["split"] = str(split)
        place = environment.name if environment is not None else None
        return cls(asked=text, environment=place, **{"repo": match["repo"], **entry})

    @property
    def folder(self) -> Path:
        """Where its rows are kept: one folder for each requested revision."""
        whose = f"{self.environment}--" if self.rename and self.environment else ""
        name = f"{whose}{self.repo.replace('/', '--')}{f'--{self.subset}' if self.subset else ''}"
        return cache_root() / "datasets" / name / self.revision.replace("/", "--")

    @property
    def command(self) -> str:
        """The command that fetches it."""
        split = [f"split={self.split}"] if self.split else []
        if self.environment is None:
            return shlex.join(["ng", "dataset", "download", self.asked, *split])
        return shlex.join(["ng_prepare", self.environment, f"dataset={self.asked}", *split])

    def prepared(self) -> Path:
        """Return the rows' file. Raises `ConfigError` if it was not fetched, or has changed since."""
        split = self.split or self._only_split()
        rows = self.rows_file(split)
        try:
            record = json.loads(self.record_file(split).read_text())
        except (OSError, ValueError):
            raise self.absent() from None
        if not rows.is_file():
            raise self.absent()
        if digest_of(rows) != record["sha256"]:
            raise ConfigError(
                f"{rows} was changed after '{self.asked}' was fetched (its sha256 differs); fetch it again:"
                f" {self.command} refresh=true",
                key="dataset",
            )
        if self.sha256 not in (None, record["sha256"]):
            raise ConfigError(
                f"data set '{self.asked}' is pinned to sha256 {self.sha256}, and what was fetched has"
                f" {record['sha256']}; fetch the revision that is meant (NAME@REVISION) or"
                " correct the pin",
                key="dataset",
            )
        return rows

    def rows_file(self, split: str) -> Path:
        return self.folder / f"{split}.jsonl"

    def record_file(self, split: str) -> Path:
        """The file that records what was fetched, from where, and its digest."""
        return self.folder / f"{split}.json"

    def absent(self) -> ConfigError:
        return ConfigError(f"data set '{self.asked}' is not on this machine; fetch it: {self.command}", key="dataset")

    def _only_split(self) -> str:
        splits = sorted(path.stem for path in self.folder.glob("*.json"))
        if not splits:
            raise self.absent()
        if len(splits) > 1:
            raise ConfigError(
                f"of data set '{self.asked}' there are {', '.join(splits)}; say which with split=", key="split"
            )
        return splits[0]


def short_names(environment: Path | None) -> dict[str, dict[str, Any]]:
    """Read the short names of data sets from an environment's folder. Raises `ConfigError`."""
    file = environment / SHORT_NAMES if environment is not None else None
    if file is None or not file.is_file():
        return {}
    names = read_yaml(file)
    for name, entry in names.items():
        if not isinstance(entry, dict) or not entry.get("repo"):
            raise ConfigError(f"{file}: '{name}' needs 'repo', the data set's name on the hub", key=str(name))
        reject_unknown_keys(entry, _ENTRY_KEYS, where=f"{file}: '{name}'")
        for key in ("repo", "subset", "revision", "split", "sha256"):
            if not isinstance(entry.get(key, ""), str):
                # YAML reads a digest or a revision that consists of digits as a number.
                raise ConfigError(f"{file}: '{name}.{key}' must be text; put it in quotes", key=f"{name}.{key}")
    return names


def digest_of(file: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
