"""A policy's chat template: Jinja with the conventions of model repositories, and its traits, found by probing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import orjson

from nemo_gym.contract.errors import ConfigError, InvalidBodyError
from nemo_gym.gateway.tokens.history import Message, arguments_of, calls_of, media_parts, role_of, text_of

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment


_GENERATION_TAG = "generation"
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_PARTS = {"type", "text", "image", "image_url", "video", "audio"}
_OF_MESSAGES = {"role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id", "arguments"}
_NAMES = _ROLES | _PARTS | _OF_MESSAGES | {"tools", "description", "parameters", "properties"}
"""Roles and fields, which templates compare with those of messages."""


class TemplateRefusedError(InvalidBodyError):
    """The policy's chat template does not accept this conversation; the message quotes the template's error."""

    code = "chat_template"
    status = 400


def too_deep() -> TemplateRefusedError:
    """Return the error for data that is nested more deeply than the interpreter's stack allows."""
    return TemplateRefusedError("the conversation's tools or messages are nested too deeply")


class ChatTemplate:
    """Renders conversations to the text a policy was trained on.

    Follows the conventions of model repositories: ``messages``, ``tools``, ``documents`` and
    ``add_generation_prompt`` as variables, special tokens by name (``bos_token``), ``raise_exception``,
    ``strftime_now``, a ``tojson`` that keeps non-ASCII text, loop controls and ``{% generation %}`` blocks.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """``variables`` are passed to every rendering (``enable_thinking`` and the like).

        Raises `ConfigError` for a template with a syntax error.
        """
        from jinja2 import TemplateSyntaxError

        self.source = source
        self._variables = {**(special_tokens or {}), **(variables or {})}
        try:
            self._template: Template = jinja_environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    @cached_property
    def compared(self) -> frozenset[str]:
        """The texts that the template may look for in messages: those in its comparisons, calls, filters and lists."""
        from jinja2 import nodes

        tree = jinja_environment().parse(self.source)
        kinds = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.List, nodes.Tuple, nodes.Dict)
        found = {const.value for each in tree.find_all(kinds) for const in each.find_all(nodes.Const)}
        found |= {each.node.value for each in tree.find_all(nodes.Assign) if isinstance(each.node, nodes.Const)}
        return frozenset(text for text in found if isinstance(text, str) and text.strip() and text not in _NAMES)

    def render(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Return the conversation's text. ``strftime_now`` formats ``now`` (default: the local time).

        Raises `TemplateRefusedError` if the template raises, or cannot handle its input.
        """
        from jinja2 import TemplateError

        variables = {
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": (now or datetime.now().astimezone()).strftime,
        }
        try:
            return self._template.render(variables)
        except RecursionError:
            raise too_deep() from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusedError(f"the policy's chat template refuses this conversation: {error}") from error


def jinja_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which templates are compiled and run."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """Ignores ``{% generation %}``, which marks the policy's text: its tokens are known from sampling."""

        tags = {_GENERATION_TAG}  # noqa: RUF012 - the attribute's declared type is a plain set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements((f"name:end{_GENERATION_TAG}",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = plain_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def plain_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter escapes for HTML, which no policy was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# The traits of a chat template, found by rendering probes: they are documented nowhere else.

_ALNUM9 = re.compile(r"[a-zA-Z0-9]{9}")
_PRINTED_PART = re.compile(r"""['"]image""")
_TEXT_A, _TEXT_B, _ARGUMENT = "firstprobetext", "secondprobetext", "argumentprobe"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How a conversation must be shaped for one template. `probe` finds them."""

    tool_use: bool = True
    """Whether the template renders both tool calls and their results. Otherwise both are refused: a policy whose
    prompt does not have the results of its calls must not be run as if it had."""
    arguments: Literal["object", "string"] = "object"
    """Whether the template formats tool arguments itself (from data), or accepts them as JSON text."""
    call_ids: Literal["any", "alnum9"] = "any"
    """``alnum9``: ids of tool calls must be nine letters or digits; others are replaced by a digest."""
    system: Literal["native", "user"] = "native"
    """``user``: there is no system role; a leading system message is put before the first user message's text."""
    mid_system: Literal["native", "reminder"] = "native"
    """``reminder``: a system message within the conversation becomes a user message in a reminder tag."""
    consecutive_users: bool = True
    """Whether two user messages may follow each other; otherwise they are joined."""
    images: frozenset[str] = frozenset()
    """Roles (``user``, ``tool``) in whose messages the template writes a placeholder for an image. In other messages
    images are refused, because the prompt would not have them."""
    user_after_tool: bool = True
    """Whether a user message may follow a tool's; otherwise its text is appended to the tool's."""


