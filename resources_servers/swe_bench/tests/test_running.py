"""Running scripts and renderings in real boxes, with code under test that works against it."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator

import pytest

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import ExecOutcome, SupportsSnapshot
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.confirm.runs import Recorded, Rendering, run_renderings
from resources_servers.swe_bench.eval_box import EvalSite, run_evaluation
from resources_servers.swe_bench.row import SweBenchRow

TREE = """
mkdir /testbed && cd /testbed && git init -q . && echo >src.py && echo x=1 >test_x.py && git add . &&
git -c user.name=a -c user.email=a@b commit -qm a
"""
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
{before}
git apply -v - <<'EOF_1'
diff --git a/test_x.py b/test_x.py
--- a/test_x.py
+++ b/test_x.py
@@ -1 +1 @@
-x=1
+x=2
EOF_1
{after}
: '>>>>> Start Test Output'
{test}
: '>>>>> End Test Output'
git status --short
"""


@pytest.fixture
async def site() -> AsyncIterator[EvalSite]:
    """A repository with an empty ``src.py`` and a test file, ``test_x.py``."""
    provider = create_provider("local")
    assert isinstance(provider, SupportsSnapshot)
    image = f"running-{uuid.uuid4().hex}"
    box = await provider.create(SandboxSpec(image="host", ttl_s=100))
    try:
        assert (await provider.exec(box, TREE)).ok
        await provider.commit(box, image, {})
    finally:
        await provider.close(box)
    yield EvalSite(provider, image, timeout_s=60)
    await provider.remove_image(image)
    await provider.aclose()


def script(test: str = "python3 test_x.py", *, before: str = ":", after: str = ":") -> str:
    return SCRIPT.format(before=before, after=after, test=test)


def source(text: str) -> bytes:
    """A patch that puts the text into ``src.py``."""
    lines = text.strip("\n").split("\n")
    head = f"diff --git a/src.py b/src.py\n--- a/src.py\n+++ b/src.py\n@@ -1 +1,{len(lines)} @@\n-\n"
    return (head + "".join(f"+{line}\n" for line in lines)).encode()


def row_of(eval_script: str) -> SweBenchRow:
    names = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
    return SweBenchRow(
        **dict.fromkeys(names, "sample"),
        fail_to_pass=("t",),
        pass_to_pass=(),
        eval_script=eval_script,
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
    )


async def recorded(site: EvalSite, eval_script: str, patch: bytes, *tests: str) -> Recorded:
    """Run renderings with these texts of the test file."""
    row = row_of(eval_script)
    renderings = [Rendering({"test_x.py": text}, f"/var/tmp/record{number}") for number, text in enumerate(tests)]
    done = await run_renderings(site, row, patch, renderings)
    assert done.applied
    return done


def record(number: int, value: object) -> str:
    return f"# SECRET-{number}\nimport src\nopen('/var/tmp/record{number}', 'w').write(str({value}))\n"


SEARCH = r"""
import glob, os, re
def found():
    secrets = set()
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/var/tmp/**/*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            text = os.pread(file, 1 << 20, 0) if "/fd/" in path else os.read(file, 1 << 20)
            os.close(file)
        except OSError:
            continue
        secrets.update(re.findall(rb"SECRET-(\d)", text))
    return sorted(map(int, secrets))
"""


async def test_code_under_test_finds_no_rendering_that_is_still_to_run(site: EvalSite) -> None:
    texts = [record(number, "src.found()") for number in range(3)]
    done = await recorded(site, script(), source(SEARCH), *texts)
    for number, text in enumerate(done.records):
        later = set(range(number + 1, 3))
        assert text.startswith("["), done.log
        assert not later.intersection(map(int, text.strip("[]").replace(",", " ").split())), done.records


