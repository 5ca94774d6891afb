"""Rollouts as a service: submitting by id, waiting, listing, results without gaps, cancel, drain, bad input."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.contract.credentials import RoleError
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.requests import ValueCounter
from nemo_gym.rollouts.interfaces import JobRecord
from nemo_gym.service.client import AsyncRolloutClient, RolloutClient, ServiceError, _batches
from nemo_gym.service.routes import ServiceRole, ServiceTokens, host
from nemo_gym.service.service import write_address
from tests.rollouts.chain_process import ChainServer
from tests.rollouts.conftest import wait_until
from tests.service.conftest import TOKENS, Chain, Served, job, serving

MakeChain = Callable[..., Chain]


async def raw(served: Served, method: str, path: str, body: Any = None, role: str = "operate") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {TOKENS[ServiceRole(role)][0]}"}
    async with aiohttp.ClientSession() as http:
        async with http.request(method, served.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)


async def test_a_job_is_submitted_waited_for_and_told_with_its_result(make_chain: MakeChain) -> None:
    async with serving(make_chain()) as served:
        done = await served.client.submit([job(0, group_id="g", priority=3)])
        assert (done.accepted, done.known, done.refused) == (1, 0, ())
        view = await served.client.job("job-0", wait_s=30)
        assert (view.state, view.reward, view.group_id, view.priority, view.attempt) == ("done", 1.0, "g", 3, 1)
        assert view.result is not None and view.result["_ng_rollout_id"] == "job-0"
        with pytest.raises(ServiceError, match="no job has the id 'job-1'"):
            await served.client.job("job-1")


async def test_jobs_of_the_same_row_have_each_a_log_of_their_own(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"says": {"t0": {"evaluation_log": "what the grading printed"}}})
    jobs = [job(0, job_id=name) for name in ("job-a", "job-b", "trivial")]
    jobs += [job(0, job_id=f"{run}.0-0", run_id=run) for run in ("one", "two")]  # as `ng_submit` names them
    async with serving(chain) as served:
        await served.client.submit(jobs)
        await served.client.wait()
        rows = [view.result or {} async for view in served.client.results(follow=False)]
    logs = {row["evaluation_log"] for row in rows}
    assert len(rows) == len(logs) == len(jobs)
    assert "logs/trivial.log" not in logs  # the name of a server's own log
    for log in logs:
        assert (chain.directory / "state" / log).read_text() == "what the grading printed"


async def test_the_same_body_is_the_same_job_and_another_is_refused_with_both_digests(make_chain: MakeChain) -> None:
    chain = make_chain()
    async with serving(chain) as served:
        first = await served.client.job("job-0") if not await served.client.submit([job(0)]) else None
        assert first is None
        assert (await served.client.submit([job(0)])).known == 1
        turned = job(0, row=dict(reversed(job(0)["row"].items())))
        assert (await served.client.submit([turned])).known == 1  # the order of members says nothing
        status, problem = await raw(served, "POST", "/v1/jobs", {"jobs": [job(0, priority=1)]})
        known = (await served.client.job("job-0", wait_s=30)).digest
        assert (status, problem["code"], problem["known_digest"]) == (409, "job_conflict", known)
        assert problem["digest"] != known
        assert len(chain.notes("act")) == 1


async def test_bad_jobs_of_a_batch_are_named_and_the_rest_goes_on(make_chain: MakeChain) -> None:
    async with serving(make_chain(), datasets={"rows": str(Path(__file__))}) as served:
        done = await served.client.submit(
            [
                job(0),
                job(1, row={"id": "x"}),
                job(2, agent="trivia"),
                job(3, priority="high"),
                {"row": {}},
                job(4, deadline_s=-1),
                job(5, dataset={"name": "rows", "row": 1}),
                {"job_id": "job-6", "dataset": {"name": "row", "row": 1}},
                {"job_id": "job-7", "dataset": {"name": "rows", "row": 10_000}},
                job(8, row={"responses_create_params": {}}),
                job(9, row="text"),
                job(10),
            ]
        )
        assert done.accepted == 2
        said = {each.job_id: each.detail for each in done.refused}
        assert "the row has no prompt" in said["job-1"]
        assert "unknown agent 'trivia' (did you mean 'trivial'?)" in said["job-2"]
        assert "jobs[3]: priority" in said["job-3"]
        assert "jobs[4]: job_id: Field required" in said["jobs[4]"]
        assert "deadline_s" in said["job-4"]
        assert "exactly one of 'row' and 'dataset'" in said["job-5"]
        assert "no data set 'row' (did you mean 'rows'?)" in said["job-6"]
        assert "10000 is asked for" in said["job-7"]
        assert "must be an object with 'input'" in said["job-8"]
        assert "jobs[10]: row" in said["job-9"]
        assert [(await served.client.job(f"job-{n}", wait_s=30)).state for n in (0, 10)] == ["done", "done"]


async def test_job_that_is_no_json_or_too_deep_is_refused_alone(make_chain: MakeChain) -> None:
    def odd(number: int, value: Any) -> dict[str, Any]:
        return job(number, row={**job(number)["row"], "odd": value})

    def deep(levels: int) -> Any:
        return [deep(levels - 1)] if levels else 1

    async with serving(make_chain()) as served:
        jobs = [job(0), odd(1, "\ud800"), odd(2, 2**70), odd(3, deep(300)), odd(4, deep(230)), job(5)]
        done = await served.client.submit(jobs)
        assert (done.accepted, [each.job_id for each in done.refused]) == (2, ["job-1", "job-2", "job-3", "job-4"])
        said = [each.detail for each in done.refused]
        assert "surrogates not allowed" in said[0] and "integer beyond 64 bits" in said[1]
        assert "nested too deeply" in said[2] and "jobs[1]: a value is nested too deeply" in said[3]


async def test_integer_that_would_be_rounded_is_refused_with_its_job(make_chain: MakeChain) -> None:
    async with serving(make_chain()) as served:
        jobs = [job(0), job(1, row={**job(1)["row"], "expected": 2**70})]
        status, answer = await raw(served, "POST", "/v1/jobs", {"jobs": jobs}, role="submit")
        assert (status, answer["accepted"], answer["refused"]) == (200, 1, 1)
        assert "jobs[1]: a value holds an integer beyond 64 bits" in answer["jobs"][1]["error"]["detail"]


async def test_rows_of_a_file_that_are_no_json_are_refused_by_the_command(make_chain: MakeChain) -> None:
    chain = make_chain()
    path = chain.write_rows(1)
    line = path.read_text().rstrip()
    odd = (f'{line[:-1]}, "odd": {value}}}' for value in ("NaN", '"\\ud800"', "2" * 30, "2" * 5000))
    path.write_text("\n".join([f"\ufeff{line}", *odd, line]))
    async with serving(chain) as served:
        words = ["submit", f"input={path}", "run=r", "num_repeats=null", "output=null", f"url={served.url}"]
        words.append(f"token={TOKENS[ServiceRole.SUBMIT][0]}")
        start = [sys.executable, "-c", "from nemo_gym.cli.jobs import main; main()"]
        command = await asyncio.create_subprocess_exec(*start, *words, stderr=asyncio.subprocess.PIPE)
        said = (await command.communicate())[1].decode()
        assert command.returncode == 2
        assert "2 jobs accepted, 0 known before, 4 refused" in said
        assert "r.3-0: the job is not JSON: a value holds an integer beyond 64 bits" in said
        assert "r.1-0: jobs[1]: row" in said and "r.2-0: jobs[2]: row" in said


async def test_large_jobs_are_submitted_in_several_requests(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.service.client.BATCH_BYTES", 1 << 20)
    async with serving(make_chain(), max_body_mib=2) as served:
        jobs = [job(n, row={**job(n)["row"], "padding": "x" * 400_000}) for n in range(8)]
        assert (await served.client.submit(jobs)).accepted == 8


@pytest.mark.parametrize("values", [[1] * 60_000, [[]] * 60_000])
def test_jobs_of_many_values_are_within_the_bounds_of_a_service(values: list[Any]) -> None:
    jobs = [job(n, row={**job(n)["row"], "mask": values}) for n in range(300)]
    batches = [orjson.dumps({"jobs": batch}) for batch in _batches(jobs, [])]
    assert sum(batch.count(b'"mask"') for batch in batches) == 300
    for batch in batches:
        counter = ValueCounter(4)
        counter.feed(batch)
        assert counter.found <= ServiceConfig.model_fields["max_body_values"].default


async def test_body_of_too_many_values_is_refused_before_it_is_parsed(make_chain: MakeChain) -> None:
    async with serving(make_chain(), max_body_values=1000) as served:
        assert (await served.client.submit([job(0)])).accepted == 1
        row = {**job(1)["row"], "lists": [[] for _ in range(300)]}
        status, problem = await raw(served, "POST", "/v1/jobs", {"jobs": [job(1, row=row)]})
        assert (status, problem["code"]) == (413, "body_too_many_values")
        assert "serve.max_body_values" in problem["detail"]


async def test_rows_of_data_sets_are_named_by_their_line(make_chain: MakeChain) -> None:
    chain = make_chain()
    path = chain.write_rows(3)
    async with serving(chain, datasets={"questions": str(path)}) as served:
        jobs = [{"job_id": f"q{n}", "dataset": {"name": "questions", "row": n}} for n in (3, 1)]
        assert (await served.client.submit(jobs)).accepted == 2
        assert (await served.client.job("q3", wait_s=30)).task_id == "t2"
        assert (await served.client.job("q1", wait_s=30)).task_id == "t0"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "0.0.0.0"}, "serve.host=0.0.0.0 can be reached from other machines"),
        ({"host": "node-1.example.org"}, "accept it with serve.plain_http=true"),
        ({"datasets": {"questions": "nope.jsonl"}}, "serve.datasets.questions: 'nope.jsonl' is not a file"),
    ],
)
def test_service_that_could_not_do_as_it_is_told_is_refused_before_it_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServiceConfig.parse(given)


def test_host_that_other_machines_reach_is_accepted_when_plain_http_is() -> None:
    assert ServiceConfig.parse({"host": "10.0.0.1", "plain_http": True}).host == "10.0.0.1"
    assert ServiceConfig.parse({"host": "localhost"}).host == "localhost"


async def test_capacity_of_an_instance_that_does_not_exist_is_refused_by_its_key(make_chain: MakeChain) -> None:
    with pytest.raises(ConfigError, match=r"serve\.capacities: unknown key 'trivail' \(did you mean 'trivial'\?\)"):
        async with serving(make_chain(), capacities={"trivail": 2}):
            raise AssertionError("the service started")


async def test_rows_of_a_large_data_set_are_found_by_the_first_callers_at_once(make_chain: MakeChain) -> None:
    chain = make_chain()
    path = chain.write_rows(1)
    path.write_text("{}\n" * 300_000 + path.read_text())
    async with serving(chain, datasets={"questions": str(path)}) as served:
        jobs = [{"job_id": f"q{n}", "dataset": {"name": "questions", "row": 300_001}} for n in range(4)]
        done = await asyncio.gather(*(served.client.submit([each]) for each in jobs))
        assert [refused.detail for each in done for refused in each.refused] == []


async def test_an_agent_whose_model_is_silent_is_refused_at_submission(make_chain: MakeChain) -> None:
    silent = {"engine": "e", "problem": None, "warning": None, "unreachable": "no answer", "context_tokens": None}
    async with serving(make_chain(model={"preflight": [silent]}), check_s=20) as served:
        (refused,) = (await served.client.submit([job(0)])).refused
        assert "model server 'policy': no answer" in refused.detail


async def test_listing_is_paged_and_filtered(make_chain: MakeChain) -> None:
    async with serving(make_chain()) as served:
        await served.client.submit([job(n, run_id=f"r{n % 2}", group_id=f"g{n}") for n in range(7)])
        counts = await served.client.wait(run="r1")
        assert counts == {"done": 3}
        assert [view.job_id async for view in served.client.jobs(run="r1")] == ["job-1", "job-3", "job-5"]
        assert [view.job_id async for view in served.client.jobs(group="g4")] == ["job-4"]
        status, page = await raw(served, "GET", "/v1/jobs?limit=4")
        assert status == 200 and len(page["jobs"]) == 4
        status, rest = await raw(served, "GET", f"/v1/jobs?limit=4&cursor={page['cursor']}")
        assert len(rest["jobs"]) == 3 and rest["cursor"] is None
        assert (await raw(served, "GET", "/v1/jobs?cursor=other:3"))[1]["code"] == "cursor"
        assert (await raw(served, "GET", "/v1/results?after=other:3"))[1]["code"] == "cursor"
        assert "queued" in (await raw(served, "GET", "/v1/jobs?state=waiting"))[1]["detail"]
        assert (await raw(served, "GET", "/v1/jobs?colour=red"))[0] == 422
        async with asyncio.timeout(20):
            status, problem = await raw(served, "GET", "/v1/results?follow=False")
        assert status == 422 and "follow: must be true or false, got 'False'" in problem["detail"]


async def test_results_go_on_behind_the_last_one_that_was_seen(make_chain: MakeChain) -> None:
    chain = make_chain()
    seen: list[str] = []
    async with serving(chain) as served:
        await served.client.submit([job(n) for n in range(10)])
        async for view in served.client.results():
            seen.append(view.job_id)
            cursor = view.cursor
            if len(seen) == 4:
                break
        await served.client.wait()
    async with serving(chain) as served:  # another process, as far as the consumer knows
        await served.client.submit([job(n) for n in range(10, 13)])
        async with asyncio.timeout(60):
            async for view in served.client.results(after=cursor):
                seen.append(view.job_id)
                if len(seen) == 13:
                    break
    assert sorted(seen) == sorted(f"job-{n}" for n in range(13))


async def test_wait_behind_a_cursor_reads_only_what_comes_after_it(make_chain: MakeChain) -> None:
    async with serving(make_chain(agent={"delay_s": 0.3}), concurrency=1) as served:
        await served.client.submit([job(n) for n in range(3)])
        cursors: list[str | None] = []
        assert await served.client.wait(on_result=lambda view: cursors.append(view.cursor)) == {"done": 3}
        async with asyncio.timeout(30):
            assert await served.client.wait(after=cursors[0]) == {"done": 2}
            assert await served.client.wait(after=cursors[-1]) == {}
            await served.client.submit([job(n) for n in range(3, 5)])
            assert await served.client.wait(after=cursors[1]) == {"done": 3}


async def test_cancel_tells_what_it_reclaimed(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": [f"t{n}" for n in range(10)]})
    async with serving(chain, concurrency=2) as served:
        await served.client.submit([job(n, group_id="a" if n < 8 else "b") for n in range(10)])
        await served.wait(lambda: len(chain.notes("act")) == 2, "both workers to hang")
        done = await served.client.cancel(group="a", reason="not needed")
        assert done.queued + done.active == 8 and done.active >= 2
        assert done.released >= 2 * 2 and done.seconds < 30
        assert (await served.client.job("job-0")).failures[-1]["reason"] == "not needed"
        assert (await raw(served, "POST", "/v1/cancel", {}))[0] == 422
        assert (await served.client.cancel(job_ids=["job-8", "job-9"])).active == 2
        counts = (await served.client.status())["jobs"]
        assert (counts["cancelled"], counts["claimed"]) == (10, 0)


async def test_runs_are_told_with_what_is_under_way_where_and_for_how_long(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t1"]})
    async with serving(chain, concurrency=2) as served:
        await served.client.submit([job(n, run_id="first" if n < 3 else "second") for n in range(4)])
        await served.client.wait(run="second")
        await served.wait(lambda: ("job-1", 1) in chain.notes("act"), "the one that hangs")
        await served.client.job("job-2", wait_s=30)
        async with asyncio.timeout(30):
            # One that is done may not be released yet.
            while len((told := await served.client.runs())["running"]) > 1:  # noqa: ASYNC110 - only the service tells
                await asyncio.sleep(0.02)
        assert [(each["run_id"], each["jobs"]["done"], each["jobs"]["claimed"]) for each in told["runs"]] == [
            ("second", 1, 0),
            ("first", 2, 1),
        ]
        assert told["runs"][0]["finished_at"] is not None
        (running,) = told["running"]
        assert {key: running[key] for key in ("rollout_id", "run_id", "stage", "works", "server", "attempt")} == {
            **{"rollout_id": "job-1", "run_id": "first", "stage": "run", "works": True},
            **{"server": "trivial", "attempt": 1},
        }
        assert running["url"].startswith("http://127.0.0.1:")
        assert running["seconds"] >= running["stage_seconds"] > 0
        assert (await raw(served, "GET", "/v1/runs", role="read"))[0] == 200
        await served.client.cancel(run="first")


@pytest.mark.parametrize("command", ["watch", "cancel", "status"])
async def test_command_about_a_run_that_the_service_does_not_know_names_the_nearest(
    make_chain: MakeChain, command: str
) -> None:
    async with serving(make_chain()) as served:
        await served.client.submit([job(0, run_id="first")])
        where = [f"url={served.url}", f"token={TOKENS[ServiceRole.OPERATE][0]}"]
        assert await jobs_command(command, "run=first", *where) == (0, "")
        code, said = await jobs_command(command, "run=frist", *where)
        assert code == 2 and "no jobs of run 'frist' (did you mean 'first'?); there are: first" in said


async def test_results_are_not_written_over_the_rows_that_were_submitted(
    make_chain: MakeChain, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(lines := orjson.dumps(job(0)["row"]) + b"\n")
    async with serving(make_chain()) as served:
        where = [f"url={served.url}", f"token={TOKENS[ServiceRole.OPERATE][0]}"]
        code, said = await jobs_command("submit", f"input={rows}", f"output={tmp_path}/./rows.jsonl", *where)
        assert code == 2 and "is the input itself" in said
        assert not any((await served.client.status())["jobs"].values())
    assert rows.read_bytes() == lines


async def jobs_command(*words: str) -> tuple[int | None, str]:
    """Run ng_jobs; return its exit code and errors."""
    start = [sys.executable, "-c", "from nemo_gym.cli.jobs import main; main()"]
    pipe = asyncio.subprocess.PIPE
    command = await asyncio.create_subprocess_exec(*start, *words, stdout=pipe, stderr=pipe)
    errors = (await command.communicate())[1].decode()
    return command.returncode, "\n".join(line for line in errors.splitlines() if "error:" in line)


async def test_refused_token_is_told_with_where_it_comes_from(
    make_chain: MakeChain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusal(**where: Any) -> str:
        async with AsyncRolloutClient(**where) as client:
            with pytest.raises(ServiceError, match="the bearer token is not valid") as refused:
                await client.status()
            return str(refused.value)

    async with serving(make_chain()) as served:
        write_address(tmp_path / "service.json", served.url, {"operate": "o" * 20}, "store")
        assert str(tmp_path / "service.json") in await refusal(run_dir=tmp_path)
        assert "the one given as token" in await refusal(run_dir=tmp_path, token="g" * 20)
        monkeypatch.setenv("NEMO_GYM_SERVICE_TOKEN", "e" * 20)
        assert "that of NEMO_GYM_SERVICE_TOKEN in the environment" in await refusal(run_dir=tmp_path)


async def test_what_is_named_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NEMO_GYM_SERVICE_URL", "http://of-the-environment:1")
    monkeypatch.setenv("NEMO_GYM_SERVICE_TOKEN", "e" * 20)
    write_address(tmp_path / "service.json", "http://of-the-directory:1", {"operate": "o" * 20}, "store")
    found = AsyncRolloutClient(run_dir=tmp_path).address
    assert (found.url, found.token) == ("http://of-the-directory:1", "o" * 20)
    assert AsyncRolloutClient("http://given:1", run_dir=tmp_path).address.url == "http://given:1"
    found = AsyncRolloutClient().address
    assert (found.url, found.token) == ("http://of-the-environment:1", "e" * 20)
    code, said = await jobs_command("cancel", "run=first", "run_id=A")
    assert code == 2 and "no stack 'A' runs" in said
    code, said = await jobs_command("cancel", "run=first", "run_id=A", "url=http://given:1")
    assert code == 2 and "run_id has no effect beside url" in said


async def test_client_that_does_not_read_keeps_few_results_in_memory(make_chain: MakeChain) -> None:
    def kept() -> int:
        return sum(isinstance(each, JobRecord) for each in gc.get_objects())

    async with serving(make_chain()) as served:
        large = [job(n, row={**job(n)["row"], "picture": f"{n}" * 1_000_000}) for n in range(12)]
        assert (await served.client.submit(large)).accepted == 12
        await served.client.wait()
        gc.collect()
        headers = {"Authorization": f"Bearer {TOKENS[ServiceRole.READ][0]}"}
        async with aiohttp.ClientSession() as http, http.get(f"{served.url}/v1/results", headers=headers) as stream:
            assert await stream.content.read(1)
            await served.wait(lambda: kept() > 0, "the results of a page")
            assert kept() <= 8  # of a page, and of the next one


async def test_drain_finishes_what_is_under_way_and_takes_nothing_new(make_chain: MakeChain) -> None:
    async with serving(make_chain(agent={"delay_s": 0.3}), concurrency=1, init_workers=1) as served:
        await served.client.submit([job(n) for n in range(8)])
        await served.client.job("job-0", wait_s=30)
        assert await served.client.drain(wait_s=60) == {"state": "drained", "under_way": 0}
        status = await served.client.status()
        assert status["state"] == "draining" and status["jobs"]["queued"] > 0
        await served.client.drain(resume=True)
        assert await served.client.wait() == {"done": 8}


async def test_a_token_opens_what_its_role_may_do(make_chain: MakeChain) -> None:
    async with serving(make_chain()) as served:
        assert (await raw(served, "GET", "/v1/status", role="read"))[0] == 200
        status, problem = await raw(served, "POST", "/v1/jobs", {"jobs": [job(0)]}, role="read")
        assert status == 403 and "needs a token of role 'submit'; this one is of role 'read'" in problem["detail"]
        assert (await raw(served, "POST", "/v1/jobs", {"jobs": [job(0)]}, role="submit"))[0] == 200
        assert (await raw(served, "POST", "/v1/drain", {}, role="submit"))[0] == 403
        async with aiohttp.ClientSession() as http:
            for path in ("/v1/status", "/metrics", "/v1/results"):
                async with http.get(served.url + path) as response:
                    assert response.status == 401
            async with http.get(served.url + "/health") as response:
                assert response.status == 200


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("submit: [aaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbb]\nread: cccccccccccccccccccc\n")
    tokens = ServiceTokens.load(path)
    assert tokens.require("Bearer bbbbbbbbbbbbbbbbbbbb", ServiceRole.READ, "GET /") is ServiceRole.SUBMIT
    assert tokens.one_of(ServiceRole.OPERATE) is None
    given = ServiceTokens.load(None, {"NEMO_GYM_SERVICE_READ_TOKEN": "d" * 20})
    assert given.one_of(ServiceRole.READ) == "d" * 20
    path.write_text("read: aaaaaaaaaaaaaaaaaaaa\nsubmit: aaaaaaaaaaaaaaaaaaaa\n")
    of_two_roles = ServiceTokens.load(path)
    assert of_two_roles.require("Bearer aaaaaaaaaaaaaaaaaaaa", ServiceRole.READ, "GET /") is ServiceRole.SUBMIT
    with pytest.raises(RoleError, match="this one is of role 'submit'"):
        of_two_roles.require("Bearer aaaaaaaaaaaaaaaaaaaa", ServiceRole.OPERATE, "POST /")
    path.write_text("submitter: [aaaaaaaaaaaaaaaaaaaa]\n")
    with pytest.raises(ConfigError, match="did you mean 'submit'"):
        ServiceTokens.load(path)
    path.write_text("submit: [short]\n")
    with pytest.raises(ConfigError, match="at least 16"):
        ServiceTokens.load(path)


async def test_status_and_metrics_tell_of_stages_and_servers(make_chain: MakeChain) -> None:
    async with serving(make_chain(), capacities={"trivial": 4}) as served:
        await served.client.submit([job(n) for n in range(3)])
        await served.client.wait()
        status = await served.client.status()
        assert [stage["stage"] for stage in status["stages"]] == ["init", "run", "eval"]
        (agent,) = [each for each in status["servers"] if each["instance"] == "trivial"]
        assert (agent["done"], agent["busy"], agent["capacity"], agent["health"]) == (3, 0, 4, "ready")
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {TOKENS[ServiceRole.READ][0]}"}
            async with http.get(served.url + "/metrics", headers=headers) as response:
                text = await response.text()
        assert 'nemo_gym_rollouts_jobs{state="done"} 3' in text
        assert 'nemo_gym_rollouts_server_done{server="trivial.0"} 3' in text


async def test_servers_register_share_the_work_and_leave(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 0.1})
    other = ChainServer("agent", {"journal": str(chain.journal), "delay_s": 0.1})
    url = f"http://127.0.0.1:{other.port}"
    try:
        other.wait_ready()
        async with serving(chain, concurrency=8, capacities={"trivial": 4}) as served:
            with pytest.raises(ServiceError, match="did you mean 'trivial'"):
                await served.client.register_server("trivia", url)
            with pytest.raises(ServiceError, match="capacity"):
                await served.client.register_server("trivial", url, capacity=0)
            added = await served.client.register_server("trivial", url, capacity=4)
            await served.client.submit([job(n) for n in range(80)])
            assert await served.client.wait() == {"done": 80}
            done = {each["server_id"]: each["done"] for each in (await served.client.status())["servers"]}
            assert abs(done["trivial.0"] - done["trivial.1"]) <= 8
        async with serving(chain, concurrency=8, capacities={"trivial": 4}) as served:  # it is remembered
            await served.client.submit([job(n) for n in range(80, 200)])
            await served.wait(lambda: len(chain.notes("act")) > 90, "work to be under way")
            await served.client.remove_server(added["server_id"])
            other.kill()
            assert await served.client.wait(run=served.service.store_id) == {"done": 200}
            with pytest.raises(ServiceError, match="no server has the id") as refused:
                await served.client.remove_server(added["server_id"])
            assert refused.value.details["status"] == 404
    finally:
        other.stop()


async def test_id_of_a_server_is_never_anothers_not_even_after_a_restart(make_chain: MakeChain) -> None:
    chain = make_chain()
    async with serving(chain) as served:
        first, second = [
            await served.client.register_server("trivial", f"http://127.0.0.1:{port}", credential="secret")
            for port in (1, 2)
        ]
        await served.client.remove_server(first["server_id"])
    async with serving(chain) as served:
        third = await served.client.register_server("trivial", "http://127.0.0.1:3")
        await served.client.register_server("trivial", "http://127.0.0.1:2", capacity=3)  # known: it keeps its place
        await served.client.remove_server(second["server_id"])
        with pytest.raises(ServiceError, match="no server has the id"):
            await served.client.remove_server(first["server_id"])
    async with serving(chain) as served:
        listed = {each["server_id"]: each["url"] for each in (await served.client.status())["servers"]}
        assert listed[third["server_id"]] == "http://127.0.0.1:3"
        assert not {first["server_id"], second["server_id"]} & set(listed)
        again = await served.client.register_server("trivial", "http://127.0.0.1:1")
        assert again["server_id"] == first["server_id"]
    assert "secret" not in (chain.directory / "state" / "servers-main.json").read_text()


async def test_id_stays_when_a_server_of_another_instance_takes_over_a_url(make_chain: MakeChain) -> None:
    chain = make_chain()
    async with serving(chain) as served:
        urls = [f"http://127.0.0.1:{port}" for port in (1, 2)]
        first, second = [await served.client.register_server("trivial", url) for url in urls]
        await served.client.remove_server(first["server_id"])
        await served.client.register_server("policy", urls[0])
    async with serving(chain) as served:
        listed = {each["server_id"]: each["url"] for each in (await served.client.status())["servers"]}
        assert listed[second["server_id"]] == urls[1]
        assert listed["policy.1"] == urls[0]


async def test_removed_server_is_asked_nothing_not_even_after_a_restart(make_chain: MakeChain) -> None:
    chain = make_chain()
    removed = "http://127.0.0.1:1"

    def asked(served: Served) -> set[str]:
        return {served.service.core.client.base_url("policy") for _ in range(4)}

    async with serving(chain) as served:
        await served.client.register_server("policy", removed)
        assert removed in asked(served)
        await served.client.remove_server("policy.1")
        assert removed not in asked(served)
    async with serving(chain) as served:
        assert removed not in asked(served)
        await served.client.register_server("policy", removed)
        assert removed in asked(served)


async def test_servers_that_register_at_once_are_all_remembered(make_chain: MakeChain) -> None:
    chain = make_chain()
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4)]
    async with serving(chain) as served:
        await asyncio.gather(*(served.client.register_server("trivial", url) for url in urls))
    async with serving(chain) as served:
        listed = {each["url"] for each in (await served.client.status())["servers"]}
        assert {*urls} <= listed


async def test_server_of_an_instance_that_is_gone_does_not_prevent_a_start(make_chain: MakeChain) -> None:
    chain = make_chain()
    entry = {"instance": "gone", "url": "http://127.0.0.1:1", "capacity": None, "credential": None}
    kept = chain.directory / "state" / "servers-main.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps([entry]))
    async with serving(chain) as served:
        await served.client.submit([job(0)])
        assert await served.client.wait() == {"done": 1}
        await served.client.register_server("trivial", "http://127.0.0.1:2")
    assert [each["instance"] for each in json.loads(kept.read_text())] == ["gone", "trivial"]


async def test_registration_that_cannot_be_kept_names_the_file(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with serving(make_chain()) as served:
        monkeypatch.setattr("nemo_gym.service.service.write_private", full)
        body = {"instance": "trivial", "url": "http://127.0.0.1:1"}
        status, problem = await raw(served, "POST", "/v1/servers", body)
        assert (status, problem["code"]) == (507, "store") and "servers-main.json" in problem["detail"]
        assert "http://127.0.0.1:1" not in [each["url"] for each in (await served.client.status())["servers"]]


async def test_client_that_never_reads_its_stream_does_not_hold_up_a_stop(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym.service.routes.STOP_GRACE_S", 1)
    chain = make_chain()
    said: asyncio.Queue[str] = asyncio.Queue()
    state = chain.directory / "state"
    serving_task = asyncio.create_task(host(chain.client(), ServiceConfig.parse({"port": 0}), state, said.put_nowait))
    await said.get()
    address = json.loads((state / "service.json").read_text())
    async with AsyncRolloutClient(run_dir=state) as client:
        padding = "x" * 400_000
        await client.submit([job(n, row={**job(n)["row"], "padding": padding}) for n in range(40)])
        assert await client.wait() == {"done": 40}
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", int(address["url"].rpartition(":")[2])))
        token = address["tokens"]["read"]
        unread.sendall(f"GET /v1/results HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        await asyncio.to_thread(unread.recv, 1024)
        serving_task.cancel()
        async with asyncio.timeout(45):
            await asyncio.wait({serving_task})
    assert serving_task.cancelled()


def test_blocking_client_does_the_same_from_a_program_without_a_loop(make_chain: MakeChain) -> None:
    chain = make_chain()

    async def serve(started: asyncio.Event, ended: asyncio.Event, at: list[str]) -> None:
        async with serving(chain) as served:
            at.append(served.url)
            started.set()
            await ended.wait()

    def use(url: str) -> None:
        with RolloutClient(url, TOKENS[ServiceRole.OPERATE][0]) as client:
            assert client.submit([job(n) for n in range(5)]).accepted == 5
            assert sorted(view.job_id for _, view in zip(range(5), client.results(), strict=False)) == [
                f"job-{n}" for n in range(5)
            ]
            assert client.job("job-1", wait_s=30).reward == 1.0
            assert len(list(client.jobs())) == 5
            assert client.wait() == {"done": 5}
            assert client.status()["jobs"]["done"] == 5

    async def main() -> None:
        started, ended, at = asyncio.Event(), asyncio.Event(), []
        serving_task = asyncio.create_task(serve(started, ended, at))
        await started.wait()
        try:
            await asyncio.to_thread(use, at[0])
        finally:
            ended.set()
            await serving_task

    asyncio.run(main())


async def test_store_of_a_run_is_refused_and_left_as_it_is(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 1.0})
    chain.write_rows(2)
    collector = chain.collect(run_id="live")
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("act")) == 2, "both rollouts to be under way")
    with pytest.raises(ConfigError, match="another service's or run's"):
        async with serving(chain, store=str(chain.directory / "out_store.sqlite")):
            pass
    await asyncio.to_thread(collector.communicate)
    with pytest.raises(ConfigError, match="holds the run 'live' of ng_run"):
        async with serving(chain, store=str(chain.directory / "out_store.sqlite")):
            pass
    assert sorted(chain.notes("act")) == [("live.0-0", 1), ("live.1-0", 1)]


async def test_two_services_do_not_share_a_file(make_chain: MakeChain) -> None:
    chain = make_chain()
    async with serving(chain):
        with pytest.raises(ConfigError, match="another service's"):
            async with serving(chain):
                pass
