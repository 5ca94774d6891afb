"""One rollout, prepared for display: its turns, artifacts, grading, attempts, and chains of tokens.

Everything in a row is text of a model, a box or a dataset. The code never relies on a value having the right form.
"""

from __future__ import annotations

import base64
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
import yaml

from nemo_gym.contract.errors import RowError
from nemo_gym.contract.verdict import ATTEMPT_INDEX_KEY, PARAMS_KEY, RESPONSE_KEY
from nemo_gym.gateway.tokens.trajectories import Trajectory, from_row
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY
from nemo_gym.sandbox.tar_stream import ArchiveError, TarParser
from nemo_gym.view.index import ResultIndex, ViewError
from nemo_gym.view.lines import list_of, mapping_of
from nemo_gym.view.live import stored_job
from nemo_gym.view.queries import FoundRow, neighbours

MAX_TEXT_CHARS = 40_000
"""Characters of one text that are sent at first; another request fetches the whole text."""
_max_chars: ContextVar[int | None] = ContextVar("the characters that `cut` leaves", default=MAX_TEXT_CHARS)
MAX_ITEMS = 5000
MAX_STEPS = 2000

_FAILING = re.compile(
    r"^(FAILED|ERROR|FAIL:|not ok\b|--- FAIL|E {2,}|AssertionError|Traceback|FATAL)|\bFAILED\b|^\s*[✕✗✘×] |"
    r"\.\.\. (FAIL|ERROR)|^\S*(Error|Exception): "
)
_PASSING = re.compile(r"^(PASSED|ok\b)|\bPASSED\b|^\s*[✓✔] |\.\.\. ok\b")
_SHOWN_AS_THEY_ARE = ("failure_reason", "failure_stage", "outcome_detail", "topology", "validation", "server_logs")
_ARTIFACT = re.compile(r"/artifacts/\d+/data")
_MODEL_ITEMS = frozenset({"message", "reasoning", "function_call"})


def rollout_view(index: ResultIndex, found: FoundRow) -> dict[str, Any]:
    """Return everything about a rollout except its tokens and its logs."""
    row, columns = found.row, found.columns
    stored = stored_job(index.files, str(columns["rollout_id"])) or {}
    params = row.get(PARAMS_KEY) or mapping_of(stored.get("row")).get(PARAMS_KEY)
    return {
        **columns,  # some are counts; the lists below replace those of the same name
        "line": found.line,
        "file": index.paths[found.source].name,
        "raw_bytes": len(found.raw),
        "is_readable": bool(row),
        **{name: text if isinstance(text := row.get(name), str) else None for name in _SHOWN_AS_THEY_ARE},
        "timings": _timings(row),
        "steps": _steps(row),
        "prompt": _prompt(params),
        "turns": turns_of(row),
        "artifacts": [*_artifacts(row)],
        "findings": _findings(row),
        "tests": _failing_tests(row),
        "official": _cut_json(row.get("official")),
        "details": _cut_json(row.get("details")),
        "evaluation": evaluation_log(index.files, row),
        "attempts": _attempts(row, stored),
        "chains": [*_chains(row)],
        "finished_at": stored.get("finished_at"),
        **neighbours(index, columns),
    }


@contextmanager
def whole_texts() -> Iterator[None]:
    """Have `rollout_view` return whole texts, for a reader that cannot ask for them later."""
    token = _max_chars.set(None)
    try:
        yield
    finally:
        _max_chars.reset(token)


def cut(text: str, where: str = "") -> dict[str, Any]:
    """Return the part of a text that a page shows; ``where`` is its place in the row, as a JSON pointer."""
    return {"text": text[: _max_chars.get()], "chars": len(text), "where": where}


def text_at(row: Mapping[str, Any], where: str) -> str:
    """Return the whole text that a JSON pointer refers to, as pages show it. Raises `ViewError`."""
    value: Any = row
    parent: Any = None
    for part in where.split("/")[1:]:
        parent = value
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ViewError(f"the row has nothing at '{where}'")
    if _ARTIFACT.fullmatch(where):
        return _artifact_text(mapping_of(parent))
    return value if isinstance(value, str) else _json(value)


# The conversation


