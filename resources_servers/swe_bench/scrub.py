"""Scrubs a repository, so that it holds one commit's history and nothing later, and rejects it when in doubt.

A clone of a benchmark's repository usually still holds the fix: on a branch or tag, in a reflog, a stash, a note, or
an unreferenced pack. Scrubbing does not search for such places. It builds a new ``.git`` from the objects reachable
from the commit, replaces the old one, and then verifies the result by enumerating it. Verification is a separate
program, because an image may be old, or made by others.

Both are shell scripts that need only ``git`` and the basic utilities, so they can run in a box while an image is made.
"""

from __future__ import annotations

from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecOutcome, SandboxHandle, SandboxProvider

SCRUB_TIMEOUT_S = 1800.0
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}

_COMMON = """
set -eu
path=$1 base=$2 head=$3
fail() { echo "scrub: $*" >&2; exit 1; }
[ -d "$path" ] || fail "$path is not a directory"
command -v git > /dev/null || fail "git is not installed"
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
"""

SCRUB_SCRIPT = (
    _COMMON
    + """
cd "$path"
export GIT_DIR="$path/.git"
[ -e "$GIT_DIR" ] || fail "$path has no .git"
common=$(git rev-parse --git-common-dir) || fail "$path/.git is not a repository"
common=$(cd "$common" && pwd -P)
own=$(git rev-parse --absolute-git-dir)
head=$(git rev-parse --verify --quiet "$head^{commit}") || fail "commit $3 is not in the repository"
base=$(git rev-parse --verify --quiet "$base^{commit}") || fail "commit $2 is not in the repository"
git merge-base --is-ancestor "$base" "$head" || fail "$head does not descend from $base"
branch=$(git symbolic-ref --quiet --short HEAD || echo main)
# git before 2.25 prints the option that it does not know, and reports success.
format=$(git rev-parse --show-object-format 2> /dev/null || true)
[ "$format" = sha256 ] || format=sha1
new="$path/.git-scrubbed"
rm -rf "$new"

option=; [ "$format" = sha1 ] || option="--object-format=$format"
GIT_DIR="$new" git init --quiet --template= $option "$path"
git rev-list --objects "$head" > "$lists/objects"
git pack-objects --quiet --delta-base-offset "$new/objects/pack/pack" < "$lists/objects" > /dev/null
mkdir -p "$new/info"
if [ -f "$common/info/exclude" ]; then cp "$common/info/exclude" "$new/info/exclude"; fi
if [ -f "$common/shallow" ]; then cp "$common/shallow" "$new/shallow"; fi
fileMode=$(git config --bool core.fileMode || echo true)

# A submodule's own history is as telling as ours; without it the submodule is plain files.
git ls-tree -r -z "$head" | tr '\\n\\0' '\\0\\n' | sed -n 's/^160000 commit [0-9a-f]*\\t//p' > "$lists/submodules"
while IFS= read -r submodule; do
  rm -rf "$path/$submodule/.git"
done < "$lists/submodules"

rm -rf "$path/.git"
case "$common" in "$path"/.git|"$path"/.git/*) ;; *) rm -rf "$common" ;; esac
case "$own" in "$path"/.git|"$path"/.git/*) ;; *) rm -rf "$own" ;; esac
mv "$new" "$path/.git"
git config core.bare false
git config core.fileMode "$fileMode"
git config --unset core.worktree || true
git update-ref "refs/heads/$branch" "$head"
git symbolic-ref HEAD "refs/heads/$branch"
rm -rf "$path/.git/logs" "$path/.git/index"
GIT_WORK_TREE="$path" git read-tree "$head"
GIT_WORK_TREE="$path" git update-index -q --refresh || true
"""
)