async def test_records_of_a_rendering_are_read_before_the_next_one_runs(site: EvalSite) -> None:
    forging = """
import glob
for path in glob.glob("/var/tmp/record*"):
    open(path, "w").write("forged")
"""
    done = await recorded(site, script(), source(forging), *(record(number, number) for number in range(3)))
    assert done.records == ("0", "1", "2")


BEFORE = """
export EXPORTED='one
two' PATH=/opt/env/bin:$PATH
plain="a 'b' \\$c"
readonly fixed=1
list=(x "y z")
say() { echo "said $1"; }
shopt -s extglob
greet() { case $1 in @(a|b)) echo greeted;; esac; }
export -f greet
unset FROM_IMAGE
cd /tmp
umask 027
"""
SHOWS = """
(
  echo "$EXPORTED" "${PATH%%:*}" "$plain" "$fixed" "${list[1]}" "$(say hello)" "$(greet b)" "${FROM_IMAGE-gone}"
  bash -O extglob -c 'greet a; echo "$EXPORTED"'
  pwd; umask; echo "$- $#"; set -o | grep pipefail; wc -c; cat test_x.py
) > "$(cat test_x.py)"
"""


async def test_each_rendering_runs_in_the_shell_as_the_rows_own_steps_left_it(site: EvalSite) -> None:
    site = dataclasses.replace(site, env={"FROM_IMAGE": "here"})
    names = ("/var/tmp/record0", "/var/tmp/record1")
    # A test command changes its own shell alone.
    shows = f"{SHOWS}\nexport EXPORTED=other; cd /"
    done = await recorded(site, script(shows, before=BEFORE), b"", *names)
    for name, text in zip(names, done.records, strict=True):
        lines = text.splitlines()
        assert lines[:4] == ["one", "two /opt/env/bin a 'b' $c 1 y z said hello greeted gone", "greeted", "one"], (
            done.log
        )
        assert lines[4:7] == ["two", "/testbed", "0027"]
        assert set("ux") <= set(lines[7].split()[0]) and lines[7].endswith(" 0")
        assert lines[8].split() == ["pipefail", "on"]
        assert lines[9:] == ["0", name], "the tests' input is empty, whatever their rendering came by"


async def test_one_time_limit_holds_for_all_renderings_and_ends_them_all(site: EvalSite) -> None:
    site = dataclasses.replace(site, timeout_s=4)
    slow = "import time\ntime.sleep({})\n"
    texts = [slow.format(second) + record(number, number) for number, second in enumerate((0, 2.5, 2.5, 0))]
    done = await recorded(site, script(), b"", *texts)
    assert done.outcome is ExecOutcome.TIMED_OUT
    assert done.records == ("0", "1", "", "")


async def test_a_service_that_the_rows_own_steps_start_serves_every_rendering(site: EvalSite) -> None:
    ask = 'kill -0 "$service" && echo serves > "$(cat test_x.py)"'
    serve = "sleep 1000 &\nservice=$!"
    done = await recorded(site, script(ask, before=serve), b"", "/var/tmp/record0", "/var/tmp/record1")
    assert done.records == ("serves\n", "serves\n"), done.log


REWRITES = """
import os
for name in os.listdir(f"/proc/{os.getppid()}/fd"):
    try:
        file = os.open(f"/proc/{os.getppid()}/fd/{name}", os.O_RDWR | os.O_NONBLOCK)
        text = os.pread(file, 1 << 20, 0)
        os.pwrite(file, text.replace(b"SWEBENCH_TEST_EXIT_CODE=$?", b"SWEBENCH_TEST_EXIT_CODE=0 "), 0)
    except OSError:
        pass
raise SystemExit(1)
"""


async def test_exit_code_stays_what_it_is_when_a_test_rewrites_the_running_script(site: EvalSite) -> None:
    done = await run_evaluation(site, script("python3 src.py"), source(REWRITES))
    assert (done.outcome, done.test_exit_code) == (ExecOutcome.EXITED, 1)
    assert ">>>>> Test Exit Code: 1" in done.log


