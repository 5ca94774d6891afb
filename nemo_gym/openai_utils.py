"""OpenAI's wire types and a client, under the names NeMo Gym plugins import. The types are those of
`nemo_gym.openai_types`."""

from nemo_gym import openai_types as _types
from nemo_gym.http.openai_client import MAX_NUM_TRIES as MAX_NUM_TRIES
from nemo_gym.http.openai_client import RATE_LIMIT_ERROR_CODES as RATE_LIMIT_ERROR_CODES
from nemo_gym.http.openai_client import RETRY_ERROR_CODES as RETRY_ERROR_CODES
from nemo_gym.http.openai_client import NeMoGymAsyncOpenAI as NeMoGymAsyncOpenAI
from nemo_gym.openai_types import *  # noqa: F403
from nemo_gym.openai_types.chat import *  # noqa: F403
from nemo_gym.openai_types.items import *  # noqa: F403
from nemo_gym.openai_types.responses import *  # noqa: F403

REQUIRED_TOKEN_METADATA_FIELDS = _types.REQUIRED_TOKEN_FIELDS
TOKEN_METADATA_FIELDS = _types.TOKEN_FIELDS
CHAT_REQUEST_PROVIDER_EXTENSION_FIELDS = frozenset({"chat_template_kwargs", "thinking", "output_config"})
"""Fields of a chat request that some engines accept and OpenAI's type lacks."""