VERIFY_SCRIPT = (
    _COMMON
    + """
cd "$path"
git="git -c safe.directory=* -c core.hooksPath=/dev/null -c core.fsmonitor=false"
export GIT_DIR="$path/.git" GIT_WORK_TREE="$path"
[ -d "$GIT_DIR" ] && [ ! -L "$GIT_DIR" ] || fail "$path/.git is not a directory of its own"
[ "$($git rev-parse --verify HEAD)" = "$head" ] || fail "HEAD is not $head"
$git merge-base --is-ancestor "$base" "$head" || fail "$head does not descend from $base"

# Every ref, under whatever name, is the one commit, and HEAD is one of them.
$git for-each-ref --format='%(objectname) %(refname)' > "$lists/refs"
while read -r target name; do
  [ "$target" = "$head" ] || fail "$name points to $target"
done < "$lists/refs"
case "$(cat "$GIT_DIR/HEAD")" in "ref: refs/heads/"*|"$head") ;; *) fail "HEAD is not a branch or $head" ;; esac

# Nothing but a known set of files, so that there is no place left to look into.
find "$GIT_DIR" ! -type d > "$lists/files"
sed "s|^$GIT_DIR/||" "$lists/files" > "$lists/names"
while IFS= read -r name; do
  case "$name" in
    HEAD|config|description|index|packed-refs|shallow|info/exclude) ;;
    refs/heads/*) [ "$(cat "$GIT_DIR/$name")" = "$head" ] || fail "$name is not $head" ;;
    hooks/*.sample) ;;
    objects/pack/pack-*.pack|objects/pack/pack-*.idx|objects/pack/pack-*.rev|objects/info/packs) ;;
    objects/[0-9a-f][0-9a-f]/*) ;;
    *) fail "unexpected file .git/$name" ;;
  esac
done < "$lists/names"
$git config --no-includes --file "$GIT_DIR/config" --name-only --list > "$lists/config"
while IFS= read -r key; do
  case "$key" in
    core.repositoryformatversion|core.filemode|core.bare|core.logallrefupdates|core.symlinks|core.ignorecase) ;;
    extensions.objectformat|user.name|user.email|gc.auto|advice.*|init.defaultbranch) ;;
    *) fail "unexpected configuration: $key" ;;
  esac
done < "$lists/config"

# Every object there is, is one that the commit leads to.
$git rev-list --objects "$head" > "$lists/named"
cut -d ' ' -f 1 "$lists/named" > "$lists/reachable"  # git before 2.22 cannot leave out the names
sort -u "$lists/reachable" > "$lists/expected"
$git cat-file --batch-all-objects --batch-check='%(objectname)' > "$lists/all"
sort -u "$lists/all" > "$lists/present"
cmp -s "$lists/expected" "$lists/present" || {
  comm -13 "$lists/expected" "$lists/present" > "$lists/extra"
  fail "$(wc -l < "$lists/extra") objects are not reachable from $head, e.g. $(head -1 "$lists/extra")"
}
$git count-objects -v > "$lists/count"
grep -q '^garbage: 0$' "$lists/count" || fail "there is garbage among the objects"
$git diff-index --cached --quiet "$head" || fail "the index differs from $head"
echo "scrubbed $head $(wc -l < "$lists/present")"
"""
)


class ScrubError(SandboxError):
    """A repository may still hold later history than its commit. No agent may get it in this state."""

    code = "scrub"


async def scrub_box(
    provider: SandboxProvider, handle: SandboxHandle, path: str, base_commit: str, *, head: str | None = None
) -> None:
    """Scrub and verify a repository in a box, for example while an image is made.

    Args:
        head: the commit to keep, if the image's makers committed on top of ``base_commit``; default: ``base_commit``.

    Raises:
        ScrubError: it could not be scrubbed, or does not pass verification.
    """
    await _exec(provider, handle, SCRUB_SCRIPT, path, base_commit, head, proof=False)
    await verify_box(provider, handle, path, base_commit, head=head)


async def verify_box(
    provider: SandboxProvider, handle: SandboxHandle, path: str, base_commit: str, *, head: str | None = None
) -> None:
    """Raise `ScrubError` unless the repository in the box holds exactly the history of one commit and no other object.
    It trusts the box's git, so use it only for boxes that no agent has used."""
    await _exec(provider, handle, VERIFY_SCRIPT, path, base_commit, head, proof=True)


async def _exec(
    provider: SandboxProvider,
    handle: SandboxHandle,
    script: str,
    path: str,
    base_commit: str,
    head: str | None,
    *,
    proof: bool,
) -> None:
    """Raise `ScrubError` unless the script succeeds and, with ``proof``, says what it has proven. It fails closed: any
    other result is a failure."""
    head = head or base_commit
    command = ["/bin/sh", "-c", script, "scrub", path.rstrip("/"), base_commit, head]
    result = await provider.exec(handle, command, cwd="/", env=_ENVIRONMENT, timeout_s=SCRUB_TIMEOUT_S)
    if result.outcome is not ExecOutcome.EXITED:
        raise ScrubError(f"repository {path} was not scrubbed: {result.outcome}", path=path, commit=base_commit)
    proven = any(line.startswith(f"scrubbed {head} ") for line in (result.stdout or "").splitlines())
    if result.return_code != 0 or (proof and not proven):
        reason = (result.stderr or "").strip().splitlines()[-1:] or [f"exit code {result.return_code}"]
        raise ScrubError(f"repository {path} cannot be trusted to end at {head}: {reason[0]}", path=path, commit=head)
