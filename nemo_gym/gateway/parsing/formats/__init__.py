"""The formats of tool calls that are parsed here, by name."""

from __future__ import annotations

from nemo_gym.gateway.parsing.answers import CallFormat
from nemo_gym.gateway.parsing.formats.deepseek import DeepSeek
from nemo_gym.gateway.parsing.formats.glm45 import Glm45
from nemo_gym.gateway.parsing.formats.hermes import Hermes
from nemo_gym.gateway.parsing.formats.kimi_k2 import KimiK2
from nemo_gym.gateway.parsing.formats.llama_json import LlamaJson
from nemo_gym.gateway.parsing.formats.minimax_m2 import MinimaxM2
from nemo_gym.gateway.parsing.formats.mistral import Mistral
from nemo_gym.gateway.parsing.formats.qwen3_coder import Qwen3Coder

CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "glm45": Glm45(),
    "deepseek": DeepSeek(),
    "kimi_k2": KimiK2(),
    "minimax_m2": MinimaxM2(),
    "mistral": Mistral(),
    "llama_json": LlamaJson(),
}
"""At most one reads what a given chat template writes; `auto` takes it. Formats without state are shared."""
