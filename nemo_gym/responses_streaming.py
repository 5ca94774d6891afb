"""NeMo Gym's name for the function that prepares the body of a streaming Responses request."""

from nemo_gym.gateway.dialects.adapters import sanitize_streaming_responses_body

__all__ = ["sanitize_streaming_responses_body"]
