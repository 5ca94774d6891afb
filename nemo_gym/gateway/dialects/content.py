"""Code that all dialects share: fields of request bodies, content of messages, tools, parts and events of answers.

Bodies are untrusted, so the type of each field is checked. The `InvalidBodyError` for a wrong type names the field by
``where``, a path as SDKs print it: ``messages.3.content.0.text``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.policy_request import Answer, CallName, nests_too_deeply

Body = Mapping[str, Any]
_WHOLE_BELOW = 1 << 63


def refuse(where: str, problem: str) -> NoReturn:
    """Raise the `InvalidBodyError` for a field; ``problem`` follows its name."""
    raise InvalidBodyError(f"'{where}' {problem}", param=where)


def text_at(body: Body, key: str, where: str, *, default: str | None = None) -> str:
    """Return a string. An absent or null field is an error, unless there is a ``default``."""
    value = body.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        refuse(join(where, key), f"must be a string, not {kind_of(value)}")
    return value


def optional_text(body: Body, key: str, where: str) -> str | None:
    return None if body.get(key) is None else text_at(body, key, where)


def object_at(body: Body, key: str, where: str) -> Body:
    """Return an object; an empty one for an absent or null field."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(join(where, key), f"must be an object, not {kind_of(value)}")
    return value


def objects_in(value: Any, where: str, start: int = 0) -> Iterator[tuple[str, Body]]:
    """Yield ``(where, object)`` for each element from ``start`` on in a list of objects; nothing for null."""
    if value is None:
        return
    if not isinstance(value, list | tuple):
        refuse(where, f"must be a list, not {kind_of(value)}")
    for number in range(start, len(value)):
        item = value[number]
        at = f"{where}.{number}"
        if not isinstance(item, Mapping):
            refuse(at, f"must be an object, not {kind_of(item)}")
        yield at, item


def number_at(body: Body, key: str, *, low: float | None = None, whole: bool = False) -> int | float | None:
    """Return a number; ``None`` for an absent or null field."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(key, f"must be a number, not {kind_of(value)}")
    if whole:
        if value != int(value):
            refuse(key, f"must be a whole number, not {value}")
        value = int(value)
        if not -_WHOLE_BELOW <= value < _WHOLE_BELOW:  # a limit of engines and records; JSON has none
            refuse(key, f"must be a whole number of 64 bits, not {value:.3g}")
    if low is not None and value < low:
        refuse(key, f"is {value}; it must be at least {low}")
    return value


def flag_at(body: Body, key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        refuse(key, f"must be true or false, not {kind_of(value)}")
    return bool(value)


def sampling_at(body: Body, names: Iterable[str], *, budget: str = "max_tokens", stop: str = "stop") -> dict[str, Any]:
    """Return the sampling parameters that are set: ``names``, ``max_tokens`` from the field ``budget``, and ``stop``,
    a list of stop strings, from the field ``stop``."""
    found: dict[str, Any] = {name: number_at(body, name, whole=name in ("seed", "top_k")) for name in names}
    found["max_tokens"] = number_at(body, budget, low=1, whole=True)
    pieces = [body[stop]] if isinstance(body.get(stop), str) else body.get(stop)
    if pieces is None:
        pieces = ()
    if not isinstance(pieces, list | tuple) or not all(isinstance(piece, str) and piece for piece in pieces):
        refuse(stop, "must be a string that is not empty, or a list of such strings")
    found["stop"] = [*pieces] or None
    return {name: value for name, value in found.items() if value is not None}


def json_at(value: Any, where: str) -> str:
    """Return parsed JSON data as JSON text again."""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # nested deeper than any tool's arguments, or not Unicode
        refuse(where, "cannot be written as JSON again: it is nested too deeply, or its text is no Unicode")


def repeatable(body: Body, *keys: str) -> None:
    """Refuse fields that a reply has to repeat, if they are nested too deeply for a reply."""
    for key in keys:
        if isinstance(value := body.get(key), list | dict):
            json_at([[[[[[[[value]]]]]]]], key)


def refuse_set(body: Body, reasons: Mapping[str, str]) -> None:
    """Refuse the fields in ``reasons`` that ask for something: those not absent, null, false, 0 or empty."""
    for key, reason in reasons.items():
        if body.get(key):
            refuse(key, reason)


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def kind_of(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


# Content of messages: text unchanged, images as ``image_url`` parts, everything else refused by name.

Part = dict[str, Any]
_UNSERVED = {
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "a file",
    "input_file": "a file",
    "document": "a document",
    "search_result": "a search result",
    "container_upload": "a container's file",
}
remote_images: ContextVar[bool] = ContextVar("nemo_gym_remote_images", default=True)
"""Whether the request that is being lowered may name images by address. Whatever serves the model fetches them, so a
box without a network would reach the engine's."""
_SEND_DATA = (
    "send the image as a data URL (data:image/…;base64,…), or set the gateway's 'remote_images: true' if a run's rows"
    " hold addresses"
)
_URL = re.compile(r"\A(?:https?://|data:image/)", re.IGNORECASE)
BETWEEN_PARTS = "\n"
"""Stands between the text parts of a message when they are joined for a template that takes text only. Without it, the
end of one part would run into the beginning of the next."""


