"""Checks through its application whether an environment obeys the contract of NeMo Gym's session protocol."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from nemo_gym.http.environment_bodies import ResourcesCloseSessionRequest, ResourcesSeedSessionRequest


def check_resources_session_contract(app: FastAPI, seed: ResourcesSeedSessionRequest, *, keeps_state: bool) -> None:
    """Seed, seed again, close and close again. Raises ``AssertionError`` with the actual reply.

    Args:
        app: the application of ``setup_webserver``.
        seed: a request with a new ``resources_session_id``.
        keeps_state: whether the server keeps state for a session. If so, it must refuse a seed after the session's
            close, and a seed after the close of an id that was never seeded.
    """
    from starlette.testclient import TestClient

    session_id = seed.resources_session_id
    unseen = f"{session_id}-unseen"

    def closing(name: str) -> dict[str, Any]:
        return ResourcesCloseSessionRequest(resources_session_id=name, episode_id=seed.episode_id).model_dump(
            mode="json"
        )

    with TestClient(app, raise_server_exceptions=False) as client:

        def post(path: str, body: dict[str, Any], *, refused: bool = False) -> dict[str, Any]:
            reply = client.post(path, json=body)
            if refused:
                assert reply.status_code >= 400, f"{path} took a seed of a closed session: {reply.text}"
                return {}
            assert reply.status_code == 200, f"{path} answered {reply.status_code}: {reply.text}"
            reply_body: dict[str, Any] = reply.json()
            echoed_id = reply_body.get("resources_session_id")
            assert echoed_id == body["resources_session_id"], f"{path} answered for session {echoed_id!r}"
            return reply_body

        body = seed.model_dump(mode="json")
        first = post("/seed_session", body)
        again = post("/seed_session", body)
        assert again == first, f"the same seed answered differently: {first} and {again}"
        closed = post("/close_session", closing(session_id))
        closed_again = post("/close_session", closing(session_id))
        assert closed_again == closed, f"the same close answered differently: {closed} and {closed_again}"
        post("/close_session", closing(unseen))
        if keeps_state:
            post("/seed_session", body, refused=True)
            post("/seed_session", {**body, "resources_session_id": unseen}, refused=True)
