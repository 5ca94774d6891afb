"""Patches in real boxes: what honest ones change is what they name, and what hides more than it names is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import VerifierError
from nemo_gym.contract.session import Artifact
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.eval_box import (
    INPUTS,
    EvalRun,
    EvalSite,
    apply_patch,
    archive_of,
    evaluation_box,
    exec_in,
)
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import SweBenchRow, read_rows, resolve_image
from resources_servers.swe_bench.signs import is_control_part, split_patch
from resources_servers.swe_bench.verdicts import judge

EXAMPLES = Path(__file__).parents[1] / "data" / "example.jsonl"
INSTANCE = "examples__slugline-1"
GIT = "git -c user.name=a -c user.email=a@b -c protocol.file.allow=always"


@pytest.fixture(scope="session")
def row() -> dict[str, Any]:
    asyncio.run(prepare(Options.parse([f"rows={EXAMPLES}", "sandbox=local", f"instances={INSTANCE}"])))
    return next(row for _, row in read_rows(EXAMPLES) if row["instance_id"] == INSTANCE)


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    made = create_provider("local")
    yield made
    await made.aclose()


@pytest.fixture
async def site(provider: SandboxProvider, row: dict[str, Any]) -> EvalSite:
    image = await resolve_image(provider, row)
    return EvalSite(provider, image.name, image.env)


async def shell(site: EvalSite, handle: SandboxHandle, script: str) -> bytes:
    done = await exec_in(site, handle, ["/bin/bash", "-ec", script], timeout_s=60, max_output_bytes=2**24)
    assert done.ok, done.stdout_bytes
    return done.stdout_bytes


async def patch_of(site: EvalSite, setup: str, change: str, diff: str) -> bytes:
    """What git says of a change in a box of its own."""
    async with evaluation_box(site) as handle:
        await shell(site, handle, f"{{ {setup}\n}} > /dev/null 2>&1")
        base = (await shell(site, handle, "git rev-parse HEAD")).decode().strip()
        return await shell(
            site, handle, f"{{ {change}\ngit add -fA\n}} > /dev/null 2>&1; git diff {diff} --cached {base}"
        )


async def apply(site: EvalSite, patch: bytes, setup: str = ":") -> EvalRun:
    async with evaluation_box(site) as handle:
        await shell(site, handle, f"{{ {setup}\n}} > /dev/null 2>&1")
        await site.provider.put_archive(handle, INPUTS, archive_of({"patch.diff": patch}))
        return await apply_patch(site, handle, patch)


COMMIT = f"git add -fA; {GIT} commit -qm more"
NUMBERS = f"seq 60 > n.txt; seq 60 > tests/n.txt; {COMMIT}"
HONEST: dict[str, tuple[str, str, set[str]]] = {
    "change": (":", "echo '# x' >> slugline/__init__.py", {"slugline/__init__.py"}),
    "rename": (NUMBERS, "git mv n.txt 'm m.txt'; echo 61 >> 'm m.txt'", {"n.txt", "m m.txt"}),
    "rename_of_a_directory": (
        f"mkdir d; seq 60 > d/a; seq 9 > d/b; {COMMIT}",
        "git mv d e",
        {"d/a", "d/b", "e/a", "e/b"},
    ),
    "copy": (NUMBERS, "cp n.txt copy.txt", {"copy.txt"}),
    "mode": (":", "chmod +x slugline/__init__.py", {"slugline/__init__.py"}),
    "binary": (":", "head -c 5000 /dev/urandom > b.bin", {"b.bin"}),
    "changed_binary": (
        f"printf 'a\\0c' > b.bin; {COMMIT}",
        "printf 'a\\0b' > b.bin",
        {"b.bin"},
    ),
    "crlf": (f"printf 'a\\r\\nb\\r\\n' > c.txt; {COMMIT}", "printf 'a\\r\\nB\\r\\n' > c.txt", {"c.txt"}),
    "crlf_by_attribute": (
        f"echo '*.txt text eol=crlf' > .gitattributes; printf 'a\\nb\\n' > c.txt; {COMMIT}; rm c.txt; git checkout .",
        "printf 'a\\r\\nB\\r\\n' > c.txt",
        {"c.txt"},
    ),
    "no_trailing_newline": (f"printf 'a\\nb' > c.txt; {COMMIT}", "printf 'a\\nc' > c.txt", {"c.txt"}),
    "strange_names": (
        ":",
        "mkdir 'a b' ' x b'; echo 1 > 'a b/c d'; echo 1 > ünï; echo 1 > $'t\\tb'; echo 1 > $'n\\nl'; echo 1 > 'q\"q';"
        " echo 1 > $'\\xff'; echo 1 > ' x b/y '; echo 1 > 'back\\slash'; echo 1 > -- -n; echo 1 > $'\\v';"
        " echo 1 > 'x '",
        {"a b/c d", "ünï", "t\tb", "n\nl", 'q"q', "\udcff", " x b/y ", "back\\slash", "--", "\v", "x "},
    ),
    "empty_files_with_strange_names": (
        ":",
        "mkdir 'p b'; : > 'p b/q'; : > 'e f'; : > e; : > ü; : > $'t\\t'",
        {"p b/q", "e f", "e", "ü", "t\t"},
    ),
    "deletions": (NUMBERS, "rm -r n.txt tests", {"n.txt"}),
    "symbolic_links": (
        f"ln -s README.md old; ln -s a gone; {COMMIT}",
        "ln -sf setup.cfg old; rm gone; ln -s /etc/passwd new",
        {"old", "gone", "new"},
    ),
    "file_becomes_link_and_directory": (
        f"echo 1 > f; echo 1 > g; {COMMIT}",
        "rm f g; ln -s README.md f; mkdir g; echo 1 > g/h",
        {"f", "g", "g/h"},
    ),
    "submodule_pointer": (
        ":",
        f"git init -q sub; cd sub; {GIT} commit -qm x --allow-empty; cd ..; echo 1 > y",
        {"y"},
    ),
    "ignored_files": (f"echo 'ign/' > .gitignore; {COMMIT}", "mkdir ign; echo 1 > ign/x", {"ign/x"}),
    "lines_that_look_like_headers": (
        f"printf 'a\\n-- old\\nb\\n' > s.sql; {COMMIT}",
        "printf 'a\\n++ new\\n++ b/other\\n@@ -1 +1 @@\\nb\\ndiff --git a/x b/x\\n' > s.sql",
        {"s.sql"},
    ),
}


@pytest.mark.parametrize("diff", ["--binary -M", "--binary -C -C --no-prefix --src-prefix=a/ --dst-prefix=b/ -U0"])
@pytest.mark.parametrize("name", HONEST)
async def test_honest_patch_is_applied_and_what_it_changes_is_known(site: EvalSite, name: str, diff: str) -> None:
    setup, change, expected = HONEST[name]
    patch = await patch_of(site, setup, change, diff)
    run = await apply(site, patch, setup)
    if "-U0" in diff and not run.applied:  # git refuses some without context, and so would the official harness
        assert run.refusal is None
        return
    assert run.applied, run.apply_log
    assert run.refusal is None, run.refusal
    assert expected <= set(run.changed_paths)


def hunk(path: str, old: str, new: str, at: int = 30, context: str = "") -> bytes:
    return (
        f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -{at},3 +{at},3 @@\n {at}{context}\n-{old}\n"
        f"+{new}\n {at + 2}\n"
    ).encode()


async def test_honest_patch_is_known_whichever_way_applies_it(site: EvalSite) -> None:
    fuzzy = await apply(site, hunk("n.txt", "31", "x", context="?"), NUMBERS)
    assert fuzzy.applied and fuzzy.refusal is None and "n.txt.orig" in fuzzy.changed_paths
    assert "with fuzz" in fuzzy.apply_log
    # The tree has moved on beside the patch; its blob is known, so git can merge.
    ours = await patch_of(site, NUMBERS, "sed -i 30s/.*/thirty/ n.txt", "")
    merged = await apply(site, ours, f"{NUMBERS}; sed -i 28s/.*/x/ n.txt; {COMMIT}")
    assert merged.applied and merged.refusal is None, (merged.apply_log, merged.refusal)
    assert ".git/index" in merged.changed_paths and "n.txt" in merged.changed_paths
    already = await apply(site, hunk("n.txt", "31", "x"), f"{NUMBERS}; sed -i 31s/.*/x/ n.txt; {COMMIT}")
    assert already.applied and already.refusal is None and already.changed_paths == ("n.txt.rej",)
    plain = await apply(
        site, b"--- n.txt.orig/n.txt\n+++ new/n.txt\t2024-01-01\n@@ -1,5 +1,4 @@\n 1\n-2\n 3\n 4\n 5\n", NUMBERS
    )
    assert plain.applied and plain.refusal is None and plain.changed_paths == ("n.txt",)


FIRST = hunk("n.txt", "31", "x")
FUZZY = FIRST.replace(b" 30\n", b" 30?\n")
"""git refuses it, GNU patch does not."""
HIDING: dict[str, tuple[bytes, str]] = {
    "git_config_behind_a_hunk": (
        FUZZY
        + b"--- a/.git/config\n+++ b/.git/config\n@@ -1,2 +1,2 @@\n [core]\n-\trepositoryformatversion = 0\n"
        + b"+\tfsmonitor = echo HOOK_RAN\n",
        "git_directory_changed",
    ),
    "hook_by_context_diff": (
        FUZZY
        + b"*** /dev/null\n--- b/.git/hooks/post-checkout\n***************\n*** 0 ****\n--- 1 ----\n+ echo HOOK_RAN\n",
        "git_directory_changed",
    ),
    "nested_git_directory": (
        FUZZY + b"--- /dev/null\n+++ b/tests/.git/config\n@@ -0,0 +1 @@\n+[core]\n",
        "git_directory_changed",
    ),
    "conftest_by_context_diff": (
        FUZZY + b"*** /dev/null\n--- b/conftest.py\n***************\n*** 0 ****\n--- 1 ----\n+ import os\n",
        "patch_paths_contradict",
    ),
    "normal_diff_by_index_line": (
        FUZZY + b"Index: a/README.md\n1d0\n< {first}\n",
        "patch_paths_contradict",
    ),
    "section_that_nobody_applies": (
        FIRST + b"diff --git a/conftest.py b/conftest.py\nsimilarity: none\n",
        "patch_paths_contradict",
    ),
}


@pytest.mark.parametrize("name", HIDING)
async def test_patch_is_refused_when_it_does_other_than_it_names(site: EvalSite, name: str) -> None:
    patch, kind = HIDING[name]
    if b"{first}" in patch:
        async with evaluation_box(site) as handle:
            patch = patch.replace(b"{first}", (await shell(site, handle, "head -1 README.md")).rstrip(b"\n"))
    run = await apply(site, patch, NUMBERS)
    assert run.refusal is not None, (run.apply_log, run.changed_paths)
    assert run.refusal.kind == kind, run.refusal


async def test_section_behind_a_hunk_is_seen_by_everything_that_reads_patches(site: EvalSite) -> None:
    hidden = FIRST + b"--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os\n"
    assert [section.paths for section in split_patch(hidden)] == [("n.txt",), ("conftest.py",)]
    assert [is_control_part(section, set()) for section in split_patch(hidden)] == [False, True]
    run = await apply(site, hidden, NUMBERS)
    assert run.refusal is None and run.changed_paths == ("conftest.py", "n.txt")


async def test_solution_that_hides_a_file_earns_nothing_and_its_tests_do_not_run(
    site: EvalSite, row: dict[str, Any]
) -> None:
    async with evaluation_box(site) as handle:
        first, second, third = (await shell(site, handle, "head -3 README.md")).decode().splitlines()
    fuzzy = f"--- a/README.md\n+++ b/README.md\n@@ -1,3 +1,4 @@\n {first}\n {second}\n+x\n {third}?\n"
    hidden = b"*** /dev/null\n--- b/sitecustomize.py\n***************\n*** 0 ****\n--- 1 ----\n+ import os\n"
    patch = row["patch"].encode() + fuzzy.encode() + hidden
    artifact = Artifact.of("patch", "git_diff", patch)
    judgement = await judge(site, SweBenchRow.from_mapping(row), artifact, None, tamper_control="off")
    verdict = judgement.verdict
    assert verdict.valid and verdict.reward == 0.0 and judgement.log == ""
    assert [finding.kind for finding in verdict.findings] == ["patch_paths_contradict"]
    assert verdict.findings[0].evidence["changed"] == ["sitecustomize.py"]


async def test_box_that_cannot_look_at_its_tree_is_the_hosts_failure(site: EvalSite) -> None:
    with pytest.raises(VerifierError, match="find"):
        await apply(site, FIRST, f"{NUMBERS}; mv $(type -P find) /somewhere")
