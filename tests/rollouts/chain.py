"""An environment, an agent and a model server of a few lines each, as separate processes: peers that can be told to
fail, with no code of the suite in them but the formulas of its metrics.

The benchmark runs the same three as the bare chain that the suite is measured against.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from nemo_gym.reward_profile import compute_aggregate_metrics


def answer(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


class Journal:
    """Appends one line per served call to a file, so that a test sees what happened in a process that was killed."""

    def __init__(self, path: str | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None

    def note(self, what: str, rollout: dict[str, Any]) -> None:
        if self._fd is not None:
            os.write(self._fd, f"{what.replace(' ', '_')} {rollout['rollout_id']} {rollout['attempt']}\n".encode())


def environment(options: dict[str, Any]) -> FastAPI:
    """Options: ``seed_status``/``verify_status`` (fail with it), ``verify_failures`` (that many per rollout, then
    right), ``invalid`` (a failure kind), ``fenced`` (409 for first attempts), ``no_solution``, ``no_verdict``,
    ``plain`` (no cookies), ``owns_boxes``, ``words_prompts`` (from the row's ``question``), ``topology``,
    ``key`` (of its control tokens), ``stateful`` (cannot grade an attempt that was closed),
    ``says`` (by task: members of the verdict), ``close_s`` (how long a close takes), ``tool`` (the name of one that
    its ``/mcp`` has, served by the MCP library), ``metrics_s`` (how long its metrics take before they fail)."""
    tools = mcp_tools(options["tool"]) if options.get("tool") else None
    app = FastAPI(lifespan=None if tools is None else lambda _: tools.session_manager.run())
    journal = Journal(options.get("journal"))
    tries: Counter[str] = Counter()
    closed: set[tuple[str, int]] = set()

    def control_token(rollout: dict[str, Any]) -> str:
        return f"control-{options.get('key', '')}{rollout['rollout_id']}"

    @app.get("/ready")
    async def ready() -> Response:
        facts = {name: True for name in ("owns_boxes", "words_prompts") if options.get(name)}
        return answer({"status": "ready", **facts})

    @app.post("/row_prompts")
    async def row_prompts(request: Request) -> Response:
        rows = orjson.loads(await request.body())["rows"]
        return answer({"without": {str(at): "no question" for at, row in enumerate(rows) if not row.get("question")}})

    @app.post("/seed_session")
    async def seed(request: Request) -> Response:
        row = orjson.loads(await request.body())
        session = row["_ng_session"]
        rollout = session["rollout"]
        journal.note("seed again" if "row_ref" in session else "seed", rollout)
        if status := options.get("seed_status"):
            return answer({"code": "sandbox_create", "detail": "no box", "retryable": True}, status)
        descriptor = {"version": 1, "environment": "env", "task_id": rollout["task_id"], "rollout": rollout}
        if topology := options.get("topology"):
            descriptor["placement"] = {"topology": topology}
        reply: dict[str, Any] = {"descriptor": descriptor, "control_token": control_token(rollout)}
        if "validation" in session and not options.get("no_solution"):
            reply["validation"] = {"text": row["expected_answer"] if session["validation"] == "gold" else ""}
        if options.get("words_prompts"):
            reply["public_row"] = {"responses_create_params": {"input": row.get("question", "")}}
        response = answer(reply)
        if not options.get("plain"):
            response.set_cookie("env_session", rollout["rollout_id"])
        return response

    @app.post("/verify")
    async def verify(request: Request) -> Response:
        row = orjson.loads(await request.body())
        session = row.pop("_ng_session")
        rollout = session["rollout"]
        journal.note("verify", rollout)
        if request.headers.get("X-NeMo-Gym-Control-Token") != control_token(rollout):
            return answer({"code": "credential", "detail": "wrong control token"}, 401)
        if options.get("stateful") and (rollout["rollout_id"], rollout["attempt"]) in closed:
            return answer({"detail": "KeyError"}, 500)
        if not options.get("plain") and request.cookies.get("env_session") != rollout["rollout_id"]:
            return answer({"code": "credential", "detail": "no session cookie"}, 401)
        if options.get("fenced") and rollout["attempt"] == 1:
            return answer({"code": "fenced", "detail": "a newer attempt has replaced this one"}, 409)
        tries[rollout["rollout_id"]] += 1
        if status := options.get("verify_status"):
            return answer({"detail": "grader broke"}, status)
        if tries[rollout["rollout_id"]] <= options.get("verify_failures", 0):
            return answer({"code": "verifier", "detail": "grader broke", "retryable": True}, 502)
        if kind := options.get("invalid"):
            invalid = {
                "reward": None,
                "valid": False,
                "mask_sample": True,
                "failure_kind": kind,
                "failure_reason": "x",
            }
            return answer({**row, **invalid})
        text = row["response"]["output"][0]["content"][0]["text"]
        says = options.get("says", {}).get(rollout["task_id"], {})
        return answer({**row, "reward": float(text == row.get("expected_answer", "B")), **says})

    @app.post("/close")
    async def close(request: Request) -> Response:
        rollout = orjson.loads(await request.body())["rollout"]
        journal.note("close", rollout)
        closed.add((rollout["rollout_id"], rollout["attempt"]))
        await asyncio.sleep(options.get("close_s", 0))
        journal.note("closed", rollout)
        return answer({})

    @app.post("/rows")
    async def rows(request: Request) -> Response:
        body = orjson.loads(await request.body())
        rollout, row = body["rollout"], body["row"]
        journal.note("rows", rollout)
        public = {key: row[key] for key in ("_ng_task_index", "_ng_rollout_index", "_ng_rollout_id")}
        public["responses_create_params"] = {"input": row["responses_create_params"]["input"]}
        return answer({"row_ref": f"ref-{rollout['rollout_id']}", "public_row": public})

    @app.post("/verdict")
    async def verdict(request: Request) -> Response:
        rollout = orjson.loads(await request.body())["rollout"]
        journal.note("verdict", rollout)
        if options.get("no_verdict"):
            return answer({"code": "contract", "detail": "no verdict"}, 409)
        return answer({"reward": 0.5, "valid": True, **options.get("says", {}).get(rollout["task_id"], {})})

    @app.post("/aggregate_metrics")
    async def aggregate(request: Request) -> Response:
        rows = orjson.loads(await request.body())["verify_responses"]
        if (seconds := options.get("metrics_s")) is not None:
            await asyncio.sleep(seconds)
            return answer({"detail": "compute_metrics raised ValueError"}, 500)
        return Response(compute_aggregate_metrics(rows).model_dump_json(), media_type="application/json")

    if tools is not None:
        app.mount("/", tools.streamable_http_app(json_response=True, stateless_http=True))
    return app


def mcp_tools(name: str) -> Any:
    """The MCP library's server of one tool."""
    from mcp.server import MCPServer

    server = MCPServer("tools", log_level="WARNING")  # it would write a line for every request

    @server.tool(name=name)
    async def tool(city: str) -> str:
        return "1.1"

    return server


def mcp_client(url: str) -> Any:
    """The MCP library's client, with an HTTP client that has no TLS context to make."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    return Client(streamable_http_client(url, http_client=httpx2.AsyncClient(trust_env=False, verify=False)))


def agent(options: dict[str, Any]) -> FastAPI:
    """Options: ``hang`` (task indices whose act never ends), ``crash`` (rollouts that answer ``crashed``), ``kills``
    (by task: attempts that end this process),
    ``delay_s``, ``overrides_run``, ``enforce_row_sampling``, ``status``, ``metrics`` (of its own, or a status),
    ``says`` (members of the act's answer, instead of the right ones),
    ``box_needs`` (the whole answer, as text), ``limits`` (that it keeps), ``outcome`` and ``detail`` (of every act),
    ``asks`` (what it asks in turn: a route of the model, or a tool by its name), ``mcp`` (URL of the tools' server),
    ``compressed`` (its answer is), ``run_status`` (of ``/run``), ``run_says`` (members of its answer), ``run_text``
    (the whole answer) and ``run_hangs`` (it never answers)."""
    journal = Journal(options.get("journal"))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            if url := options.get("mcp"):
                app.state.mcp = await stack.enter_async_context(mcp_client(url))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> Response:
        overrides_run, limits = bool(options.get("overrides_run")), options.get("limits", [])
        facts = {"enforce_row_sampling": True} if options.get("enforce_row_sampling") else {}
        facts["overrides_metrics"] = "metrics" in options
        return answer({"status": "ready", "overrides_run": overrides_run, "limits": limits, **facts})

    async def cancelled(request: Request, rollout: dict[str, Any]) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        journal.note("cancelled", rollout)
        return answer({}, 499)

    @app.post("/act")
    async def act(request: Request) -> Response:
        body = orjson.loads(await request.body())
        rollout = body["descriptor"]["rollout"]
        journal.note("act", rollout)
        if "expected_answer" in str(body.get("responses_create_params")):
            return answer({"detail": "private data reached the agent"}, 500)
        if status := options.get("status"):
            return answer({"detail": "agent broke"}, status)
        if rollout["attempt"] <= options.get("kills", {}).get(rollout["task_id"], 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if rollout["task_id"] in options.get("hang", ()):
            return await cancelled(request, rollout)
        await asyncio.sleep(options.get("delay_s", 0))
        if (outcome := options.get("outcome")) is not None:
            journal.note("failed", rollout)
            return answer({"response": {}, "outcome": outcome, "outcome_detail": options["detail"]})
        if (crashes := options.get("crash", {}).get(rollout["task_id"], 0)) and rollout["attempt"] <= crashes:
            return answer({"response": {}, "outcome": "crashed", "outcome_detail": "harness died"})
        if "validation" in body:
            return answer({"response": message(body["validation"]["text"]), "validation": True})
        inference, params = body["inference"], body["responses_create_params"]
        headers = {"Authorization": f"Bearer {inference['token']}", "Content-Type": "application/json"}
        for asked in options.get("asks", ("/responses",)):
            if not asked.startswith("/"):
                assert not (await request.app.state.mcp.call_tool(asked, {"city": "Quito"})).is_error
                continue
            url = inference["base_url"] + asked
            async with request.app.state.http.post(url, data=orjson.dumps(params), headers=headers) as response:
                completion = await response.read()
                assert response.status == 200, completion
        reply = {"response": orjson.Fragment(completion), "outcome": "completed", "artifacts": []}
        whole = answer({**reply, "observations": {"turns": 1}, **options.get("says", {})})
        if options.get("compressed"):
            return Response(gzip.compress(bytes(whole.body)), headers={"Content-Encoding": "gzip"})
        return whole

    @app.post("/aggregate_metrics")
    async def aggregate(request: Request) -> Response:
        if isinstance(metrics := options["metrics"], int):
            return answer({"detail": "compute_metrics raised KeyError"}, metrics)
        rows = orjson.loads(await request.body())["verify_responses"]
        return answer({"agent_metrics": {**metrics, "keys": sorted({key for row in rows for key in row})}})

    @app.get("/box_needs")
    async def box_needs() -> Response:
        return Response(options["box_needs"], media_type="application/json")

    @app.post("/run")
    async def run(request: Request) -> Response:
        body = orjson.loads(await request.body())
        session = body["_ng_session"]
        journal.note("run", session["rollout"])
        if "row_ref" in session and "expected_answer" in body:
            return answer({"detail": "private data reached the agent"}, 500)
        assert session.get("row_ref") in (None, f"ref-{session['rollout']['rollout_id']}")
        if status := options.get("run_status"):
            return answer({"detail": "agent broke after its verdict"}, status)
        if options.get("run_hangs"):
            return await cancelled(request, session["rollout"])
        if text := options.get("run_text"):
            return Response(text, media_type="application/json")
        return answer({**body, "response": message("B"), "reward": 1.0, **options.get("run_says", {})})

    return app


def model(options: dict[str, Any]) -> FastAPI:
    """Answers ``B`` at once. Options: ``trajectories`` (finalize returns these; if true, one which holds the reward it
    was given), ``end_status`` (finalize and abort fail with it), ``end_text`` (they answer it), ``forgets`` (tasks
    whose sessions cannot be finalized), ``end_s`` (how long they take), ``usage`` (of each session), ``preflight``
    (its answer), ``forwards_to`` (the base URL of an endpoint that it asks first), ``sampling`` (it opens sessions
    with this alone)."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app.state.http:
            yield

    app = FastAPI(lifespan=lifespan)
    journal = Journal(options.get("journal"))
    completion = orjson.dumps(message("B"))
    opened: dict[str, dict[str, Any]] = {}
    aborted: set[str] = set()

    @app.get("/ready")
    async def ready() -> Response:
        return answer({"status": "ready"})

    @app.post("/sessions")
    async def open_session(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        if asked.get("sampling") != options.get("sampling", asked.get("sampling")):
            return answer({"detail": f"other sampling: {asked}"}, 422)
        rollout = asked["rollout"]
        session_id = f"{rollout['rollout_id']}-a{rollout['attempt']}"
        opened[session_id] = rollout
        base_url = f"http://{request.headers['host']}/v1"
        return answer(
            {
                "session_id": session_id,
                "base_url": base_url,
                "inference_token": "inference",
                "control_token": f"control-{session_id}",
                "model": "policy",
                "expires_at": 4e9,
            }
        )

    @app.post("/preflight")
    async def preflight() -> Response:
        return answer({"engines": options["preflight"]}) if "preflight" in options else answer({}, 404)

    @app.post("/v1/responses")
    @app.post("/v1/chat/completions")
    async def inference(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        if url := options.get("forwards_to"):
            headers = {"Content-Type": "application/json"}
            path = request.url.path.removeprefix("/v1")
            async with request.app.state.http.post(url + path, data=orjson.dumps(asked), headers=headers) as reply:
                orjson.loads(await reply.read())
        return Response(completion, media_type="application/json")

    @app.post("/sessions/{session_id}/{action}")
    async def end(session_id: str, action: str, request: Request) -> Response:
        if request.headers.get("X-NeMo-Gym-Control-Token") != f"control-{session_id}":
            return answer({"detail": "wrong control token"}, 401)
        if (rollout := opened.pop(session_id, None)) is not None:
            journal.note(action, rollout)
        if action == "finalize" and rollout is not None and rollout["task_id"] in options.get("forgets", ()):
            return answer({"code": "unknown_session", "detail": "no such session"}, 404)
        if action == "abort":
            aborted.add(session_id)
        elif session_id in aborted:
            return answer({"code": "fenced", "detail": "the session was aborted"}, 409)
        await asyncio.sleep(options.get("end_s", 0))
        if status := options.get("end_status"):
            return answer({"detail": "session broke"}, status)
        if text := options.get("end_text"):
            return Response(text)
        trajectories = options.get("trajectories") or []
        if trajectories is True:
            trajectories = [orjson.loads(await request.body())]
        usage = options.get("usage", {})
        return answer({"session_id": session_id, "turns": 1, "usage": usage, "trajectories": trajectories})

    return app


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "resp_1",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": [{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 11,
        },
    }


def serve(role: str, listener: socket.socket, options: dict[str, Any]) -> None:
    """Serve one role until killed."""
    app = {"environment": environment, "agent": agent, "model": model}[role](options)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=60)
    uvicorn.Server(config).run(sockets=[listener])