def _prompt(params: Any) -> list[dict[str, Any]]:
    where, messages = f"/{PARAMS_KEY}/input", mapping_of(params).get("input")
    if isinstance(messages, str):
        return [{"role": "user", **cut(messages, where)}]
    return [
        {
            "role": str(mapping_of(item).get("role") or mapping_of(item).get("type") or "?"),
            **_text_of(item, f"{where}/{number}"),
        }
        for number, item in enumerate(list_of(messages)[:MAX_ITEMS])
    ]


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the response into turns: the model's messages and tool calls, and the tools' results."""
    output = mapping_of(row.get(RESPONSE_KEY)).get("output")
    turns: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    after_result = True
    for number, item in enumerate(list_of(output)[:MAX_ITEMS]):
        item = mapping_of(item)
        kind, where = str(item.get("type") or "message"), f"/{RESPONSE_KEY}/output/{number}"
        is_model = kind in _MODEL_ITEMS and item.get("role") in (None, "assistant")
        if (after_result and is_model) or not turns:
            turns.append({"number": len(turns) + 1, "items": []})
        after_result = not is_model
        if kind == "function_call":
            arguments = _arguments(item.get("arguments"), f"{where}/arguments")
            call = {"kind": "call", "name": str(item.get("name") or "?"), "arguments": arguments, "result": None}
            calls[str(item.get("call_id"))] = call
            turns[-1]["items"].append(call)
        elif kind == "function_call_output":
            result = _text_of(item, where, ("output",))
            call_of = calls.get(str(item.get("call_id")))
            if call_of is not None and call_of["result"] is None:
                call_of["result"] = result
            else:
                turns[-1]["items"].append({"kind": "result", **result})
        else:
            body = _text_of(item, where)
            if body["text"]:
                shown_as = "reasoning" if kind == "reasoning" else "message"
                turns[-1]["items"].append({"kind": shown_as, "role": str(item.get("role") or kind), **body})
    return [turn for turn in turns if turn["items"]]


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """Return a call's arguments; a single text argument, such as a command, as that text."""
    text = value if isinstance(value, str) else _json(value)
    try:
        parsed = orjson.loads(text)
        if isinstance(parsed, dict):
            if len(parsed) == 1 and isinstance(argument := next(iter(parsed.values())), str):
                return {**cut(argument, where), "name": next(iter(parsed))}
            text = orjson.dumps(parsed, option=orjson.OPT_INDENT_2).decode()
    except (orjson.JSONDecodeError, TypeError):
        pass  # no JSON, or nested more deeply than orjson writes: show it unchanged
    return cut(text, where)


def _text_of(item: Any, where: str, keys: tuple[str, ...] = ("content", "summary", "text")) -> dict[str, Any]:
    """Return the text of a message, whatever its form."""
    if not isinstance(item, Mapping):
        return cut(item if isinstance(item, str) else _json(item), where)
    for key in keys:
        value = item.get(key)
        if isinstance(value, str):
            return cut(value, f"{where}/{key}")
        if isinstance(value, list) and value:
            parts = [*map(_part, value)]
            is_one_text = len(parts) == 1 and isinstance(mapping_of(value[0]).get("text"), str)
            return cut("\n".join(parts), f"{where}/{key}" + ("/0/text" if is_one_text else ""))
    if set(item) <= {"type", "role", "content", "id", "status", "summary", "encrypted_content"}:
        return cut("", where)
    return cut(_json(item), where)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    part = mapping_of(part)
    for key in ("text", "refusal", "output"):
        if isinstance(part.get(key), str):
            return str(part[key])
    kind = str(part.get("type", "part"))
    return f"[{kind}]" if "image" in kind or "audio" in kind or "file" in kind else _json(part)


# Timings, artifacts and grading


def _timings(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"stage": str(name).removesuffix("_s"), "seconds": seconds}
        for name, seconds in mapping_of(row.get("timings")).items()
        if isinstance(seconds, int | float)
    ]


