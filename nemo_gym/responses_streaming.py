"""NeMo Gym's name for how its model servers take a request of Responses that asks for a stream."""

from nemo_gym.gateway.dialects.adapters import sanitize_streaming_responses_body

__all__ = ["sanitize_streaming_responses_body"]
