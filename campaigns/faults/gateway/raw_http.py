"""Malformed HTTP requests."""

from __future__ import annotations

import random
import socket
import time

from campaigns.faults.gateway.answers import WrongAnswerError

TIMEOUT_S = 30.0


def request(draw: random.Random, body: bytes, token: str) -> bytes:
    path = draw.choice(
        [
            *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/v1/models/%00"),
            *("/sessions/%2e%2e/v1/messages", "/sessions//v1/responses", "/sessions/x/token/%ff/v1/messages"),
            *("/v1/chat/completions?" + "a" * 3000, "/v1/%c3%28", "/v1/../engines", "//v1/messages", "/v1/messages/"),
            *("/ng-rollout/x/v1/messages", "/ng-rollout/%00/capture/v1/responses", "/sessions/é/v1/messages"),
        ]
    ).encode()
    method = draw.choice(
        [b"POST", b"POST", b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"FOO"]
    )
    head = [b"Host: x", b"Authorization: Bearer " + token.encode()]
    framing = draw.choice(["right", "chunked", "bad chunks", "short", "none", "two lengths", "negative"])
    sent = body if draw.random() < 0.5 else body[: draw.randrange(len(body))]
    if framing in ("chunked", "bad chunks"):
        head.append(b"Transfer-Encoding: chunked")
        half = len(sent) // 2
        sent = b"%x\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (half, sent[:half], len(sent) - half, sent[half:])
        if framing == "bad chunks":
            at = draw.randrange(len(sent))
            sent = sent[:at] + bytes(draw.randrange(256) for _ in range(4)) + sent[at + draw.randrange(4) :]
    elif framing == "short":
        head.append(b"Content-Length: %d" % (len(sent) + 10))
    elif framing == "two lengths":
        head += [b"Content-Length: %d" % len(sent), b"Content-Length: 1"]
    elif framing == "negative":
        head.append(b"Content-Length: -1")
    elif framing == "right":
        head.append(b"Content-Length: %d" % len(sent))
    if draw.random() < 0.2:
        head.append(bytes(draw.randrange(256) for _ in range(20)))
    return b"%s %s HTTP/1.1\r\n%s\r\n\r\n%s" % (method, path, b"\r\n".join(head), sent)


def send(port: int, request: bytes) -> None:
    """Send the bytes and read what the server sends. Raises `WrongAnswerError` for a 5xx."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
        reply = b""
        try:
            sock.sendall(request)
            began = time.monotonic()
            sock.settimeout(0.5)
            while time.monotonic() - began < TIMEOUT_S and (piece := sock.recv(65536)):
                reply += piece
        except TimeoutError:
            pass  # the server waits for the rest of the body, or for the next request
        except OSError:
            pass  # the server closed the connection, as this is not HTTP
    if reply and int(reply.split(b" ", 2)[1]) >= 500:
        raise WrongAnswerError(f"{reply[:400]!r}")
