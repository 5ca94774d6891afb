"""Importing packages that are not dependencies of this one, with errors that say what is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens.policy import PolicyTokenizer


def imported(field: str, parser: str, *modules: str) -> Any:
    """The first of ``modules`` that there is. Raises `ConfigError` for a package that is missing, or is broken."""
    problem: ImportError | None = None
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            # A module that exists but lacks a dependency of its own is the one to tell of.
            gone = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
            problem = problem if gone and problem is not None else error
    package = modules[0].split(".")[0]
    raise ConfigError(
        f"{field}: '{parser}' needs the package '{package}' in the gateway's environment ({problem})"
    ) from problem


def unknown_parser(field: str, name: str, known: Iterable[str]) -> ConfigError:
    listed = sorted(known)
    return ConfigError(f"{field}: unknown parser '{name}'{nearest(name, listed)}; known are {', '.join(listed)}")


def transformers_tokenizer(field: str, parser: str, policy: PolicyTokenizer) -> Any:
    """The policy's tokenizer as engines' parsers want it."""
    kind = imported(field, parser, "transformers").PreTrainedTokenizerFast
    return kind(tokenizer_object=policy.tokenizer)
