"""What must not be readable in a captured call, wherever it stands in it."""

from __future__ import annotations

import base64
import json
import os
import secrets

import orjson
import pytest

from nemo_gym._util.secrets import redact_tokens
from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.gateway.capture import CallRecord, redacted_json

CANARY = "kD93mZq7Lw2pXv81"


@pytest.mark.parametrize(
    "body",
    [
        {"api_key": CANARY},
        {"extra_headers": {"Authorization": f"Bearer {CANARY}", "x-api-key": CANARY, "Cookie": f"s={CANARY}"}},
        {"set-cookie": f"s={CANARY}"},
        {"nested": [{"aws_secret_access_key": f'quoted "{CANARY}" and \\ more {CANARY}'}]},
        {"tools": [{"server_url": f"https://user:{CANARY}@host/x?api_key={CANARY}&n=1"}]},
        {"text": f"curl -H 'Authorization: Bearer {CANARY}' https://host"},
        {"arguments": json.dumps({"password": CANARY, "openai_api_key": f'a "{CANARY}" b'})},
        {"text": f"export KEY=sk-proj-{CANARY}{CANARY}"},
        {"text": f"token hf_{CANARY} and ghp_{CANARY}{CANARY}"},
        {"text": f"POST /sessions/ab12/token/ngi1_{CANARY}{CANARY}/v1/messages"},
        {"text": f"POST https://host/v1?token={CANARY}"},
    ],
    ids=lambda body: next(iter(body)),
)
def test_secret_is_hidden(body: object) -> None:
    for given in (body, orjson.dumps(body), json.dumps(body, indent=2).encode()):
        shown = redacted_json(given)
        assert CANARY.encode() not in shown
        assert b"(secret)" in shown
        orjson.loads(shown)


def test_what_is_no_secret_stays_as_it_is() -> None:
    body = {
        "model": "m",
        "max_tokens": 5,
        "key": "value",
        "tokens": ["a", "b"],
        "messages": [
            {"role": "user", "content": 'say "token" and token: x in C:\\dir, see https://host/a?b=c and 1.5e3'}
        ],
        "tools": [{"parameters": {"properties": {"token": {"type": "string"}}}}],
        "eos_token": "<|end|>",
    }
    assert orjson.loads(redacted_json(body)) == body


def test_pictures_become_digest_and_size() -> None:
    picture = os.urandom(5000)
    text = base64.b64encode(picture).decode()
    body = {"image_url": {"url": f"data:image/png;base64,{text}"}, "source": {"type": "base64", "data": text}}
    shown = orjson.loads(redacted_json(body))
    assert shown["image_url"]["url"].startswith(f"data:image/png;base64,({len(text)} bytes, sha256 ")
    digest = shown["source"]["data"]
    assert digest == shown["image_url"]["url"].split(",", 1)[1]
    assert orjson.loads(redacted_json({"d": text[:-4] + "AAAA"}))["d"] != digest


def test_given_secrets_are_hidden_as_well() -> None:
    shown = redacted_json({"text": 'the "engine key" was odd\nkey'}, ["odd\nkey", '"engine key"', ""])
    assert orjson.loads(shown) == {"text": "the (secret) was (secret)"}


@pytest.mark.parametrize("body", [b"no json \xff", b"", {"deep": "\ud800"}, {1: {2.5: b"bytes"}}, [1, None]])
def test_whatever_a_body_is_the_line_is_json(body: object) -> None:
    orjson.loads(redacted_json(body))


def test_tokens_of_the_suite_are_hidden_in_log_lines() -> None:
    credential = StackKeys.generate().caller(Role.PIPELINE, "collector x", "model/1")
    token = "ngi1_" + secrets.token_urlsafe(32)
    line = f'{{"event":"GET /sessions/a/token/{token}/v1/models","h":"{credential}","c":"ngt1.17.{CANARY}"}}'
    shown = redact_tokens(line)
    assert json.loads(shown)["h"] == "(secret)"
    assert token not in shown and credential not in shown and CANARY not in shown
    assert "/sessions/a/token/(secret)/v1/models" in shown


def test_marks_are_milliseconds_since_the_call_came() -> None:
    record = CallRecord("a", "chat", "/v1")
    record.mark("queued")
    record.mark("sampled")
    assert 0 <= record.milliseconds["queued"] <= record.milliseconds["sampled"]
