"""From sampled text to content, reasoning and tool calls.

    parser = answer_parser(policy)                      # auto: what the policy's chat template writes
    answer = parser.parse(text, prompt_tail=…, tools=…)

No text is lost or added: markup that is no complete call stays content, and JSON that the policy wrote is passed on
unchanged.
"""

from nemo_gym.gateway.parsing.formats import (
    AnswerParser,
    CallFormat,
    ParsedAnswer,
    ParsedCall,
    ReasoningFormat,
    Segment,
    Tool,
)
from nemo_gym.gateway.parsing.registry import answer_parser

__all__ = [
    "AnswerParser",
    "CallFormat",
    "ParsedAnswer",
    "ParsedCall",
    "ReasoningFormat",
    "Segment",
    "Tool",
    "answer_parser",
]
