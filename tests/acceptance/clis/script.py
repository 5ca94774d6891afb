"""What the policy is made to say: a long tool-using run for each CLI, chosen by the conversation and nothing else.

The task and every answer carry a mark such as ``[[main:3]]``. The last mark in a prompt, and the answers behind it,
say how far its conversation is, so a retried, resumed, compacted or forked conversation finds its place, whatever
order the requests come in.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_testing.gateway.tiny.script import CallView

START = "[[main:0]]"
_MARK = re.compile(r"\[\[(main|side):(\d+)\]\]")
_SUMMARY_ASKED = re.compile(
    r"CONTEXT CHECKPOINT COMPACTION|detailed summary of the conversation|mention the summary process"
    r"|produce the <state_snapshot> XML"
)
"""How Codex, Claude Code, opencode and qwen-code ask for one."""
_TAIL = 24_000
"""Characters at the end of a prompt where the wish for a summary is looked for."""

_SUMMARY = (
    "<analysis>\nWhat was asked, and how far it is.\n</analysis>\n"
    "<summary>\n<state_snapshot>\n{}\n</state_snapshot>\n</summary>"
)
"""With the tags that each of them looks for."""

AWKWARD = (
    "Größe: 37,5 °C ≈ 99.5 °F → «warm» 🌡️\n\tquotes \"double\" 'single' `back` $HOME $(pwd) \\n \\\\ \\u00e9\n"
    '<b>tags</b> & {"json": [1, 2.0, 1e3, null, true]} <|not a token|> </tool> 100%\n   indented   \n'
)
"""Text that is easily changed on its way through JSON, shells and harnesses."""


@dataclass(frozen=True)
class Call:
    """One tool call. ``name`` may be the end of the offered name, where the gateway puts a namespace before it."""

    name: str
    arguments: Mapping[str, Any]

    def marked(self, mark: str) -> Call:
        """The same with ``mark`` in it, where that changes nothing: as a comment behind a command of one line."""
        commands = {key: f"{value} # {mark}" for key, value in self.arguments.items() if key in ("command", "cmd")}
        if any("\n" in command for command in commands.values()):
            return self
        return Call(self.name, {**self.arguments, **commands})

    def message(self, offered: Sequence[str], spelling: Mapping[str, Any]) -> dict[str, Any]:
        name = next((tool for tool in offered if tool == self.name or tool.endswith(f"__{self.name}")), self.name)
        return {"name": name, "arguments": json.dumps(self.arguments, **spelling)}


@dataclass(frozen=True)
class Step:
    """One answer. ``calls`` may depend on the conversation, for ids that a tool gave."""

    text: str
    calls: Sequence[Call] | Callable[[str], Sequence[Call]] = ()
    reasoning: str | None = None


class Hands(ABC):
    """How one CLI's tools do things."""

    def __init__(self, work: str) -> None:
        self.work = work

    @abstractmethod
    def shell(self, command: str) -> Call: ...

    @abstractmethod
    def read(self, name: str) -> Call: ...

    @abstractmethod
    def write(self, name: str, text: str) -> Call: ...

    @abstractmethod
    def edit(self, name: str, old: str, new: str) -> Call: ...

    def delegated(self, prompt: str) -> list[Step]:
        """Steps that hand ``prompt`` to a sub-agent and get its answer; none where the CLI has no sub-agents."""
        return []

    def interactive(self) -> list[Step]:
        """Steps of a kind that only this CLI has."""
        return []

    def finished(self) -> list[Step]:
        """How a run ends."""
        return [Step("Both conversions work, and the notes are written.")]


class ClaudeHands(Hands):
    def shell(self, command: str) -> Call:
        return Call("Bash", {"command": command, "description": "Run a command"})

    def read(self, name: str) -> Call:
        return Call("Read", {"file_path": f"{self.work}/{name}"})

    def write(self, name: str, text: str) -> Call:
        return Call("Write", {"file_path": f"{self.work}/{name}", "content": text})

    def edit(self, name: str, old: str, new: str) -> Call:
        return Call("Edit", {"file_path": f"{self.work}/{name}", "old_string": old, "new_string": new})

    def delegated(self, prompt: str) -> list[Step]:
        arguments = {"description": "Count lines", "prompt": prompt, "subagent_type": "general-purpose"}
        return [Step("Someone else counts.", [Call("Agent", {**arguments, "run_in_background": False})])]


