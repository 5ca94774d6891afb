"""Servers as processes: the routes, a client over several of them, and a trainer's batches."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.cli.prorl_server import addresses, serve
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.prorl.client import ProRLClient, assign_llm_servers, server_urls
from nemo_gym.prorl.llm_servers import parse_address
from nemo_gym.prorl.trainer import prorl_sampler
from tests.prorl.fleet import prorl_server

LONG_S = 60.0
WISH: dict[str, Any] = {"data_source": "wishes", "instance_id": "w"}


class Http:
    def __init__(self, url: str, token: str | None = None) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"} if token else {}

    async def __call__(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        method = "GET" if body is None else "POST"
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async with session.request(method, self._url + path, json=body) as reply:
                return reply.status, await reply.json(content_type=None)


async def reached(ask: Http, key: str, value: int) -> None:
    """Until the server's status says so."""
    async with asyncio.timeout(LONG_S):
        while True:
            if (await ask("/status"))[1][key] == value:
                return
            await asyncio.sleep(0.01)


async def test_routes_do_what_the_object_does(tmp_path: Path) -> None:
    bounds = ("max_run_workers=2", "max_body_mib=1", "max_body_values=1000")
    with prorl_server(tmp_path, *bounds, f"url_file={tmp_path / 'urls' / 'node'}") as server:
        ask = Http(server.url)
        assert (tmp_path / "urls" / "node").read_text() == server.url + "\n"
        status, told = await ask("/process", {"instance": WISH})
        assert (status, told["code"]) == (503, "not_running"), "as published: it is started by /start"
        assert (await ask("/start", {}))[0] == 200
        status, told = await ask("/start", {})
        assert (status, told["detail"]) == (400, "the server is running already; stop() it first")

        status, told = await ask("/status")
        assert status == 200 and told["running"] and told["total"] == 0
        assert (told["max_init_workers"], told["max_run_workers"], told["max_eval_workers"]) == (6, 2, 2)
        assert told["data_sources"] == ["math", "swebench", "wishes"]

        status, result = await ask("/process", {"instance": WISH, "sampling_params": {"max_iterations": 3}})
        assert (status, result["reward"], result["success"]) == (200, 1.0, True)
        status, result = await ask("/process", {"instance": {**WISH, "fails": True}, "sampling_params": {}})
        assert (status, result["error"], result["reward"]) == (200, "run: RuntimeError: as wished", None)

        status, result = await ask("/process", {"instance": {**WISH, "odd": True}})
        assert (status, result["reward"], result["text"], result["path"]) == (200, 1.0, "caf?", "x")
        assert result["many"] == str(2**70) and json.dumps(result["deep"]).count("[") == 301
        assert [result[each] for each in ("name", "error", "digits")] == ["caf?", "?", "<int>"]
        parents = [child["parent"] for child in result["tree"]["children"]]
        assert all(parent.startswith("{'children': [{'parent': {...}}") for parent in parents)

        for body, said in (
            ({"instance": {"data_source": "codeforces"}}, "'codeforces'; registered: math, swebench, wishes"),
            ({"instance": WISH, "sampling_params": {"max_iterations": "x"}}, "max_iterations must be a whole number"),
        ):
            status, told = await ask("/process", body)
            assert status == 400 and said in told["detail"]
        for path, body, field in (
            ("/process", {}, "instance"),
            ("/process", {"instance": WISH, "jobid": "x"}, "unknown key 'jobid' (did you mean 'job_id'?)"),
            ("/cancel", {}, "job_id"),
            ("/add_llm_server", {"address": "http://a", "weight": 0}, "weight"),
        ):
            status, told = await ask(path, body)
            assert status == 422 and field in told["detail"]
        for large, key in (("x" * (1 << 20), "max_body_mib"), ([[] for _ in range(300)], "max_body_values")):
            status, told = await ask("/process", {"instance": {**WISH, "large": large}})
            assert status == 413 and f"'{key}'" in told["detail"]
        for address in ("http://[::1", "http://a:99999", "http://a..b", "node:80"):
            status, told = await ask("/add_llm_server", {"address": address})
            assert status == 400 and f"'{address}' is no address of a server" in told["detail"]

        status, told = await ask("/process", {"instance": {**WISH, "answer": 2**70}})
        assert status == 422 and "integer beyond 64 bits; send it as text" in told["detail"]

        under_way = asyncio.create_task(ask("/process", {"instance": {**WISH, "sleep_s": 600}, "job_id": "long"}))
        await reached(ask, "active_run", 1)
        status, told = await ask("/cancel", {"job_id": "long"})
        assert status == 200 and told["cancelled"] and told["seconds"] < LONG_S
        assert (await under_way)[1]["failure"]["kind"] == "cancelled"
        assert (await ask("/cancel", {"job_id": "long"}))[0] == 404

        left = asyncio.create_task(ask("/process", {"instance": {**WISH, "sleep_s": 600}, "job_id": "left"}))
        await reached(ask, "active_run", 1)
        left.cancel()
        await reached(ask, "total", 0)

        assert (await ask("/add_llm_server", {"address": "http://b:1", "weight": 2}))[1]["new"] is True
        assert (await ask("/status"))[1]["llm_servers"] == ["http://127.0.0.1:9", "http://b:1"]
        assert (await ask("/clear_llm_server", {}))[0] == 200
        status, told = await ask("/process", {"instance": WISH})
        assert (status, told["code"]) == (503, "no_llm_server")
        assert (await ask("/stop", {}))[0] == 200
        assert (await ask("/status"))[1]["running"] is False


