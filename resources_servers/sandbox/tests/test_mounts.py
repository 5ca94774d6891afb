"""What of the broker's host a caller may have mounted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from resources_servers.sandbox.tests.api import Answer, Api, calling
from resources_servers.sandbox.tests.conftest import StartBroker


async def created(api: Api, source: Path) -> Answer:
    return await api.create(spec={"mounts": [{"source": str(source), "target": "/srv/mounted"}]})


async def test_mount_is_refused_when_it_is_not_below_a_root(start_broker: StartBroker, tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    (shared / "tool").mkdir(parents=True)
    private.mkdir()
    (shared / "tool" / "version").write_text("7")
    (shared / "way_out").symlink_to(private)
    async with calling(start_broker(mount_roots=[str(shared)])) as api:
        made = await created(api, shared / "tool")
        assert made.status == 201, made.body
        for source in (private, shared / "way_out", shared / "tool" / ".." / ".." / "private", Path("/etc")):
            refused = await created(api, source)
            assert (refused.status, refused.json["code"], refused.json["started"]) == (403, "mount_refused", "no")
            assert str(source) in refused.json["detail"]
        assert await api.ids() == [made.json["sandbox"]["sandbox_id"]]


async def test_caller_from_outside_mounts_nothing_when_no_root_is_named(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(caller_tokens={"trainer": "s3cret-trainer"})
    async with calling(broker) as stack:
        outside = dataclasses.replace(stack, caller={"Authorization": "Bearer s3cret-trainer"})
        assert (await created(outside, tmp_path)).json["code"] == "mount_refused"
        assert (await outside.create()).status == 201
        assert (await created(stack, tmp_path)).status == 201
