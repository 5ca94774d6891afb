"""Error messages: suggestions for misspelled names, and the problems that a pydantic model found."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

MAX_PROBLEMS = 10
SIMILAR = 0.6
"""How much a name resembles a known one (`difflib`'s ratio, 0 to 1) to be suggested for it."""
MISSPELT = 0.8
"""The same where an unknown name may be intended, as names of one's own are. A lower value would match by chance:
``judge_model_name`` resembles ``policy_model_name``, but is another key."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = SIMILAR) -> str:
    """Return `` (did you mean 'x'?)``, or an empty string if no known name is similar."""
    matches = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=cutoff)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, else the name of its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def validation_problems(
    error: ValidationError, known: Collection[str] = (), *, where: str = "", whole: str = "value"
) -> str:
    """Describe the problems by field, without the values, which may be secret or private to an environment.

    Args:
        known: the model's keys, from which a misspelled key gets a suggestion.
        where: the dotted path of a configuration's block, so that each problem names the key as a user types it.
        whole: the name used for a problem without a key, if there is no ``where``.
    """
    problems, block = [], f"{where}." if where else ""
    for item in error.errors(include_input=False, include_url=False, include_context=False)[:MAX_PROBLEMS]:
        *parents, key = map(str, item["loc"] or (whole,))
        path = block + ".".join((*parents, key)) if item["loc"] or not where else where
        if item["type"] == "value_error" and not item["loc"] and not where:
            problems.append(item["msg"].removeprefix("Value error, "))  # about several keys, which it names
        elif item["type"] == "extra_forbidden":
            problems.append(f"unknown key '{path}'{nearest(key, _keys_at(known, parents))}")
        elif item["type"] == "model_type" and where:
            problems.append(f"{path} must be a block of keys")
        else:
            problems.append(f"{path}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems)


def _keys_at(known: Collection[str], parents: Iterable[str]) -> Collection[str]:
    """The keys of the model at a path below a model whose fields are ``known``; none if it is not a single model."""
    for index, parent in enumerate(parents):
        field = known.get(parent) if isinstance(known, Mapping) else None
        if isinstance(field, FieldInfo):
            models = [each for each in _types_in(field.annotation) if issubclass(each, BaseModel)]
            known = models[0].model_fields if len(models) == 1 else ()
        elif not index:
            return ()
        # Else the part is an index of a list, or a key of a mapping, of such models.
    return known


def _types_in(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [each for part in get_args(annotation) for each in _types_in(part)]
