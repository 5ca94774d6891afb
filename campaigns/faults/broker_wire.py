#!/usr/bin/env python3
"""Break connections to the broker at given and random bytes, both ways, and send requests twice, on every route.

    python -m campaigns.faults.broker_wire --json [--database sqlite] [--provider local] [--seed 1] [--cuts 8]
                                           [--boxes 40]

The routes come from the broker's OpenAPI document; a route without a recipe here misses a bar. A request without a
complete response is sent again until it has one, and its effect must have happened exactly once. Then owners work with
many boxes over a network that breaks connections at random, judged as `campaigns.faults.broker_crash` judges. Prints
figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.faults.broker.client import Client, RefusedError, client
from campaigns.faults.broker.lives import script
from campaigns.faults.broker.recipes import RECIPES, Call, Check, Scene
from campaigns.faults.broker.stage import DATABASES, PROVIDERS, Stage, database, stage
from campaigns.faults.broker_crash import AT_ONCE, Play, judged
from tests.sandbox.unreliable_network import Relay, relay

COPIES = 3
ANSWER_S = 120.0
"""The time limit of a request with its repetitions."""


class Breaking(Relay):
    """Breaks connections at random bytes."""

    def __init__(self, port: int, draw: random.Random, share: float) -> None:
        super().__init__(port)
        self._draw, self._share = draw, share

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        breaks = self._draw.random() < self._share
        place = int(10 ** self._draw.uniform(0, 4.5)) if breaks else None
        # The base class reads these before it awaits anything, so each connection gets its own values.
        self.cut_requests_after, self.cut_answers_after = (place, None) if self._draw.random() < 0.4 else (None, place)
        await super()._serve(reader, writer)


async def described(broker_url: str, calls: Client) -> list[str]:
    async with calls.session.get(f"{broker_url}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


async def every_route(
    folder: Path, *, provider: str, settings: dict[str, Any], seed: int, cuts: int
) -> tuple[dict[str, Any], list[Bar]]:
    """Call each route with cuts in its request and in its response, and with several copies at once."""
    draw = random.Random(seed)
    wrong: list[str] = []
    tried: Counter[str] = Counter()
    async with stage(folder, provider, settings) as set_up, client(set_up.broker.url) as direct:
        play = Play(set_up, direct)
        await play.start()
        routes = await described(set_up.broker.url, direct)
        scene = Scene(set_up, direct)
        scene.box, scene.token = await scene.create()
        # Each request has its own connection, because bytes are counted from the beginning of a connection.
        async with relay(set_up.broker.port) as network, client(network.url, fresh=True) as shaken:
            for name in routes:
                if name in RECIPES:
                    wrong += [f"{name}: {error}" for error in await _shake(scene, name, network, shaken, draw, cuts)]
                    tried[name] += 1
            broken, cut = shaken.broken, network.connections
        play.promises.closed |= scene.gone
        left = await play.finish()
    figures, bars = judged(play, "routes", left)
    missing = sorted(set(routes) - RECIPES.keys())
    bars += [
        Bar.at_most("routes: without a recipe", len(missing), 0),
        Bar.at_most("routes: effects that are not there exactly once", len(wrong), 0),
        Bar.at_least("routes: requests broken", broken, cuts * len(tried)),
    ]
    figures |= {"routes": len(routes), "connections": cut, "broken": broken, "wrong_effects": wrong[:10]}
    return {**figures, "missing": missing}, bars


async def _shake(scene: Scene, name: str, network: Relay, shaken: Client, draw: random.Random, cuts: int) -> list[str]:
    wrong = []
    for number in range(2 * cuts):
        call, check = await RECIPES[name](scene)
        request_bytes = 250 + len(call.path) + sum(map(len, call.headers.values())) + len(call.data or b"")
        network.cuts, network.max_cuts = 0, draw.randint(1, 3)
        network.cut_requests_after = network.cut_answers_after = None
        if number % 2:
            # Cut before the first byte, then after it, then anywhere: small responses are mostly headers.
            network.cut_answers_after = (0, 1)[number // 2] if number < 4 else int(10 ** draw.uniform(0, 3.2))
        else:
            network.cut_requests_after = 1 if number == 0 else draw.randrange(1, request_bytes)
        wrong += await _sent(shaken, call, check, copies=1, what=f"cut {number}")
    network.cut_requests_after = network.cut_answers_after = None
    for _ in range(max(1, cuts // 2)):
        call, check = await RECIPES[name](scene)
        wrong += await _sent(shaken, call, check, copies=COPIES, what="copies")
    return wrong


async def _sent(shaken: Client, call: Call, check: Check, *, copies: int, what: str) -> list[str]:
    try:
        async with asyncio.timeout(ANSWER_S):
            answers = await asyncio.gather(
                *(shaken.final(call.method, call.path, call.headers, call.data) for _ in range(copies))
            )
            problem = await check(answers)
    except RefusedError as error:
        problem = str(error)
    except TimeoutError:
        problem = f"no answer within {ANSWER_S:g} s"
    return [f"{what}: {problem}"] if problem else []


async def shaken_work(
    folder: Path, *, provider: str, settings: dict[str, Any], seed: int, boxes: int
) -> tuple[dict[str, Any], list[Bar]]:
    """Let owners work over a network that breaks a third of the connections."""
    draw = random.Random(seed)
    async with stage(folder, provider, settings) as set_up:
        network = Breaking(set_up.broker.port, random.Random(draw.random()), share=0.33)
        await network.start()
        try:
            async with client(network.url, fresh=True) as calls:
                play = Play(set_up, calls)
                await play.start()
                room = asyncio.Semaphore(AT_ONCE)
                lives = [play.life(draw, script(draw)) for _ in range(boxes)]

                async def play_life(number: int) -> None:
                    async with room:
                        await lives[number].play()

                await asyncio.gather(*(play_life(number) for number in range(boxes)))
                left = await _finish(play, set_up)
        finally:
            await network.stop()
    figures, bars = judged(play, f"{boxes} shaken boxes", left)
    bars.append(Bar.at_least(f"{boxes} shaken boxes: connections broken", network.cuts, boxes))
    return {"boxes": boxes, "connections": network.connections, "cut": network.cuts, **figures}, bars


async def _finish(play: Play, set_up: Stage) -> dict[str, list[str]]:
    """Finish over an undisturbed network: this compares what was received and does not test the network."""
    async with client(set_up.broker.url) as direct:
        direct.asked, direct.broken = play.client.asked, play.client.broken
        play.client = direct
        return await play.finish()


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--provider", choices=PROVIDERS, default="local")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=8, help="in requests and in answers of each route")
    parser.add_argument("--boxes", type=int, default=40)
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(3600, exit=True)  # a campaign that hangs prints where
    figures: dict[str, Any] = {name: getattr(chosen, name) for name in ("database", "provider", "seed")}
    bars: list[Bar] = []
    common = {"provider": chosen.provider, "seed": chosen.seed}
    for name, part, size in (
        ("every_route", every_route, {"cuts": chosen.cuts}),
        ("shaken_work", shaken_work, {"boxes": chosen.boxes}),
    ):
        with tempfile.TemporaryDirectory(prefix="broker-wire-") as place, database(chosen.database) as settings:
            new_figures, new_bars = asyncio.run(part(Path(place), settings=settings, **common, **size))
        figures[name], bars = new_figures, bars + new_bars
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
