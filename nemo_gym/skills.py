"""Skills for agents: folders with a ``SKILL.md``, copied to where a harness looks for them. The module's name is NeMo
Gym's."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from nemo_gym._util.suggest import validation_problems

SKILL_MD_FILENAME = "SKILL.md"
_HASH_CHARS = 12


class SkillMetadata(BaseModel):
    """The front matter of a ``SKILL.md``."""

    name: str
    description: str | None = None
    version: str | None = None


class SkillsRef(BaseModel):
    """The skills of a run; stored in its result rows."""

    path: str
    hash: str
    """The digest of all files, which distinguishes versions at the same path."""
    skills: list[SkillMetadata]


class SkillsConfig(BaseModel):
    path: str
    """A directory with one folder per skill."""


def hash_skill_dir(root: Path) -> str:
    """Return a short digest of every file's path and content."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_HASH_CHARS]


def parse_skill_md(skill_md_path: Path) -> SkillMetadata:
    """Parse the YAML between the two ``---`` lines at the file's start. Raises ``ValueError`` naming the file."""
    lines = skill_md_path.read_text(encoding="utf-8").splitlines()
    ends = [number for number, line in enumerate(lines) if line.strip() == "---"]
    if len(ends) < 2 or ends[0] != 0:
        raise ValueError(f"{skill_md_path} does not begin with a head between two lines '---'")
    try:
        return SkillMetadata.model_validate(yaml.safe_load("\n".join(lines[1 : ends[1]])) or {})
    except (yaml.YAMLError, ValidationError) as error:
        problem = validation_problems(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{skill_md_path}: its head needs 'name': {problem}") from error


def load_skill_directory(path: str) -> SkillsRef:
    """Load the skills below ``path``. Raises ``ValueError`` if the directory is missing or has no skills."""
    root = _existing(path)
    files = sorted(folder / SKILL_MD_FILENAME for folder in root.iterdir() if folder.is_dir())
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{missing[0].parent} has no {SKILL_MD_FILENAME}")
    if not files:
        raise ValueError(f"{root} holds no skills: one folder each, with a {SKILL_MD_FILENAME}")
    return SkillsRef(path=path, hash=hash_skill_dir(root), skills=[parse_skill_md(file) for file in files])


def stage_skills(path: str, dest_skills_dir: Path) -> None:
    """Copy the skills to ``dest_skills_dir``, which must not exist yet."""
    shutil.copytree(_existing(path), dest_skills_dir)


def _existing(path: str) -> Path:
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"skills path '{path}' is no directory")
    return root
