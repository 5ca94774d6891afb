"""What agents, and callers from outside, get of the broker's host, network and other callers: nothing unnamed."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.local import LocalProvider
from resources_servers.sandbox.tests.api import Answer, Api, LentBox, calling
from resources_servers.sandbox.tests.broker_process import INSTANCE, BrokerProcess
from resources_servers.sandbox.tests.conftest import StartBroker

MODEL_ROUTES = ["POST /v1/responses", "GET /v1/models", "POST /mcp"]


@asynccontextmanager
async def roles(broker: BrokerProcess) -> AsyncIterator[dict[Role, Api]]:
    """One caller of each role that has boxes, named as its role."""
    async with AsyncExitStack() as stack:
        yield {
            role: await stack.enter_async_context(calling(broker, str(role), role))
            for role in (Role.AGENT, Role.ENVIRONMENT, Role.PIPELINE, Role.OPERATOR)
        }


def from_outside(stack: Api, token: str) -> Api:
    return dataclasses.replace(stack, caller={"Authorization": f"Bearer {token}"})


async def created(api: Api, source: Path) -> Answer:
    return await api.create(spec={"mounts": [{"source": str(source), "target": "/srv/mounted"}]})


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code


# -- mounts --------------------------------------------------------------------------------------------------------


async def test_mount_is_refused_when_it_is_not_below_a_root(start_broker: StartBroker, tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    (shared / "tool").mkdir(parents=True)
    private.mkdir()
    (shared / "tool" / "version").write_text("7")
    (shared / "way_out").symlink_to(private)
    async with roles(start_broker(mount_roots=[str(shared)])) as callers:
        for api in (callers[Role.AGENT], callers[Role.OPERATOR]):
            made = await created(api, shared / "tool")
            assert made.status == 201, made.body
            for source in (private, shared / "way_out", shared / "tool" / ".." / ".." / "private", Path("/etc")):
                refused = await created(api, source)
                assert (refused.status, refused.json["code"], refused.json["started"]) == (403, "mount_refused", "no")
                assert str(source) in refused.json["detail"]
        assert len(await callers[Role.OPERATOR].ids()) == 2


async def test_agent_mounts_nothing_of_the_host_when_no_root_is_named(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    async with roles(start_broker()) as callers:
        for source in (tmp_path, Path("/"), Path("/etc/shadow")):
            assert said(await created(callers[Role.AGENT], source)) == (403, "mount_refused")
        assert (await callers[Role.AGENT].create()).status == 201
        for role in (Role.ENVIRONMENT, Role.PIPELINE, Role.OPERATOR):
            assert (await created(callers[role], tmp_path)).status == 201


async def test_agent_mounts_the_programs_of_agents_when_the_configuration_says_so(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path / "plugins"))
    packages = [tmp_path / "cache/agents/tool/1.0", tmp_path / "plugins/responses_api_agents/mine/program"]
    async with roles(start_broker(agent_packages=True)) as callers:
        for package in packages:
            package.mkdir(parents=True)
            made = await created(callers[Role.AGENT], package)
            assert made.status == 201, made.body
        for source in (tmp_path / "cache", tmp_path / "plugins", tmp_path):
            assert said(await created(callers[Role.AGENT], source)) == (403, "mount_refused")
            assert (await created(callers[Role.ENVIRONMENT], source)).status == 201


async def test_agents_image_is_no_path_of_the_host_unless_a_root_is_named(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    paths = ["/", "/etc", "~/.ssh", "./x", "docker-archive:/x.tar", "oci-archive:x.tar", "docker:///x", str(tmp_path)]
    async with roles(start_broker(mount_roots=[str(tmp_path)])) as callers:
        for path in paths[:-1]:
            refused = await callers[Role.AGENT].create(spec={"image": path})
            assert said(refused) == (403, "mount_refused"), path
            assert "spec.image" in refused.json["detail"]
        for role, path in ((Role.AGENT, paths[-1]), (Role.ENVIRONMENT, "/etc"), (Role.AGENT, "registry:5000/a/b:c")):
            # Left to the backend; the local one knows no paths.
            assert (await callers[role].create(spec={"image": path})).code.startswith("sandbox_"), path


async def test_caller_from_outside_may_what_an_agent_may_unless_it_is_trusted(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    tokens = {"trainer": "s3cret-trainer", "preparer": "s3cret-preparer"}
    broker = start_broker(caller_tokens=tokens, trusted_callers=["preparer"])
    async with calling(broker) as stack:
        trainer, preparer = (from_outside(stack, token) for token in tokens.values())
        for outside in (trainer, preparer):
            assert (await created(outside, tmp_path)).json["code"] == "mount_refused"
            assert (await outside.create()).status == 201
        assert said(await trainer.create(spec={"network": "open"})) == (403, "not_permitted")
        assert (await preparer.create(spec={"network": "open"})).status == 201
        assert (await created(stack, tmp_path)).status == 201


async def test_server_of_the_stack_and_a_caller_from_outside_are_not_taken_for_each_other(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(caller_tokens={"world": "s3cret"})
    async with calling(broker, "world", Role.ENVIRONMENT) as server:
        outside = from_outside(server, "s3cret")
        await outside.box()
        refused = await server.call("GET", "/v1/sandboxes")
        assert said(refused) == (401, "unauthenticated")
        assert "caller_tokens" in refused.json["detail"]
        bearer = from_outside(server, broker.keys.caller(Role.ENVIRONMENT, "world", INSTANCE))
        assert said(await bearer.call("GET", "/v1/sandboxes")) == (401, "unauthenticated")


# -- network, options, quotas --------------------------------------------------------------------------------------


async def test_agent_opens_no_box_with_a_network_and_those_who_prepare_do(start_broker: StartBroker) -> None:
    async with roles(start_broker()) as callers:
        refused = await callers[Role.AGENT].create(spec={"network": "open"})
        assert said(refused) == (403, "not_permitted")
        assert "spec.network" in refused.json["detail"]
        assert refused.json["started"] == "no"
        assert await callers[Role.OPERATOR].ids() == []
        for role in (Role.ENVIRONMENT, Role.PIPELINE, Role.OPERATOR):
            assert (await callers[role].create(spec={"network": "open"})).status == 201


@pytest.mark.parametrize(
    "options",
    [
        {"runtime": "runc"},
        {"privileged": True},
        {"devices": ["/dev/kvm"]},
        {"cap_add": ["SYS_ADMIN"]},
        {"network_mode": "host"},
        {"volumes": {"/": "/host"}},
        {"extensions": {"host": "yes"}},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_agent_sets_no_option_of_the_backend(options: dict[str, Any], broker: BrokerProcess) -> None:
    async with roles(broker) as callers:
        refused = await callers[Role.AGENT].create(spec={"provider_options": options})
        assert said(refused) == (403, "not_permitted")
        assert f"spec.provider_options.{next(iter(options))}" in refused.json["detail"]
        # Others are refused by the backend itself, which has no such option.
        assert "not_permitted" not in (await callers[Role.ENVIRONMENT].create(spec={"provider_options": options})).code


async def test_agent_sets_an_option_to_the_value_that_the_configuration_names(start_broker: StartBroker) -> None:
    async with roles(start_broker(agent_provider_options={"runtime": "runsc"})) as callers:
        weaker = await callers[Role.AGENT].create(spec={"provider_options": {"runtime": "runc"}})
        assert said(weaker) == (403, "not_permitted")
        named = await callers[Role.AGENT].create(spec={"provider_options": {"runtime": "runsc"}})
        assert named.code != "not_permitted", "the local backend has no options, and says so"


async def test_agents_boxes_count_against_its_own_quota(start_broker: StartBroker) -> None:
    async with roles(start_broker(max_boxes_per_owner=1, queue_timeout_s=0.2)) as callers:
        agent = callers[Role.AGENT]
        refused = await agent.create(labels={"nemo_gym.owner": "environment"})
        assert said(refused) == (403, "not_permitted")
        assert (await agent.create(labels={"nemo_gym.owner": "agent"})).status == 201
        assert said(await agent.create()) == (429, "quota")
        assert (await callers[Role.ENVIRONMENT].create()).status == 201


async def test_agent_reads_no_metrics_and_reaps_no_boxes_of_others(start_broker: StartBroker) -> None:
    broker = start_broker(caller_tokens={"prometheus": "s3cret"})
    async with roles(broker) as callers:
        theirs = await callers[Role.ENVIRONMENT].box(labels={"run": "r1"})
        mine = await callers[Role.AGENT].box(labels={"run": "r1"})
        reaped = await callers[Role.AGENT].call("DELETE", "/v1/sandboxes?label=run=r1")
        assert reaped.json["reaped"] == [mine.sandbox_id]
        assert said(await callers[Role.AGENT].call("DELETE", theirs.path)) == (404, "sandbox_not_found")
        assert (await theirs.run("echo alive")).stdout == b"alive\n"
        assert said(await callers[Role.AGENT].call("GET", "/metrics")) == (403, "not_permitted")
        for other in (callers[Role.OPERATOR], from_outside(callers[Role.OPERATOR], "s3cret")):
            assert (await other.call("GET", "/metrics")).status == 200


# -- doors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def host_service() -> AsyncIterator[str]:
    """Something on the loopback of the broker's host that is meant for nobody's box."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"inside:{request.path}")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def door(target: str, *allow: str, name: str = "d", port: int = 8000) -> dict[str, Any]:
    return {"name": name, "port": port, "target": target, "allow": list(allow)}


