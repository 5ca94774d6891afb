"""How many files one rollout enters, over all processes of a real run.

    python -m tests.architecture.rooms [--json] [--model scripted|gateway]

A profile hook in each process notes every file of the product that is called into between the first row's claim and
its result, and which files call each other. The supervisor of local boxes is not followed: it is started with an
environment of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "resources_servers" / "swe_bench" / "data" / "example.jsonl"
PRODUCT = ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models")
BARS = {"scripted": 60, "gateway": 95}
MAX_MUTUAL_PAIRS = 6
_OPENED, _CLAIMED = 1, 2
"""What has become of the run's store. It is looked at every few milliseconds, so each call after it is opened is
written down with its time, and what came before the claim is left out in the end."""
_HOOK = f"""
import dis, inspect, mmap, os, sys, threading, time
_directory, _root = os.environ["ROOMS_DIRECTORY"], os.environ["ROOMS_ROOT"]
with open(os.path.join(_directory, "watching"), "rb") as _file:
    _watching = mmap.mmap(_file.fileno(), 1, access=mmap.ACCESS_READ)
_rooms, _seen, _RESUME = {{}}, set(), dis.opmap["RESUME"]
def _room(code):
    name = code.co_filename
    if name not in _rooms:
        inside = name.startswith(_root) and name[len(_root):].split("/", 1)[0] in {PRODUCT!r} and "/tests/" not in name
        _rooms[name] = name[len(_root):] if inside else None
    return _rooms[name]
def _goes_on(frame):
    # A coroutine or generator that was called before and is resumed now.
    at, code = frame.f_lasti, frame.f_code.co_code
    return at >= 0 and (code[at] != _RESUME or code[at + 1] != 0)
def _enter(frame, event, _):
    if event != "call" or not _watching[0] or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return  # or a module's or class's statement, which an import runs
    here = _room(frame.f_code)
    if here is None or _goes_on(frame):
        return
    back = frame.f_back
    while back is not None and _room(back.f_code) is None:
        back = back.f_back
    pair = (here, _room(back.f_code) if back is not None else None)
    if (os.getpid(), pair) not in _seen:
        if _watching[0] == {_CLAIMED}:
            _seen.add((os.getpid(), pair))
        with open(os.path.join(_directory, f"{{os.getpid()}}.pairs"), "a") as file:
            file.write(" ".join(map(str, (time.time(), *pair))) + "\\n")
sys.setprofile(_enter)
threading.setprofile(_enter)
"""


@contextmanager
def _engine(directory: Path) -> Iterator[list[str]]:
    """A tiny policy on an engine of vLLM's wire: words for ``ng_run``."""
    policy = directory / "policy"
    module = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny"]
    subprocess.run([*module, "--make", "chatml_think", str(policy)], check=True, stdout=subprocess.DEVNULL)
    engine = subprocess.Popen([*module, "--policy", str(policy)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    try:
        url = next(word for word in engine.stdout.readline().split() if word.startswith("http"))
        yield [
            "model=vllm",
            f"policy_base_url={url}",
            f"policy_path={policy}",
            "policy_model_name=tiny",
            "++policy_model.responses_api_models.gateway.policy.max_context_tokens=65536",
            "max_turns=3",
        ]
    finally:
        engine.terminate()
        engine.wait()


def measure(model: str) -> dict[str, object]:
    """Run one row and return what was entered."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rooms-")))
        (directory / "sitecustomize.py").write_text(_HOOK)
        (directory / "watching").write_bytes(b"\0")
        with (directory / "watching").open("r+b") as file:
            watching = mmap.mmap(file.fileno(), 1)
        words = ["model=scripted"] if model == "scripted" else stack.enter_context(_engine(directory))
        output = directory / "rollouts.jsonl"
        outputs = (output, output.with_name("rollouts_failures.jsonl"))
        subprocess.run(
            [_command("ng_prepare"), "swe_bench", f"rows={ROWS}", "sandbox=local"],
            check=True,
            stdout=sys.stderr,
            cwd=ROOT,
        )
        command = [_command("ng_run"), "agent=mini_swe_agent", "environment=swe_bench"]
        command += ["sandbox=local", *words, f"input={ROWS}", "limit=1"]
        environment = {**os.environ, "PYTHONPATH": str(directory), "ROOMS_DIRECTORY": str(directory)}
        run = subprocess.Popen(
            [*command, f"output={output}"], cwd=ROOT, env={**environment, "ROOMS_ROOT": f"{ROOT}/"}, stdout=sys.stderr
        )
        store = output.with_name("rollouts_store.sqlite")
        while run.poll() is None:
            if watching[0] != _CLAIMED and store.exists():
                watching[0] = _CLAIMED if _claimed_at(store) is not None else _OPENED
            if any(map(_has_rows, outputs)):
                break
            time.sleep(0.002)
        watching[0] = 0
        run.wait()
        result = next((json.loads(path.read_text()) for path in outputs if _has_rows(path)), None)
        if result is None:
            raise SystemExit("the run gave no result; see above")
        claimed_at = _claimed_at(store)
        assert claimed_at is not None
        lines = (line.split() for path in directory.glob("*.pairs") for line in path.read_text().splitlines())
        pairs = {(here, caller) for at, here, caller in lines if float(at) >= claimed_at}
    rooms = sorted({str(here) for here, _ in pairs})
    mutual = sorted({tuple(sorted(pair)) for pair in pairs if pair[0] != pair[1] and (pair[1], pair[0]) in pairs})
    return {"reward": result.get("reward"), "files": len(rooms), "rooms": rooms, "mutual_pairs": mutual}


def _command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _claimed_at(store: Path) -> float | None:
    """When the run's only row was claimed, in seconds since 1970."""
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT claimed_at FROM jobs WHERE claimed_at IS NOT NULL").fetchone()
    except sqlite3.OperationalError:  # there are no tables in it yet
        return None
    return None if found is None else float(found[0])


def _has_rows(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object, else the lists")
    parser.add_argument("--model", choices=[*BARS], action="append", help="default: both")
    options = parser.parse_args()
    figures = {model: measure(model) for model in options.model or BARS}
    bars = []
    for model, found in figures.items():
        mutual = len(found["mutual_pairs"])  # type: ignore[arg-type]
        bars += [
            {"name": f"files_{model}", "value": found["files"], "unit": "files", "bar": f"<= {BARS[model]}"},
            {"name": f"mutual_pairs_{model}", "value": mutual, "unit": "pairs", "bar": f"<= {MAX_MUTUAL_PAIRS}"},
        ]
    for bar in bars:
        bar["ok"] = int(str(bar["value"])) <= int(str(bar["bar"]).split()[1])
    if options.json:
        print(json.dumps({"figures": figures, "bars": bars}))
    else:
        for model, found in figures.items():
            print(f"{model}: {found['files']} files, reward {found['reward']}", *found["rooms"], sep="\n  ")  # type: ignore[misc]
            print("  mutual:", *found["mutual_pairs"], sep="\n    ")  # type: ignore[misc]
    return 0 if all(bar["ok"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
