#!/usr/bin/env python3
"""Disconnect from the gateway after every byte of a response, in every dialect, and send the request again.

    python -m campaigns.faults.gateway_disconnect --json [--stride 1] [--dialects chat responses messages]

A client that did not read the whole response gets the same one again, sampled once. A client that disconnects during
sampling ends the sampling, and the session is unchanged. Prints figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.faults.gateway.clients import Client, connector
from campaigns.faults.gateway.harness import PATHS, Conversation, Received
from campaigns.faults.gateway.processes import EngineProcess, GatewayProcess, policy_in
from campaigns.faults.gateway.wire import Call, Leave
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym_testing.gateway.tiny.log import EngineCall, read_log

PARTS = ("every_byte", "while_sampling", "streams_with_pings")
WORKERS = 8
_TAG = re.compile(r"session-\d+")
_ANSWER_EVENT = re.compile(
    rb'"(?:content|reasoning_content)":"[^"]|"type":"(?:response.output_item.added|content_block_start)"'
)
"""Bytes that no stream contains before the model's response begins."""
MAX_TOKENS = 64
ANSWER = {"rules": [{"steps": [{"think": "Brief.", "say": "Twenty-two — вот и всё. 三"}]}]}
"""Always the same text, so that every stream of a dialect is equally long. The tokens and logprobs are still the
model's own."""


@dataclass
class Setting:
    """A gateway, its engine, and how sessions are opened."""

    gateway: GatewayProcess
    engine: EngineProcess
    http: aiohttp.ClientSession
    policy: PolicyTokenizer
    opened: int = 0

    async def session(self, dialect: Dialect) -> Client:
        client = Client(self.opened, self.gateway, self.http, dialect, True, True, MAX_TOKENS)
        self.opened += 1
        await client.open()
        return client

    async def send(self, client: Client, body: dict[str, Any], *, retry: bool = False) -> Call:
        headers = {"Authorization": f"Bearer {client.opened['inference_token']}"}
        if retry:
            headers["x-stainless-retry-count"] = "1"
        path = f"/sessions/{client.opened['session_id']}/v1{PATHS[client.dialect]}"
        return await Call.send(self.gateway.port, path, body, headers)

    def calls(self) -> dict[str, list[EngineCall]]:
        """The engine's calls by session tag."""
        calls_by_tag: dict[str, list[EngineCall]] = {}
        for call in read_log(self.engine.log):
            tags = _TAG.findall(self.policy.decode(call.prompt_ids.tolist()))
            calls_by_tag.setdefault(tags[-1], []).append(call)
        return calls_by_tag


@asynccontextmanager
async def setting(folder: Path, *options: str, **block: Any) -> AsyncIterator[Setting]:
    folder.mkdir(exist_ok=True)
    policy = policy_in(folder)
    script = folder / "script.json"
    script.write_text(json.dumps(ANSWER))
    engine = EngineProcess(policy, folder / "engine.jsonl", "--script", str(script), *options)
    gateway = GatewayProcess(folder, [engine.url], policy, **block)
    try:
        gateway.start()
        async with aiohttp.ClientSession(connector=connector()) as http:
            yield Setting(gateway, engine, http, PolicyTokenizer.load(policy))
    finally:
        gateway.close()
        engine.stop()


@dataclass
class Outcome:
    """The results of one or more cuts."""

    cuts: int = 0
    same: int = 0
    resampled: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """The retry's bytes do not begin with those that were read before."""
    inconsistent: list[str] = field(default_factory=list)
    """Cuts after which turns or engine calls are not as they must be."""
    tags: set[str] = field(default_factory=set)
    """The tags of the sessions that sampled again."""


