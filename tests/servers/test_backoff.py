"""What somebody else asks to wait is bounded, whoever is asked."""

from __future__ import annotations

import pytest

from nemo_gym._util.backoff import RETRY_AFTER_AT_MOST_S, retry_after_s


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("1e9", RETRY_AFTER_AT_MOST_S),
        ("inf", RETRY_AFTER_AT_MOST_S),
        ("-5", 0.0),
        ("nan", 0.5),
        ("soon", 0.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_AT_MOST_S),
        (None, 0.5),
    ],
)
def test_time_to_wait_is_between_nothing_and_a_minute(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, default=0.5) == seconds
