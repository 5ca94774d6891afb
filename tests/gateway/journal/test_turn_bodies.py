from __future__ import annotations

import orjson

from nemo_gym.gateway.live_session import decode_committed, encode_committed
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerUsage

MESSAGE = {"role": "assistant", "content": "said"}
ANSWER = Answer("a1", 0.0, "m", MESSAGE, AnswerEnd.STOP, AnswerUsage(3, 2))


def test_message_of_answer_and_turn_is_in_the_journal_once() -> None:
    turn = {"turn_id": 4, "message": MESSAGE, "relayed": {}}
    body = b"".join(encode_committed(ANSWER, turn))
    assert body.count(orjson.dumps(MESSAGE)) == 1
    committed, record = decode_committed(body, 7)
    assert (committed.answer, committed.turn_id, committed.index) == (ANSWER, 4, 7)
    assert record == turn


def test_message_that_a_turn_has_for_itself_is_kept() -> None:
    own = {"role": "assistant", "content": "said otherwise"}
    body = b"".join(encode_committed(ANSWER, {"turn_id": 4, "message": own}))
    committed, record = decode_committed(body, 7)
    assert (committed.answer.message, record["message"]) == (MESSAGE, own)
