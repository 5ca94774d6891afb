"""Commands: once, streamed, resumed, ended exactly once."""

from __future__ import annotations

import asyncio
import base64
import os
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.facade import AsyncSandbox
from resources_servers.sandbox.tests.api import Api, calling, eventually
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.conftest import FailingBroker, StartBroker


async def test_command_runs_once_however_often_it_is_submitted(api: Api) -> None:
    box = await api.box()
    exec_id = uuid.uuid4().hex
    answers = await asyncio.gather(*(box.submit("echo x >> /tmp/runs; sleep 0.2", exec_id) for _ in range(10)))
    assert sorted(answer.status for _, answer in answers) == [200] * 9 + [201]
    assert (await box.output(exec_id)).end["outcome"] == "exited"
    assert (await box.submit("echo x >> /tmp/runs; sleep 0.2", exec_id))[1].status == 200
    assert (await box.run("wc -l < /tmp/runs")).stdout == b"1\n"
    _, other = await box.submit("echo another", exec_id)
    assert (other.status, other.code, other.json["started"]) == (409, "exec_conflict", "no")


async def test_command_whose_record_stands_although_its_writing_failed_runs_when_it_is_sent_again(
    api: Api, broker: BrokerProcess
) -> None:
    box = await api.box()
    command = "echo x >> /tmp/runs"
    first, _ = await box.submit(command)
    await box.output(first)
    with closing(sqlite3.connect(broker.state_dir / "broker.sqlite")) as registry, registry:
        registry.execute(
            "insert into broker_execs (sandbox_id, exec_id, body_digest, submitted_at)"
            " select sandbox_id, 'again', body_digest, submitted_at from broker_execs where exec_id = ?",
            (first,),
        )
    _, other = await box.submit("echo another", "again")
    assert (other.status, other.code) == (409, "exec_conflict")
    answers = await asyncio.gather(*(box.submit(command, "again") for _ in range(3)))
    assert sorted(answer.status for _, answer in answers) == [200, 200, 201]
    async with asyncio.timeout(30):
        assert (await box.output("again")).end["outcome"] == "exited"
    assert (await box.run("wc -l < /tmp/runs")).stdout == b"2\n"


async def test_command_that_the_backend_failed_to_start_in_an_unknown_way_is_lost_and_not_awaited(
    failing_broker: FailingBroker,
) -> None:
    broker, fail = failing_broker
    async with calling(broker) as api:
        box = await api.box()
        fail.write_text("start_exec RuntimeError")
        await box.submit("true", "once")
        fail.unlink()
        async with asyncio.timeout(30):
            assert (await box.submit("true", "once"))[1].status == 200
            assert (await box.output("once")).end["outcome"] == "lost"


async def test_output_has_both_streams_in_order_and_one_end(api: Api) -> None:
    box = await api.box()
    output = await box.run("printf a; printf b >&2; printf 'c\\377\\000' ; exit 7")
    assert (output.stdout, output.stderr) == (b"ac\xff\x00", b"b")
    assert output.end["outcome"] == "exited"
    assert output.end["return_code"] == 7
    assert output.end["output_bytes"] == 5