def joined(parts: list[Part]) -> str | list[Part]:
    """Return ``parts`` as content: as one text if all of them are text."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return BETWEEN_PARTS.join(part["text"] for part in parts)


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, where: str, detail: Any = None) -> Part:
    """Return an image part for a URL or data URL. A URL is refused where `remote_images` is false."""
    if not _URL.match(url):
        refuse(where, "must be an http(s) URL or a data URL of an image (data:image/…;base64,…)")
    if url[:4].lower() == "http" and not remote_images.get():
        refuse(where, f"is an address, which the engine would fetch from its own network: {_SEND_DATA}")
    image = {"url": url}
    if isinstance(detail, str) and detail != "auto":
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def openai_part(part: Body, where: str) -> Part:
    """Convert a content part of Chat Completions or Responses."""
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return text_part(text_at(part, "text", where))
    if kind == "refusal":
        return text_part(text_at(part, "refusal", where))
    if kind == "image_url":
        value = part.get("image_url")
        if isinstance(value, str):
            return image_part(value, f"{where}.image_url")
        image = object_at(part, "image_url", where)
        return image_part(text_at(image, "url", f"{where}.image_url"), f"{where}.image_url.url", image.get("detail"))
    if kind == "input_image":
        if part.get("image_url") is None:
            refuse(where, "holds an image by file id; nothing is stored here: send it as a data URL in 'image_url'")
        return image_part(text_at(part, "image_url", where), f"{where}.image_url", part.get("detail"))
    refuse_part(kind, where)


def anthropic_image(block: Body, where: str) -> Part:
    """Convert an ``image`` block of Messages."""
    source = object_at(block, "source", where)
    where = f"{where}.source"
    kind = source.get("type")
    if kind == "base64":
        media = text_at(source, "media_type", where)
        return image_part(f"data:{media};base64,{text_at(source, 'data', where)}", where)
    if kind == "url":
        return image_part(text_at(source, "url", where), f"{where}.url")
    refuse(f"{where}.type", f"is {kind!r}: nothing is stored here; send an image as 'base64' or 'url'")


def refuse_part(kind: Any, where: str) -> NoReturn:
    """Refuse content of a type that the policy cannot take."""
    name = _UNSERVED.get(kind) if isinstance(kind, str) else None
    if name is not None:
        refuse(where, f"is {name} (type '{kind}'): this model takes text and images only")
    refuse(f"{where}.type", f"is {kind!r}: content of this type is not known here")


def openai_content(value: Any, where: str) -> str | list[Part] | None:
    """Return the content of a message or of a tool's output: text, parts or ``None``."""
    if value is None or isinstance(value, str):
        return value
    return joined([openai_part(part, at) for at, part in objects_in(value, where)])


def answer_text(value: Any, where: str) -> str | None:
    """Return the text of an assistant's message. Its parts are joined without a separator: they are one sample."""
    if value is None or isinstance(value, str):
        return value
    texts = []
    for at, part in objects_in(value, where):
        converted = openai_part(part, at)
        if converted["type"] != "text":
            refuse(at, "is not text: assistant messages hold text only")
        texts.append(converted["text"])
    return "".join(texts)