async def cut_and_retry(
    there: Setting, dialect: Dialect, count: int | None, *, how: Leave, retry: bool, outcome: Outcome, whole: bool
) -> int:
    """Read ``count`` bytes of a response (``None``: all), disconnect, repeat the request; return how many bytes were
    read. ``retry``: the repeated request has a retry count. ``whole``: the repeated request asks for no stream."""
    client = await there.session(dialect)
    conversation = Conversation(dialect)
    conversation.user(f"{client.tag} says something")
    body = conversation.body(stream=True, max_tokens=MAX_TOKENS)
    call = await there.send(client, body)
    if count is None:
        await call.whole()
    else:
        await call.read_bytes(count)
    length = len(call.read)
    call.leave(how)
    if count is not None and call.is_whole:  # its times have fewer digits than the measured ones: nothing was cut
        return length
    again = conversation.body(stream=not whole, max_tokens=MAX_TOKENS)
    second = await there.send(client, again, retry=retry)
    status, data = await second.whole()
    second.leave(Leave.CLOSE)
    where = f"{dialect}, {count} bytes, {how}"
    outcome.cuts += 1
    if status != 200 or (received := conversation.received(data, stream=not whole)) is None:
        outcome.inconsistent.append(f"{where}: answered {status}: {data[:200]!r}")
        return length
    _, _, begun = call.read.partition(b"\r\n\r\n")
    if not whole and not data.startswith(begun):
        outcome.different.append(where)
    await _check(client, received, outcome, where)
    return length


async def _check(client: Client, received: Received, outcome: Outcome, where: str) -> None:
    summary = await client.finalize()
    turns = [turn["details"]["call_id"] for row in summary["trajectories"] for turn in row["turns"]]
    if len(turns) == 1 and turns == [received.call_id]:
        outcome.same += 1
    elif len(turns) == 2:
        outcome.resampled.append(where)
        outcome.tags.add(client.tag)
    else:
        outcome.inconsistent.append(f"{where}: turns {turns}, received {received.call_id}")


async def every_byte(folder: Path, dialects: Sequence[Dialect], stride: int) -> tuple[dict[str, Any], list[Bar]]:
    """Cut responses that are complete before the gateway sends their first byte."""
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    resampled: set[str] = set()
    async with setting(folder) as there:
        for dialect in dialects:
            length = await cut_and_retry(
                there, dialect, None, how=Leave.CLOSE, retry=True, outcome=Outcome(), whole=False
            )
            for how, retry in ((Leave.CLOSE, False), (Leave.RESET, False), (Leave.HALF, True)):
                outcome = Outcome()
                cut = partial(cut_and_retry, there, dialect, how=how, retry=retry, outcome=outcome)
                await _together([partial(cut, at, whole=at % 3 == 2) for at in range(0, length, stride)])
                name = f"{dialect}/{how}"
                figures[name] = {"stream_bytes": length, "cuts": outcome.cuts, "same_answer": outcome.same}
                bars += _bars(name, outcome, figures[name])
            # The gateway cannot tell such a caller from one that read everything: only a retry count would help.
            silent = Outcome()
            cut = partial(cut_and_retry, there, dialect, how=Leave.HALF, retry=False, outcome=silent, whole=False)
            await _together([partial(cut, at) for at in range(0, length, 16 * stride)])
            figures[f"{dialect}/half, without saying that it retries"] = {
                "cuts": silent.cuts,
                "same_answer": silent.same,
                "sampled_again": len(silent.resampled),
            }
            resampled |= silent.tags
            bars.append(Bar.at_most(f"{dialect}/half, untold: inconsistent sessions", len(silent.inconsistent), 0))
        calls = there.calls()
    answered = [sum(call.answered for call in of_session) for tag, of_session in calls.items() if tag not in resampled]
    figures["engine_outcomes"] = dict(Counter(call.outcome for of_session in calls.values() for call in of_session))
    bars.append(Bar.at_most("sessions whose answer was not sampled once", sum(n != 1 for n in answered), 0))
    return figures, bars


def _bars(name: str, outcome: Outcome, figures: dict[str, Any]) -> list[Bar]:
    for kind in ("resampled", "different", "inconsistent"):
        if examples := getattr(outcome, kind):
            figures[kind] = examples[:5]
    return [
        Bar.at_most(f"{name}: sampled again", len(outcome.resampled), 0),
        Bar.at_most(f"{name}: another answer than before", len(outcome.different), 0),
        Bar.at_most(f"{name}: inconsistent sessions", len(outcome.inconsistent), 0),
    ]


