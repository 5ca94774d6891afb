"""Trying again: towards engines with a bound and a budget, towards harnesses without sampling twice."""

from nemo_gym.gateway.retries.answers import AnswerState, Delivery, IdempotencyKeyError, Repeat, SessionAnswers
from nemo_gym.gateway.retries.fingerprint import request_fingerprint
from nemo_gym.gateway.retries.hints import RequestHints, request_hints
from nemo_gym.gateway.routing.calls import EngineCalls, RetryBudget, RetryOptions, TokenCalls

__all__ = [
    "AnswerState",
    "Delivery",
    "EngineCalls",
    "IdempotencyKeyError",
    "Repeat",
    "RequestHints",
    "RetryBudget",
    "RetryOptions",
    "SessionAnswers",
    "TokenCalls",
    "request_fingerprint",
    "request_hints",
]