ODD = r"""
cat - <<'EOF_2'
} here $x
{ brace
EOF_2
cat <<EOF_3
line $LINENO $(echo }) "
EOF_3
no_such_command x
say() { echo "in it: $1"; }
say '}'
case x in x) echo "$0";; esac
(echo sub; exit 2)
"""


@pytest.mark.parametrize("end", ["exit 5", 'echo "$unset"', ":"], ids=["exit", "fatal error", "end"])
async def test_instrumented_script_prints_what_the_rows_own_script_prints(site: EvalSite, end: str) -> None:
    own = script("(exit 3)", before=ODD, after=end)
    done = await run_evaluation(site, own, b"")
    box = await site.provider.create(SandboxSpec(image=site.image, ttl_s=100, workdir="/testbed"))
    try:
        lower = own.replace("\n", "\n\n", 1)  # by the line that deletes the inputs
        place = "mkdir /var/tmp/ng-eval; cd /testbed; cat > /var/tmp/ng-eval/eval.sh; bash /var/tmp/ng-eval/eval.sh"
        plain = await site.provider.exec(box, place, stdin=lower.encode(), merge_stderr=True)
    finally:
        await site.provider.close(box)
    own_lines = plain.stdout_bytes.decode().splitlines()
    lines = [line for line in done.log.splitlines() if not line.removeprefix("+ ").startswith("exit ")]
    added = ("SWEBENCH_TEST_EXIT_CODE=", "echo '>>>>> Test Exit Code", ">>>>> Test Exit Code")
    lines = [line for line in lines if not line.removeprefix("+ ").startswith(added)]
    assert lines == [line for line in own_lines if not line.startswith("+ exit ")]
    assert done.test_exit_code == (3 if end == ":" else plain.return_code)


async def test_nothing_runs_after_steps_that_broke_off(site: EvalSite) -> None:
    done = await recorded(site, script(before="set -e; false"), b"", record(0, 1))
    assert (done.outcome, done.records) == (ExecOutcome.EXITED, ("",))


async def test_files_of_an_earlier_rendering_are_gone_though_its_command_ended_the_shell(site: EvalSite) -> None:
    done = await recorded(
        site, script("python3 test_x.py; python3 -c 'import own'", before="set -e"), b"", record(0, 1), record(1, 2)
    )
    assert done.records == ("1", "2"), done.log
    row = row_of(script("ls own.py test_x.py > /var/tmp/listed; exit 1"))
    own = Rendering({"own.py": "", "test_x.py": ""}, "/var/tmp/listed")
    done = await run_renderings(site, row, b"", [own, Rendering({"test_x.py": ""}, "/var/tmp/listed")])
    assert done.records == ("own.py\ntest_x.py\n", "test_x.py\n"), done.log


async def test_plain_rendering_imports_from_a_copy_of_its_tests_directory_that_is_gone_afterwards(
    site: EvalSite,
) -> None:
    text = "import sys\nfrom ..names import N\nopen('/var/tmp/listed', 'w').write(f'{N} {\"t\" in sys.modules}')\n"
    plain = Rendering({"another/u/x.py": text}, "/var/tmp/listed", "another/u/x.py", "another.u.x", beside="t")
    steps = "mkdir t /bins; echo N=3 > t/names.py; ln -s $(type -p python3) /bins/python; PATH=/bins:$PATH; set -e"
    row = row_of(script("ls -d */ > /var/tmp/listed", before=steps))
    done = await run_renderings(site, row, b"", [plain, Rendering({}, "/var/tmp/listed")])
    assert done.records == ("3 False", "t/\n"), done.log


async def test_test_command_may_be_longer_than_an_argument(site: EvalSite) -> None:
    names = " ".join(f"test_{number}" for number in range(20_000))
    done = await recorded(site, script(f": {names}\npython3 test_x.py"), b"", record(0, 1))
    assert done.records == ("1",), done.log[-2000:]