def fetch(path: str, port: int = 8000) -> str:
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}{path}', timeout=20).read().decode())"
    return f'python3 -c "{code}"'


async def test_agents_doors_lead_to_models_and_mcp_servers_alone(host_service: str, start_broker: StartBroker) -> None:
    async with roles(start_broker(door_targets=[host_service])) as callers:
        for allow in ("GET /**", "GET /containers/json", "POST /v1/*", "PUT /v1/models", "get /v1/models"):
            refused = await callers[Role.AGENT].create(spec={"doors": [door(host_service, allow)]})
            assert said(refused) == (403, "not_permitted"), allow
            assert allow in refused.json["detail"]
        mine = await callers[Role.AGENT].box(spec={"doors": [door(host_service, *MODEL_ROUTES)]})
        assert b"inside:/v1/models" in (await mine.run(fetch("/v1/models"))).stdout
        late = door(host_service, "GET /**", name="late", port=8001)
        assert said(await mine.ask("PUT", "/doors/late", json=late)) == (403, "not_permitted")
        assert (await mine.run(fetch("/secret", 8001))).end["return_code"] != 0


async def test_only_an_environment_opens_a_proxy_to_an_allow_list(host_service: str, broker: BrokerProcess) -> None:
    port = int(host_service.rpartition(":")[2])
    proxy = {"name": "egress", "port": 3128, "target": "", "allow": [f"127.0.0.0/8:{port}"], "kind": "proxy"}
    code = (
        "import urllib.request as u; way = u.build_opener(u.ProxyHandler({'http': 'http://127.0.0.1:3128'}));"
        f" print(way.open('{host_service}/secret', timeout=20).read().decode())"
    )
    async with roles(broker) as callers:
        refused = await callers[Role.AGENT].create(spec={"doors": [proxy]})
        assert said(refused) == (403, "not_permitted") and "kind" in refused.json["detail"]
        owned = await callers[Role.ENVIRONMENT].box(spec={"doors": [proxy]})
        assert b"inside:/secret" in (await owned.run(f'python3 -c "{code}"')).stdout


