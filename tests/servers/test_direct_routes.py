"""The short way to the suite's own routes changes nothing but the time it takes."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nemo_gym.contract.errors import RowError
from nemo_gym.http.middleware import DirectRoutesMiddleware
from nemo_gym.http.problems import install_problem_handlers


async def plain(request: Request) -> Response:
    return PlainTextResponse(f"plain {request.url.path} {request.path_params}")


async def refusing(request: Request) -> Response:
    raise RowError("row 7 is empty")


async def missing(request: Request) -> Response:
    raise HTTPException(404, "gone")


def application() -> FastAPI:
    app = FastAPI()
    install_problem_handlers(app)
    app.add_middleware(DirectRoutesMiddleware, application=app)
    return app


def test_first_route_of_a_path_wins_whichever_kind_it_is() -> None:
    app = application()

    @app.post("/typed")
    async def typed(body: dict[str, int]) -> dict[str, int]:
        return body

    app.router.routes.append(Route("/typed", plain, methods=["POST"]))
    app.router.routes.append(Route("/plain", plain, methods=["POST"]))
    app.post("/plain")(typed)
    with TestClient(app) as client:
        assert client.post("/typed", json={"a": 1}).json() == {"a": 1}
        assert client.post("/plain", json={"a": 1}).text == "plain /plain {}"


def test_routes_added_after_a_request_are_found() -> None:
    app = application()
    with TestClient(app) as client:
        assert client.get("/late").status_code == 404
        app.router.routes.append(Route("/late", plain, methods=["GET"]))
        assert client.get("/late").text == "plain /late {}"
        assert client.post("/late").status_code == 405


def test_path_parameters_reach_the_route() -> None:
    app = application()
    app.router.routes.append(Route("/sessions/{session_id}/abort", plain, methods=["POST"]))
    with TestClient(app) as client:
        assert client.post("/sessions/s1/abort").text == "plain /sessions/s1/abort {'session_id': 's1'}"


def test_errors_are_answered_as_everywhere() -> None:
    app = application()
    app.router.routes.append(Route("/refusing", refusing, methods=["POST"]))
    app.router.routes.append(Route("/missing", missing, methods=["POST"]))
    with TestClient(app) as client:
        refused = client.post("/refusing")
        assert (refused.status_code, refused.json()["code"]) == (422, "row")
        assert client.post("/missing").status_code == 404