async def while_sampling(folder: Path, dialects: Sequence[Dialect], rounds: int) -> tuple[dict[str, Any], list[Bar]]:
    """Disconnect before the response is sampled: before the headers, and between pings."""
    outcome = Outcome()
    pinged = 0
    options = ("--first-token-delay", "0.25", "--tokens-per-second", "40")
    block = {"first_event_grace_s": 0.05, "ping_interval_s": 0.02}
    async with setting(folder, *options, **block) as there:

        async def disconnect(number: int) -> None:
            nonlocal pinged
            dialect, how = dialects[number % len(dialects)], [*Leave][number // len(dialects) % 3]
            client = await there.session(dialect)
            conversation = Conversation(dialect)
            conversation.user(f"{client.tag} says something")
            stream = number % 4 != 3
            call = await there.send(client, conversation.body(stream=stream, max_tokens=MAX_TOKENS))
            await _until(lambda: client.tag in there.calls())
            if stream and number % 2:
                await call.read_bytes(200 + number)  # the headers, and into the pings
                pinged += 1
            call.leave(how)
            await _until(lambda: there.calls()[client.tag][0].outcome != "killed")
            state = await client.state()
            where = f"{dialect}, {how}, {'stream' if stream else 'whole'}"
            if (state["turns"], state["in_flight"]) != (0, 0):
                outcome.inconsistent.append(f"{where}: {state}")
            second = await there.send(client, conversation.body(stream=stream, max_tokens=MAX_TOKENS))
            status, data = await second.whole()
            second.leave(Leave.CLOSE)
            received = conversation.received(data, stream=stream)
            summary = await client.finalize()
            # An engine logs the end of a call after it has sent the last byte.
            await _until(lambda: all(call.outcome != "killed" for call in there.calls()[client.tag]))
            calls = there.calls()[client.tag]
            rows = summary["trajectories"]
            kept_ids = [list(row["response_ids"]) for row in rows]
            outcome.cuts += 1
            if status != 200 or received is None or [call.outcome for call in calls] != ["cancelled", "answered"]:
                outcome.inconsistent.append(f"{where}: {status}, engine: {[call.outcome for call in calls]}")
            elif kept_ids != [calls[1].token_ids.tolist()]:
                outcome.inconsistent.append(f"{where}: the trajectory is not what the second call sampled")
            else:
                outcome.same += 1

        await _together([partial(disconnect, number) for number in range(rounds)])
        left = [call for calls in there.calls().values() for call in calls if call.outcome == "killed"]
    figures = {"callers_that_left": outcome.cuts, "of_them_after_headers": pinged, "clean": outcome.same}
    if outcome.inconsistent:
        figures["inconsistent"] = outcome.inconsistent[:5]  # type: ignore[assignment]
    return figures, [
        Bar.at_most("while sampling: sessions that were changed", len(outcome.inconsistent), 0),
        Bar.at_most("while sampling: engine calls still running", len(left), 0),
    ]


async def while_streaming(folder: Path, dialects: Sequence[Dialect], stride: int) -> tuple[dict[str, Any], list[Bar]]:
    """Cut a stream that begins with pings at every byte: wherever the cut is, exactly one turn is kept."""
    outcome = Outcome()
    sampled_twice = after_its_beginning = 0
    options = ("--first-token-delay", "0.1")
    block = {"first_event_grace_s": 0.02, "ping_interval_s": 0.02}
    async with setting(folder, *options, **block) as there:

        async def disconnect(dialect: Dialect, at: int, *, into_the_answer: bool = False) -> None:
            nonlocal sampled_twice, after_its_beginning
            client = await there.session(dialect)
            conversation = Conversation(dialect)
            conversation.user(f"{client.tag} says something")
            body = conversation.body(stream=True, max_tokens=MAX_TOKENS)
            call = await there.send(client, body)
            while into_the_answer and _ANSWER_EVENT.search(call.read) is None:
                await call.read_bytes(1)
            await call.read_bytes(at)
            call.leave(Leave.CLOSE)
            if call.is_whole:  # fewer pings than in the measured stream: nothing was cut, and a repeat is a new turn
                return
            second = await there.send(client, body)
            status, data = await second.whole()
            second.leave(Leave.CLOSE)
            where = f"{dialect}, {at} bytes"
            outcome.cuts += 1
            if status != 200 or conversation.received(data, stream=True) is None:
                outcome.inconsistent.append(f"{where}: answered {status}: {data[-200:]!r}")
                return
            summary = await client.finalize()
            kept_calls = [turn["details"]["call_id"] for row in summary["trajectories"] for turn in row["turns"]]
            # An engine logs the end of a call after it has sent the last byte.
            await _until(lambda: all(call.outcome != "killed" for call in there.calls()[client.tag]))
            calls = there.calls()[client.tag]
            answered = [str(call.request_id)[:32] for call in calls if call.outcome == "answered"]
            sampled_twice += len(calls) > 1
            begun = _ANSWER_EVENT.search(call.read) is not None
            after_its_beginning += begun
            outcomes = [call.outcome for call in calls]
            if len(kept_calls) != 1 or kept_calls[0] not in answered:
                outcome.inconsistent.append(f"{where}: {len(kept_calls)} turns, engine: {outcomes}")
            elif len(calls) > 1 and begun:
                outcome.resampled.append(f"{where}: engine: {outcomes}")
            else:
                outcome.same += 1

        for dialect in dialects:
            client = await there.session(dialect)
            conversation = Conversation(dialect)
            conversation.user(f"{client.tag} says something")
            call = await there.send(client, conversation.body(stream=True, max_tokens=MAX_TOKENS))
            await call.whole()
            length = len(call.read)
            call.leave(Leave.CLOSE)
            # The number of pings varies; 600 bytes are longer than a ping.
            anywhere = [partial(disconnect, dialect, at) for at in range(0, length - 600, stride)]
            # Under load more pings come before the response, so that cuts counted from the start may all miss it.
            behind = [partial(disconnect, dialect, at, into_the_answer=True) for at in range(0, 120, 40)]
            await _together([*anywhere, *behind])
    figures: dict[str, Any] = {
        "cuts": outcome.cuts,
        "one_turn": outcome.same,
        "left_after_the_answer_had_begun": after_its_beginning,
        "left_before_the_answer_and_sampled_anew": sampled_twice,
    }
    if outcome.inconsistent:
        figures["inconsistent"] = outcome.inconsistent[:5]
    if outcome.resampled:
        figures["resampled"] = outcome.resampled[:5]
    return figures, [
        Bar.at_most("streams with pings: inconsistent sessions", len(outcome.inconsistent), 0),
        Bar.at_most("streams with pings: sampled again after the answer had begun", len(outcome.resampled), 0),
    ]


async def _together(works: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    waiting = list(reversed(works))

    async def worker() -> None:
        while waiting:
            await waiting.pop()()

    await asyncio.gather(*(worker() for _ in range(WORKERS)))


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stride", type=int, default=1, help="cut at every n-th byte")
    parser.add_argument("--rounds", type=int, default=72, help="callers that leave while their answer is sampled")
    parser.add_argument("--dialects", nargs="+", type=Dialect, default=[*Dialect], choices=[*Dialect])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(3000, exit=True)  # a campaign that hangs prints where
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="gateway-disconnect-") as name:
        folder = Path(name)
        works = {
            "every_byte": lambda: every_byte(folder / "a", chosen.dialects, chosen.stride),
            "while_sampling": lambda: while_sampling(folder / "b", chosen.dialects, chosen.rounds),
            "streams_with_pings": lambda: while_streaming(folder / "c", chosen.dialects, chosen.stride * 4),
        }
        for part in chosen.parts:
            figures[part], new_bars = asyncio.run(works[part]())
            bars += new_bars
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