async def test_agents_doors_lead_to_servers_of_the_run_alone_unless_others_are_named(
    host_service: str, start_broker: StartBroker
) -> None:
    async with roles(start_broker(endpoints=[f"{host_service}/run"])) as callers:
        agent, environment = callers[Role.AGENT], callers[Role.ENVIRONMENT]
        for target in (host_service, "http://127.0.0.1:1", f"{host_service}/run/../x", "http://169.254.169.254"):
            refused = await agent.create(spec={"doors": [door(target, *MODEL_ROUTES)]})
            assert said(refused) == (403, "not_permitted") and "door_targets" in refused.json["detail"]
        box = await agent.box(spec={"doors": [door(f"{host_service}/run/sessions/1", *MODEL_ROUTES)]})
        assert b"inside:/run/sessions/1/v1/models" in (await box.run(fetch("/v1/models"))).stdout
        late = door(host_service, *MODEL_ROUTES, name="late", port=8001)
        assert said(await box.ask("PUT", "/doors/late", json=late)) == (403, "not_permitted")
        lent = await (await environment.box()).mint("operate")
        assert said(await lent.ask("PUT", "/doors/late", json=late)) == (403, "not_permitted")
        assert (await environment.create(spec={"doors": [door(host_service, *MODEL_ROUTES)]})).status == 201


