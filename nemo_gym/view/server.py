"""The viewer's server: static pages, and JSON about the runs on this machine. It only reads.

On loopback it serves clients that know the token in its URL. On another address it requires a password. Content of
rows is only ever sent as data: pages come from this package, and their content security policy allows nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import anyio
import anyio.to_thread
import orjson
import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.view import logs
from nemo_gym.view.docs import SITE
from nemo_gym.view.queries import (
    FoundRow,
    TableQuery,
    aggregate_metrics,
    compared,
    find_row,
    histogram,
    reasons,
    table,
    tasks,
)
from nemo_gym.view.rollout import chain_of, packed_chain, rollout_view, text_at
from nemo_gym.view.runs import Run, Runs
from nemo_gym.view.why import explain, explain_reason

STATIC = Path(__file__).parent / "static"
THREADS = 4
COOKIE = "nemo_gym_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
log = structlog.get_logger(__name__)
Question = Callable[[Request], Any]


class Pages:
    """The responses of each route."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._limit = anyio.CapacityLimiter(THREADS)

    def application(self, docs: Path) -> Starlette:
        questions: dict[str, Question] = {
            "/api/runs": self.list_runs,
            "/api/runs/{run}": self.one_run,
            "/api/runs/{run}/state": self.state,
            "/api/runs/{run}/table": lambda request: table(self._index(request), _query(request)),
            "/api/runs/{run}/tasks": lambda request: tasks(self._index(request), _query(request)),
            "/api/runs/{run}/rollout": self.rollout,
            "/api/runs/{run}/logs": self.rollout_logs,
            "/api/runs/{run}/raw": self.raw,
            "/api/runs/{run}/text": self.text,
            "/api/runs/{run}/chain": self.chain,
            "/api/compare": self.compare,
        }
        return Starlette(
            routes=[
                Route("/", _start_page),
                *(Route(path, self._answer(question)) for path, question in questions.items()),
                Mount("/static", StaticFiles(directory=STATIC)),
                Mount("/docs", StaticFiles(directory=docs, html=True) if docs.is_dir() else _NO_DOCUMENTATION),
            ]
        )

    def _answer(self, question: Question) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                found = await anyio.to_thread.run_sync(question, request, limiter=self._limit)
                return found if isinstance(found, Response) else _json(found)
            except NemoGymError as error:
                status = 400 if isinstance(error, ConfigError) else error.status
                return _json({"error": error.message}, status)
            except Exception as error:
                log.exception("a page could not be made", path=request.url.path)
                return _json({"error": f"{type(error).__name__}: {error}"[:500]}, 500)

        return answer

    def _run(self, request: Request) -> Run:
        return self._runs.get(request.path_params["run"])

    def _index(self, request: Request) -> Any:
        return self._run(request).ready()

    def _found(self, request: Request) -> tuple[Run, FoundRow]:
        """Return the run and the rollout that a request names."""
        run = self._run(request)
        return run, find_row(run.ready(), _required_param(request, "id"))

    def list_runs(self, request: Request) -> Any:
        return {
            "runs": [self._runs.describe(run) for run in self._runs.all()],
            "services": [service.described() for service in self._runs.services],
        }

    def one_run(self, request: Request) -> Any:
        run = self._run(request)
        described = self._runs.describe(run)
        if run.index is None:
            return described
        return {
            **described,
            "reasons": [{**each, **explain_reason(each)} for each in reasons(run.index)],
            "histogram": histogram(run.index, "reward", 10),
            "metrics": aggregate_metrics(run.index),
        }

    def state(self, request: Request) -> Any:
        run = self._run(request)
        return {
            "version": run.index.version if run.index is not None else 0,
            "reading": self._runs.describe(run)["reading"] if run.index is None else None,
            "progress": run.progress(),
            "problem": run.problem,
        }

    def rollout(self, request: Request) -> Any:
        run, found = self._found(request)
        return {
            **rollout_view(run.ready(), found),
            "run_name": run.name,
            "why": explain(found.columns, found.row),
        }

    def rollout_logs(self, request: Request) -> Any:
        run, found = self._found(request)
        folders = run.log_folders(found.row)
        lines = logs.lines_of(folders, str(found.columns["rollout_id"]), found.row)
        return {
            "folders": [str(folder) for folder in folders],
            "lines": [
                {name: getattr(line, name) for name in ("timestamp", "server", "level", "event", "more")}
                for line in lines
            ],
        }

    def raw(self, request: Request) -> Response:
        raw = self._found(request)[1].raw
        if "indent" in request.query_params:
            try:
                raw = orjson.dumps(orjson.loads(raw), option=orjson.OPT_INDENT_2)
            except (orjson.JSONDecodeError, TypeError):
                pass  # no JSON, or too deeply nested for orjson: send it unchanged
        return Response(raw, media_type="text/plain; charset=utf-8")

    def text(self, request: Request) -> Response:
        found = self._found(request)[1]
        return PlainTextResponse(text_at(found.row, _required_param(request, "where")).encode("utf-8", "replace"))

    def chain(self, request: Request) -> Response:
        run, found = self._found(request)
        number = request.query_params.get("number", "0")
        chain = chain_of(found.row, int(number) if number.isdecimal() else -1)
        texts = self._runs.token_texts(run).of({*chain.prompt_ids, *chain.response_ids})
        return Response(packed_chain(chain, texts), media_type="application/octet-stream")

    def compare(self, request: Request) -> Any:
        both = [self._runs.get(_required_param(request, name)) for name in ("a", "b")]
        found = compared(both[0].ready(), both[1].ready(), changed_only="changed" in request.query_params)
        return {**found, "rows": found["rows"][:1000], "names": [run.name for run in both]}