def _steps(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return tool calls with the harness's timings, relative to the first call."""
    records = mapping_of(mapping_of(row.get("ng_agent_observations")).get("records")).get("records")
    timed = [
        record
        for record in list_of(records)[:MAX_STEPS]
        if isinstance(record, Mapping)
        and isinstance(record.get("started_at"), int | float)
        and isinstance(record.get("duration_ms"), int | float)
    ]
    first = min((record["started_at"] for record in timed), default=0.0)
    return [
        {
            "name": str(record.get("tool_name") or record.get("kind")),
            "start_s": record["started_at"] - first,
            "seconds": record["duration_ms"] / 1000,
            "status": str(record.get("status", "")),
        }
        for record in timed
    ]


def _artifacts(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, artifact in enumerate(map(mapping_of, list_of(row.get("artifacts")))):
        text = _artifact_text(artifact)
        is_diff = artifact.get("kind") == "git_diff" or text.startswith("diff --git")
        yield {
            "name": str(artifact.get("name", number)),
            "kind": str(artifact.get("kind", "")),
            "size": size if isinstance(size := artifact.get("size"), int) else None,
            "truncated": bool(artifact.get("truncated")),
            "error": artifact.get("error") and str(artifact["error"]),
            "is_diff": _is_text(artifact) and is_diff,
            **cut(text, f"/artifacts/{number}/data"),
        }


def _is_text(artifact: Mapping[str, Any]) -> bool:
    return artifact.get("encoding") in (None, "utf-8") and isinstance(artifact.get("data"), str)


def _artifact_text(artifact: Mapping[str, Any]) -> str:
    """Return the files of an archive, else the artifact's text; empty if it is neither."""
    data = artifact.get("data")
    files = _archived_files(data, artifact.get("encoding")) if artifact.get("kind") == "files" else None
    return files or (str(data) if _is_text(artifact) else "")


def _archived_files(data: Any, encoding: Any) -> str | None:
    """Return the names and texts of the files in a harvested archive; ``None`` if it is not an undamaged archive."""
    files: list[tuple[str, bytearray]] = []
    try:
        content = base64.b64decode(data, validate=True) if encoding == "base64" else data.encode()
        for event in TarParser().feed(content):
            if isinstance(event, tarfile.TarInfo):
                files.append((event.name, bytearray()))
            elif event is not None:
                files[-1][1].extend(event)
    except (ArchiveError, AttributeError, TypeError, ValueError):
        return None
    return "\n".join(f"{name}:\n{_content(bytes(body))}" for name, body in files)


def _content(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"({len(data)} bytes that are not text)"


def _findings(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "kind": str(each.get("kind")),
            "detail": str(each.get("detail", "")),
            "evidence": _cut_json(each.get("evidence")),
        }
        for each in list_of(row.get("findings"))
        if isinstance(each, Mapping)
    ]


def _failing_tests(row: Mapping[str, Any]) -> list[str]:
    """Return the tests that fail although they should pass, according to the official verdict."""
    statuses = mapping_of(mapping_of(row.get("official")).get("tests_status"))
    return [
        str(name)
        for kind, status in statuses.items()
        if str(kind).endswith("_TO_PASS")
        for name in list_of(mapping_of(status).get("failure"))
    ]


def evaluation_log(files: RunFiles, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the grading output, with the lines of failing tests marked; ``None`` if no log was kept."""
    named = row.get("evaluation_log")
    if not isinstance(named, str) or not named:
        return None
    path = files.output.parent / named
    try:
        if not path.resolve().is_relative_to(files.logs.resolve()):
            return None  # a dataset row may have its own field of that name
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return {"path": str(named), "lines": [], "is_missing": True}
    named_at = _lines_with(text, {part for test in _failing_tests(row) for part in (test, test.rpartition("::")[2])})
    lines = [{"text": line, "mark": _mark(line, place in named_at)} for place, line in enumerate(text.splitlines())]
    return {"path": str(path), "lines": lines, "is_missing": False}


def _lines_with(text: str, names: set[str]) -> set[int]:
    """Return the numbers of the lines that hold one of the names, from 0. Looks for each name in the whole text at
    once: a log may have tens of thousands of lines, and a row thousands of failing tests."""
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    found: set[int] = set()
    for name in names:
        at = text.find(name) if len(name) > 3 else -1
        while at >= 0:
            found.add(bisect_right(starts, at) - 1)
            at = text.find(name, at + len(name))
    return found


def _mark(line: str, names_failing_test: bool) -> str:
    if _FAILING.search(line):
        return "fail"
    if _PASSING.search(line):
        return "pass"
    return "test" if names_failing_test else ""


def _attempts(row: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how each attempt ended, including the last one."""
    failures = row.get("failures") if isinstance(row.get("failures"), list) else stored.get("failures")
    attempts = []
    number = 1
    for failure in map(mapping_of, list_of(failures)):
        attempts.append(
            {
                "number": number,
                "stage": str(failure.get("stage", "")),
                "kind": str(failure.get("kind", "")),
                "reason": str(failure.get("reason", "")),
                "details": _cut_json(failure.get("details") or None),
            }
        )
        number += bool(failure.get("new_attempt", True))
    last = row.get(ATTEMPT_INDEX_KEY)
    if row.get("reward") is not None:
        number = max(number, last + 1 if isinstance(last, int) else 1)
        reason = row.get("reward_reason") or row.get("outcome_detail")
        attempts.append({"number": number, "stage": "eval", "kind": "", "reason": str(reason or ""), "details": None})
    return attempts


# Tokens


def _chains(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(map(mapping_of, list_of(row.get(TRAJECTORY_KEY)))):
        yield {
            "number": number,
            "prompt_tokens": len(list_of(each.get("prompt_ids"))),
            "response_tokens": len(list_of(each.get("response_ids"))),
            "sampled": list_of(each.get("response_mask")).count(1),
            "has_logprobs": isinstance(each.get("logprobs"), list),
            "turns": len(list_of(each.get("turns"))),
            "split_reason": str(each.get("split_reason", "")),
            "split_detail": each.get("split_detail") and str(each["split_detail"]),
            "finish_reason": each.get("finish_reason") and str(each["finish_reason"]),
            "weights_versions": [
                version for version in list_of(each.get("weights_versions")) if isinstance(version, str)
            ],
        }


def chain_of(row: Mapping[str, Any], number: int) -> Trajectory:
    """Return one chain of a row. Raises `ViewError`."""
    chains = list_of(row.get(TRAJECTORY_KEY))
    if not 0 <= number < len(chains) or not isinstance(chains[number], Mapping):
        raise ViewError(f"the row has no chain {number}")
    try:
        return from_row(chains[number])
    except RowError as error:
        raise ViewError(f"chain {number} cannot be shown: {error.message}") from error


def packed_chain(chain: Trajectory, texts: Mapping[int, str]) -> bytes:
    """Pack a chain for a browser: the length of a JSON head (4 bytes, little-endian), the head padded to a multiple of
    4 bytes, prompt ids, response ids and log-probabilities (4 bytes each), and the mask (1 byte each)."""
    head = orjson.dumps(
        {
            "prompt": len(chain.prompt_ids),
            "response": len(chain.response_ids),
            "has_logprobs": chain.logprobs is not None,
            "turns": [
                {name: getattr(turn, name) for name in ("start", "end", "finish_reason", "weights_version")}
                for turn in chain.turns
            ],
            "texts": texts,
        },
        option=orjson.OPT_NON_STR_KEYS,
        default=str,
    )
    head += b" " * (-len(head) % 4)
    parts = [len(head).to_bytes(4, "little"), head, chain.prompt_ids.tobytes(), chain.response_ids.tobytes()]
    if chain.logprobs is not None:
        parts.append(chain.logprobs.tobytes())
    return b"".join([*parts, chain.response_mask])


class TokenTexts:
    """Decodes token ids, if the run's policy is a folder on this machine that holds a tokenizer."""

    def __init__(self, files: RunFiles) -> None:
        self._tokenizer = _tokenizer(files.configuration)
        self._texts: dict[int, str] = {}

    def of(self, ids: set[int]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        for token in ids - self._texts.keys():
            try:
                self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
            except (OverflowError, ValueError):
                self._texts[token] = "?"
        return {token: self._texts[token] for token in ids}


def _tokenizer(configuration: Path) -> Any:
    try:
        settings = yaml.safe_load(configuration.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    for folder in _policies(settings):
        path = Path(folder, "tokenizer.json")
        if path.is_file():
            try:
                from tokenizers import Tokenizer
            except ImportError:
                return None
            try:
                return Tokenizer.from_file(str(path))
            except Exception:  # noqa: BLE001 - its own error type is plain Exception
                return None
    return None


def _policies(value: Any, key: str = "", depth: int = 0) -> Iterator[str]:
    if isinstance(value, Mapping) and depth < 8:
        for name, each in value.items():
            if key == "policy" and name == "path" and isinstance(each, str):
                yield each
            else:
                yield from _policies(each, str(name), depth + 1)


# Helpers


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()
    except TypeError:  # nested more deeply than it writes
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except RecursionError:
            return "It is nested too deeply to be shown here."


def _cut_json(value: Any) -> dict[str, Any] | None:
    return None if value in (None, {}, []) else cut(_json(value))
