"""Runs NeMo Gym's plugins, as they are, against this core: their suites, their configurations, their compositions.

    python -m campaigns.compat.suites --plugins DIR [--json] [--kind resources_servers] [--only WORD] [--jobs 2]
    python -m campaigns.compat.suites --plugins DIR --configs
    python -m campaigns.compat.suites --plugins DIR --serve

``DIR`` holds ``resources_servers``, ``responses_api_agents``, … as NeMo Gym's repository or wheel does. No file there
is edited. Each suite runs in a separate process, in its folder, without a network, with its own time limit; a suite
passes if pytest ends with 0 and at least one test passed. ``--core`` runs the same suites on another ``nemo_gym``
(NeMo Gym's own), ``--python`` in another environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from campaigns.bench.report import Bar, argument_parser, machine, print_report
from campaigns.compat import compositions

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
ISOLATED = Path(__file__).with_name("isolated.py")
_SEVERAL = 3
"""How many suites are named for each cause."""


@dataclass
class Suite:
    """The result of one suite of tests."""

    kind: str
    name: str
    passed: int = 0
    failed: int = 0
    exit_code: int | None = None
    """``None`` if the time limit stopped the suite."""
    seconds: float = 0.0
    causes: dict[str, int] = field(default_factory=dict)
    """The number of failed tests for each cause."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.passed > 0


def find_suites(plugins: Path, kinds: Sequence[str], only: str | None) -> list[tuple[str, Path]]:
    """Return the folder of every plugin that has tests, with its kind."""
    found = []
    for kind in kinds:
        for folder in sorted((plugins / kind).glob("*/")):
            has_tests = next(folder.rglob("test_*.py"), None) is not None
            if has_tests and (only is None or re.search(only, folder.name)):
                found.append((kind, folder))
    return found