async def test_agents_doors_of_a_broker_by_itself_lead_nowhere(host_service: str, broker: BrokerProcess) -> None:
    async with roles(broker) as callers:
        refused = await callers[Role.AGENT].create(spec={"doors": [door(host_service, *MODEL_ROUTES)]})
        assert said(refused) == (403, "not_permitted")


async def test_borrower_opens_doors_to_models_and_mcp_servers_alone_and_the_owner_any(
    host_service: str, start_broker: StartBroker
) -> None:
    async with roles(start_broker(door_targets=[host_service])) as callers:
        owned = await callers[Role.ENVIRONMENT].box()
        lent: LentBox = await owned.mint("operate")
        wide = door(host_service, "GET /**")
        assert said(await lent.ask("PUT", "/doors/d", json=wide)) == (403, "not_permitted")
        assert (await lent.ask("PUT", "/doors/m", json=door(host_service, *MODEL_ROUTES, name="m"))).status == 204
        assert b"inside:/v1/models" in (await owned.run(fetch("/v1/models"))).stdout
        assert (await owned.ask("PUT", "/doors/d", json={**wide, "port": 8001})).status == 204
        assert b"inside:/secret" in (await owned.run(fetch("/secret", 8001))).stdout


async def test_agents_doors_stay_below_the_targets_that_the_configuration_names(
    host_service: str, start_broker: StartBroker
) -> None:
    async with roles(start_broker(door_targets=[f"{host_service}/gateway"])) as callers:
        agent = callers[Role.AGENT]
        for target in (host_service, f"{host_service}/gateways", "http://127.0.0.1:1", f"{host_service}1/gateway"):
            assert said(await agent.create(spec={"doors": [door(target, *MODEL_ROUTES)]})) == (403, "not_permitted")
        box = await agent.box(spec={"doors": [door(f"{host_service}/gateway/sessions/1", *MODEL_ROUTES)]})
        assert b"inside:/gateway/sessions/1/v1/models" in (await box.run(fetch("/v1/models"))).stdout
        for target in (f"{host_service}/gateway/../x", f"{host_service}/gateway/%2e%2e/x"):
            assert said(await agent.create(spec={"doors": [door(target, *MODEL_ROUTES)]})) == (403, "not_permitted")


# -- images --------------------------------------------------------------------------------------------------------


@pytest.fixture
def backend(tmp_path: Path, local_backend: dict[str, Any]) -> dict[str, Any]:
    """The local backend, with images of the test's own."""
    return {"local": {**local_backend["local"], "image_dir": str(tmp_path / "images")}}


async def commit(api: Api, image: str, content: str, labels: dict[str, str] | None = None) -> Answer:
    box = await api.box()
    await box.run(f"echo {content} > /srv/content")
    answer = await box.ask("POST", "/images", json={"image": image, "labels": labels or {"by": content}})
    await box.ask("DELETE")
    return answer


async def content_of(api: Api, image: str) -> str:
    box = await api.box(spec={"image": image})
    output = await box.run("cat /srv/content")
    await box.ask("DELETE")
    return output.stdout.decode().strip()


def at(image: str) -> str:
    return f"/v1/images/{image}"