class CodexHands(Hands):
    def shell(self, command: str) -> Call:
        return Call("exec_command", {"cmd": command, "yield_time_ms": 10_000})

    def read(self, name: str) -> Call:
        return self.shell(f"nl -ba {name}")

    def write(self, name: str, text: str) -> Call:
        return self.shell(f"cat > {name} <<'END-OF-FILE'\n{text}END-OF-FILE")

    def edit(self, name: str, old: str, new: str) -> Call:
        changed = [f"-{line}" for line in old.splitlines()] + [f"+{line}" for line in new.splitlines()]
        patch = "\n".join(("*** Begin Patch", f"*** Update File: {name}", "@@", *changed, "*** End Patch"))
        return self.shell(f"apply_patch <<'PATCH'\n{patch}\nPATCH")

    def delegated(self, prompt: str) -> list[Step]:
        def wait(conversation: str) -> list[Call]:
            spawned = re.findall(r"agent_id\W+([0-9a-f]{8}-[0-9a-f-]{27})", conversation)
            return [Call("wait_agent", {"targets": [spawned[-1]], "timeout_ms": 60_000})] if spawned else []

        return [
            Step("Someone else counts.", [Call("spawn_agent", {"message": prompt})]),
            Step("Waiting for them.", wait),
        ]

    def interactive(self) -> list[Step]:
        def type_in(conversation: str) -> list[Call]:
            running = re.findall(r"session ID (\d+)", conversation)
            return [Call("write_stdin", {"session_id": int(running[-1]), "chars": "hello there\n"})] if running else []

        asking = 'read -r line; echo "read: $line"'
        return [
            Step("A program that asks.", [Call("exec_command", {"cmd": asking, "tty": True, "yield_time_ms": 300})]),
            Step("It is answered.", type_in),
        ]


class OpencodeHands(Hands):
    def shell(self, command: str) -> Call:
        return Call("bash", {"command": command})

    def read(self, name: str) -> Call:
        return Call("read", {"filePath": f"{self.work}/{name}"})

    def write(self, name: str, text: str) -> Call:
        return Call("write", {"content": text, "filePath": f"{self.work}/{name}"})

    def edit(self, name: str, old: str, new: str) -> Call:
        return Call("edit", {"filePath": f"{self.work}/{name}", "oldString": old, "newString": new})

    def delegated(self, prompt: str) -> list[Step]:
        arguments = {"description": "Count lines", "prompt": prompt, "subagent_type": "general"}
        return [Step("Someone else counts.", [Call("task", arguments)])]


class QwenHands(Hands):
    def shell(self, command: str) -> Call:
        return Call("run_shell_command", {"command": command, "is_background": False})

    def read(self, name: str) -> Call:
        return Call("read_file", {"file_path": f"{self.work}/{name}"})

    def write(self, name: str, text: str) -> Call:
        return Call("write_file", {"file_path": f"{self.work}/{name}", "content": text})

    def edit(self, name: str, old: str, new: str) -> Call:
        return Call("edit", {"file_path": f"{self.work}/{name}", "old_string": old, "new_string": new})

    def delegated(self, prompt: str) -> list[Step]:
        arguments = {"description": "Count lines", "prompt": prompt, "subagent_type": "general-purpose"}
        return [Step("Someone else counts.", [Call("agent", {**arguments, "run_in_background": False})])]