def probe(template: ChatTemplate) -> TemplateTraits:
    """Return the template's traits. Raises `ConfigError` for a template that cannot render a single exchange."""
    user, reply = {"role": "user", "content": _TEXT_A}, {"role": "assistant", "content": _TEXT_B}
    try:
        shown = template.render([user, reply])
    except TemplateRefusedError as error:
        raise ConfigError(f"chat template: cannot render one user message and one answer ({error.message})") from error
    if _TEXT_A not in shown or _TEXT_B not in shown:
        raise ConfigError("chat template: does not show the content of a user message and its answer")
    tool_use, arguments, call_ids = _tool_traits(template)
    known = TemplateTraits(arguments=arguments, call_ids=call_ids)

    def takes(*messages: Mapping[str, Any]) -> bool:
        shaped = shape(messages, known, leading=True)
        return _shows(template, shaped, _TEXT_A, _TEXT_B)

    first, second = user, {"role": "user", "content": _TEXT_B}
    plain = {"role": "assistant", "content": "x"}
    return TemplateTraits(
        tool_use=tool_use,
        arguments=arguments,
        call_ids=call_ids,
        system="native" if takes({"role": "system", "content": _TEXT_A}, second) else "user",
        mid_system="native" if takes(first, plain, {"role": "system", "content": _TEXT_B}, first) else "reminder",
        consecutive_users=takes(first, second),
        images=_image_roles(template, known),
        user_after_tool=takes({"role": "user", "content": "x"}, *_call("object", "call_0123456789"), second),
    )


def _image_roles(template: ChatTemplate, traits: TemplateTraits) -> frozenset[str]:
    text, image = {"type": "text", "text": _TEXT_A}, {"type": "image"}
    user, *called = {"role": "user", "content": "x"}, *_call("object", "abcdef123")
    before: dict[str, list[dict[str, Any]]] = {"user": [], "tool": [user, called[0]]}
    last = {"user": user, "tool": called[1]}
    roles = set()
    for role, messages in before.items():
        with contextlib.suppress(TemplateRefusedError):
            start = shape(messages, traits, leading=True)
            shown = [
                template.render([*start, {**last[role], "content": content}])
                for content in ([text], [text, image], [text, image, image])
            ]
            printed = _PRINTED_PART.search(shown[1])  # the template prints the parts as data, without a placeholder
            if _TEXT_A in shown[0] and len(shown[0]) < len(shown[1]) < len(shown[2]) and not printed:
                roles.add(role)
    return frozenset(roles)


def _call(arguments: str, call_id: str) -> list[dict[str, Any]]:
    data = {"value": _ARGUMENT}
    given: Any = data if arguments == "object" else orjson.dumps(data).decode()
    call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": given}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": _TEXT_A},
    ]


def _tool_traits(template: ChatTemplate) -> tuple[bool, Literal["object", "string"], Literal["any", "alnum9"]]:
    forms: tuple[Literal["object", "string"], ...] = ("object", "string")
    ids: tuple[tuple[Literal["any", "alnum9"], str], ...] = (("any", "call_0123456789"), ("alnum9", "abcdef123"))
    for style, call_id in ids:
        for form in forms:
            messages = [{"role": "user", "content": "x"}, *_call(form, call_id)]
            # A Python literal or doubly quoted JSON means that the template expects the other form.
            if _shows(template, messages, _ARGUMENT, _TEXT_A, never=("{'value'", '\\"value')):
                return True, form, style
    return False, "object", "any"


