"""What one caller or one box may take of a broker that others use too."""

from __future__ import annotations

import asyncio
import json
import resource
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.broker.execs import MAX_OPEN_EXECS
from nemo_gym.broker.routes.sandboxes import MAX_LEASES
from nemo_gym.sandbox.wire.models import MAX_DOORS
from resources_servers.sandbox.tests.api import Api, calling
from resources_servers.sandbox.tests.conftest import StartBroker


@pytest.mark.parametrize(
    "spec",
    [
        {"env": {f"{number:x}": "" for number in range(300_000)}},
        {"files": {f"/x/{number:x}": "" for number in range(300_000)}},
        {"provider_options": {"a": [[]] * 300_000}},
        {"mounts": [{"source": "/x", "target": "/y"}] * 100_000},
    ],
    ids=["env", "files", "provider_options", "mounts"],
)
async def test_body_of_more_values_than_any_box_needs_is_refused_before_it_is_read(
    api: Api, spec: dict[str, Any]
) -> None:
    body = json.dumps({"spec": spec})
    headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
    began = time.monotonic()
    answer = await api.call("POST", "/v1/sandboxes", data=body, headers=headers)
    assert (answer.status, answer.code, answer.json["limit"]) == (413, "body_too_many_values", 20_000)
    assert "max_body_values" in answer.json["detail"]
    assert time.monotonic() - began < 10


async def test_submission_that_no_system_would_run_is_refused(api: Api) -> None:
    box = await api.box()
    _, answer = await box.submit("x" * 5_000_000, stdin="attached")
    assert (answer.status, answer.code) == (413, "body_too_large")


async def test_box_has_so_many_commands_at_once_and_more_when_they_ended(api: Api) -> None:
    box = await api.box()
    answers = await asyncio.gather(*(box.submit("cat", stdin="attached") for _ in range(MAX_OPEN_EXECS + 3)))
    refused = [answer for _, answer in answers if answer.status != 201]
    assert len(refused) == 3
    assert {(answer.status, answer.code, answer.json["started"]) for answer in refused} == {
        (429, "too_many_of_box", "no")
    }
    again = next(exec_id for exec_id, answer in answers if answer.status == 201)
    assert (await box.submit("cat", again, stdin="attached"))[1].status == 200
    assert (await box.ask("POST", f"/execs/{again}/signal", json={"signal": 9})).status == 204
    assert (await box.run("echo there is room")).stdout == b"there is room\n"
    other = await api.box()
    assert (await other.run("echo and beside it")).stdout == b"and beside it\n"


async def test_box_has_so_many_doors(api: Api) -> None:
    def door(number: int) -> dict[str, Any]:
        return {
            "name": f"d{number}",
            "port": 2000 + number,
            "target": "http://127.0.0.1:9",
            "allow": ["GET /v1/models"],
        }

    box = await api.box()
    for number in range(MAX_DOORS):
        assert (await box.ask("PUT", f"/doors/d{number}", json=door(number))).status == 204
    answer = await box.ask("PUT", "/doors/d64", json=door(64))
    assert (answer.status, answer.code) == (429, "too_many_of_box")
    assert (await box.ask("DELETE", "/doors/d0")).status == 204
    assert (await box.ask("PUT", "/doors/d64", json=door(64))).status == 204
    answer = await api.create(spec={"doors": [door(number) for number in range(MAX_DOORS + 1)]})
    assert (answer.status, answer.code) == (422, "body") and "spec.doors" in answer.json["detail"]


async def test_box_has_so_many_leases(api: Api) -> None:
    box = await api.box()
    minted = [await box.mint("read") for _ in range(MAX_LEASES)]
    answer = await box.ask("POST", "/leases", json={"scope": "read"})
    assert (answer.status, answer.code) == (429, "too_many_of_box")
    assert (await box.ask("DELETE", f"/leases/{minted[0].lease['lease_id']}")).status == 204
    assert (await box.mint("operate")).lease["scope"] == "operate"


@pytest.mark.parametrize("spec", [{"image": "a\0b"}, {"image": "a" * 2000}, {"workdir": "/a\0b"}])
async def test_name_that_a_database_cannot_hold_is_refused_by_its_field(api: Api, spec: dict[str, Any]) -> None:
    answer = await api.create(spec=spec)
    assert (answer.status, answer.code) == (422, "body"), answer.body
    assert f"spec.{next(iter(spec))}" in answer.json["detail"]


async def test_command_that_finds_no_descriptors_is_refused_and_starts_when_it_is_sent_again(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    assert broker.process is not None
    async with calling(broker) as api:
        box = await api.box()
        await box.run("true")
        used = len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))
        before = resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, (used, before[1]))
        answers = [(await box.submit("echo x >> /tmp/runs", "same"))[1] for _ in range(3)]
        assert all(answer.status >= 400 and answer.json["retryable"] for answer in answers), answers[0].body
        assert "Too many open files" in answers[0].json["detail"]
        resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, before)
        async with asyncio.timeout(30):
            assert (await box.submit("echo x >> /tmp/runs", "same"))[1].status == 201
            assert (await box.output("same")).end["outcome"] == "exited"
        assert (await box.run("wc -l < /tmp/runs")).stdout == b"1\n"


async def test_command_whose_output_finds_no_room_on_the_brokers_disk_is_lost_and_not_cut(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    assert broker.process is not None
    async with calling(broker) as api:
        box = await api.box()
        before = resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE)
        # A file that may not grow is, for whoever writes it, a full disk; SIGXFSZ is ignored by the interpreter.
        resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (4_000_000, before[1]))
        output = await box.run("head -c 6000000 /dev/zero; echo all tests passed")
        assert (output.end["outcome"], output.end["return_code"]) == ("lost", None), output.end
        resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, before)
        output = await box.run("head -c 6000000 /dev/zero; echo all tests passed")
        assert (output.end["outcome"], len(output.stdout)) == ("exited", 6_000_017)