def _required_param(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise ConfigError(f"{name}=: is missing")
    return value


def _query(request: Request) -> TableQuery:
    return TableQuery.of(dict(request.query_params))


def _json(value: Any, status: int = 200) -> Response:
    try:
        content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:  # a path, for one, may be no UTF-8
        content = json.dumps(value, default=str).encode()
    return Response(content, status, media_type="application/json")


_NO_DOCUMENTATION = PlainTextResponse(
    "The documentation has not been built here: 'make docs' does, then start ng_view again.", 404
)


async def _start_page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


class Door:
    """Admits clients that know the token or the password, and adds the headers that isolate pages from other sites."""

    def __init__(self, app: ASGIApp, *, token: str | None, password: str | None, hosts: frozenset[str]) -> None:
        self._app = app
        self._token, self._password, self._hosts = token, password, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own_names = {name for name, _ in _HEADERS}
                headers = [
                    (name, value) for name, value in message.get("headers", ()) if name.lower() not in own_names
                ]
                message = {**message, "headers": [*headers, *_HEADERS]}
            await send(message)

        response = await self._refusal(scope)
        await (response or self._app)(scope, receive, guarded)

    async def _refusal(self, scope: Scope) -> Response | None:
        """Return the response for a client that is not admitted, or ``None`` for one that is."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").rpartition("]")[0] or headers.get("host", "").partition(":")[0]
        if self._hosts and host.strip("[]") not in self._hosts:
            # Otherwise a page of another site whose name resolves to this address could read the runs.
            return PlainTextResponse(f"This viewer is not known as '{host[:100]}'.", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This viewer only reads.", 405)
        if self._password is not None:
            if _is_equal(_basic_password(headers.get("authorization", "")), self._password):
                return None
            await anyio.sleep(0.5)
            return PlainTextResponse(
                "Give the password of this viewer.", 401, {"www-authenticate": 'Basic realm="runs", charset="UTF-8"'}
            )
        cookie = f"{COOKIE}_{(scope.get('server') or ('', 0))[1]}"
        parameters = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        if tokens := parameters.pop("token", None):
            if not _is_equal(tokens[0], self._token):
                return PlainTextResponse(
                    "That is not the token of this viewer; use the URL that ng_view printed.", 403
                )
            # Removes the token from the address bar, and so from what is copied from there.
            query = urlencode(parameters, doseq=True)
            redirect = RedirectResponse(scope["path"] + (f"?{query}" if query else ""), 303)
            redirect.set_cookie(cookie, self._token or "", httponly=True, samesite="strict", path="/")
            return redirect
        # Other programs at this address have cookies, too, and not every parser reads on behind an odd one.
        if _is_equal(cookie_parser(headers.get("cookie", "")).get(cookie), self._token):
            return None
        return PlainTextResponse("Open the URL that ng_view printed: it holds the token of this viewer.", 403)


def _is_equal(value: str | None, expected: str | None) -> bool:
    return value is not None and expected is not None and hmac.compare_digest(value.encode(), expected.encode())


def _basic_password(header: str) -> str | None:
    """Return the password of a header; the user name does not matter."""
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MIN_PASSWORD_CHARS = 8


def viewer(runs: Runs, host: str, password: str | None, docs: Path = SITE) -> tuple[ASGIApp, str | None]:
    """Return the application, and the token of its URL, or ``None`` if it requires a password. ``docs`` is the folder
    of the documentation's site. Raises `ConfigError`."""
    if host not in LOOPBACK and password is None:
        raise ConfigError(
            f"host '{host}' can be reached from other machines, and result files hold gold answers: give a password in"
            " NG_VIEW_PASSWORD or with --password-file, or leave --host out"
        )
    if password is not None and len(password) < MIN_PASSWORD_CHARS:
        raise ConfigError(f"the password has fewer than {MIN_PASSWORD_CHARS} characters")
    token = None if password is not None else secrets.token_urlsafe(24)
    hosts = LOOPBACK | {host} if host in LOOPBACK else frozenset()
    return Door(Pages(runs).application(docs), token=token, password=password, hosts=hosts), token
