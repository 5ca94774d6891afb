"""Calls a plugin's hook as FastAPI would: the body is validated by its annotation, the request is passed if wanted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import anyio.to_thread
import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym._util.exact_json import loads_exactly
from nemo_gym.contract.errors import ConfigError, InvalidBodyError
from nemo_gym.http.client import encode_as_text
from nemo_gym.http.problems import InternalError
from nemo_gym.http.requests import JsonResponse

MAX_ERROR_CHARS = 300
_ERROR_TEXTS = ("detail", "error", "message", "failure_reason")


class PluginCall:
    """A hook such as ``verify(self, [request,] body)``, inspected once and called many times.

    Raises `ConfigError` for a parameter that is not a request, a response, a model or plain data.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._name = getattr(hook, "__qualname__", repr(hook))
        self._request: str | None = None
        self._response: str | None = None
        self._body: tuple[str, tuple[type[BaseModel], ...]] | None = None
        try:
            parameters = inspect.signature(hook, eval_str=True).parameters.values()
        except NameError as error:
            raise ConfigError(
                f"{self._name} annotates a parameter with a name that cannot be resolved: {error}; import it outside"
                " of TYPE_CHECKING"
            ) from error
        for parameter in parameters:
            self._assign(parameter)

    @functools.cached_property
    def declared(self) -> frozenset[str]:
        """The keys of a body that the models of the hook declare as their fields."""
        models = self._body[1] if self._body is not None else ()
        keys: set[str] = set()
        for model in models:
            for name, field in model.model_fields.items():
                alias = field.validation_alias
                aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
                keys |= {name, *(each for each in aliases if isinstance(each, str))}
        return frozenset(keys)

    def _assign(self, parameter: inspect.Parameter) -> None:
        kind = _without_none(parameter.annotation)
        if inspect.isclass(kind) and issubclass(kind, Request):
            self._request = parameter.name
        elif inspect.isclass(kind) and issubclass(kind, Response):
            self._response = parameter.name
        elif self._body is None and (models := _models(kind)):
            self._body = (parameter.name, models)
        elif self._body is None and (kind in (dict, Any, inspect.Parameter.empty) or str(kind).startswith("dict[")):
            self._body = (parameter.name, ())
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise ConfigError(
                f"{self._name}: parameter '{parameter.name}' is annotated {kind!r}; a hook takes a Request and one"
                " body"
            )

    async def __call__(
        self, request: Request, body: dict[str, Any] | BaseModel, *, response: Response | None = None
    ) -> Any:
        """Call the hook and return its result. A ``body`` that is already a model is passed unchanged. Raises
        `InvalidBodyError`, which names the wrong fields but never their values."""
        arguments: dict[str, Any] = {}
        response = response or Response()
        if self._request is not None:
            arguments[self._request] = request
        if self._response is not None:
            arguments[self._response] = response
        if self._body is not None:
            name, models = self._body
            arguments[name] = self._validate(models, body) if models and isinstance(body, dict) else body
        try:
            result = await self._call(arguments)
        except RequestValidationError as error:  # raised by a plugin that validates its body itself
            raise InvalidBodyError(f"{self._name}: the body is invalid", errors=_error_list(error.errors())) from None
        if response.status_code >= 400 and not isinstance(result, Response):
            # The hook set the status of its result on its ``Response`` parameter.
            return JsonResponse(plain(result), response.status_code)
        return result

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._hook):
            return await self._hook(**arguments)
        result = await anyio.to_thread.run_sync(lambda: self._hook(**arguments))
        return await result if isinstance(result, Awaitable) else result

    def _validate(self, models: tuple[type[BaseModel], ...], body: dict[str, Any]) -> BaseModel:
        """Return the body as the first of ``models`` that accepts it; if none does, the error is the last model's."""
        *earlier, model = models
        for candidate in earlier:
            with contextlib.suppress(ValidationError):
                return candidate.model_validate(body)
        try:
            return model.model_validate(body)
        except ValidationError as error:
            # Without the input: the body may hold private fields of the row, and the caller may be an agent.
            errors = _error_list(error.errors(include_input=False, include_url=False, include_context=False))
            first = errors[0]
            where = ".".join(map(str, first["loc"]))
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise InvalidBodyError(f"{self._name}: field '{where}': {first['msg']}{more}", errors=errors) from None


def _error_list(errors: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"loc": list(item["loc"]), "msg": item["msg"], "type": item["type"]} for item in errors]


def _without_none(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None`` from an annotation."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models of an annotation, those that forbid unknown keys first; empty if it has any other type."""
    is_union = isinstance(annotation, types.UnionType) or get_origin(annotation) is Union
    kinds = get_args(annotation) if is_union else (annotation,)
    models = tuple(kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel))
    if len(models) != len(kinds):
        return ()
    return tuple(sorted(models, key=lambda model: model.model_config.get("extra") != "forbid"))


def plain(result: Any, *, exclude: set[str] | None = None, hook: str = "a hook") -> dict[str, Any]:
    """Convert the result of ``hook`` to plain data, without the keys in ``exclude``. Fields of a model have their
    aliases, as in FastAPI's replies. A `Response` with the status of an error is no result: it is raised as the
    `HTTPException` of that status."""
    if isinstance(result, BaseModel):
        try:
            fields = result.model_dump(mode="json", by_alias=True, exclude=exclude)
        except ValueError:  # pydantic refuses objects of other types, and bytes that are no UTF-8
            fields = orjson.loads(encode_as_text(result.model_dump(by_alias=True, exclude=exclude)))
        # JSON has no word for these, and null would say that the hook returned nothing.
        for name, value in result:
            if isinstance(value, float) and not math.isfinite(value):
                field = type(result).model_fields.get(name)
                key = (field and field.serialization_alias) or name
                if fields.get(key, 0) is None:
                    fields[key] = value
        return fields
    if isinstance(result, Response):
        if result.status_code >= 400:
            raise _error_in(result)
        result = loads_exactly(bytes(result.body))
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise InternalError(f"{hook} returned {type(result).__name__}; it must return a model or a dict")
    return {key: value for key, value in result.items() if not exclude or key not in exclude}


def _error_in(response: Response) -> HTTPException:
    body = bytes(getattr(response, "body", b""))  # a streamed response has none
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body.decode("utf-8", "replace").strip()
    if isinstance(said, dict):
        said = next((said[key] for key in _ERROR_TEXTS if said.get(key)), said)
    detail = said if isinstance(said, str) else orjson.dumps(said).decode()
    retry_after = response.headers.get("retry-after")
    headers = None if retry_after is None else {"Retry-After": retry_after}
    return HTTPException(response.status_code, detail[:MAX_ERROR_CHARS] or None, headers)
