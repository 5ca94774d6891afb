"""``{"name": …, "parameters": {…}}`` as the answer itself, or after ``<|python_tag|>``: Llama 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_gym.gateway.parsing.answers import Segment, Tool
from nemo_gym.gateway.parsing.json_calls import call_at
from nemo_gym.gateway.parsing.json_text import skip_space

_TOKEN = "<|python_tag|>"
_KEYS = frozenset(["name", "parameters", "arguments", "type", "id"])


class LlamaJson:
    """Nothing but its place marks a call: at the start of the answer or after the token, and after another call with
    or without a semicolon. JSON with any other key is an answer, not a call."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        taken = start = at = 0  # up to where text is in segments; where a call's markup, and its JSON, would start
        while True:
            found = call_at(text, skip_space(text, at), _KEYS)
            if found is not None:
                segments += [text[taken:start], found[0]]
                taken = start = at = found[1]
                after = skip_space(text, at)
                if text[after : after + 1] == ";":
                    at = after + 1
                continue
            start = text.find(_TOKEN, at)
            if start < 0:
                return [*segments, text[taken:]]
            at = start + len(_TOKEN)
