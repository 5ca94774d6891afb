"""Rollouts as a service: jobs by id over HTTP, and clients for it."""

from nemo_gym.service.client import AsyncRolloutClient, JobView, Refusal, RolloutClient, ServiceError, Submission

__all__ = ["AsyncRolloutClient", "JobView", "Refusal", "RolloutClient", "ServiceError", "Submission"]