async def test_token_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    with prorl_server(tmp_path, PRORL_SERVER_TOKEN="word") as server:
        for token in (None, "other"):
            status, told = await Http(server.url, token)("/status")
            assert status == 401 and "PRORL_SERVER_TOKEN" in told["detail"]
        assert (await Http(server.url, "word")("/status"))[0] == 200
        async with ProRLClient([server.url], token="word") as client:
            assert (await client.process(WISH))["success"]
        with pytest.raises(ConfigError, match="wants its token"):
            async with ProRLClient([server.url]):
                pass


async def test_free_server_takes_the_next_and_a_faster_one_takes_more(tmp_path: Path) -> None:
    with prorl_server(tmp_path / "slow", SLOW="2") as slow, prorl_server(tmp_path / "quick") as quick:
        async with ProRLClient(f"{slow.url}+{quick.url}", places=2) as client:
            assert client.places == 4
            results = {number: result async for number, result in client.process_all([WISH] * 40)}
            assert sorted(results) == [*range(40)] and all(result["success"] for result in results.values())
            assert client.done[slow.url] + client.done[quick.url] == 40
            assert client.done[quick.url] > 3 * client.done[slow.url] > 0


async def test_jobs_of_a_killed_server_go_to_another_and_one_that_comes_back_takes_jobs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(prorl_server(tmp_path / "first", SLOW="0.3"))
        second = stack.enter_context(prorl_server(tmp_path / "second"))
        port = first.url.rpartition(":")[2]
        async with ProRLClient([first.url, second.url], places=4) as client:
            jobs = [asyncio.create_task(client.process({**WISH, "sleep_s": 0.05})) for _ in range(80)]
            async with asyncio.timeout(LONG_S):
                await asyncio.wait(jobs[:1])
                while client.done[first.url] == 0:
                    await asyncio.wait([job for job in jobs if not job.done()], return_when=asyncio.FIRST_COMPLETED)
                first.kill()
                results = await asyncio.gather(*jobs)
                assert len(results) == 80 and all(result["success"] for result in results)
                before = client.done[first.url]
                assert before < 80
                assert "problem" in (await client.status())[first.url]
                stack.enter_context(prorl_server(tmp_path / "first", f"port={port}"))
                while client.done[first.url] == before:
                    await asyncio.gather(*(client.process(WISH) for _ in range(8)))


async def test_server_that_was_restarted_gets_its_llm_servers_again_before_it_gets_jobs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(prorl_server(tmp_path / "first"))
        second = stack.enter_context(prorl_server(tmp_path / "second"))
        async with ProRLClient([first.url, second.url], places=1, max_tries=1) as client, asyncio.timeout(LONG_S):
            await client.set_llm_servers(["http://127.0.0.1:7001/"])
            first.kill()
            await asyncio.gather(*(client.process(WISH) for _ in range(4)))
            before, port = client.done[first.url], first.url.rpartition(":")[2]
            stack.enter_context(prorl_server(tmp_path / "first", f"port={port}", "llm_server_addresses="))
            while client.done[first.url] == before:
                results = await asyncio.gather(*(client.process(WISH) for _ in range(8)))
                assert {result["llm_server"] for result in results} == {"http://127.0.0.1:7001"}
            # Restarted between two jobs, so that the client has not missed it.
            await Http(first.url)("/clear_llm_server", {})
            assert all([(await client.process(WISH))["success"] for _ in range(4)])


