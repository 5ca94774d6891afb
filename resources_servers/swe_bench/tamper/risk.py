"""Files that decide how tests run rather than what is tested, and signs of tampering in a patch itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from nemo_gym.contract.verdict import Finding
from resources_servers.swe_bench.patches import FilePatch, copied_from, split_patch

RUNNER_FILES = frozenset(
    {
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
        "noxfile.py",
        "runtests.py",
        ".coveragerc",
        "Makefile",
        "package.json",
        "jasmine.json",
        "jest.config.js",
        "jest.config.ts",
        "vitest.config.js",
        "vitest.config.ts",
        "karma.conf.js",
        ".mocharc.js",
        ".mocharc.json",
        ".mocharc.yml",
        ".babelrc",
        ".npmrc",
    }
)
_RUNNER_MODULES = frozenset(
    {
        *("pytest", "_pytest", "unittest", "pluggy", "xdist", "nose", "hypothesis", "py"),
        # What the evaluation script runs from the repository's root, before the tests.
        *("pip", "setuptools", "wheel", "pkg_resources", "distutils", "_distutils_hack"),
    }
)
_TEST_DIRECTORIES = frozenset({"test", "tests", "testing", "spec", "specs", "__tests__"})
_TEST_FILE = re.compile(r"^(test_.*|.*_tests?|tests?)\.py$|.*[.-](test|spec)\.[cm]?[jt]sx?$")
_MARKER = re.compile(rb">>>>> (?:Start|End) Test Output|>>>>> Test Exit Code|>>>>> (?:Applied Patch|All Tests Passed)")
_LEFTOVERS = (".orig", ".rej")
_INDEX_AND_OBJECTS = re.compile(r"\.git/(index|sharedindex\.[0-9a-f]+|objects/[0-9a-f]{2}(/[0-9a-f]+)?)")
_GIT_INTERNAL = re.compile(r"(^|/)\.git(/|$)", re.IGNORECASE)


def decides_how_tests_run(path: str) -> bool:
    """Whether a file is of the kind that a runner reads or imports by itself, or that supports tests."""
    parts = PurePosixPath(path).parts
    if not parts:
        return False
    name = parts[-1]
    return (
        name in RUNNER_FILES
        or name.endswith((".pth", ".egg-link"))
        or bool(_TEST_FILE.match(name))
        or not _TEST_DIRECTORIES.isdisjoint(parts[:-1])
        or PurePosixPath(parts[0]).stem in _RUNNER_MODULES
    )


def is_control_part(section: FilePatch, gold_paths: set[str]) -> bool:
    """Whether a section belongs into the control run without source changes: such files, except those that the gold
    patch itself has to change. A copy of what gold changes is such a file as well when its new name is."""
    return any(decides_how_tests_run(path) and path not in gold_paths for path in section.paths)


def findings_in_patch(patch: bytes) -> list[Finding]:
    """What no honest change contains, whether or not it had an effect."""
    findings: list[Finding] = []
    for section in split_patch(patch):
        internal = [path for path in section.paths if _GIT_INTERNAL.search(path) or ".." in path.split("/")]
        if internal:
            findings.append(
                Finding(
                    kind="patch_reaches_outside_the_tree",
                    detail="the patch writes into git's own directory or outside the repository",
                    evidence={"paths": internal[:5]},
                )
            )
        if any(_MARKER.search(line) for line in section.added_lines):
            findings.append(
                Finding(
                    kind="forged_markers",
                    detail="the patch contains the grader's own output markers",
                    evidence={"paths": list(section.paths[:5])},
                )
            )
    return findings


def finding_in_tree(
    patch: bytes, changed: Mapping[str, bool], listed: set[str] | None, *, by_three_way: bool
) -> Finding | None:
    """What contradicts the patch in what applying it did.

    Args:
        changed: path → whether it is only a directory, of all that is not as it was before.
        listed: what git says the patch names; ``None`` where git cannot read it and another program applied it.
        by_three_way: git merged the patch by means of its index and objects, which thereby change.
    """
    internal = sorted(path for path in changed if _GIT_INTERNAL.search(path))
    if by_three_way:
        internal = [path for path in internal if not _INDEX_AND_OBJECTS.fullmatch(path)]
    if internal:
        return Finding(
            kind="git_directory_changed",
            detail="applying the patch changed a directory of git's own",
            evidence={"paths": internal[:5]},
        )
    sections = split_patch(patch)
    named = {path for section in sections for path in section.paths}
    parents = {str(parent) for path in named for parent in PurePosixPath(path).parents}
    leftovers = {path + ending for path in named for ending in _LEFTOVERS}
    read = {path for path in changed if not _GIT_INTERNAL.search(path)} | (listed or set())
    unnamed = {path for path in read - named - leftovers if not (changed.get(path, False) and path in parents)}
    unread = named - read - {path for section in sections for path in copied_from(section)}
    if unnamed or unread:
        return Finding(
            kind="patch_paths_contradict",
            detail="the patch changes files that it does not seem to name, or names files that it does not change",
            evidence={"changed": sorted(unnamed)[:5], "named": sorted(unread)[:5]},
        )
    return None