def run_suite(kind: str, folder: Path, plugins: Path, shown_core: Path, python: str, timeout_s: float) -> Suite:
    """Run one suite in a separate process."""
    suite = Suite(kind, folder.name)
    with tempfile.TemporaryDirectory(prefix="compat-") as scratch:
        report = Path(scratch) / "junit.xml"
        argv = [python, str(ISOLATED), "-q", "-rN", "-p", "no:cacheprovider", "-p", "no:randomly"]
        argv += ["-o", "asyncio_mode=auto", "-o", "addopts=", f"--junitxml={report}", "--tb=short", "."]
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment(plugins, shown_core, folder, Path(scratch)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        started = time.monotonic()
        try:
            output, _ = process.communicate(timeout=timeout_s)
            suite.exit_code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            suite.causes = {f"stopped after {timeout_s:g} s": 1}
        suite.seconds = round(time.monotonic() - started, 1)
        if report.is_file():
            read_report(report, suite)
        elif suite.exit_code is not None:
            suite.causes = {last_words(output.decode(errors="replace")): 1}
    return suite


def environment(plugins: Path, shown_core: Path, folder: Path, scratch: Path) -> dict[str, str]:
    """Return the child's environment. Its path has the core first, then the plugin, then the folder of all plugins."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("NEMO_GYM", "PYTEST"))}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, (shown_core, folder, plugins))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NEMO_GYM_EXTRA_ROOTS": str(plugins),
        "NEMO_GYM_CACHE_DIR": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
    }


def read_report(report: Path, suite: Suite) -> None:
    """Count the passed and failed tests in pytest's XML, and the causes of failures."""
    causes: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            suite.failed += 1
            causes[cause_of(bad[0].get("message") or "", bad[0].text or "")] += 1
        elif case.find("skipped") is None:
            suite.passed += 1
    suite.causes = dict(causes.most_common())


def cause_of(message: str, text: str) -> str:
    """Return one line that all failures with the same cause share."""
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    error = re.compile(r"(ModuleNotFoundError|ImportError|AttributeError|[A-Za-z_.]*(Error|Exception|Undefined)\b)")
    cause = next((line for line in reversed(lines) if error.match(line)), None) or (lines[0] if lines else message)
    cause = re.sub(r"0x[0-9a-f]+|'\d+'|\(/[^)]*\)", "…", cause)
    return cause[:160]


def last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"


def group_causes(suites: Iterable[Suite]) -> list[dict[str, Any]]:
    """Return causes with the suites that they fail, those with the most suites first."""
    suites_by_cause: dict[str, list[str]] = defaultdict(list)
    tests: Counter[str] = Counter()
    for suite in suites:
        if not suite.ok:
            for cause, count in suite.causes.items():
                suites_by_cause[cause].append(suite.name)
                tests[cause] += count
    ordered = sorted(suites_by_cause, key=lambda cause: (-len(suites_by_cause[cause]), -tests[cause]))
    return [{"cause": cause, "tests": tests[cause], "suites": suites_by_cause[cause]} for cause in ordered]


def show_core(core: Path, scratch: Path) -> Path:
    """Make a directory that holds only ``nemo_gym``, so that nothing beside the core hides a plugin."""
    shown = scratch / "core"
    shown.mkdir()
    (shown / "nemo_gym").symlink_to(core / "nemo_gym")
    return shown


def run_suites(args: argparse.Namespace) -> dict[str, Any]:
    plugins = args.plugins.resolve()
    with tempfile.TemporaryDirectory(prefix="compat-core-") as scratch:
        shown = show_core(args.core.resolve(), Path(scratch))
        folders = find_suites(plugins, args.kind or KINDS, args.only)

        def run(item: tuple[str, Path]) -> Suite:
            suite = run_suite(*item, plugins, shown, args.python, args.timeout)
            mark = "ok  " if suite.ok else "FAIL"
            counts = f"{suite.passed} passed, {suite.failed} failed"
            print(
                f"{mark} {suite.kind}/{suite.name}: {counts}", file=sys.stderr if args.json else sys.stdout, flush=True
            )
            return suite

        with ThreadPoolExecutor(args.jobs) as pool:
            suites = list(pool.map(run, folders))
    return {
        "core": str(args.core),
        "kinds": {
            kind: {
                "suites": sum(suite.kind == kind for suite in suites),
                "suites_ok": sum(suite.ok for suite in suites if suite.kind == kind),
                "tests_of_ok": sum(suite.passed for suite in suites if suite.kind == kind and suite.ok),
                "tests_passed": sum(suite.passed for suite in suites if suite.kind == kind),
            }
            for kind in KINDS
            if any(suite.kind == kind for suite in suites)
        },
        "causes": group_causes(suites),
        "suites": [asdict(suite) | {"ok": suite.ok} for suite in suites],
    }


def _compositions(args: argparse.Namespace) -> int:
    plugins = args.plugins.resolve()
    if args.configs:
        report = compositions.compose_all(plugins, args.only, args.expected)
    else:
        served = compositions.serve_all(plugins, args.only, args.python, args.core, args.jobs, args.timeout)
        report = compositions.serve_report(served)
    if not args.json:
        for name, problem in report.get("refused", {}).items():
            print(f"{name}: {problem}")
        for row in report.get("served", ()):
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['name']}: {row['valid']} valid rows {row['problem']}")
        print({key: value for key, value in report.items() if key not in ("refused", "served")})
        return 0
    print(json.dumps({**report, "machine": machine()}))
    return 0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--plugins", type=Path, required=True, help="a directory with resources_servers and the like")
    parser.add_argument("--core", type=Path, default=ROOT, help="the directory of the nemo_gym under test")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the plugins' packages")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these kinds of plugins")
    parser.add_argument("--only", help="only names that match this expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each suite")
    parser.add_argument("--min-suites", type=int, help="a bar: how many suites of resources servers pass")
    parser.add_argument("--min-tests", type=int, help="a bar: how many of their tests pass, in suites that fail too")
    parser.add_argument("--configs", action="store_true", help="compose every YAML instead")
    parser.add_argument("--expected", type=Path, help="with --configs: only the files that this file names")
    parser.add_argument("--serve", action="store_true", help="start compositions and run three rows of each instead")
    args = parser.parse_args()
    if args.configs or args.serve:
        return _compositions(args)
    report = run_suites(args)
    if not args.json:
        for group in report["causes"]:
            names = ", ".join(group["suites"][:_SEVERAL])
            print(f"{len(group['suites']):3} suites, {group['tests']:4} tests: {group['cause']}  [{names}]")
        print(report["kinds"])
    servers = report["kinds"].get("resources_servers", {"suites_ok": 0, "tests_passed": 0})
    bars = []
    if args.min_suites is not None:
        bars.append(Bar.at_least("suites_of_resources_servers", servers["suites_ok"], args.min_suites, "suites"))
    if args.min_tests is not None:
        bars.append(Bar.at_least("tests_of_resources_servers", servers["tests_passed"], args.min_tests, "tests"))
    return print_report(report, bars, as_json=True)


if __name__ == "__main__":
    sys.exit(main())
