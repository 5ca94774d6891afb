"""Why rollouts failed: the cause that a row points to, what happened, and what usually helps.

A cause is recognised by the kind of a failure and the words of its reason, as this suite's servers, engines and
benchmarks write them. Rows with an unknown cause are shown with their own reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import JOB_OVERDUE, FailureKind, is_context_exceeded
from nemo_gym.view import live
from nemo_gym.view.index import ResultIndex
from nemo_gym.view.lines import list_of, mapping_of
from nemo_gym.view.logs import LogLine, lines_of, log_folders, trouble_of
from nemo_gym.view.queries import find_row, reasons
from nemo_gym.view.rollout import evaluation_log

MAX_CLASSES = 30
MAX_LOG_LINES = 6
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """One class of failure."""

    name: str
    title: str
    happened: str
    helps: str
    log_words: tuple[str, ...] = ()
    """Words by which log lines that name no rollout are found."""

    def as_data(self) -> dict[str, Any]:
        return {"cause": self.name, "title": self.title, "happened": self.happened, "helps": self.helps}


CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "tampering",
            "Signs of tampering",
            "Something in the attempt would have earned the reward by other means than the task, so its reward is 0.",
            "Read the finding's evidence and the diff. If it is the policy's doing, the reward of 0 is right. If"
            " honest work is called tampering, keep the row and report it with its evaluation log.",
        ),
        Cause(
            "disk_full",
            "A disk is full",
            "A server, a box or the engine could not write: no space is left on its device.",
            "Free space where the reason says (`df -h`; `docker system prune` for an engine; old run folders), or move"
            " the folder: 'output' for results, 'state_dir' for boxes. Then the same command with retry_failed=true.",
            ("no space left", "disk is full", "disk quota"),
        ),
        Cause(
            "wrong_key",
            "The model's endpoint refuses the key",
            "The endpoint was reached and answered that the API key is missing or wrong.",
            "Set policy_api_key in env.yaml, or POLICY_API_KEY, to a key that this endpoint takes, and check that"
            " policy_base_url is the endpoint the key is for. Then the same command with retry_failed=true.",
            ("api key", "401", "403"),
        ),
        Cause(
            "model_refused",
            "The model's endpoint refuses the requests",
            "The endpoint was reached and refused to serve: it has no model of this name, or does not take the"
            " request.",
            "Compare policy_model_name with what the endpoint lists (GET /v1/models); where the name is right, look"
            " for the parameter that the reason names.",
            ("404", "400"),
        ),
        Cause(
            "context_exceeded",
            "The task does not fit the model's context",
            "The first request of the attempt is longer than the context the model is served with, or larger than its"
            " server takes (413).",
            "Serve the model with a longer context (vLLM: --max-model-len, SGLang: --context-length), choose shorter"
            " tasks, or shorten the agent's own prompt and tools; after a 413, raise the model server's limit that the"
            " reason names (max_body_bytes).",
        ),
        Cause(
            "image_missing",
            "The task's image is missing",
            "No box could be made, for its image is not on this machine or cannot be fetched.",
            "Run ng_prepare for these rows and this sandbox; it builds or fetches every image and says which cannot be"
            " had. Then the same command with retry_failed=true.",
            ("image",),
        ),
        Cause(
            "out_of_memory",
            "Out of memory",
            "The box or its host ran out of memory, and the kernel ended the process.",
            "Lower 'concurrency', give the box more memory (limits, sandbox resources), or run on a host with more."
            " Where the policy's own program took it all, the attempt is graded as it is.",
            ("out of memory", "oom"),
        ),
        Cause(
            "grader_timeout",
            "Grading took too long",
            "The tests did not end in their time.",
            "If the gold patch takes as long (ng_run agent=oracle oracle=gold on this row), raise the environment's"
            " time limit or lower 'concurrency'; if it does not, the patch hangs and 0 is right.",
            ("timed out", "timeout"),
        ),
        Cause(
            "lost_box",
            "The box was lost",
            "The box vanished while it was in use: its engine or its broker went away, or somebody removed it.",
            "Look at the log of the broker or the engine at that time. Attempts are repeated by themselves; where many"
            " are lost, lower 'concurrency' or look for a host that runs out of memory.",
            ("lost", "is gone", "reaped"),
        ),
        Cause(
            "sandbox_failed",
            "No box could be made",
            "The sandbox provider failed to create a box, or cannot do what the task asks of it.",
            "ng_validate with the same words says what this machine's provider lacks; the reason names the rest.",
            ("sandbox", "box"),
        ),
        Cause(
            "engine_down",
            "The model's engine does not answer",
            "Requests to the model could not be served: nothing listens at its address, or it fails.",
            "Start the engine, check policy_base_url, and look at the model server's log. Then the same command with"
            " retry_failed=true.",
            ("engine", "connect", "unreachable"),
        ),
        Cause(
            "mcp_down",
            "The environment's tools do not answer",
            "An MCP server that the agent was given answered none of its requests, or the environment answered a call"
            " of a tool with 503: it cannot do its work.",
            "Look at the environment server's log; it serves the tools. Where the tools are another program's, start"
            " it.",
            ("mcp",),
        ),
        Cause(
            "agent_crashed",
            "The agent crashed",
            "The harness ended with an error of its own before its work was done.",
            "Read the reason and the agent server's log. A version of the CLI other than the pinned one, or a box that"
            " lacks what it needs, are the usual causes: ng_prepare agents fetches the pinned ones.",
            ("crash", "traceback", "exited"),
        ),
        Cause(
            "agent_lost",
            "The agent server went away",
            "The server that ran the harness ended, or could not be reached, with the attempt under way.",
            "Look at the end of the agent server's log and at the host's memory; ng_status shows restarts.",
            ("agent",),
        ),
        Cause(
            "cancelled",
            "Cancelled",
            "The rollout was cancelled by its caller, before it had a verdict.",
            "Nothing is wrong. A job of a service runs after all if it is submitted under another job_id.",
        ),
        Cause(
            "stopped",
            "The run was stopped",
            "The command that collected was interrupted, or ended, before these rollouts did.",
            "The same ng_run command goes on with it; what has ended is not run again.",
        ),
        Cause(
            "deadline",
            "A stage took too long",
            "A stage did not end within its deadline.",
            "Raise the stage's limit (init_timeout_s, run_timeout_s, eval_timeout_s), or lower 'concurrency'.",
            ("deadline", "timed out"),
        ),
        Cause(
            "job_deadline",
            "The job's own deadline passed",
            "The job had no verdict when its deadline_s had passed, which counts from its submission on, with queues.",
            "Submit it under another job_id with a longer deadline_s or a higher priority, or give the service more"
            " servers or a higher 'concurrency'.",
        ),
        Cause(
            "control_failed",
            "The environment fails its own control run",
            "The row's own solution does not pass here, so a verdict would say nothing about the policy.",
            "Prepare the image anew (ng_prepare), and try the row with ng_run agent=oracle oracle=gold. A row whose"
            " tests need the network or another machine belongs out of the set.",
            ("control",),
        ),
        Cause(
            "verifier_failed",
            "Grading failed",
            "The environment's verify did not come to a verdict.",
            "Look at the environment server's log and mend the cause. Then the same command with retry_failed=true.",
            ("verify",),
        ),
        Cause(
            "seed_failed",
            "The environment opened no session",
            "The environment refused the row, or failed, before the attempt began.",
            "The reason names the field of the row, or the error. If the environment's code failed, its server's log"
            " has the traceback.",
            ("seed",),
        ),
        Cause(
            "environment_lost",
            "The environment server went away",
            "The environment's server ended, or could not be reached, before the attempt began or in its midst.",
            "Look at the end of the environment server's log and at the host's memory; ng_status shows restarts.",
            ("seed", "tool"),
        ),
        Cause(
            "internal",
            "An unexpected error",
            "Something failed in a way that nobody expected.",
            "The servers' log lines hold the traceback; it is worth a report.",
            ("error", "traceback"),
        ),
        Cause(
            "ran_out",
            "The agent ran out of turns, output or time",
            "The harness stopped at one of its limits; what was there then was graded.",
            "Compare the limits (step_limit, max turns, the row's wall-clock limit) with what solved attempts take.",
        ),
        Cause(
            "not_solved",
            "Not solved",
            "The attempt ended in order, and its work does not pass.",
            "Read the failing tests in the evaluation log and the diff beside them: that is for the policy to learn.",
        ),
    )
}

_DISK = re.compile(r"no space left|disk is full|enospc|disk quota", re.I)
_KEY = re.compile(r"\b(401|403)\b|api key|unauthori[sz]ed|authentication|invalid_api_key|engine_credential", re.I)
_IMAGE = re.compile(
    # The group is atomic: the words stand behind a line's first image if they stand behind any other.
    r"^(?>.*?\bimages?\b).*(not|no |missing|unknown|cannot|pull|prepare|denied)|no such image|manifest",
    re.I | re.M,
)
_MEMORY = re.compile(r"out of memory|\boom\b|oom.?kill|memory limit", re.I)
_TIME = re.compile(r"timed? ?out|too long|did not end|deadline", re.I)
_LOST = re.compile(r"\b(is gone|was lost|vanished|lost)\b", re.I)
_MCP = re.compile(r"\bmcp\b", re.I)
_NO_ENGINE = re.compile(r"cannot connect|connection refused|unreachable|no engine|not answer", re.I)

_CAUSE_OF_KIND = {
    FailureKind.CONTEXT_EXCEEDED: "context_exceeded",
    FailureKind.HOST_OUT_OF_MEMORY: "out_of_memory",
    FailureKind.SANDBOX_LOST: "lost_box",
    FailureKind.EXEC_LOST: "lost_box",
    FailureKind.SANDBOX_FAILED: "sandbox_failed",
    FailureKind.MODEL_UNREACHABLE: "engine_down",
    FailureKind.MODEL_REFUSED: "model_refused",
    FailureKind.MCP_FAILED: "mcp_down",
    FailureKind.AGENT_CRASHED: "agent_crashed",
    FailureKind.AGENT_LOST: "agent_lost",
    FailureKind.CANCELLED: "cancelled",
    FailureKind.CONTROL_RUN_FAILED: "control_failed",
    FailureKind.CONTROLS_WEAK: "control_failed",
    FailureKind.VERIFIER_FAILED: "verifier_failed",
    FailureKind.SEED_FAILED: "seed_failed",
    FailureKind.ENVIRONMENT_LOST: "environment_lost",
    FailureKind.DEADLINE: "deadline",
    FailureKind.INTERNAL: "internal",
}
_LIMITS = frozenset({AgentOutcome.MAX_TURNS, AgentOutcome.MAX_OUTPUT, AgentOutcome.TIMED_OUT})


def cause_of(
    outcome: str,
    reason: str,
    *,
    has_reward: bool,
    reward: float = 0.0,
    findings: int = 0,
    stage: str = "",
    timed_out: bool = False,
) -> Cause | None:
    """Return the cause of a rollout's failure, or ``None`` if it did not fail. ``outcome`` is the kind of failure if
    there is no reward; ``timed_out`` is the official verdict's."""
    if findings:
        return CAUSES["tampering"]
    if has_reward:
        if reward > 0:
            return None
        if timed_out:
            return CAUSES["grader_timeout"]
        if _MEMORY.search(reason):
            return CAUSES["out_of_memory"]
        return CAUSES["ran_out" if outcome in _LIMITS else "not_solved"]
    if outcome == FailureKind.CANCELLED:
        return CAUSES["cancelled"]
    if _DISK.search(reason):
        return CAUSES["disk_full"]
    if outcome == FailureKind.MODEL_REFUSED:
        if is_context_exceeded(reason):
            return CAUSES["context_exceeded"]
        return CAUSES["wrong_key" if _KEY.search(reason) else "model_refused"]
    if _MEMORY.search(reason):
        return CAUSES["out_of_memory"]
    if outcome in (FailureKind.SANDBOX_FAILED, FailureKind.SEED_FAILED) and _IMAGE.search(reason):
        return CAUSES["image_missing"]
    if outcome == FailureKind.DEADLINE and reason.startswith(JOB_OVERDUE):
        return CAUSES["job_deadline"]
    if outcome == FailureKind.DEADLINE and stage == "eval":
        return CAUSES["grader_timeout"]
    if outcome in (FailureKind.CONTROL_RUN_FAILED, FailureKind.VERIFIER_FAILED) and _TIME.search(reason):
        return CAUSES["grader_timeout"]
    if outcome == FailureKind.AGENT_CRASHED:
        for pattern, name in ((_MCP, "mcp_down"), (_LOST, "lost_box")):
            if pattern.search(reason) and _NO_ENGINE.search(reason):
                return CAUSES[name]
    named = _CAUSE_OF_KIND.get(FailureKind(outcome)) if outcome in [*FailureKind] else None
    return CAUSES[named or "internal"]


