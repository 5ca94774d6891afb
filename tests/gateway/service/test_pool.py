"""Engines that come, go and change while calls run, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from nemo_gym.contract.errors import ConfigError, ModelError
from nemo_gym.gateway.engines import EngineConfig, Generation, Sampling, TokenRequest
from nemo_gym.gateway.engines.calls import RetryConfig
from nemo_gym.gateway.engines.pool import EngineKind, EnginePool
from nemo_gym.gateway.engines.router import RoutingConfig
from nemo_gym_testing.gateway import FakeEngine, FakeOpenAIEngine, FakeSglangEngine, FakeVllmEngine, Hang, Status

CONFIG: TypeAdapter[Any] = TypeAdapter(EngineConfig)
_numbers = itertools.count()


def config(fake: FakeEngine, name: str, **options: Any) -> Any:
    kinds = {FakeVllmEngine: "vllm", FakeSglangEngine: "sglang", FakeOpenAIEngine: "openai"}
    return CONFIG.validate_python({"type": kinds[type(fake)], "base_url": fake.url, "name": name, **options})


def request() -> TokenRequest:
    return TokenRequest(f"r{next(_numbers)}", [5, 6, 7], Sampling(8))


def engine_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(engine for engine in status["engines"] if engine["name"] == name)


async def test_pool_spreads_calls_over_engines_of_different_wires() -> None:
    async with FakeVllmEngine() as one, FakeSglangEngine() as two:
        async with EnginePool([config(one, "one"), config(two, "two")]) as pool:
            assert pool.kind == "token"
            seen = Counter([(await pool.token_calls.generate(None, request())).engine for _ in range(10)])
    assert seen == {"one": 5, "two": 5}


async def test_text_pool_passes_bodies() -> None:
    async with FakeOpenAIEngine() as fake, EnginePool([config(fake, "one")]) as pool:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        reply = await pool.text_calls.call("s", lambda engine: engine.complete("/chat/completions", body))
    assert pool.kind == "text" and orjson.loads(reply.body)["choices"] and reply.engine == "one"


async def test_kinds_do_not_mix() -> None:
    async with FakeVllmEngine() as token, FakeOpenAIEngine() as text:
        with pytest.raises(ConfigError, match=r"'a' \(vllm\) takes token ids, 'b' \(openai\) takes text; use one"):
            EnginePool([config(token, "a"), config(text, "b")])
        async with EnginePool(kind="token") as pool:
            with pytest.raises(ConfigError, match=r"'b' \(openai\) takes text; this gateway's engines take token ids"):
                pool.add(config(text, "b"))
            with pytest.raises(ConfigError, match="token ids, not text"):
                pool.text_calls  # noqa: B018


@pytest.mark.parametrize("kind", ["token", "text"])
async def test_pool_can_begin_empty(kind: EngineKind) -> None:
    async with EnginePool(kind=kind) as pool:
        assert pool.kind == kind
    with pytest.raises(ConfigError, match="kind must be given"):
        EnginePool()


async def test_name_given_twice_is_an_error_that_says_it() -> None:
    async with FakeVllmEngine() as fake:
        with pytest.raises(ConfigError, match="2 engines have the name 'a'"):
            EnginePool([config(fake, "a"), config(fake, "a")])
        async with EnginePool([config(fake, "a")]) as pool:
            with pytest.raises(ConfigError, match="'a' already"):
                pool.add(config(fake, "a"))


async def test_status_is_plain_data_without_secrets() -> None:
    async with FakeVllmEngine() as fake:
        secret = config(fake, "a", api_key="sk-secret", headers={"x-token": "sk-other"}, weight=2.5)
        async with EnginePool([secret]) as pool:
            await pool.token_calls.generate("s", request())
            status = orjson.loads(orjson.dumps(pool.status()))
    engine = engine_of(status, "a")
    assert engine["state"] == "up" and engine["placed"] == 1 and engine["in_flight"] == 0 and engine["sessions"] == 1
    assert engine["type"] == "vllm" and engine["base_url"] == fake.url and engine["weight"] == 2.5
    assert status["kind"] == "token" and status["waiting"] == 0 and "sk-" not in str(status)


async def test_pool_is_ready_when_an_engine_is_in_service(eventually: Callable[..., Any]) -> None:
    fake = FakeVllmEngine()
    await fake.start()
    gone = config(fake, "a")
    await fake.stop()
    pool = EnginePool([gone], routing=RoutingConfig(probe_interval_s=0.02))
    missing = pool.ready()
    assert missing is not None and "not been probed" in missing["reason"]
    async with pool:
        await eventually(lambda: "no engine is in service" in (pool.ready() or {}).get("reason", ""))
        missing = pool.ready()
        assert missing is not None and "is it running" in missing["engines"]["a"]
        await fake.start()
        try:
            await eventually(lambda: pool.ready() is None)
            pool.router.replica("a").draining = True
            missing = pool.ready()
            assert missing is not None and "no engine is in service" in missing["reason"]
        finally:
            await fake.stop()
        await pool.remove("a")
        missing = pool.ready()
        assert missing is not None and "POST /engines" in missing["reason"]


async def test_removed_engine_finishes_its_calls_when_it_is_given_time(eventually: Callable[..., Any]) -> None:
    async with FakeVllmEngine() as fake, FakeVllmEngine() as other:
        async with EnginePool([config(fake, "a")]) as pool:
            fake.gate.clear()
            call = asyncio.create_task(pool.token_calls.generate("s", request()))
            await eventually(lambda: len(fake.calls) == 1)
            pool.add(config(other, "b"))
            removing = asyncio.create_task(pool.remove("a", drain_timeout_s=30.0))
            await eventually(lambda: engine_of(pool.status(), "a")["draining"])
            assert (await pool.token_calls.generate("s", request())).engine == "b"
            assert not removing.done()
            fake.gate.set()
            assert (await call).engine == "a"
            await removing
            assert [engine["name"] for engine in pool.status()["engines"]] == ["b"]


async def test_running_calls_go_on_elsewhere_when_their_engine_is_removed() -> None:
    async with FakeVllmEngine() as fake, FakeVllmEngine() as other:
        async with EnginePool([config(fake, "a")], retries=RetryConfig(keep_partial_answers=True)) as pool:
            fake.event_gate = asyncio.Semaphore(3)  # three tokens, then silence
            items = pool.token_calls.stream("s", request())
            read: list[int] = []
            while len(read) < 3:
                read += (await anext(items)).token_ids
            pool.add(config(other, "b"))
            await pool.remove("a")
            *_, answer = [item async for item in items]
    assert isinstance(answer, Generation)
    assert [(part.engine, part.tokens) for part in answer.segments] == [("a", 3), ("b", 5)]
    assert answer.token_ids == fake.calls[0].token_ids[:3] + other.calls[0].token_ids
    assert other.calls[0].body["prompt"] == [5, 6, 7, *fake.calls[0].token_ids[:3]]


async def test_engine_that_came_back_without_the_model_gets_no_more_calls() -> None:
    """It answers faster than any other: while it was in service, it would draw most of the calls."""
    async with (
        FakeVllmEngine() as good,
        FakeVllmEngine() as bad,
        EnginePool([config(good, "good"), config(bad, "bad")]) as pool,
    ):
        bad.chance = lambda: Status(404, b'{"error": {"message": "The model `policy` does not exist.", "code": 404}}')
        answers = [await pool.token_calls.generate(f"s{number}", request()) for number in range(12)]
        assert {answer.engine for answer in answers} == {"good"}
        assert len(bad.calls) < 6 and "has no such model" in engine_of(pool.status(), "bad")["last_error"]


async def test_endpoint_that_does_not_list_its_models_comes_back_into_service(eventually: Callable[..., Any]) -> None:
    class Unlisted(FakeOpenAIEngine):
        HEALTH = "/nothing"

    async with Unlisted() as fake:
        named = CONFIG.validate_python({"type": "openai", "base_url": fake.url, "name": "a"})
        async with EnginePool([named], routing=RoutingConfig(probe_interval_s=0.02)) as pool:
            await fake.stop()
            await eventually(lambda: engine_of(pool.status(), "a")["state"] == "down")
            await fake.start()
            await eventually(lambda: engine_of(pool.status(), "a")["state"] == "trial")


async def test_engine_that_comes_back_with_a_shorter_context_is_asked_again(eventually: Callable[..., Any]) -> None:
    async with FakeVllmEngine() as fake:
        fake.max_model_len = 16_384
        async with EnginePool([config(fake, "a")], routing=RoutingConfig(probe_interval_s=0.02)) as pool:
            await eventually(lambda: pool.context_tokens == 16_384)
            await fake.stop()
            await eventually(lambda: engine_of(pool.status(), "a")["state"] == "down")
            fake.max_model_len = 4_096
            await fake.start()
            await eventually(lambda: pool.context_tokens == 4_096)


async def test_added_engine_is_asked_for_its_context_although_it_gets_calls_at_once(
    eventually: Callable[..., Any],
) -> None:
    async with FakeVllmEngine() as fake, FakeVllmEngine() as other:
        seldom = RoutingConfig(probe_interval_s=3600)  # as seldom as engines are probed that answer calls
        async with EnginePool([config(fake, "a")], routing=seldom) as pool:
            await eventually(lambda: pool.ready() is None)
            other.max_model_len = 4_096
            pool.add(config(other, "b"))
            assert {(await pool.token_calls.generate(None, request())).engine for _ in range(4)} == {"a", "b"}
            await eventually(lambda: pool.context_tokens == 4_096)


async def test_two_removals_of_one_engine_leave_one_engine_less(eventually: Callable[..., Any]) -> None:
    async with FakeVllmEngine() as fake, EnginePool([config(fake, "a"), config(fake, "b", weight=0.01)]) as pool:
        fake.gate.clear()
        call = asyncio.create_task(pool.token_calls.generate(None, request()))
        await eventually(lambda: len(fake.calls) == 1)
        removals = [asyncio.create_task(pool.remove("a", 30.0)) for _ in range(2)]
        await eventually(lambda: engine_of(pool.status(), "a")["draining"])
        fake.gate.set()
        assert (await call).engine == "a"
        await asyncio.gather(*removals)
        assert [engine["name"] for engine in pool.status()["engines"]] == ["b"]
        with pytest.raises(ConfigError, match="there is no engine 'a'; there are: b"):
            await pool.remove("a")


IMPATIENT = RoutingConfig(probe_interval_s=0.02, silence_s=0.2)


async def answer_of(pool: EnginePool, session: str) -> str:
    """Make one call; return the engine that answered it."""
    if pool.kind == "token":
        return (await pool.token_calls.generate(session, request())).engine
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return (await pool.text_calls.call(session, lambda engine: engine.complete("/chat/completions", body))).engine


@pytest.mark.parametrize("wire", [FakeVllmEngine, FakeSglangEngine, FakeOpenAIEngine])
async def test_sessions_leave_an_engine_that_hangs_and_still_answers_probes(
    wire: type[FakeEngine], eventually: Callable[..., Any]
) -> None:
    async with (
        wire() as sick,
        wire() as well,
        EnginePool([config(sick, "sick"), config(well, "well")], routing=IMPATIENT) as pool,
    ):
        homes = {await answer_of(pool, session): session for session in ("s0", "s1")}
        pool.router.pin("pinned", "sick")
        sick.gate.clear()
        stuck = asyncio.create_task(answer_of(pool, homes["sick"]))
        await eventually(lambda: engine_of(pool.status(), "sick")["state"] == "silent")
        sessions = [homes["sick"], homes["well"], "pinned", *(f"new{number}" for number in range(8))]
        assert {await answer_of(pool, session) for session in sessions} == {"well"}
        assert not stuck.done() and "answered nothing" in engine_of(pool.status(), "sick")["last_error"]
        sick.gate.set()
        assert await stuck == "sick"
        assert await answer_of(pool, "pinned") == "sick"
        await eventually(lambda: engine_of(pool.status(), "sick")["state"] == "up")


async def test_engine_that_hangs_and_is_then_killed_gets_no_sessions_back(eventually: Callable[..., Any]) -> None:
    routing = RoutingConfig(probe_interval_s=0.1, silence_s=0.5)
    sick = FakeVllmEngine()
    await sick.start()
    async with FakeVllmEngine() as well:
        async with EnginePool([config(sick, "sick"), config(well, "well")], routing=routing) as pool:
            pool.router.pin("stuck", "sick")
            sick.gate.clear()
            stuck = asyncio.create_task(answer_of(pool, "stuck"))
            await eventually(lambda: engine_of(pool.status(), "sick")["state"] == "silent")
            for number in range(9):
                assert await answer_of(pool, f"s{number}") == "well"
            asked = len(sick.calls)
            await eventually(lambda: len(sick.calls) > asked)
            homes = [pool.router.home(f"s{number}") for number in range(9)]
            await sick.stop()
            await eventually(lambda: engine_of(pool.status(), "sick")["state"] != "silent")
            assert await stuck == "well"
            assert [pool.router.home(f"s{number}") for number in range(9)] == homes


async def test_engine_that_hangs_stays_out_however_many_calls_reach_their_limit(
    eventually: Callable[..., Any],
) -> None:
    async with FakeVllmEngine() as sick, FakeVllmEngine() as well:
        engines = [config(sick, "sick", request_timeout_s=0.05), config(well, "well")]
        async with EnginePool(engines, routing=IMPATIENT) as pool:
            sick.gate.clear()
            number = itertools.count()
            while engine_of(pool.status(), "sick")["state"] != "silent":
                assert await answer_of(pool, f"early{next(number)}") == "well", "tried there as well"
            stuck = [call for call in sick.calls if call.body["max_tokens"] > 1]
            probes = sick.probes
            for late in range(20):
                assert await answer_of(pool, f"late{late}") == "well"
            await eventually(lambda: sick.probes > probes + 3)
            assert engine_of(pool.status(), "sick")["state"] == "silent"
            assert [call for call in sick.calls if call.body["max_tokens"] > 1] == stuck


async def test_only_engine_keeps_its_calls_when_it_is_too_busy_to_answer(eventually: Callable[..., Any]) -> None:
    async with FakeVllmEngine() as busy, EnginePool([config(busy, "busy")], routing=IMPATIENT) as pool:
        busy.gate.clear()
        first = asyncio.create_task(answer_of(pool, "s0"))
        await eventually(lambda: engine_of(pool.status(), "busy")["state"] == "silent")
        second = asyncio.create_task(answer_of(pool, "s1"))
        await eventually(lambda: sum(call.body["max_tokens"] > 1 for call in busy.calls) == 2)
        assert pool.ready() is None
        busy.gate.set()
        assert [await first, await second] == ["busy", "busy"]
        await eventually(lambda: engine_of(pool.status(), "busy")["state"] == "up")


async def test_engine_with_one_long_answer_is_asked_for_a_token_and_keeps_its_sessions(
    eventually: Callable[..., Any],
) -> None:
    routing = RoutingConfig(probe_interval_s=0.1, silence_s=1.0)
    async with FakeVllmEngine() as slow, FakeVllmEngine() as other:
        async with EnginePool([config(slow, "slow"), config(other, "other")], routing=routing) as pool:
            pool.router.pin("s", "slow")
            slow.faults.append(Hang())
            long = asyncio.create_task(answer_of(pool, "s"))
            await eventually(lambda: sum(call.outcome == "answered" for call in slow.calls) == 2)
            assert engine_of(pool.status(), "slow")["state"] == "up" and slow.probes > 2 * 5, "probes outnumber tokens"
            assert await answer_of(pool, "s") == "slow" and not long.done()
            long.cancel()


async def test_weights_version_is_the_trainers_to_say() -> None:
    async with FakeVllmEngine() as fake, EnginePool([config(fake, "a"), config(fake, "b")]) as pool:
        pool.set_weights_version("step-1")
        assert (await pool.token_calls.generate(None, request())).weights.last == "step-1"
        with pytest.raises(ConfigError, match="no engine 'c'"):
            pool.set_weights_version("step-2", ["a", "c"])
        pool.set_weights_version("step-2", ["b"])
        assert [engine["weights_version"] for engine in pool.status()["engines"]] == ["step-1", "step-2"]


async def test_set_weights_version_outlives_the_process_until_another_is_configured(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"

    async def versions(*engines: Any, told: str | None = None) -> list[str | None]:
        pool = EnginePool(engines)
        await pool.start(file)
        if told is not None:
            pool.set_weights_version(told, ["a"])
        found = [engine["weights_version"] for engine in pool.status()["engines"]]
        await pool.aclose()
        return found

    async with FakeVllmEngine() as fake:
        a, b = config(fake, "a", weights_version="0"), config(fake, "b", weights_version="0")
        assert await versions(a, b) == ["0", "0"]
        assert await versions(a, b, told="7") == ["7", "0"]
        assert await versions(a, b) == ["7", "0"]
        assert await versions(config(fake, "a", weights_version="1"), b) == ["1", "0"]
        file.write_bytes(b"")  # a power loss
        assert await versions(a, b) == ["0", "0"]
        file.unlink()
        file.mkdir()
        with pytest.raises(ModelError, match="set it again"):
            await versions(a, b, told="8")


async def test_server_that_named_another_version_while_the_gateway_was_down_is_believed(tmp_path: Path) -> None:
    async with FakeSglangEngine(weights_version="default") as fake:
        engine = config(fake, "a")
        for reported, told, expected in (("default", "7", "default"), ("default", None, "7"), ("8", None, "8")):
            fake.weights_version = reported
            pool = EnginePool([engine])
            await pool.start(tmp_path / "weights.json")
            assert (await pool.token_calls.generate(None, request())).weights.last == expected
            if told is not None:
                pool.set_weights_version(told)
            await pool.aclose()


async def test_answer_tells_of_weights_that_changed_while_it_was_sampled(eventually: Callable[..., Any]) -> None:
    async with FakeVllmEngine() as fake, EnginePool([config(fake, "a", weights_version="v1")]) as pool:
        fake.gate.clear()
        call = asyncio.create_task(pool.token_calls.generate(None, request()))
        await eventually(lambda: len(fake.calls) == 1)
        pool.set_weights_version("v2")
        fake.gate.set()
        weights = (await call).weights
    assert (weights.first, weights.last) == ("v1", "v2")


async def test_closed_pool_leaves_nothing_running() -> None:
    async with FakeVllmEngine() as fake:
        before = asyncio.all_tasks()
        pool = EnginePool([config(fake, "a")])
        await pool.start()
        await pool.token_calls.generate("s", request())
        await pool.aclose()
        await pool.aclose()
        assert {task for task in asyncio.all_tasks() - before if "probe" in task.get_name()} == set()
