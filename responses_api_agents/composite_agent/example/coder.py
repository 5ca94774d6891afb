"""The coder: reads steps from standard input, one JSON object a line, does each step, and reports the result.

It writes its events and reports to standard output, where the planner reads them. It remembers earlier steps.
"""

import json
import sys
from pathlib import Path

from policy import Conversation, OutOfTurns, say
from tools import BASH, EDIT, WRITE

SYSTEM = """You are the coder. A planner gives you one step at a time, and sees nothing but your report on it.
Do the step with your tools, check what you did, and answer with a short report: what you found, what you changed,
and what did not work. Do no more than the step says."""


def main():
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    conversation = Conversation(task, SYSTEM, [BASH, EDIT, WRITE], agent="coder")
    for line in sys.stdin:
        try:
            report = conversation.work(json.loads(line)["step"])
        except OutOfTurns:
            say(stopped="max_turns")
            return
        say(report=report)


if __name__ == "__main__":
    main()