def explain(columns: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Explain what happened to a rollout, with evidence; ``None`` if nothing needs explaining."""
    cause = cause_of(
        str(columns["outcome"]),
        _reason(columns, row),
        has_reward=columns["reward"] is not None,
        reward=columns["reward"] or 0.0,
        findings=columns["findings"],
        stage=str(row.get("failure_stage") or ""),
        timed_out=bool(mapping_of(row.get("official")).get("timed_out")),
    )
    return None if cause is None else {**cause.as_data(), "evidence": [*_evidence(columns, row)]}


def explain_reason(group: Mapping[str, Any]) -> dict[str, Any]:
    """Explain what happened to rollouts that failed the same way, given a row of `queries.reasons`."""
    cause = cause_of(
        str(group["outcome"]),
        str(group["reason"] or ""),
        has_reward=group["rank"] != 0,
        findings=int(group["rank"] == 1),
    )
    assert cause is not None  # a group's reward is none or 0
    return cause.as_data()


def _reason(columns: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    parts = [columns.get("reason"), row.get("failure_reason"), row.get("outcome_detail")]
    parts += [mapping_of(each).get("details") for each in list_of(row.get("failures"))[-1:]]
    return "; ".join(str(each) for each in parts if each)


def _evidence(columns: Mapping[str, Any], row: Mapping[str, Any]) -> Iterable[str]:
    if columns["reward"] is None:
        stage = row.get("failure_stage") or "an unknown stage"
        yield f"{columns['outcome']} in {stage}: {columns['reason'] or 'no reason given'}"
        failures = list_of(row.get("failures"))
        if len(failures) > 1:
            kinds = [str(each.get("kind")) for each in failures if isinstance(each, Mapping)]
            yield f"{len(kinds)} attempts ended so: {', '.join(kinds)}"
        return
    for finding in list_of(row.get("findings")):
        if isinstance(finding, Mapping):
            yield f"finding {finding.get('kind')}: {finding.get('detail', '')}"
    if columns["reason"]:
        yield str(columns["reason"])
    for kind, status in mapping_of(mapping_of(row.get("official")).get("tests_status")).items():
        failing = list_of(mapping_of(status).get("failure"))
        if failing and str(kind).endswith("_TO_PASS"):
            more = ", …" if len(failing) > 3 else ""
            yield f"{len(failing)} of {kind} fail: {', '.join(map(str, failing[:3]))}{more}"


def explain_run(index: ResultIndex) -> Iterable[dict[str, Any]]:
    """Yield a class for each way to fail, explained by its first rollout."""
    for group in reasons(index, MAX_CLASSES):
        explained = explain_rollout(index, group["named"][0]["rollout_id"])
        if explained is not None:
            named = [f"{each['task_id']}#{each['sample_index']}" for each in group["named"][:EXAMPLES]]
            yield {**explained, "rollouts": group["rollouts"], "named": named, "label": group["label"]}
    if (unfinished := live.left_over(index.files)) is not None:
        yield _stopped(index, *unfinished)


def _stopped(index: ResultIndex, count: int, begun: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Explain what a stopped run has left unfinished, with log lines of rollouts that had ``begun``."""
    folders = live.server_logs(index.files)
    lines = [line for each in begun[:EXAMPLES] for line in lines_of(folders, each["rollout_id"])]
    first = [f"{each['task_id']}#{each['sample_index']} in attempt {each['attempt']}" for each in begun[:EXAMPLES]]
    more = ", …" if len(begun) > EXAMPLES else ""
    return {
        **CAUSES["stopped"].as_data(),
        "evidence": [
            f"{count} rollouts have no end, and no command works on them",
            *([f"begun: {', '.join(first)}{more}"] if begun else []),
        ],
        "rollouts": count,
        "named": [f"{each['task_id']}#{each['sample_index']}" for each in begun[:EXAMPLES]],
        "label": "no verdict yet",
        "rollout_id": None,
        "log_lines": [_line(line) for line in lines[-MAX_LOG_LINES:]],
        "log_folders": [str(folder) for folder in folders],
        "evaluation_log": None,
        "failing_lines": [],
    }


def explain_rollout(index: ResultIndex, rollout: str) -> dict[str, Any] | None:
    """Explain what happened to a rollout, with its servers' log lines; ``None`` if nothing needs explaining."""
    result = find_row(index, rollout)
    explained = explain(result.columns, result.row)
    if explained is None:
        return None
    folders = log_folders(index.files, result.row)
    lines = lines_of(folders, str(result.columns["rollout_id"]), result.row)
    lines = [line for line in lines if line.is_trouble] or lines
    if not lines and (words := CAUSES[explained["cause"]].log_words):
        lines = trouble_of(folders, words)
    log = evaluation_log(index.files, result.row)
    failing = [line["text"] for line in log["lines"] if line["mark"] in ("fail", "test")] if log else []
    return {
        **explained,
        "rollouts": 1,
        "named": [f"{result.columns['task_id']}#{result.columns['sample_index']}"],
        "label": result.columns["label"],
        "rollout_id": result.columns["rollout_id"],
        "log_lines": [_line(line) for line in lines[-MAX_LOG_LINES:]],
        "log_folders": [str(folder) for folder in folders],
        "evaluation_log": log and log["path"],
        "failing_lines": failing[:MAX_LOG_LINES],
    }


_GROUP = re.compile(r"^ +(\| |\+ |\+-.*)")
"""What Python draws around the errors of a group."""


def _error_of(trace: Sequence[str]) -> str:
    """The error at the end of a traceback, without the lines of its last frame. They are indented like those in which
    pydantic gives an address for each field."""
    trace = [_GROUP.sub("", text) for text in trace]
    frame = max((at for at, text in enumerate(trace) if text.startswith('  File "')), default=len(trace) - 2)
    lines = (text.strip() for text in trace[frame + 1 :] if not text.startswith("    "))
    return " ".join(filter(None, lines)) or trace[-1]


def _line(line: LogLine) -> dict[str, Any]:
    more = {key: value for key, value in line.more.items() if key != "exception"}
    trace = str(line.more.get("exception", "")).strip().splitlines()
    if trace:
        more["exception"] = _error_of(trace)
    return {
        "at": f"{line.file.name}:{line.number}",
        "timestamp": line.timestamp,
        "server": line.server,
        "level": line.level,
        "event": line.event,
        "more": more,
    }
