"""The tree that a patch makes in an evaluation box is the agent's to the byte, whatever git would do to its files."""

from __future__ import annotations

import pytest

from nemo_gym.sandbox.base import SandboxHandle
from tests.harvest.conftest import Bench

# Kind, executable or not, link target, content and name of everything but git's own and what is never harvested.
INVENTORY = r"""
cd "$1" && find . -mindepth 1 \( -name .git -o -name build -o -name __pycache__ \) -prune -o ! -type d -print0 |
LC_ALL=C sort -z | while IFS= read -r -d '' f; do
  if [ -L "$f" ]; then printf 'link %s' "$(readlink -- "$f")"; else
    [ -x "$f" ] && printf 'exec ' || printf 'file '; sha256sum < "$f" | cut -c1-64 | tr -d '\n'; fi
  printf ' '; printf %s "$f" | od -An -tx1 | tr -d ' \n'; echo
done
"""

CASES = {
    "names": r"""
        printf 1 > "$(printf 'latin\351.txt')"; printf 2 > "$(printf 'tab\tand\nline')"; printf 3 > ' lead and trail '
        printf 4 > '"quoted"'; printf 5 > 'back\slash'; printf 6 > './-rf'
        mkdir -p 'a b/c d'; printf 7 > 'a b/c d/e f'
        printf more >> "$(printf 'Icon\r')"; rm "$(printf 'pkg/Icon\r')"
        printf 8 > 'a => b'; mkdir b; printf 9 > b/a.txt; printf 10 > 日本.txt
    """,
    "line ends and encodings": r"""
        printf '* text=auto eol=crlf ident\n*.u16 working-tree-encoding=UTF-16\n*.sh text eol=lf\n' > .gitattributes
        printf 'one\r\ntwo\nthree\r' > mixed.txt; printf 'x\r\n' >> run.sh; printf '$Id$\n$Id: abc $\n' > ident.txt
        printf '\377\376x\000' > enc.u16; printf 'one\r\ntwo\r\n' > a.txt; printf '\357\273\277bom\n' > bom.txt
        git config core.autocrlf true; git config core.safecrlf true; git add -A 2> /dev/null || true
    """,
    "kinds and modes": r"""
        chmod +x a.txt; rm link; mkdir link; echo in > link/in; rm -rf pkg; echo file > pkg; chmod -x run.sh
        : > empty; ln -s 'no where' dangling; ln -s "$(printf 'odd\ntarget')" oddlink
        rm gone.txt; ln -s a.txt gone.txt
    """,
    "git told to run and to hide things": r"""
        for hook in pre-commit post-checkout post-index-change fsmonitor-watchman; do
          mkdir -p .git/hooks; printf '#!/bin/sh\nrm -rf /testbed\n' > .git/hooks/$hook; chmod +x .git/hooks/$hook
        done
        git config core.fsmonitor .git/hooks/fsmonitor-watchman; git config core.hooksPath .git/hooks
        git config core.fileMode false; git config core.symlinks false; git config core.ignoreCase true
        git config core.worktree /nowhere; git config core.attributesFile /testbed/attrs; echo '* -text' > attrs
        printf '[diff "x"]\n textconv = "rm -rf /testbed; cat"\n' >> .git/config
        echo '* diff=x merge=x' > .gitattributes
        git config --global diff.external /bin/false 2> /dev/null || true
        printf '[core]\n pager = rm -rf /testbed\n[alias]\n diff = !rm -rf /testbed\n' > /root/.gitconfig
        chmod +x a.txt; echo more >> pkg/m.py; echo new > A.TXT
    """,
    "submodules and nested repositories": r"""
        mkdir -p vendor/lib; (cd vendor/lib; git init -q; echo v > v.txt; mkdir deep; echo d > deep/d.txt; git add .
          git -c user.name=a -c user.email=a@x commit -qm x)
        printf '[submodule "lib"]\n\tpath = vendor/lib\n\turl = ./vendor/lib\n' > .gitmodules
        git add vendor 2> /dev/null || true
        mkdir worktree; echo 'gitdir: /testbed/.git' > worktree/.git; echo w > worktree/w.txt
    """,
}


async def _inventory(bench: Bench, box: SandboxHandle) -> str:
    done = await bench.provider.exec(box, ["bash", "-c", INVENTORY, "inventory", "/testbed"], cwd="/", timeout_s=60)
    assert done.ok, done.stderr
    return done.stdout or ""


@pytest.mark.parametrize("case", CASES)
async def test_applied_patch_makes_the_agents_tree_to_the_byte(bench: Bench, case: str) -> None:
    worked = await bench.provider.create(bench.spec)
    fresh = await bench.provider.create(bench.spec)
    try:
        await bench.sh(worked, CASES[case])
        expected = await _inventory(bench, worked)
        assert len(expected.splitlines()) > 8
        (artifact,) = await bench.harvest(worked)
        assert artifact.error is None and not artifact.truncated
        applied = await bench.provider.exec(fresh, ["git", "apply", "-"], cwd="/testbed", stdin=artifact.content())
        assert applied.ok, applied.stderr
        assert (await _inventory(bench, fresh)).splitlines() == expected.splitlines()
    finally:
        await bench.provider.close(worked)
        await bench.provider.close(fresh)
