"""What somebody else asks to wait is bounded, whoever is asked."""

from __future__ import annotations

import pytest

from nemo_gym._util.tasks import RETRY_AFTER_AT_MOST_S, Backoff, pause_after, retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("1e9", RETRY_AFTER_AT_MOST_S),
        ("inf", RETRY_AFTER_AT_MOST_S),
        ("-5", 0.0),
        ("nan", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_AT_MOST_S),
        (None, None),
    ],
)
def test_time_to_wait_is_between_nothing_and_a_minute(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


async def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1, longest_s=5)
    assert [backoff.next_pause_s() for _ in range(5)] == [1, 2, 4, 5, 5]


async def test_tries_count_the_first_one() -> None:
    backoff = Backoff(first_s=1, factor=3, tries=3)
    assert [backoff.next_pause_s() for _ in range(4)] == [1, 3, None, None]


async def test_no_try_begins_after_patience() -> None:
    backoff = Backoff(first_s=1, longest_s=2, patience_s=10)
    assert backoff.next_pause_s(at_least_s=7) == 7
    assert backoff.next_pause_s(at_least_s=11) is None
    assert not await backoff.again(at_least_s=11)
    assert not await Backoff(first_s=0.1, patience_s=0).again()


async def test_a_peer_asks_for_another_pause() -> None:
    backoff = Backoff(first_s=1, longest_s=5)
    assert backoff.next_pause_s(at_least_s=0.5) == 1
    assert backoff.next_pause_s(instead_s=0) == 0
    assert backoff.next_pause_s(instead_s=60) == 5
    assert backoff.next_pause_s() == 5


async def test_jitter_only_lengthens_a_pause() -> None:
    pauses = [Backoff(first_s=1, jitter=0.25).next_pause_s() for _ in range(200)]
    assert all(1 <= pause <= 1.25 for pause in pauses if pause is not None)
    assert len(set(pauses)) > 100


def test_a_thread_waits_as_a_task_does() -> None:
    backoff = Backoff(first_s=0.01, tries=2)
    assert backoff.again_blocking()
    assert not backoff.again_blocking()


def test_pauses_after_counted_failures() -> None:
    assert [pause_after(n, first_s=0.5, longest_s=3) for n in (1, 2, 3, 4, 5000)] == [0.5, 1, 2, 3, 3]