class MiniHands(Hands):
    def shell(self, command: str) -> Call:
        return Call("bash", {"command": command})

    def read(self, name: str) -> Call:
        return self.shell(f"nl -ba {name}")

    def write(self, name: str, text: str) -> Call:
        return self.shell(f"cat > {name} <<'END-OF-FILE'\n{text}END-OF-FILE")

    def edit(self, name: str, old: str, new: str) -> Call:
        program = f"import pathlib; p = pathlib.Path({name!r}); p.write_text(p.read_text().replace({old!r}, {new!r}))"
        return self.shell(f"python3 - <<'PROGRAM'\n{program}\nPROGRAM")

    def finished(self) -> list[Step]:
        return [Step("Done.", [self.shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")])]


HANDS: Mapping[str, type[Hands]] = {
    "claude-code": ClaudeHands,
    "codex": CodexHands,
    "opencode-ai": OpencodeHands,
    "qwen-code": QwenHands,
    "mini-swe-agent": MiniHands,
}


ONE_SILENT_CALL = frozenset({"llama_headers"})
"""Template families whose answers are either text or one call."""
SPELLINGS: Sequence[Mapping[str, Any]] = (
    {"ensure_ascii": False},
    {"ensure_ascii": True, "separators": (",", ":")},
    {"ensure_ascii": False, "indent": 1},
)
"""Ways in which a policy writes the same arguments, in turn."""


@dataclass
class Script:
    """All that one CLI's policy says; called by the engine with what it sees of a call."""

    main: Sequence[Step]
    side: Sequence[Step]
    """A sub-agent's."""
    asked: list[str] = field(default_factory=list)
    """The mark of every answer begun, in order; ``summary`` and ``aside`` for answers outside the marks."""
    silent_calls: bool = False
    """Whether the chat template drops the text, and the mark, of answers that call tools."""

    def __call__(self, view: CallView) -> Mapping[str, Any]:
        marks = [*_MARK.finditer(view.prompt)]
        if not marks:
            return self._said("aside", "Temperatures")
        own = [mark for mark in marks if mark[1] == "main"] or marks
        kind, steps = (own[-1][1], self.main if own[-1][1] == "main" else self.side)
        number = int(own[-1][2]) + 1
        if self.silent_calls:
            number += max(0, view.renderer.answers_in(view.prompt[own[-1].end() :]))
        if _SUMMARY_ASKED.search(view.prompt[marks[-1].end() :][-_TAIL:]):
            return self._said("summary", _SUMMARY.format(f"Temperatures are converted; at [[{kind}:{number - 1}]]."))
        if number > len(steps):
            return self._said("aside", "Nothing is left to do.")
        step = steps[number - 1]
        calls = step.calls(view.prompt) if callable(step.calls) else step.calls
        # A sub-agent's last answer goes into the main conversation, whose marks it must not disturb.
        mark = "" if kind == "side" and number == len(steps) else f" [[{kind}:{number}]]"
        spelling = SPELLINGS[number % len(SPELLINGS)]
        message = self._said(f"{kind}:{number}", step.text + mark)
        if self.silent_calls:
            calls = [call.marked(f"[[{kind}:{number}]]") for call in calls]
        message["tool_calls"] = [call.message(view.tools, spelling) for call in calls]
        if step.reasoning is not None:
            message["reasoning_content"] = step.reasoning
        return message

    def _said(self, what: str, text: str) -> dict[str, Any]:
        self.asked.append(what)
        return {"content": text}

    @property
    def last(self) -> str:
        """The mark of the answer that ends the run."""
        return f"main:{len(self.main)}"


def script_for(cli: str, work: str, *, family: str, bulk_lines: int = 0) -> Script:
    """The run of one CLI in ``work``. ``bulk_lines``: of output that two of its commands print each, to fill the
    context until the CLI compacts."""
    hands = HANDS[cli](work)
    one_way = "def to_celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9\n"
    other_way = one_way + "\n\ndef to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32\n"
    bulk = f"seq -f 'line %g of the output' {bulk_lines}" if bulk_lines else "git status --short"
    main = [
        Step("First the files.", [hands.shell("ls -la && git log --oneline")], "What is there decides what to do."),
        Step("Now the code.", [hands.read("convert.py")]),
        Step("  Two at once.\n", [hands.read("test_convert.py"), hands.shell("grep -n return convert.py")]),
        Step("Another function is added.", [hands.edit("convert.py", one_way.splitlines()[1], _rest(other_way))]),
        Step("", [hands.shell("python3 test_convert.py; cat convert.py")], "Does it still work?\n\nIt should."),
        Step("Much to read." if bulk_lines else "A look around.", [hands.shell(bulk)]),
        *hands.delegated("Count the lines of all Python files here. [[side:0]]"),
        Step("Notes with awkward characters.\n\n", [hands.write("notes.txt", AWKWARD)]),
        Step("They are checked.", [hands.shell("cat notes.txt | od -c | head -n 5; wc notes.txt")]),
        Step("A command that fails.", [hands.shell("echo to stderr >&2; exit 3")]),
        *hands.interactive(),
        Step("Once more.", [hands.shell(bulk)]),
        Step("What has changed?", [hands.shell("git diff --stat && git status --short"), hands.read("notes.txt")]),
        *hands.finished(),
    ]
    side = [
        Step("Counting.", [hands.shell("wc -l *.py")]),
        Step("Which are they?", [hands.shell("git ls-files '*.py'"), hands.read("README.md")]),
        Step("There are two Python files."),
    ]
    if family in ONE_SILENT_CALL:
        main, side = ([one for step in steps for one in _one_by_one(step)] for steps in (main, side))
    return Script(main, side, silent_calls=family in ONE_SILENT_CALL)


def _one_by_one(step: Step) -> list[Step]:
    if callable(step.calls) or len(step.calls) < 2:
        return [step]
    return [Step(step.text, [call], step.reasoning) for call in step.calls]


def _rest(text: str) -> str:
    return "\n".join(text.splitlines()[1:])
