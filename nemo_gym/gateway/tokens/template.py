"""A policy's chat template: Jinja as model repositories write it, in a sandbox, with nothing downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from nemo_gym.contract.errors import ConfigError, InvalidBodyError
from nemo_gym.gateway.tokens.messages import Message

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_GENERATION_TAG = "generation"


class TemplateRefusedError(InvalidBodyError):
    """The policy's chat template does not take this conversation; the message holds the template's own words."""

    code = "chat_template"
    status = 400


def too_deep() -> TemplateRefusedError:
    """For what is nested more deeply than the interpreter can follow."""
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
        """``variables`` are given to every rendering (``enable_thinking`` and the like).

        Raises `ConfigError` for a template with a syntax error.
        """
        from jinja2 import TemplateSyntaxError

        self.source = source
        self._variables = {**(special_tokens or {}), **(variables or {})}
        try:
            self._template: Template = jinja_environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """The conversation's text. ``now`` is what ``strftime_now`` formats (default: the local time).

        Raises `TemplateRefusedError` when the template raises, or cannot handle what it is given.
        """
        from jinja2 import TemplateError

        moment = now or datetime.now().astimezone()
        try:
            return self._template.render(
                self.variables(messages, tools=tools, add_generation_prompt=add_generation_prompt, now=moment)
            )
        except RecursionError:
            raise too_deep() from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateRefusedError(f"the policy's chat template refuses this conversation: {error}") from error

    def variables(
        self,
        messages: Iterable[Message],
        *,
        tools: Iterable[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        now: datetime,
    ) -> dict[str, Any]:
        """What the template sees."""
        return {
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }


def jinja_environment(*mixed_in: type) -> ImmutableSandboxedEnvironment:
    """What templates are compiled and run in. ``mixed_in``: classes whose methods go before the sandbox's own."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """``{% generation %}`` marks what a policy writes; which tokens those are is known here from sampling."""

        tags = {_GENERATION_TAG}  # noqa: RUF012 - the attribute's declared type is a plain set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements((f"name:end{_GENERATION_TAG}",), drop_needle=True)

    class Sandbox(*mixed_in, ImmutableSandboxedEnvironment):  # type: ignore[misc]
        """Looks up a message's keys at once; the sandbox's own way tries, and fails, to read an attribute first."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
                return obj[attribute]
            return super().getattr(obj, attribute)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = Sandbox(
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
    """Plain JSON; Jinja's own filter escapes for HTML, which no policy was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