def _shows(template: ChatTemplate, messages: Sequence[Message], *texts: str, never: Sequence[str] = ()) -> bool:
    try:
        shown = template.render(messages, add_generation_prompt=True)
    except TemplateRefusedError:
        return False
    return all(text in shown for text in texts) and not any(text in shown for text in never)


def shape(messages: Sequence[Message], traits: TemplateTraits, *, leading: bool) -> list[dict[str, Any]]:
    """Return messages in the shape that the template accepts.

    ``leading``: whether they start the conversation. No messages are joined across an assistant message, so shaping
    only the messages after one gives the same result as shaping the whole conversation.
    """
    shaped: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = role_of(message)
        if not traits.tool_use and (role == "tool" or calls_of(message)):
            raise TemplateRefusedError(
                "messages: hold tool calls or results, which the policy's chat template does not show;"
                " use a policy or a chat_template made for tools"
            )
        new = _shaped(message, role, traits)
        previous = shaped[-1] if shaped else None
        if role == "system":
            if leading and index == 0:
                new["role"] = "system" if traits.system == "native" else "user"
            elif traits.mid_system == "reminder" or traits.system == "user":
                new = {"role": "user", "content": f"<system-reminder>\n{text_of(new['content'])}\n</system-reminder>"}
        if previous is not None and new["role"] == "user" and _joins(previous["role"], traits):
            previous["content"] = _joined(previous["content"], new["content"])
        else:
            shaped.append(new)
    return shaped


def _joins(previous_role: str, traits: TemplateTraits) -> bool:
    if previous_role == "user":
        # A system message that became a user message is always joined with the user message after it.
        return not traits.consecutive_users or traits.system == "user"
    return previous_role == "tool" and not traits.user_after_tool


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        for content in (first, second)
    ]
    return parts[0] + parts[1]


def _shaped(message: Message, role: str, traits: TemplateTraits) -> dict[str, Any]:
    shaped = {"role": role, "content": _content(message.get("content"), role, traits)}
    if role == "assistant":
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            shaped["reasoning_content"] = reasoning
        if calls := calls_of(message):
            shaped["tool_calls"] = [
                {
                    "id": _call_id(call.get("id"), traits),
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": _arguments(call, traits)},
                }
                for call in calls
            ]
    elif role == "tool":
        shaped["tool_call_id"] = _call_id(message.get("tool_call_id"), traits)
        if name := message.get("name"):
            shaped["name"] = name
    return shaped


def _arguments(call: Mapping[str, Any], traits: TemplateTraits) -> Any:
    arguments = arguments_of(call)
    if traits.arguments == "string":
        return arguments if isinstance(arguments, str) else _json_text(arguments)
    # Templates that format data iterate over its items, so text that is not JSON is wrapped in an object.
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _json_text(data: Any) -> str:
    try:
        return orjson.dumps(data).decode()
    except TypeError:  # integers beyond 64 bits, and escaped lone surrogates
        return json.dumps(data, separators=(",", ":"))


def _call_id(raw_id: Any, traits: TemplateTraits) -> str:
    call_id = str(raw_id or "")
    if traits.call_ids == "any" or _ALNUM9.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _content(content: Any, role: str, traits: TemplateTraits) -> Any:
    media = list(media_parts(content))
    if not media:
        return text_of(content)
    shown_in = "tool" if role == "tool" else "user"
    if any(kind == "image" for kind, _ in media) and shown_in not in traits.images:
        raise TemplateRefusedError(
            f"messages: a {role} message holds an image, which the policy's chat template does not show there;"
            " use a policy or a chat_template made for images"
        )
    parts: list[dict[str, Any]] = []
    for part in content:
        media_part = next(media_parts([part]), None)
        parts.append({"type": media_part[0]} if media_part else {"type": "text", "text": text_of([part])})
    return parts
