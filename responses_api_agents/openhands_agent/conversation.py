"""Runs one conversation of the OpenHands SDK in the box, with the package's own Python, and prints it as JSON lines.

Run it as ``python conversation.py SETTINGS`` with the prompt on standard input. The output of libraries goes to
standard error. It imports nothing from this project.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

FINISHED, NOT_FINISHED, FAILED = 0, 3, 1


class Teller:
    """Writes events to standard output, one JSON object a line. All other output goes to standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def tell(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"type": kind, **fields}) + "\n")
        self._file.flush()


def converse(settings: dict[str, Any], prompt: str, teller: Teller) -> int:
    from openhands.sdk import LLM, Agent, AgentContext, Conversation, Tool
    from openhands.sdk.context.condenser import LLMSummarizingCondenser
    from openhands.sdk.event import ActionEvent, AgentErrorEvent, Condensation, Event, MessageEvent, ObservationEvent
    from openhands.sdk.event.conversation_error import ConversationErrorEvent
    from openhands.sdk.llm import content_to_str
    from openhands.tools.file_editor import FileEditorTool
    from openhands.tools.task_tracker import TaskTrackerTool
    from openhands.tools.terminal import TerminalTool

    available = {"terminal": TerminalTool, "file_editor": FileEditorTool, "task_tracker": TaskTrackerTool}
    params: dict[str, dict[str, Any]] = {"terminal": {"terminal_type": "subprocess"}}
    tools = [Tool(name=available[name].name, params=params.get(name, {})) for name in settings["tools"]]
    llm = LLM(**settings["llm"], usage_id="agent", retry_min_wait=1, retry_max_wait=30, retry_multiplier=2.0)
    condenser = None
    if (size := settings["condense_after_events"]) is not None:
        condenser = LLMSummarizingCondenser(
            llm=llm.model_copy(update={"usage_id": "condenser"}), max_size=size, keep_first=min(4, size // 2 - 2)
        )
    agent = Agent(
        llm=llm,
        tools=tools,
        mcp_config=settings["mcp"],
        condenser=condenser,
        agent_context=AgentContext(system_message_suffix=settings["system"] or None),
        system_prompt_kwargs={"cli_mode": True},
        tool_concurrency_limit=settings["parallel_tool_calls"],
    )
    failure: list[str] = []

    def on_event(event: Event) -> None:
        match event:
            case ActionEvent():
                teller.tell(
                    "action",
                    response=event.llm_response_id,
                    text="".join(part.text for part in event.thought),
                    reasoning=event.reasoning_content or "",
                    call=event.tool_call_id,
                    tool=event.tool_name,
                    arguments=event.tool_call.arguments,
                    message=event.message if event.tool_name == "finish" else None,
                )
                usage()
            case MessageEvent(source="agent"):
                text = "".join(content_to_str(event.llm_message.content))
                reasoning = event.llm_message.reasoning_content or ""
                teller.tell("message", response=event.llm_response_id, text=text, reasoning=reasoning)
                usage()
            case ObservationEvent():
                observation = event.observation
                text = "".join(content_to_str(observation.to_llm_content))
                teller.tell("observation", call=event.tool_call_id, text=text, failed=observation.is_error)
            case AgentErrorEvent():
                teller.tell("observation", call=event.tool_call_id, text=event.error, failed=True)
            case Condensation():
                teller.tell("condensation")
            case ConversationErrorEvent():
                failure[:] = [event.code, event.detail]

    conversation = Conversation(
        agent=agent,
        workspace=settings["workdir"],
        callbacks=[on_event],
        max_iteration_per_run=settings["max_turns"],
        stuck_detection=settings["stuck_detection"],
        visualizer=None,
    )

    def usage() -> None:
        tokens = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
        if tokens is not None:
            teller.tell(
                "usage",
                input_tokens=tokens.prompt_tokens,
                output_tokens=tokens.completion_tokens,
                cached_tokens=tokens.cache_read_tokens,
            )

    try:
        conversation.send_message(prompt)
        conversation.run()
    except Exception as error:  # noqa: BLE001
        # The SDK raises its own errors, errors of its libraries, and exception groups.
        failure = failure or [type(error).__name__, str(error)]
    usage()
    status = conversation.state.execution_status.value
    code, detail = failure if failure else (None, None)
    teller.tell("end", status=status, code=code, detail=detail and detail[:2000])
    if status == "finished":
        return FINISHED
    return NOT_FINISHED if code == "MaxIterationsReached" or status == "stuck" else FAILED


def main() -> None:
    teller = Teller()
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    status = converse(settings, sys.stdin.buffer.read().decode("utf-8", "replace"), teller)
    sys.stderr.flush()
    # Exit at once: threads of the terminal and the MCP client may still wait for the policy's background processes.
    os._exit(status)


if __name__ == "__main__":
    main()