def lead_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge several system messages at the beginning into one: most templates accept only one."""
    end = 0
    while end < len(messages) and messages[end]["role"] == "system":
        end += 1
    if end < 2:
        return messages
    texts = (message["content"] for message in messages[:end] if message["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[end:]]


def system_text(value: Any, where: str) -> str:
    """Return the text of a system prompt, which is text or a list of text parts."""
    content = openai_content(value, where)
    if isinstance(content, list):
        refuse(where, "holds an image: system messages hold text only")
    return content or ""


def reasoning_of(message: Mapping[str, Any], where: str) -> str | None:
    """Return the reasoning that a harness sends back, under either of its names in Chat Completions."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    return optional_text(message, "reasoning_content", where)


# Tools in the form for the policy: functions with flat, unique names, whatever names a harness uses.
#
# Codex groups tools in namespaces, and some of its tools take free text; functions of Chat Completions have neither.
# The prompt has ``<namespace>__<name>`` and one string argument instead; `CallName` serves to convert calls back.

_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
CUSTOM_INPUT = "input"
"""The one argument of a tool that takes free text."""
RAW_CALL = "_raw"
"""Suffix of the id of a call to a free-text tool whose arguments were not ``{"input": text}``. Its text is then the
sampled arguments, and the suffix marks it when the harness sends the call back."""
LOCAL_SHELL = "local_shell"
_LOCAL_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
_SHELL_TYPES = {"command": list, "working_directory": str, "timeout_ms": int}