async def test_server_without_an_llm_server_is_left_out_while_others_have_one(tmp_path: Path) -> None:
    none = "llm_server_addresses="
    with prorl_server(tmp_path / "first", none) as first, prorl_server(tmp_path / "second", none) as second:
        async with ProRLClient([first.url, second.url], places=1) as client, asyncio.timeout(LONG_S):
            for _ in range(2):
                with pytest.raises(ServerError, match="there is no LLM server: give llm_server_addresses"):
                    await client.process(WISH)
            given, left = second.url, first.url
            await Http(given)("/add_llm_server", {"address": "http://127.0.0.1:9"})
            while client.done[given] == 0:
                with suppress(ServerError):
                    await client.process(WISH)
                await asyncio.sleep(0.2)  # a server logs each refusal to a pipe that nobody reads
            results = await asyncio.gather(*(client.process(WISH) for _ in range(20)))
            assert all(result["success"] for result in results)
            assert client.done[left] == 0
            await Http(left)("/add_llm_server", {"address": "http://127.0.0.1:9"})
            while client.done[left] == 0:
                await asyncio.gather(*(client.process(WISH) for _ in range(8)))


async def test_client_without_any_server_says_which_and_why() -> None:
    async with ProRLClient(["http://127.0.0.1:9"], patience_s=0.2) as client:
        with pytest.raises(ServerError, match=r"no ProRL server was there for 0\.2 s: http://127\.0\.0\.1:9: "):
            await client.process(WISH)


async def test_what_a_server_refuses_is_told_and_not_tried_again(tmp_path: Path) -> None:
    with prorl_server(tmp_path) as server:
        async with ProRLClient([server.url], places=1) as client:
            with pytest.raises(ConfigError, match="no handler is registered for data_source 'stem'"):
                await client.process({"data_source": "stem"})
            failed = await client.process({**WISH, "fails": True})
            assert failed["error"] == "run: RuntimeError: as wished"
            assert client.done[server.url] == 3, "an error of the infrastructure is tried again"
            assert (await client.process(WISH))["success"], "the place is free again"


def test_trainer_hands_its_loader_over_once_and_gets_effective_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = [{**WISH, "instance_id": f"w{n}", "rewards": [0.0, 1.0] if n % 2 else [1.0]} for n in range(12)]
    with prorl_server(tmp_path / "a") as one, prorl_server(tmp_path / "b") as two:
        monkeypatch.setenv("PRORL_SERVER_URLS", f"{one.url}+{two.url}")
        run = {"output": str(tmp_path / "train.jsonl"), "max_turns": 3}
        with prorl_sampler(
            loader, run, llm_servers=["http://127.0.0.1:7001"], sampling={"samples_per_group": 6}
        ) as sampler:
            first = sampler.next_batch(requested_batch_size=2)
            checkpoint = sampler.state_dict()
            second = sampler.next_batch(requested_batch_size=1)
        for batch in (first, second):
            for row in batch.rows():
                assert row["reward"] in (0.0, 1.0) and row["data_source"] == "wishes" and row["valid"] is True
            assert {len(set(group.rewards)) for group in batch.groups} == {2}, "groups of equal rewards are left out"
        assert [len(batch.groups) for batch in (first, second)] == [2, 1]
        assert all(int(row["instance_id"][1:]) % 2 for batch in (first, second) for row in batch.rows())
        assert {row["llm_server"] for row in first.rows()} == {"http://127.0.0.1:7001"}
        pids = {row["pid"] for row in first.rows()}
        with prorl_sampler(loader, run, sampling={"samples_per_group": 6}) as sampler:
            sampler.load_state_dict(checkpoint)
            again = sampler.next_batch(requested_batch_size=1)
        assert [group.group_id for group in again.groups] == [group.group_id for group in second.groups]
    assert len(pids) == 2, "both servers worked"
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len({line["_ng_rollout_id"] for line in lines}) == len(lines)


