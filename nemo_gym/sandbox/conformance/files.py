"""Single files into and out of a box, and paths that a box made to mislead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_gym.contract.errors import SandboxError, SandboxLostError
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.conformance.base import Checks, StartBox, sh
from nemo_gym.sandbox.facade import AsyncSandbox


class FileChecks(Checks):
    async def test_file_goes_in_and_comes_out_unchanged_with_its_mode(self, box: AsyncSandbox, tmp_path: Path) -> None:
        source = tmp_path / "tool.bin"
        source.write_bytes(os.urandom(1_000_000))
        source.chmod(0o755)
        await box.upload(source, "/opt/new/directory/renamed.bin")
        assert await sh(box, "stat -c %a,%s /opt/new/directory/renamed.bin") == "755,1000000\n"
        await box.download("/opt/new/directory/renamed.bin", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    async def test_upload_replaces_a_file_and_follows_a_link_on_the_host(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        (tmp_path / "a").write_text("new")
        (tmp_path / "link").symlink_to("a")
        await sh(box, "echo old > /tmp/f")
        await box.upload(tmp_path / "link", "/tmp/f")
        assert await sh(box, "cat /tmp/f; test ! -L /tmp/f") == "new"

    async def test_uploaded_file_belongs_to_whoever_runs_commands(self, box: AsyncSandbox, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("x")
        await box.upload(tmp_path / "a", "/tmp/owned")
        assert await sh(box, "test -w /tmp/owned; stat -c %u /tmp/owned") == await sh(box, "id -u")

    async def test_missing_file_and_directory_raise_and_leave_no_target(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        for path in ("/no/such/file", "/etc"):
            with pytest.raises(SandboxError) as caught:
                await box.download(path, tmp_path / "back")
            assert not isinstance(caught.value, SandboxLostError)
            assert path in str(caught.value)
            assert not (tmp_path / "back").exists()

    async def test_download_follows_links_inside_the_box_only(self, box: AsyncSandbox, tmp_path: Path) -> None:
        secret = tmp_path / "host_secret"
        secret.write_text("secret of the host")
        await sh(box, f"ln -s {secret} /tmp/to_host; ln -s /proc/1/root{secret} /tmp/by_proc; mkdir -p /tmp/d")
        await sh(box, "echo inside > /tmp/d/real; ln -s /tmp/d /tmp/to_dir")
        for path in ("/tmp/to_host", "/tmp/by_proc"):
            with pytest.raises(SandboxError):
                await box.download(path, tmp_path / "back")
            assert not (tmp_path / "back").exists()
        await box.download("/tmp/to_dir/real", tmp_path / "back")
        assert (tmp_path / "back").read_text() == "inside\n"

    async def test_upload_through_a_link_of_the_box_stays_in_the_box(self, box: AsyncSandbox, tmp_path: Path) -> None:
        target = tmp_path / "outside"
        target.mkdir()
        (tmp_path / "a").write_text("x")
        await sh(box, f"ln -s {target} /tmp/out")
        try:
            await box.upload(tmp_path / "a", "/tmp/out/written")
        except SandboxError:
            pass
        assert list(target.iterdir()) == []

    async def test_files_of_a_closed_box_are_lost(
        self, provider: SandboxProvider, start: StartBox, tmp_path: Path
    ) -> None:
        box = await start()
        (tmp_path / "a").write_text("x")
        await provider.close(box.handle)
        with pytest.raises(SandboxLostError):
            await box.upload(tmp_path / "a", "/tmp/a")
        with pytest.raises(SandboxLostError):
            await box.download("/etc/passwd", tmp_path / "b")