@pytest.mark.parametrize("offset", [0, 1, 99_999, 100_000, 299_999, 300_000])
async def test_output_is_read_from_any_offset(offset: int, api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("head -c 100000 /dev/zero; head -c 100000 /dev/zero >&2; head -c 100000 /dev/zero")
    whole = await box.output(exec_id)
    rest = await box.output(exec_id, offset)
    assert len(rest.stdout) + len(rest.stderr) == 300_000 - offset
    assert whole.end == rest.end


async def test_offset_beyond_the_output_is_refused(api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("printf abc")
    await box.output(exec_id)
    answer = await box.ask("GET", f"/execs/{exec_id}/output?offset=4")
    assert (answer.status, answer.code) == (416, "offset_out_of_range")


async def test_events_carry_base64_and_offsets_and_resume_by_last_event_id(api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("printf one; sleep 0.3; printf two >&2")
    await box.output(exec_id)
    whole = await box.ask("GET", f"/execs/{exec_id}/output", headers={"Accept": "text/event-stream"})
    assert whole.headers["Content-Type"].startswith("text/event-stream")
    events = [
        dict(line.split(": ", 1) for line in block.split("\n")) for block in whole.body.decode().split("\n\n")[:-1]
    ]
    assert [(e["event"], e["id"]) for e in events] == [("stdout", "3"), ("stderr", "6"), ("exit", "6")]
    assert base64.b64decode(events[0]["data"]) == b"one"
    rest = await box.ask("GET", f"/execs/{exec_id}/output", headers={"Last-Event-ID": "3"})
    assert rest.body.count(b"event: stdout") == 0
    assert base64.b64encode(b"two") in rest.body


async def test_readers_that_leave_and_come_back_get_every_byte_once(api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("for i in $(seq 2000); do echo line $i; done; sleep 0.2; echo end")
    collected = b""
    for _ in range(50):
        part = await box.output(exec_id, len(collected), chunks=1)
        collected += part.stdout
        if part.ends:
            break
    else:
        collected += (await box.output(exec_id, len(collected))).stdout
    assert collected == b"".join(b"line %d\n" % i for i in range(1, 2001)) + b"end\n"


async def test_submission_can_be_answered_by_the_output(api: Api) -> None:
    box = await api.box()
    path = f"{box.path}/execs/{uuid.uuid4().hex}"
    headers = {"Content-Type": "application/json"}
    async with api.session.put(
        api.broker.url + path,
        headers={**headers, "Authorization": f"Bearer {box.token}", "Accept": "application/octet-stream"},
        data=b'{"argv": ["printf", "direct"]}',
    ) as response:
        assert response.status == 201
        body = await response.read()
    assert b"direct" in body
    assert b'"exited"' in body


async def test_waiting_for_the_end_returns_when_it_comes_or_when_the_wait_is_over(api: Api) -> None:
    box = await api.box()
    exec_id, submitted = await box.submit("sleep 1")
    assert submitted.json["state"] == "running"
    assert (await box.ask("GET", f"/execs/{exec_id}?wait_s=0.05")).json["state"] == "running"
    ended = (await box.ask("GET", f"/execs/{exec_id}?wait_s=30")).json
    assert (ended["state"], ended["end"]["outcome"]) == ("ended", "exited")


async def test_standard_input_is_given_once_and_starts_the_command(api: Api) -> None:
    box = await api.box()
    data = os.urandom(300_000)
    exec_id, submitted = await box.submit("cat", stdin="attached")
    assert submitted.json["state"] == "awaiting_stdin"
    kind = {"Content-Type": "application/octet-stream"}
    assert (await box.ask("PUT", f"/execs/{exec_id}/stdin", data=data, headers=kind)).status == 200
    assert (await box.output(exec_id)).stdout == data
    again = await box.ask("PUT", f"/execs/{exec_id}/stdin", data=data, headers=kind)
    assert (again.status, again.json["state"]) == (200, "ended")
    other = await box.ask("PUT", f"/execs/{exec_id}/stdin", data=data[1:], headers=kind)
    assert (other.status, other.code) == (409, "stdin_not_expected")


async def test_signal_reaches_the_process_tree_and_ends_it(api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("sleep 600 & sleep 600; true")
    await asyncio.sleep(0.2)
    assert (await box.ask("POST", f"/execs/{exec_id}/signal", json={"signal": 9})).status == 204
    end = (await box.output(exec_id)).end
    assert (end["outcome"], end["signal"], end["return_code"]) == ("signaled", 9, None)
    assert (await box.ask("POST", f"/execs/{exec_id}/signal", json={"signal": 9})).status == 204
    assert (await box.ask("POST", "/execs/none/signal", json={"signal": 9})).code == "exec_not_found"


async def test_signal_that_meets_a_command_being_started_still_ends_it(api: Api) -> None:
    box = await api.box()

    async def one(number: int) -> None:
        exec_id = f"e-{number}"
        submitting = asyncio.create_task(box.submit("exec sleep 600", exec_id))
        while (await box.ask("POST", f"/execs/{exec_id}/signal", json={"signal": 9})).status != 204:
            pass
        await submitting
        ended = (await box.ask("GET", f"/execs/{exec_id}?wait_s=20")).json
        assert (ended["state"], ended["end"]["outcome"]) == ("ended", "signaled")

    await asyncio.gather(*(one(number) for number in range(8)))


async def test_timeout_and_truncation_are_told_by_the_end(api: Api) -> None:
    box = await api.box()
    output = await box.run("head -c 5000 /dev/zero; sleep 600", timeout_s=1, max_output_bytes=1000)
    assert output.end["outcome"] == "timed_out"
    assert output.end["truncated"] == ["stdout"]
    assert len(output.stdout) == output.end["output_bytes"] == 1000


async def test_command_whose_time_is_over_before_it_starts_times_out(broker: BrokerProcess) -> None:
    async with AsyncSandbox(broker.remote(), SandboxSpec(ttl_s=120)) as box:
        for timeout_s in (0.0, -3.5):
            result = await box.exec("sleep 600", timeout_s=timeout_s)
            assert result.outcome is ExecOutcome.TIMED_OUT


async def test_running_command_is_lost_when_its_box_is_destroyed(api: Api) -> None:
    box = await api.box()
    exec_id, _ = await box.submit("printf said; sleep 600")

    async def said() -> bool:
        return bool((await box.ask("GET", f"/execs/{exec_id}")).json["output_bytes"] == 4)

    await eventually(said, "the output is there")
    reading = asyncio.create_task(box.output(exec_id))
    await box.ask("DELETE")
    output = await reading
    assert (output.stdout, output.end["outcome"], output.end["return_code"]) == (b"said", "lost", None)
    # What was said before stays readable, and the end stays what it was.
    assert await box.output(exec_id) == output


async def test_command_that_cannot_start_is_refused_and_may_be_sent_again_corrected(api: Api) -> None:
    box = await api.box()
    exec_id, answer = await box.submit("true", cwd="relative")
    if answer.status == 201:
        assert (await box.output(exec_id)).end["outcome"] != "lost"
        return
    assert answer.status in (400, 422, 502)


async def test_client_that_stops_reading_neither_blocks_the_command_nor_fills_memory(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box = await api.box()
        exec_id, _ = await box.submit("head -c 150000000 /dev/zero", max_output_bytes=2**30)
        headers = {"Authorization": f"Bearer {box.token}", "Accept": "application/octet-stream"}
        url = f"{broker.url}{box.path}/execs/{exec_id}/output"
        async with api.session.get(url, headers=headers):  # opened, never read
            ended = (await box.ask("GET", f"/execs/{exec_id}?wait_s=60")).json
            assert ended["end"]["output_bytes"] == 150_000_000
            assert broker.process is not None
            status = Path(f"/proc/{broker.process.pid}/status").read_text()
            resident_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            assert resident_kib < 300 * 1024


async def test_oldest_output_is_dropped_when_the_spool_is_full(start_broker: StartBroker) -> None:
    broker = start_broker(spool_bytes=1024 * 1024)
    async with calling(broker) as api:
        box = await api.box()
        ids = []
        for _ in range(3):
            exec_id, _ = await box.submit("head -c 500000 /dev/zero")
            await box.output(exec_id)
            ids.append(exec_id)
        gone = await box.ask("GET", f"/execs/{ids[0]}/output")
        assert (gone.status, gone.code) == (410, "output_gone")
        assert (await box.ask("GET", f"/execs/{ids[0]}")).json["end"]["outcome"] == "exited"
        assert len((await box.output(ids[2])).stdout) == 500_000


async def test_output_is_dropped_a_while_after_its_box_is_gone(start_broker: StartBroker) -> None:
    broker = start_broker(output_retention_s=1, reconcile_interval_s=1)
    async with calling(broker) as api:
        box, lasting = await api.box(), await api.box()
        ids = [(await one.submit("echo said"))[0] for one in (box, lasting)]
        await box.output(ids[0])
        await lasting.output(ids[1])
        await box.ask("DELETE")

        async def dropped() -> bool:
            answer = await box.ask("GET", f"/execs/{ids[0]}/output")
            return answer.status == 410 and answer.code == "output_gone"

        await eventually(dropped, "the output is dropped")
        assert (await lasting.output(ids[1])).stdout == b"said\n"
        assert [path.name for path in (broker.state_dir / "spool").iterdir()] == [lasting.sandbox_id]


async def test_command_under_way_is_lost_and_killed_when_the_broker_was_killed(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box = await api.box()
        done, _ = await box.submit("echo done")
        finished = await box.output(done)
        exec_id, _ = await box.submit("echo begun; while :; do echo x >> /tmp/ticks; sleep 0.05; done")
        seen = await box.output(exec_id, chunks=1)
        assert seen.stdout == b"begun\n"
        broker.kill()
        broker.start()
        lost = await box.output(exec_id)
        assert (lost.stdout, lost.end["outcome"]) == (b"begun\n", "lost")
        assert (await box.submit("echo begun; while :; do echo x >> /tmp/ticks; sleep 0.05; done", exec_id))[1].json[
            "state"
        ] == "ended"
        assert await box.output(done) == finished
        before = (await box.run("wc -l < /tmp/ticks")).stdout
        await asyncio.sleep(0.5)
        assert (await box.run("wc -l < /tmp/ticks")).stdout == before