def test_run_keys_of_a_trainer_reach_the_jobs_or_are_refused(tmp_path: Path) -> None:
    keys = {"top_k": 5, "stop": ["END"], "temperature": 0.5, "max_output_tokens": 9}
    run = {"output": str(tmp_path / "train.jsonl"), "max_turns": 3, "seed": 40, **keys}
    loader = [{**WISH, "rewards": [0.0, 1.0]}]
    with prorl_server(tmp_path / "a") as server:
        with prorl_sampler(
            loader,
            run,
            urls=[server.url],
            sampling_params={"top_k": 7, "min_p": 0.1},
            sampling={"samples_per_group": 2, "epochs": 1},
            filters=(),
        ) as sampler:
            rows = sampler.next_batch(requested_batch_size=1).rows()
        asked = [{key: value for key, value in row["llm"].items() if key != "base_url"} for row in rows]
        for refused in ({"wall_clock_s": 5}, {"memory_mib": 100}, {"agent_caps": {"wishes": 1}}, {"num_repeats": 2}):
            with pytest.raises(ConfigError, match=f"{next(iter(refused))} has no effect here"):
                prorl_sampler(loader, {**run, **refused}, urls=[server.url])
    assert asked == [{**keys, "min_p": 0.1, "max_iterations": 3, "seed": 40 + number} for number in range(2)]


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
def test_interrupted_command_ends_in_order_and_says_nothing(tmp_path: Path, inherited: Any) -> None:
    before = signal.signal(signal.SIGINT, inherited)  # a shell without job control ignores it for its background
    try:
        with prorl_server(tmp_path) as server:
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "error" not in (tmp_path / "said.txt").read_text()


def test_url_file_that_cannot_be_written_ends_the_command_in_order_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    start = [sys.executable, "-c", "from nemo_gym.cli.prorl_server import main; main()"]
    words = ["port=0", "start=true", f"url_file={tmp_path / 'file' / 'url'}"]
    ended = subprocess.run([*start, *words], capture_output=True, text=True, timeout=LONG_S)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"ng_prorl_server: error: url_file=.* cannot be written: .*\n", ended.stderr), ended.stderr


def test_trainer_whose_rows_no_server_handles_is_told(tmp_path: Path) -> None:
    with prorl_server(tmp_path / "a") as server:
        with prorl_sampler(
            [{"data_source": "stem"}], {"output": str(tmp_path / "o.jsonl")}, urls=[server.url]
        ) as sampler:
            with pytest.raises(ConfigError, match="'stem' has no handler on http"):
                sampler.next_batch(1)
    with pytest.raises(ConfigError, match="no ProRL server is there"):
        prorl_sampler([WISH], {"output": str(tmp_path / "o.jsonl")}, urls=["http://127.0.0.1:9"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["max_run_workers=0"], "max_run_workers must be a whole number from 1, got 0"),
        (["max_run_worker=2"], "unknown key 'max_run_worker' (did you mean 'max_run_workers'?)"),
        (["swebench=agent=nobody"], "swebench='agent=nobody':"),
        (["handlers=no_such_module"], "handlers=no_such_module cannot be imported"),
        (["host=0.0.0.0"], "export PRORL_SERVER_TOKEN"),
        (["start=maybe"], "start=maybe must be true or false"),
        (["llm_server_addresses=nowhere"], "'nowhere' is no address of a server"),
        (["word"], "'word' is not a setting"),
    ],
)
def test_command_names_what_is_wrong_with_it(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=re.escape(said)):
        serve(["port=0", *words])


def test_urls_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SERVER_URLS", "http://a:8006/ + http://b:8006,http://a:8006")
    assert server_urls() == ["http://a:8006", "http://b:8006"]
    monkeypatch.delenv("PRORL_SERVER_URLS")
    with pytest.raises(ConfigError, match="set PRORL_SERVER_URLS="):
        server_urls()
    with pytest.raises(ConfigError, match="'node-1' is not a valid server URL"):
        server_urls("node-1")
    for check in (server_urls, parse_address):
        with pytest.raises(ConfigError, match=r"http://me:.*@node-1:8006") as refused:
            check("http://me:word@node-1:8006")
        assert "word" not in str(refused.value)
    assert addresses("http://a:1/v1*2,http://b:1") == [("http://a:1/v1", 2.0), ("http://b:1", 1.0)]


def test_llm_servers_go_to_the_server_of_their_node_and_the_rest_is_spread_evenly() -> None:
    servers = ["http://gpu-1:8006", "http://gpu-2:8006", "http://cpu-1:8006", "http://cpu-2:8006"]
    engines = ["http://gpu-1:8100", "http://gpu-1:8101", "http://gpu-2:8100", "http://gpu-2:8101"]
    assert assign_llm_servers(engines, servers) == {
        "http://gpu-1:8006": engines[:2],
        "http://gpu-2:8006": engines[2:],
        "http://cpu-1:8006": ["http://gpu-1:8100"],
        "http://cpu-2:8006": ["http://gpu-1:8101"],
    }
    far = [f"http://far-{n}:1" for n in range(5)]
    assert [len(part) for part in assign_llm_servers(far, servers).values()] == [2, 1, 1, 1]
