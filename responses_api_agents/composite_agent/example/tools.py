"""The tools of the planner and the coder: a shell, file edits, and the environment's MCP tools."""

import json
import os
import signal
import subprocess
from pathlib import Path

from policy import post

COMMAND_TIMEOUT_S = 120


class Tool:
    """A tool. `run(arguments)` returns the output and whether the call failed."""

    def __init__(self, name, about, properties, run):
        self.name, self.about, self.run = name, about, run
        self.schema = {
            "type": "object",
            "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
            "required": list(properties),
        }

    def description(self):
        function = {"name": self.name, "description": self.about, "parameters": self.schema}
        return {"type": "function", "function": function}


def bash(arguments):
    process = subprocess.Popen(
        ["sh", "-c", arguments["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, timed_out = process.communicate(timeout=COMMAND_TIMEOUT_S)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, timed_out = process.communicate()[0], True
    text = output.decode("utf-8", "replace")
    if timed_out:
        text += f"\n[killed after {COMMAND_TIMEOUT_S} seconds]"
    elif process.returncode:
        text += f"\n[exit status {process.returncode}]"
    return text, timed_out or process.returncode != 0


def edit_file(arguments):
    path = Path(arguments["path"])
    text = path.read_text(encoding="utf-8")
    count = text.count(arguments["old"]) if arguments["old"] else 0
    if count != 1:
        return f"'old' is in the file {count} times; it must be there once", True
    path.write_text(text.replace(arguments["old"], arguments["new"]), encoding="utf-8")
    return "edited", False


def write_file(arguments):
    path = Path(arguments["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(arguments["content"], encoding="utf-8")
    return "written", False


BASH = Tool("bash", "Run a shell command in the work directory.", {"command": "The command"}, bash)
EDIT = Tool(
    "edit_file",
    "Replace a piece of text that is in a file exactly once.",
    {"path": "The file", "old": "The text that is there", "new": "The text in its place"},
    edit_file,
)
WRITE = Tool("write_file", "Write a whole file.", {"path": "The file", "content": "All of its text"}, write_file)


class McpTool(Tool):
    """A tool of an MCP server over streamable HTTP."""

    def __init__(self, server, offer):
        super().__init__(offer["name"], offer.get("description") or "", {}, self.ask)
        self.server, self.schema = server, offer["inputSchema"]

    def ask(self, arguments):
        result = self.server.request("tools/call", {"name": self.name, "arguments": arguments})
        text = "".join(part.get("text", "") for part in result.get("content") or [])
        return text, bool(result.get("isError"))


class McpServer:
    PROTOCOL = "2025-06-18"

    def __init__(self, url, api_key):
        self.url, self.api_key, self.number = url, api_key, 0
        client_info = {"name": "planner-and-coder", "version": "1"}
        self.request("initialize", {"protocolVersion": self.PROTOCOL, "capabilities": {}, "clientInfo": client_info})

    def request(self, method, params):
        self.number += 1
        body = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        text = post(self.url, body, self.api_key)
        # The body is one JSON object, or an event stream whose last event is the response.
        data = [line[5:] for line in text.splitlines() if line.startswith("data:")]
        answer = json.loads(data[-1] if data else text)
        if "error" in answer:
            raise ValueError("MCP: {}".format(answer["error"].get("message")))
        return answer["result"]

    def tools(self):
        return [McpTool(self, offer) for offer in self.request("tools/list", {})["tools"]]


def mcp_tools(task):
    """Return the tools of all MCP servers of the task."""
    return [tool for url in task["mcp"].values() for tool in McpServer(url, task["api_key"]).tools()]
