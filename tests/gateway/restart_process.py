"""A gateway in small: sessions, turns sampled by an engine, committed to a journal, each answered once.

Usage: python -m tests.gateway.restart_process JOURNAL ENGINE_URL; prints its port.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import orjson
from aiohttp import web

from nemo_gym.gateway.dialects.chat import request_fingerprint
from nemo_gym.gateway.engines import EngineConnections, EngineEndpoint, Generation, Sampling, TokenRequest, VllmEngine
from nemo_gym.gateway.engines.calls import EngineCalls
from nemo_gym.gateway.engines.router import Router
from nemo_gym.gateway.journal import SessionJournal, SessionRecord
from nemo_gym.gateway.live_session import SessionAnswers


async def main(directory: Path, engine_url: str) -> None:
    journal, replayed = SessionJournal.open(directory)
    answers: dict[str, SessionAnswers[bytes]] = {}
    for session in replayed:
        known = answers[session.record.session_id] = SessionAnswers()
        for turn in session.turns:
            known.restore(turn.fingerprint, turn.key, turn.body, sent=turn.sent)

    async with EngineConnections() as http:
        router: Router[VllmEngine] = Router()
        router.add(VllmEngine(EngineEndpoint("e0", engine_url), http))
        calls = EngineCalls(router)

        async def turn(request: web.Request) -> web.Response:
            session_id, body = request.match_info["session"], orjson.loads(await request.read())
            if session_id not in answers:
                answers[session_id] = SessionAnswers()
                await journal.opened(SessionRecord(session_id, {}, "i", "c", time.time(), time.time() + 3600))
            fingerprint = request_fingerprint("/turn", body)

            async def sample() -> Generation:
                asked = TokenRequest("r", body["prompt"], Sampling(16))
                return await calls.call(session_id, lambda engine: engine.generate(asked))

            async def commit(sampled: Generation) -> bytes:
                answer = orjson.dumps({"prompt": body["prompt"], "tokens": sampled.token_ids})
                await journal.commit_turn(session_id, answer, fingerprint=fingerprint)
                return answer

            delivery = await answers[session_id].once(fingerprint, sample, commit)
            return web.Response(body=delivery.answer)

        app = web.Application()
        app.router.add_post("/{session}", turn)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
