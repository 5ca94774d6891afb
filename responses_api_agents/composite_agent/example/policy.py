"""A conversation with the policy model over Chat Completions, with only the standard library."""

import json
import sys
import time
import urllib.error
import urllib.request

TRIES = 5
TOOL_OUTPUT_CHARS = 20000


class OutOfTurns(Exception):
    """The attempt has used all of its answers."""


def say(**event):
    """Print an event, without fields that are None."""
    fields = {key: value for key, value in event.items() if value is not None}
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def post(url, body, api_key):
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Authorization": "Bearer " + api_key,
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return reply.read().decode("utf-8")


class Conversation:
    """One agent's conversation with the model; `agent` is None for the main agent."""

    def __init__(self, task, system, tools, agent=None):
        self.task, self.tools, self.agent = task, tools, agent
        self.messages = [{"role": "system", "content": system}]

    def work(self, text):
        """Ask until the model answers without a tool call. Return the text of that answer."""
        self.messages.append({"role": "user", "content": text})
        while True:
            message = self.ask()
            calls = message.get("tool_calls") or []
            if not calls:
                return message.get("content") or ""
            for call in calls:
                self.call(call["id"], call["function"]["name"], call["function"]["arguments"])

    def ask(self):
        body = {
            "model": self.task["model"],
            "messages": self.messages,
            "tools": [tool.description() for tool in self.tools],
        }
        if self.task.get("max_output_tokens"):
            body["max_tokens"] = self.task["max_output_tokens"]
        answer = json.loads(self.patiently(body))
        message, usage = answer["choices"][0]["message"], answer.get("usage") or {}
        assistant_message = {"role": "assistant", "content": message.get("content")}
        if message.get("tool_calls"):
            assistant_message["tool_calls"] = message["tool_calls"]
        self.messages.append(assistant_message)
        tokens = {"input_tokens": usage.get("prompt_tokens"), "output_tokens": usage.get("completion_tokens")}
        say(type="answer", agent=self.agent, text=message.get("content") or "", usage=tokens)
        return message

    def patiently(self, body):
        for attempt in range(1, TRIES + 1):
            try:
                return post(self.task["model_url"] + "/v1/chat/completions", body, self.task["api_key"])
            except urllib.error.HTTPError as error:
                error_body = error.read().decode("utf-8", "replace")
                if error.code == 403 and "door_limit" in error_body:
                    raise OutOfTurns() from None
                if attempt == TRIES or (error.code < 500 and error.code != 429):
                    raise RuntimeError(f"the model answered {error.code}: {error_body[:500]}") from None
            except OSError:
                if attempt == TRIES:
                    raise
            time.sleep(0.5 * 2**attempt)

    def call(self, call_id, name, arguments):
        matches = [tool for tool in self.tools if tool.name == name]
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        say(
            type="call", agent=self.agent, id=call_id, name=name, arguments=parsed if parsed is not None else arguments
        )
        if not matches:
            output, failed = f"there is no tool '{name}'", True
        elif not isinstance(parsed, dict):
            output, failed = "the arguments are no JSON object", True
        else:
            try:
                output, failed = matches[0].run(parsed)
            except (KeyError, TypeError, ValueError, OSError) as error:
                output, failed = f"{type(error).__name__}: {error}", True
        if len(output) > TOOL_OUTPUT_CHARS:
            half = TOOL_OUTPUT_CHARS // 2
            output = output[:half] + "\n[...]\n" + output[-half:]
        say(type="result", agent=self.agent, id=call_id, output=output, failed=failed)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