def function_tool(name: str, description: str | None, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """Return a tool as in Chat Completions."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters if parameters else {"type": "object", "properties": {}}
    if strict is True:  # the default is no part of a prompt
        function["strict"] = True
    return {"type": "function", "function": function}


class ToolTable:
    """The tools of one request, and the mapping between their names and flat names in both directions."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.names: dict[str, CallName] = {}
        self._flat: dict[tuple[str | None, str], str] = {}
        self._taken: set[str] = set()

    def add(self, tool: Body, where: str, namespace: str | None = None, about: str | None = None) -> None:
        """Add a function tool: ``name``, ``description``, ``parameters``, ``strict``."""
        parameters = object_at(tool, "parameters", where)
        description = optional_text(tool, "description", where) or about
        flat = self._named(CallName(_name(tool, where), namespace), where)
        self.tools.append(function_tool(flat, description, parameters, tool.get("strict")))

    def add_custom(self, tool: Body, where: str, namespace: str | None = None) -> None:
        """Add a tool that takes free text. Its description includes its grammar, which sampling does not enforce."""
        about = optional_text(tool, "description", where) or ""
        grammar = object_at(tool, "format", where)
        grammar = object_at(grammar, "grammar", f"{where}.format") or grammar
        if isinstance(definition := grammar.get("definition"), str):
            about += f"\n\nThe input follows this {grammar.get('syntax')} grammar:\n{definition}"
        flat = self._named(CallName(_name(tool, where), namespace, custom=True), where)
        text = {"type": "string", "description": "The tool's input, as plain text."}
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        self.tools.append(function_tool(flat, about.strip(), parameters))

    def add_local_shell(self, where: str) -> None:
        flat = self._named(CallName(LOCAL_SHELL, local_shell=True), where)
        self.tools.append(function_tool(flat, "Runs a command on the local machine.", _LOCAL_SHELL_PARAMETERS))

    def flat_name(self, name: str, namespace: str | None = None) -> str:
        """Return the flat name of a tool, even of one that is no longer offered."""
        return self._flat.get((namespace, name)) or _flat(name, namespace)

    def _named(self, called: CallName, where: str) -> str:
        key = (called.namespace, called.name)
        if key in self._flat:
            refuse(f"{where}.name", f"is {called.name!r} again; names of tools must be unique")
        flat = _flat(called.name, called.namespace)
        if flat in self._taken:
            flat += "_" + hashlib.sha256(repr(key).encode("utf-8", "backslashreplace")).hexdigest()[:8]
        self._flat[key] = flat
        self._taken.add(flat)
        if called != CallName(flat):
            self.names[flat] = called
        return flat


def _name(tool: Body, where: str) -> str:
    name = text_at(tool, "name", where)
    if not name:
        refuse(f"{where}.name", "is empty")
    return name


def _flat(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    return _UNUSUAL.sub("_", f"{namespace.rstrip('_')}__{name}")


def called(flat: str, call_id: str, arguments: str) -> dict[str, Any]:
    """Return a call as in Chat Completions."""
    return {"id": call_id, "type": "function", "function": {"name": flat, "arguments": arguments}}


def custom_arguments(text: str, call_id: str, where: str) -> str:
    """Return the arguments of a call to a free-text tool that a harness sends back."""
    return text if call_id.endswith(RAW_CALL) else json_at({CUSTOM_INPUT: text}, where)


def chosen(choice: Any, table: ToolTable) -> str | dict[str, Any]:
    """Convert ``tool_choice`` of an OpenAI dialect to ``auto``, ``none``, ``required`` or ``{"name": flat name}``."""
    where = "tool_choice"
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            refuse(where, f"is {choice!r}; it must be 'auto', 'none', 'required' or the tool to call")
        return choice
    if not isinstance(choice, Mapping):
        refuse(where, "must be a string or an object")
    kind = choice.get("type")
    if kind == LOCAL_SHELL:
        return {"name": LOCAL_SHELL}
    if kind not in ("function", "custom"):
        refuse(f"{where}.type", f"is {kind!r}; only a function or custom tool can be chosen")
    inner = object_at(choice, kind, where) or choice
    return {"name": table.flat_name(text_at(inner, "name", where), optional_text(inner, "namespace", where))}


def shell_action(data: Any) -> dict[str, Any] | None:
    """Return the action of a ``local_shell`` call with these arguments; ``None`` if an action cannot carry them
    unchanged, and the reply has to hold a function call instead."""
    if not isinstance(data, Mapping) or not isinstance(command := data.get("command"), list):
        return None
    fits = all(isinstance(word, str) for word in command) and all(
        type(value) is _SHELL_TYPES.get(key) for key, value in data.items()
    )
    return {"type": "exec", "env": {}, **data} if fits else None


def shell_arguments(action: Body, where: str) -> str:
    """Return the arguments of a ``local_shell`` call that a harness sends back."""
    return json_at({key: action[key] for key in _SHELL_TYPES if action.get(key) is not None}, where)


# Server-sent events, and text cut into pieces for them.

PIECE_CHARS = 256
"""Small enough for a harness to show progress, large enough that 65,536 tokens make about a thousand events."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def data(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + dumped(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event named by its ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # lone surrogates or deep nesting, which a relayed reply may hold
        return json.dumps(value, default=list).encode()


def pieces(text: str) -> Iterator[str]:
    """Cut ``text`` into pieces. Each ends between code points, so it is valid Unicode by itself."""
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def unicode_of(text: str) -> str:
    """Return ``text`` in a form that UTF-8 can encode: surrogate pairs joined, lone surrogates replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# The parts of an answer's message that replies need.


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One tool call of an answer, under the flat name."""

    call_id: str
    name: str
    arguments: str
    data: Any
    """The arguments as `data_in` returns them."""


def custom_input(call: AnswerCall) -> tuple[str, str]:
    """Return ``(id, text)`` of a call to a free-text tool, for a reply."""
    data = call.data
    if isinstance(data, Mapping) and [*data] == [CUSTOM_INPUT] and isinstance(data[CUSTOM_INPUT], str):
        return call.call_id, data[CUSTOM_INPUT]
    return call.call_id + RAW_CALL, call.arguments


def text_in(answer: Answer) -> str:
    return unicode_of(str(answer.message.get("content") or ""))


def is_refusal(answer: Answer) -> bool:
    """Whether the text of the answer says why the policy refused."""
    return bool(answer.message.get("refusal"))


def reasoning_in(answer: Answer) -> str:
    return unicode_of(str(answer.message.get("reasoning_content") or ""))


def calls_in(answer: Answer) -> list[AnswerCall]:
    calls = []
    for number, call in enumerate(answer.message.get("tool_calls") or ()):
        function = call["function"]
        arguments = unicode_of(str(function.get("arguments") or ""))
        # Harnesses refuse a call without an id. An id derived from the answer is the same each time it is raised.
        call_id = str(call.get("id") or "") or f"call_{answer.answer_id[:20]}_{number}"
        calls.append(AnswerCall(call_id, unicode_of(str(function["name"])), arguments, data_in(arguments)))
    return calls


def data_in(arguments: str) -> Any:
    """Return a call's arguments as data; ``None`` if they are not JSON, or nested too deeply for a reply."""
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    return None if nests_too_deeply(arguments, data) else data


def made_up(answer: Answer, what: str) -> str:
    """Return 48 hexadecimal digits that depend only on the answer and ``what``."""
    return hashlib.blake2b(f"{answer.answer_id}/{what}".encode("utf-8", "replace"), digest_size=24).hexdigest()
