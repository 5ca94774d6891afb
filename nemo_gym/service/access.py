"""Access to the service: bearer tokens, each with a role."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from nemo_gym.contract.credentials import RoleError
from nemo_gym.contract.errors import ConfigError, CredentialError, reject_unknown_keys

MIN_TOKEN_CHARS = 16


class ServiceRole(StrEnum):
    READ = "read"
    SUBMIT = "submit"
    """May submit and read."""
    OPERATE = "operate"
    """May do everything, also cancel, drain and change servers."""

    @property
    def rank(self) -> int:
        return list(ServiceRole).index(self)


class ServiceTokens:
    """The tokens of a service, by role."""

    def __init__(self, tokens: Mapping[ServiceRole, list[str]]) -> None:
        self._tokens = tokens

    @classmethod
    def load(cls, path: Path | None, environment: Mapping[str, str] = os.environ) -> ServiceTokens:
        """Load the tokens from a file or else from the environment, or else create new ones. Raises `ConfigError`."""
        if path is not None:
            return cls(_of_file(path))
        tokens = {role: environment.get(variable_of(role)) for role in ServiceRole}
        if any(tokens.values()):
            return cls({role: _checked([token], variable_of(role)) for role, token in tokens.items() if token})
        return cls({role: [secrets.token_urlsafe(24)] for role in ServiceRole})

    def one_of(self, role: ServiceRole) -> str | None:
        """Return the first token of a role."""
        return next(iter(self._tokens.get(role, ())), None)

    def require(self, authorization: str | None, role: ServiceRole, route: str) -> ServiceRole:
        """Return the caller's role. Raises `CredentialError` if the request has no token of this service, and
        `RoleError` if the token's role does not cover ``role``."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise CredentialError(f"{route} needs the header 'Authorization: Bearer <token>' with a token of {role}")
        roles = [
            each
            for each, tokens in self._tokens.items()
            for valid_token in tokens
            if hmac.compare_digest(valid_token.encode(), token.strip().encode())
        ]
        if not roles:
            raise CredentialError("the bearer token is not valid for this service")
        granted = max(roles, key=lambda each: each.rank)  # a token may be listed under several roles
        if granted.rank < role.rank:
            raise RoleError(f"{route} needs a token of role '{role}'; this one is of role '{granted}'", route=route)
        return granted


def variable_of(role: ServiceRole) -> str:
    return f"NEMO_GYM_SERVICE_{role.name}_TOKEN"


def _of_file(path: Path) -> dict[ServiceRole, list[str]]:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"tokens: '{path}' cannot be read ({type(error).__name__})", key="tokens") from None
    if not isinstance(content, dict):
        raise ConfigError(f"tokens: '{path}' must map roles to tokens, as in 'submit: [<token>]'", key="tokens")
    reject_unknown_keys(map(str, content), list(ServiceRole), where=f"tokens: '{path}'")
    return {
        ServiceRole(role): _checked([tokens] if isinstance(tokens, str) else tokens, f"'{path}', {role}")
        for role, tokens in content.items()
    }


def _checked(tokens: Any, where: str) -> list[str]:
    if not isinstance(tokens, list) or not all(
        isinstance(token, str) and len(token) >= MIN_TOKEN_CHARS and token.isascii() and token == token.strip()
        for token in tokens
    ):
        raise ConfigError(
            f"tokens: {where} must hold tokens of at least {MIN_TOKEN_CHARS} ASCII characters", key="tokens"
        )
    return tokens
