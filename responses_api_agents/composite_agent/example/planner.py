"""The planner: asks the model for the next step and hands each step to the coder, which is a separate process.

It writes its own and the coder's events to standard output, one JSON object a line, in `composite_agent`'s format.
"""

import json
import subprocess
import sys
from pathlib import Path

from policy import Conversation, OutOfTurns, say
from tools import BASH, Tool, mcp_tools

SYSTEM = """You are the planner. You look at the task, decide on the steps, and hand them one by one to a coder, who
works in the same directory and remembers the steps before. Say in each step all that the coder needs to know. You may
look around yourself with your own tools. When the task is done, answer without a tool call; what you say then is the
answer."""


class Coder:
    """The coder process. It reads steps from standard input and writes events and reports to standard output."""

    def __init__(self, task_file):
        command = [sys.executable, "-B", str(Path(__file__).with_name("coder.py")), task_file]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def delegate(self, arguments):
        self.process.stdin.write(json.dumps({"step": arguments["step"]}).encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            event = json.loads(line.decode("utf-8"))
            if "stopped" in event:
                raise OutOfTurns()
            if "report" in event:
                return event["report"], False
            say(**event)
        raise RuntimeError(f"the coder ended with status {self.process.wait()}")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    coder = Coder(sys.argv[1])
    hand_over = Tool(
        "delegate", "Let the coder do one step; the result is its report.", {"step": "What to do"}, coder.delegate
    )
    try:
        system = "\n\n".join(text for text in (SYSTEM, task["system"]) if text)
        Conversation(task, system, [hand_over, BASH, *mcp_tools(task)]).work(task["prompt"])
    except OutOfTurns:
        say(type="end", outcome="max_turns", detail="the model gave all the answers it may")
        return
    coder.close()
    say(type="end", outcome="completed")


if __name__ == "__main__":
    main()