async def prepared(backend: dict[str, Any], image: str, content: str) -> None:
    """Make an image on the backend itself, as ``ng_prepare`` does."""
    provider = LocalProvider(**backend["local"])
    handle = await provider.create(SandboxSpec(ttl_s=60))
    try:
        await provider.exec(handle, f"echo {content} > /srv/content")
        await provider.commit(handle, image, {"by": content})
    finally:
        await provider.close(handle)
        await provider.aclose()


async def labels_at(backend: dict[str, Any], image: str) -> Any:
    provider = LocalProvider(**backend["local"])
    try:
        return await provider.image_labels(image)
    finally:
        await provider.aclose()


async def test_agent_replaces_and_deletes_no_image_but_its_own_also_after_a_restart(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    broker = start_broker(backend)
    await prepared(backend, "prepared", "honest")
    async with roles(broker) as callers:
        assert (await commit(callers[Role.ENVIRONMENT], "evaluation", "honest")).status == 201
        assert (await commit(callers[Role.AGENT], "mine", "first")).status == 201
        await nothing_but_mine_is_in_reach(callers[Role.AGENT], callers[Role.ENVIRONMENT])
    broker.kill()
    broker.start()
    async with roles(broker) as callers:
        await nothing_but_mine_is_in_reach(callers[Role.AGENT], callers[Role.ENVIRONMENT])
        agent = callers[Role.AGENT]
        assert (await commit(agent, "mine", "second")).status == 201
        assert await content_of(agent, "mine") == "second"
        for _ in range(2):
            assert (await agent.call("DELETE", at("mine"))).status == 204
            assert said(await agent.call("GET", at("mine"))) == (404, "image_not_found")


async def nothing_but_mine_is_in_reach(agent: Api, environment: Api) -> None:
    assert await content_of(agent, "mine") == "first"
    for image in ("evaluation", "prepared", "host"):
        for refused in (
            await commit(agent, image, "poisoned", {"by": "honest"}),
            await agent.call("DELETE", at(image)),
        ):
            assert said(refused) == (403, "image_owned")
            assert image in refused.json["detail"]
        assert said(await agent.call("GET", at(image))) == (404, "image_not_found")
    for image in ("evaluation", "prepared"):
        assert await content_of(environment, image) == "honest"
        assert (await environment.call("GET", at(image))).json["labels"] == {"by": "honest"}
        assert await content_of(agent, image) == "honest", "it may work in boxes of what was prepared"


async def test_agents_image_is_nobody_elses_whatever_it_is_called(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    """An evaluation image that is not there yet cannot be made in its place."""
    broker = start_broker(backend, caller_tokens={"elsewhere": "s3cret"})
    async with roles(broker) as callers, calling(broker, "rival", Role.AGENT) as rival:
        agent, outside = callers[Role.AGENT], from_outside(rival, "s3cret")
        assert (await commit(agent, "to-be-prepared", "poisoned")).status == 201
        assert await labels_at(backend, "to-be-prepared") is None, "ng_prepare on the backend does not find it"
        for other in (rival, outside, callers[Role.ENVIRONMENT], callers[Role.PIPELINE]):
            assert said(await other.call("GET", at("to-be-prepared"))) == (404, "image_not_found")
            assert (await other.create(spec={"image": "to-be-prepared"})).status == 424
        assert (await commit(callers[Role.ENVIRONMENT], "to-be-prepared", "honest")).status == 201
        assert await content_of(callers[Role.ENVIRONMENT], "to-be-prepared") == "honest"
        assert await content_of(agent, "to-be-prepared") == "poisoned"
        assert await content_of(rival, "to-be-prepared") == "honest"
        assert (await outside.call("GET", at("to-be-prepared"))).json["labels"] == {"by": "honest"}
        assert said(await commit(outside, "to-be-prepared", "poisoned")) == (403, "image_owned")
        (hidden,) = [path.stem for path in (Path(backend["local"]["image_dir"]) / "images").glob("nemo-gym-agent.*")]
        for other in (rival, outside, callers[Role.ENVIRONMENT]):
            assert said(await other.create(spec={"image": hidden})) == (403, "image_owned")
            assert said(await other.call("GET", at(hidden))) == (403, "image_owned")
            assert said(await other.call("DELETE", at(hidden))) == (403, "image_owned")
            assert said(await commit(other, hidden, "poisoned")) == (403, "image_owned")
        assert (await callers[Role.OPERATOR].call("DELETE", at(hidden))).status == 204
        assert said(await agent.call("GET", at("to-be-prepared"))) == (404, "image_not_found")


async def test_environments_image_is_replaced_and_deleted_by_itself_the_pipeline_and_operators(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    broker = start_broker(backend)
    await prepared(backend, "prepared", "earlier")
    async with roles(broker) as callers, calling(broker, "another", Role.ENVIRONMENT) as another:
        owner = callers[Role.ENVIRONMENT]
        assert (await commit(owner, "evaluation", "first")).status == 201
        for refused in (await commit(another, "evaluation", "other"), await another.call("DELETE", at("evaluation"))):
            assert said(refused) == (403, "image_owned")
            assert "evaluation" in refused.json["detail"]
        for api, content in ((owner, "second"), (callers[Role.PIPELINE], "third"), (owner, "fourth")):
            assert (await commit(api, "evaluation", content)).status == 201
            assert await content_of(another, "evaluation") == content
        assert (await commit(another, "prepared", "again")).status == 201, "nobody's, as no broker made it"
        assert (await callers[Role.OPERATOR].call("DELETE", at("evaluation"))).status == 204
        assert (await commit(another, "evaluation", "new")).status == 201
        assert said(await owner.call("DELETE", at("evaluation"))) == (403, "image_owned")


async def test_of_two_environments_that_commit_under_one_name_at_once_one_has_the_image(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    broker = start_broker(backend)
    async with AsyncExitStack() as stack:
        apis = [
            await stack.enter_async_context(calling(broker, f"environment-{n}", Role.ENVIRONMENT)) for n in range(6)
        ]
        answers = await asyncio.gather(*(commit(api, "one", f"by-{n}") for n, api in enumerate(apis)))
        statuses = [answer.status for answer in answers]
        assert sorted(statuses) == [201, *[403] * 5]
        winner = statuses.index(201)
        assert await content_of(apis[0], "one") == f"by-{winner}"
        assert (await apis[winner].call("DELETE", at("one"))).status == 204


async def test_name_of_a_commit_that_was_cut_short_is_free_again_after_a_restart(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    broker = start_broker(backend)
    async with roles(broker) as callers:
        assert (await commit(callers[Role.ENVIRONMENT], "kept", "first")).status == 201
    broker.kill()
    with closing(sqlite3.connect(broker.state_dir / "broker.sqlite")) as database, database:
        database.execute(
            "insert into broker_images select identity, 'cut-short', owner, owner_role, created_at from broker_images"
        )
    broker.start()
    async with calling(broker, "another", Role.ENVIRONMENT) as another:
        assert (await commit(another, "cut-short", "mine")).status == 201
        assert said(await commit(another, "kept", "mine")) == (403, "image_owned")


async def test_boxes_of_a_release_without_roles_go_on_and_may_what_anybody_may(
    start_broker: StartBroker, backend: dict[str, Any]
) -> None:
    broker = start_broker(backend)
    await prepared(backend, "prepared", "honest")
    async with calling(broker, "world", Role.ENVIRONMENT) as api:
        box = await api.box(ttl_s=600)
        lent = await box.mint("operate")
    broker.kill()
    with closing(sqlite3.connect(broker.state_dir / "broker.sqlite")) as database, database:
        database.execute("drop table broker_images")
        database.execute("alter table broker_boxes drop column creator_role")
        database.execute("update broker_meta set value = '1' where key = 'schema_version'")
    broker.start()
    async with calling(broker, "world", Role.ENVIRONMENT) as api:
        box, lent = (dataclasses.replace(lease, api=api) for lease in (box, lent))
        assert (await lent.run("echo alive")).stdout == b"alive\n"
        assert (await box.ask("PUT", "/lease", json={"ttl_s": 60})).status == 200
        assert said(await box.ask("POST", "/images", json={"image": "prepared"})) == (403, "image_owned")
        assert (await commit(api, "evaluation", "honest")).status == 201
        assert (await box.ask("DELETE")).status == 204
