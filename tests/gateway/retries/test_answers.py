"""A retry at any moment gets the answer that was sampled; a resample after delivery gets a new one."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym.gateway.dialects.chat import request_fingerprint
from nemo_gym.gateway.live_session import AnswerState, Delivery, IdempotencyKeyError, Repeat, SessionAnswers

BODY = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.0}


class Session:
    """Samples numbered answers; each step can be held."""

    def __init__(self, **options: int) -> None:
        self.answers: SessionAnswers[str] = SessionAnswers(**options)
        self.sampled = 0
        self.committed: list[str] = []
        self.cancelled = 0
        self.sample_gate = asyncio.Event()
        self.commit_gate = asyncio.Event()
        self.sample_gate.set()
        self.commit_gate.set()
        self.sample_error: Exception | None = None
        self.commit_error: Exception | None = None

    async def sample(self) -> int:
        self.sampled += 1
        number = self.sampled
        try:
            await self.sample_gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.sample_error is not None:
            raise self.sample_error
        return number

    async def commit(self, number: int) -> str:
        await self.commit_gate.wait()
        if self.commit_error is not None:
            raise self.commit_error
        self.committed.append(f"answer {number}")
        return f"answer {number}"

    async def ask(
        self, fingerprint: str = "f", key: str | None = None, repeat: Repeat = Repeat.UNKNOWN
    ) -> Delivery[str]:
        return await self.answers.once(fingerprint, self.sample, self.commit, key=key, repeat=repeat)

    def start(self, fingerprint: str = "f", key: str | None = None) -> asyncio.Task[Delivery[str]]:
        return asyncio.create_task(self.ask(fingerprint, key))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def leave(task: asyncio.Task[Delivery[str]]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_retry_while_sampling_waits_for_the_same_answer() -> None:
    session = Session()
    session.sample_gate.clear()
    first, retry = session.start(), session.start()
    await turns()
    session.sample_gate.set()
    assert [(await first).answer, (await retry).answer] == ["answer 1", "answer 1"]
    assert session.sampled == 1 and session.committed == ["answer 1"]
    assert ((await first).repeated, (await retry).repeated) == (False, True)


async def test_first_caller_may_leave_while_its_retry_waits() -> None:
    session = Session()
    session.sample_gate.clear()
    first, retry = session.start(), session.start()
    await turns()
    await leave(first)
    session.sample_gate.set()
    assert (await retry).answer == "answer 1"
    assert (session.sampled, session.cancelled) == (1, 0)


async def test_sampling_is_cancelled_and_forgotten_when_all_callers_have_left() -> None:
    session = Session()
    session.sample_gate.clear()
    first, second = session.start(), session.start()
    await turns()
    await leave(first)
    assert session.cancelled == 0
    await leave(second)
    await turns()
    assert session.cancelled == 1 and session.committed == [] and session.answers.states == []
    session.sample_gate.set()
    assert (await session.ask()).answer == "answer 2"
    assert session.committed == ["answer 2"], "the abandoned call left nothing"


async def test_request_that_comes_as_the_last_caller_leaves_is_sampled_anew() -> None:
    session = Session()
    session.sample_gate.clear()
    first = session.start()
    await turns()
    first.cancel()
    retry = session.start()  # before the cancelled task has run
    await turns()
    session.sample_gate.set()
    assert (await retry).answer == f"answer {session.sampled}" and len(session.committed) == 1


async def test_commit_is_never_interrupted_and_its_answer_waits_for_the_retry() -> None:
    session = Session()
    session.commit_gate.clear()
    first = session.start()
    await turns()
    assert session.answers.states == [AnswerState.COMMITTING]
    await leave(first)
    retry = session.start()
    await turns()
    session.commit_gate.set()
    assert (await retry).answer == "answer 1" and (await retry).repeated
    assert session.committed == ["answer 1"]


async def test_commit_ends_also_when_nobody_waits() -> None:
    session = Session()
    session.commit_gate.clear()
    await_me = session.start()
    await turns()
    await leave(await_me)
    session.commit_gate.set()
    await turns()
    assert session.answers.states == [AnswerState.COMMITTED]
    assert (await session.ask()).answer == "answer 1"


async def test_answer_that_was_not_delivered_is_given_again_as_often_as_asked() -> None:
    session = Session()
    for _ in range(4):
        assert (await session.ask()).answer == "answer 1"
    assert session.sampled == 1


async def test_resample_after_delivery_is_a_new_sample() -> None:
    session = Session()
    (await session.ask()).sent()
    (await session.ask()).sent()
    third = await session.ask()
    assert (third.answer, third.repeated, session.sampled) == ("answer 3", False, 3)
    assert (await session.ask()).answer == "answer 3", "the third was not delivered yet"


@pytest.mark.parametrize("ends", ["error", "cancelled", "cancelled at once"])
async def test_retry_of_a_resample_that_failed_does_not_get_the_earlier_answer(ends: str) -> None:
    session = Session()
    (await session.ask()).sent()
    if ends == "error":
        session.sample_error = ValueError("busy")
        with pytest.raises(ValueError, match="busy"):
            await session.ask(repeat=Repeat.RESAMPLE)
        session.sample_error = None
    else:
        session.sample_gate.clear()
        resample = session.start()
        await turns(1 if ends == "cancelled at once" else 5)
        resample.cancel()
        await turns(1)
    session.sample_gate.set()
    retried = await session.ask(repeat=Repeat.RETRY)
    assert not retried.repeated and session.committed == ["answer 1", retried.answer]
    retried.sent()
    again = await session.ask(repeat=Repeat.RETRY)
    assert again.repeated and again.answer == retried.answer


async def test_answer_is_given_again_when_it_turns_out_undelivered() -> None:
    session = Session()
    delivery = await session.ask()
    delivery.sent()
    delivery.undelivered()
    assert (await session.ask()).answer == "answer 1" and session.sampled == 1


async def test_server_may_know_that_an_equal_request_is_a_retry() -> None:
    session = Session()
    (await session.ask()).sent()
    (await session.ask()).sent()
    assert (await session.ask(repeat=Repeat.RETRY)).answer == "answer 2", "the latest"
    assert (await session.ask(repeat=Repeat.RESAMPLE)).answer == "answer 3"


async def test_idempotency_key_gets_the_same_answer_also_after_delivery() -> None:
    session = Session()
    (await session.ask(key="k")).sent()
    for repeat in Repeat:
        assert (await session.ask(key="k", repeat=repeat)).answer == "answer 1"
    assert (await session.ask(key="other")).answer == "answer 2", "another key, another sample"
    assert session.sampled == 2


async def test_same_request_under_two_keys_is_sampled_twice_also_at_once() -> None:
    session = Session()
    session.sample_gate.clear()
    first, second = session.start(key="a"), session.start(key="b")
    await turns()
    session.sample_gate.set()
    assert {(await first).answer, (await second).answer} == {"answer 1", "answer 2"}


async def test_idempotency_key_for_another_request_is_refused() -> None:
    session = Session()
    await session.ask("f", key="k")
    with pytest.raises(IdempotencyKeyError, match="'k'"):
        await session.ask("g", key="k")
    assert session.sampled == 1


@pytest.mark.parametrize("step", ["sample_error", "commit_error"])
async def test_failure_reaches_all_who_wait_and_is_not_remembered(step: str) -> None:
    session = Session()
    session.sample_gate.clear()
    setattr(session, step, RuntimeError("no"))
    first, retry = session.start(key="k"), session.start(key="k")
    await turns()
    session.sample_gate.set()
    for task in (first, retry):
        with pytest.raises(RuntimeError, match="no"):
            await task
    setattr(session, step, None)
    assert (await session.ask(key="k")).answer == "answer 2"


async def test_different_requests_do_not_wait_for_each_other() -> None:
    session = Session()
    session.sample_gate.clear()
    tasks = [session.start(f"f{number}") for number in range(5)]
    await turns()
    assert session.sampled == 5
    session.sample_gate.set()
    assert len({(await task).answer for task in tasks}) == 5


async def test_restored_answers_behave_as_before_the_restart() -> None:
    session = Session()
    session.answers.restore("f", None, "old", sent=False)
    session.answers.restore("g", None, "delivered", sent=True)
    session.answers.restore("h", "k", "keyed", sent=True)
    assert (await session.ask("f")).answer == "old"
    assert (await session.ask("g")).answer == "answer 1"
    assert (await session.ask("h", key="k")).answer == "keyed"


async def test_finished_answers_are_bounded_and_running_ones_stay() -> None:
    session = Session(kept=3)
    session.sample_gate.clear()
    running = session.start("running")
    await turns()
    session.sample_gate.set()
    for number in range(10):
        await session.ask(f"f{number}")
    await running
    assert len(session.answers.states) == 3


async def test_closing_cancels_sampling_and_waits_for_a_commit() -> None:
    session = Session()
    session.commit_gate.clear()
    committing = session.start("a")
    await turns()
    session.sample_gate.clear()
    sampling = session.start("b")
    await turns()
    closing = asyncio.create_task(session.answers.aclose())
    await turns()
    assert not closing.done()
    session.commit_gate.set()
    await closing
    assert (await committing).answer == "answer 1" and session.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await sampling


async def test_closing_ends_calls_whose_sampling_has_not_begun() -> None:
    session = Session()
    asked = session.start()
    await asyncio.sleep(0)
    await session.answers.aclose()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert (session.sampled, session.cancelled) == (0, 0)


def test_fingerprint_ignores_key_order_and_delivery() -> None:
    one = request_fingerprint("/v1/messages", {**BODY, "stream": True, "metadata": {"user_id": "a"}})
    assert one == request_fingerprint("/v1/messages", {"temperature": 1.0, "messages": BODY["messages"]})
    assert one != request_fingerprint("/v1/messages", {**BODY, "temperature": 0.5})
    assert one != request_fingerprint("/v1/chat/completions", BODY)
