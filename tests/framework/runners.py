"""Runners as a trainer's user writes them, found by their import path."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import requests

from nemo_gym.framework import SessionHandle

calls_seen: list[dict[str, Any]] = []
in_flight: dict[str, int] = {}
most: dict[str, int] = {}
hanging: asyncio.Event | None = None


def reset() -> None:
    calls_seen.clear()
    in_flight.clear()
    most.clear()


async def chat(session: SessionHandle, raw_prompt: Any, **body: Any) -> str:
    async with aiohttp.ClientSession() as http:
        url = f"{session.base_url}/chat/completions"
        async with http.post(url, json={"model": "any", "messages": raw_prompt, **body}) as reply:
            if reply.status != 200:
                raise RuntimeError(f"the gateway answered {reply.status}: {await reply.text()}")
            answer = await reply.json()
    return str(answer["choices"][0]["message"]["content"])


async def post_reward(session: SessionHandle, reward_info: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.post(session.complete_url, json={"reward_info": reward_info}) as reply:
            assert reply.status == 200, await reply.text()


async def calls(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """One call, and a reward of 1."""
    calls_seen.append({"session": session, "raw_prompt": raw_prompt, "sample_index": sample_index, **kwargs})
    await chat(session, raw_prompt)
    await post_reward(session, kwargs.get("reward_info") or {"reward": 1.0})


class Counting:
    """A class: how many of its sessions are under way at once."""

    def __init__(self, label: str = "counting", turns: int = 3) -> None:
        self.label = label
        self.turns = turns

    async def __call__(self, *, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
        in_flight[self.label] = in_flight.get(self.label, 0) + 1
        most[self.label] = max(most.get(self.label, 0), in_flight[self.label])
        calls_seen.append({"label": self.label, "sample_index": sample_index, **kwargs})
        try:
            for _ in range(self.turns):
                await chat(session, raw_prompt)
            await post_reward(session, {"score": 0.5})
        finally:
            in_flight[self.label] -= 1


async def fails_for(
    *, session: SessionHandle, raw_prompt: Any, sample_index: int, failing: list[int], **kwargs: Any
) -> None:
    """Fails for some prompts, after a call."""
    await chat(session, raw_prompt)
    if sample_index in failing:
        raise ValueError("the agent broke")
    await post_reward(session, {"reward": 1.0, "acc": 0.5})


async def fails_once_per_prompt(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """The first session of each prompt fails."""
    is_first = sample_index not in [call["sample_index"] for call in calls_seen]
    calls_seen.append({"session": session, "sample_index": sample_index})
    await chat(session, raw_prompt)
    if is_first:
        raise ValueError("the agent broke")
    await post_reward(session, {"reward": 1.0})


async def two_conversations(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """A main conversation of two turns, and a sub-agent between them."""
    first = await chat(session, raw_prompt)
    await chat(session, [{"role": "user", "content": "sub-agent"}])
    more = [*raw_prompt, {"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    await chat(session, more)
    await post_reward(session, kwargs.get("reward_info") or {"reward": 0.25})


async def posts_nothing(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    await chat(session, raw_prompt)


async def says_nothing(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """Never calls the model."""


async def blocks(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """Blocking HTTP inside an async function, as published recipes have it."""
    url = f"{session.base_url}/chat/completions"
    reply = requests.post(url, json={"model": "any", "messages": raw_prompt}, timeout=60)  # noqa: ASYNC210
    reply.raise_for_status()
    done = requests.post(session.complete_url, json={"reward_info": {"score": 1.0}}, timeout=60)  # noqa: ASYNC210
    done.raise_for_status()


async def hangs(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    await chat(session, raw_prompt)
    calls_seen.append({"session": session, "sample_index": sample_index})
    await asyncio.Event().wait()


async def asks_for_its_own(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    await chat(session, raw_prompt, temperature=1.5, top_p=0.1)
    await post_reward(session, {"reward": 1.0})


async def notes_its_process(
    *, session: SessionHandle, raw_prompt: Any, sample_index: int, folder: str, failing: int | None = None, **_: Any
) -> None:
    """For Ray tasks: which process ran it, and that this module was imported there."""
    with (Path(folder) / "processes").open("a") as file:
        file.write(f"{os.getpid()} {sample_index}\n")
    await chat(session, raw_prompt)
    if sample_index == failing:
        raise ValueError("the agent broke")
    await post_reward(session, {"reward": 1.0})


class NeedsLabel:
    def __init__(self, *, label: str) -> None:
        self.label = label

    async def __call__(self, **_: Any) -> None: ...


def not_async(**_: Any) -> None: ...


async def rewards_in_turn(
    *, session: SessionHandle, raw_prompt: Any, sample_index: int, failing: int | None = None, **_: Any
) -> None:
    """0 for even places of a batch, 1 for odd ones; fails at one."""
    await chat(session, raw_prompt)
    if sample_index == failing:
        raise ValueError("the agent broke")
    await post_reward(session, {"reward": float(sample_index % 2)})


async def quotes_its_addresses(*, session: SessionHandle, raw_prompt: Any, sample_index: int, **kwargs: Any) -> None:
    """As HTTP clients do in their errors."""
    addresses = (session.base_url, session.complete_url)
    calls_seen.append({"tokens": [url.split("/token/")[1].split("/")[0] for url in addresses]})
    raise ValueError(f"cannot reach {session.base_url} nor {session.complete_url}")
