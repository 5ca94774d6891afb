"""Images of the local provider: layers stay whole while they are used, and errors name what to do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.contract.errors import SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.conformance.base import eventually
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.local.images import ImageManifest, ImageStore, copy_layer, remove_directory
from nemo_gym.sandbox.providers.local.supervisor.construction import place_in_image
from tests.sandbox.local_boxes import LocalPlace, leftovers, local_place


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


async def test_layers_keep_owners_modes_links_and_deletions_of_system_files(place: LocalPlace) -> None:
    first = await place.create()
    await place.run(
        first,
        "touch /tmp/scratch /var/tmp/scratch; rm /usr/bin/env; mkdir -p /opt/a/b; echo 1 > /opt/a/f;"
        " chmod 4711 /opt/a/f; ln /opt/a/f /opt/a/g; ln -s f /opt/a/s; chmod 700 /opt/a/b;"
        " mv /usr/share/common-licenses /usr/share/moved",
    )
    await place.provider.commit(first, "one", {})
    second = await place.create(image="one")
    assert await place.run(second, "cd /opt/a; stat -c '%a %h %N' f g s; stat -c %a b") == (
        "4711 2 'f'\n4711 2 'g'\n777 1 's' -> 'f'\n700\n"
    )
    assert not (await place.provider.exec(second, "test -e /usr/bin/env -o -e /usr/share/common-licenses")).ok
    assert await place.run(second, "ls /usr/share/moved | wc -l") != "0\n"
    assert await place.run(second, "ls -A /tmp /var/tmp | grep scratch || true") == ""
    await place.run(second, "rm -r /opt/a; cp /bin/true /usr/bin/env")
    await place.provider.commit(second, "two", {})
    third = await place.create(image="two")
    assert (await place.provider.exec(third, "/usr/bin/env; test ! -e /opt/a")).ok


async def test_commit_leaves_out_one_directory_of_temporary_files_when_the_other_is_untouched(
    place: LocalPlace,
) -> None:
    first = await place.create()
    await place.run(first, "touch /var/tmp/scratch")
    await place.provider.commit(first, "one", {})
    second = await place.create(image="one")
    assert await place.run(second, "ls -A /var/tmp") == ""


@pytest.mark.parametrize(
    "command",
    [
        "rm -r /tmp && ln -s {place} /tmp",
        "mv /var /var.old && ln -s {place} /var",
        "rm -r /var/tmp && ln -s {place} /var/tmp",
    ],
)
async def test_commit_touches_no_file_of_the_host_whatever_links_a_box_makes(
    place: LocalPlace, tmp_path: Path, command: str
) -> None:
    (tmp_path / "kept" / "tmp").mkdir(parents=True)
    for file in (tmp_path / "kept" / "file", tmp_path / "kept" / "tmp" / "file"):
        file.write_text("of the host")
    box = await place.create()
    await place.run(box, command.format(place=tmp_path / "kept"))
    await place.provider.commit(box, "linked", {})
    assert sorted(path.name for path in (tmp_path / "kept").rglob("*")) == ["file", "file", "tmp"]


async def test_removed_image_stays_usable_for_its_boxes_and_is_deleted_after_them(place: LocalPlace) -> None:
    made = await place.create()
    await place.run(made, "mkdir /opt/data; echo kept > /opt/data/f")
    await place.provider.commit(made, "image", {})
    user = await place.create(image="image")
    await place.provider.remove_image("image")
    assert await place.run(user, "cat /opt/data/f") == "kept\n"
    layers = place.base / "images" / "layers"
    assert len(list(layers.iterdir())) == 1
    await place.provider.close(user)
    await place.provider.remove_image("image")
    assert list(layers.iterdir()) == []


async def test_boxes_work_while_a_commit_waits_for_another_process_to_release_the_images(place: LocalPlace) -> None:
    made, other = await place.create(), await place.create()
    await place.run(made, "echo kept > /opt/f")
    store = ImageStore(place.base / "images")

    async def is_staged() -> bool:
        return any((store.root / "staging").iterdir())

    with store.locked(exclusive=True):
        committing = asyncio.create_task(place.provider.commit(made, "image", {}))
        await eventually(is_staged, "the commit has begun")
        async with asyncio.timeout(30):
            for _ in range(20):
                assert await place.run(other, "echo works") == "works\n"
        assert not committing.done()
    await committing
    assert await place.run(await place.create(image="image"), "cat /opt/f") == "kept\n"
    assert [*(store.root / "staging").iterdir()] == []


async def test_what_a_supervisor_that_was_killed_at_a_commit_had_copied_is_deleted_by_the_next(
    place: LocalPlace,
) -> None:
    made = await place.create()
    await place.run(made, "echo kept > /opt/f")
    store = ImageStore(place.base / "images")

    async def is_staged() -> bool:
        return bool([*(store.root / "staging").glob("*/root/opt/f")])

    with store.locked(exclusive=True):
        committing = asyncio.create_task(place.provider.commit(made, "image", {}))
        await eventually(is_staged, "the commit has copied the box's files")
        os.kill(place.supervisor_pid(), signal.SIGKILL)
        with pytest.raises(SandboxLostError):
            await committing
    await place.provider.commit(await place.create(), "image", {})
    assert [*(store.root / "staging").iterdir()] == []


KILLED_WHILE_BUILDING = """
import os, signal, sys
from pathlib import Path
from nemo_gym.sandbox.providers.local.images import ImageStore

with ImageStore(Path(sys.argv[1])).building("image", {}) as staged:
    (staged / "root").mkdir()
    (staged / "root" / "file").write_text("half of an image")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_unfinished_is_deleted_and_what_others_build_is_not(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with store.building("other", {}) as staged:
        (staged / "root").mkdir()
        subprocess.run([sys.executable, "-c", KILLED_WHILE_BUILDING, tmp_path], check=False)
        with store.building("image", {}) as again:
            (again / "root").mkdir()
    assert [*(tmp_path / "staging").iterdir()] == []
    assert store.names() == ["host", "image", "other"]
    assert len([*store.layers.iterdir()]) == 2


def test_what_is_unfinished_without_a_lock_is_deleted_when_nobody_can_work_on_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path)
    store.prepare()
    (tmp_path / "staging" / "123-of-an-earlier-release" / "root").mkdir(parents=True)
    (tmp_path / "staging" / "removed-layer" / "root").mkdir(parents=True)
    (tmp_path / "staging" / "manifest.json").write_text("{")
    store.collect()
    assert len([*(tmp_path / "staging").iterdir()]) == 3
    two_days_later = time.time() + 2 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: two_days_later)
    store.collect()
    assert [*(tmp_path / "staging").iterdir()] == []


async def test_missing_image_names_those_there_are_and_how_to_prepare_one(place: LocalPlace) -> None:
    await place.provider.commit(await place.create(), "swe/b:1", {})
    with pytest.raises(SandboxCreateError, match=r"no image 'swe/b:2'.*available: host, swe/b:1.*ng_prepare"):
        await place.create(image="swe/b:2")
    assert len(await place.provider.list()) == 1


async def test_image_without_one_of_its_layers_is_refused(place: LocalPlace) -> None:
    await place.provider.commit(await place.create(), "image", {})
    (layer,) = (place.base / "images" / "layers").iterdir()
    remove_directory(layer)
    with pytest.raises(SandboxCreateError, match="lacks its layer"):
        await place.create(image="image")


async def test_damaged_manifest_is_refused_by_its_path(place: LocalPlace) -> None:
    await place.provider.commit(await place.create(), "image", {})
    (place.base / "images" / "images" / "image.json").write_text("{")
    with pytest.raises(SandboxCreateError, match=r"image\.json is damaged"):
        await place.create(image="image")


async def test_built_in_image_cannot_be_removed(place: LocalPlace) -> None:
    with pytest.raises(SandboxError, match="built in"):
        await place.provider.remove_image("host")


def build_tree(tree: Path) -> Path:
    """A root filesystem of one program and the libraries it needs."""
    (tree / "bin").mkdir(parents=True)
    (tree / "etc").mkdir()
    (tree / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    shutil.copy("/bin/expr", tree / "bin" / "own")
    for word in subprocess.run(["ldd", "/bin/expr"], check=True, capture_output=True, text=True).stdout.split():
        if word.startswith("/"):
            (tree / word.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, tree / word.lstrip("/"))
    return tree


async def test_root_filesystem_without_any_program_of_the_host_works(place: LocalPlace, tmp_path: Path) -> None:
    tree = build_tree(tmp_path / "tree")
    store = ImageStore(place.base / "images")
    with store.building("tiny", {"made": "here"}) as staged:
        copy_layer(tree, staged / "root")
    box = await place.create(image="tiny", workdir="/work")
    done = await place.provider.exec(box, ["/bin/own", "6", "*", "7"])
    assert (done.return_code, done.stdout) == (0, "42\n")
    assert (await place.provider.exec(box, "true")).return_code == 127, "it has no shell"
    assert await place.provider.image_labels("tiny") == {"made": "here"}
    assert "/usr/bin/env" not in await _names(place, box)


async def _names(place: LocalPlace, box: object) -> list[str]:
    import io
    import tarfile

    data = b"".join([chunk async for chunk in place.provider.get_archive(box, "/")])  # type: ignore[arg-type]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [f"/{name.removeprefix('./')}" for name in tar.getnames()]


async def test_limited_disk_is_full_at_its_size_can_be_committed_and_frees_its_device(place: LocalPlace) -> None:
    assert place.provider.capabilities.disk_limit, place.provider.capabilities.reasons
    box = await place.create(resources=SandboxResources(disk_gib=0.05))
    for target in ("/tmp/big", "/usr/share/big"):
        done = await place.provider.exec(box, f"head -c 80000000 /dev/zero > {target}")
        assert "No space left on device" in (done.stderr or "")
        await place.run(box, f"rm {target}")
    await place.run(box, "echo kept > /opt/f")
    await place.provider.commit(box, "disked", {})
    await place.provider.close(box)
    assert str(place.base) not in await asyncio.to_thread(loop_devices)
    assert await place.run(await place.create(image="disked"), "cat /opt/f") == "kept\n"


def loop_devices() -> str:
    return subprocess.run(["losetup", "--all"], check=True, capture_output=True, text=True).stdout


async def test_missing_bubblewrap_names_the_package(tmp_path: Path) -> None:
    async with local_place(tmp_path, bwrap="no-such-bwrap") as place:
        assert "apt-get install bubblewrap" in place.provider.capabilities.reasons["network_none"]
        with pytest.raises(SandboxCreateError, match=r"'no-such-bwrap'.*apt-get install bubblewrap"):
            await place.create()


async def test_state_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "real")
    provider = LocalProvider(state_dir=str(tmp_path / "state"), image_dir=str(tmp_path / "images"))
    with pytest.raises(SandboxCreateError, match="state_dir"):
        await provider.create(SandboxSpec())


def mount_small_disk(path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", str(path)], check=True)


async def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with local_place(tmp_path) as place:
        place.state_dir.mkdir(mode=0o700, parents=True)
        mount_small_disk(place.state_dir)
        try:
            await place.provider.close(await place.create())
            free = shutil.disk_usage(place.state_dir).free
            (place.state_dir / "filler").write_bytes(bytes(max(0, free - free % 4096)))
            with pytest.raises(SandboxCreateError, match=r"(?i)no space left.*state_dir"):
                for _ in range(64):
                    await place.create(files={"/srv/f": "x" * 65536})
            (place.state_dir / "filler").unlink()
            await place.provider.close(await place.create())
        finally:
            await place.provider.aclose()
            await asyncio.to_thread(subprocess.run, ["umount", "-l", str(place.state_dir)], check=True)
    assert not leftovers(tmp_path)


def test_layer_copy_keeps_whiteouts_attributes_and_hard_links(tmp_path: Path) -> None:
    import os

    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"x" * 3_000_000)
    os.link(source / "d" / "f", source / "d" / "g")
    with (source / "sparse").open("wb") as sparse:
        sparse.seek(1 << 40)
        sparse.write(b"end")
    os.mknod(source / "gone", 0o20000, 0)
    os.setxattr(source / "d", "user.note", b"kept")
    os.utime(source / "d", ns=(1_000_000_001, 2_000_000_002))
    copy_layer(source, tmp_path / "copy")
    copied = tmp_path / "copy"
    assert (copied / "d" / "f").read_bytes() == b"x" * 3_000_000
    assert (copied / "d" / "f").stat().st_ino == (copied / "d" / "g").stat().st_ino
    assert (copied / "gone").stat().st_mode & 0o170000 == 0o20000
    assert (copied / "gone").stat().st_rdev == 0
    assert (copied / "sparse").stat().st_size == (1 << 40) + 3
    assert (copied / "sparse").stat().st_blocks < 100
    assert os.getxattr(copied / "d", "user.note") == b"kept"
    assert (copied / "d").stat().st_mtime_ns == 2_000_000_002


def test_image_of_root_is_refused_for_an_ordinary_user(tmp_path: Path) -> None:
    from nemo_gym.sandbox.providers.local.images import ImageError

    store = ImageStore(tmp_path)
    with store.staging() as staged:
        (staged / "root").mkdir()
        store.publish("mine", ImageManifest("host", host_base=True), staged, {}, "trusted")
    assert store.resolve("mine", "trusted").layers
    with pytest.raises(ImageError, match="made by root and cannot be used as an ordinary user"):
        store.resolve("mine", "user")


def nest(tree: Path, name: str, link_to: Path | None = None) -> None:
    """Nest 3,000 directories ``name`` below ``tree``, the last with a link."""
    at = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    if link_to is not None:
        os.symlink(link_to, "link", dir_fd=at)
    os.close(at)


def test_tree_is_removed_however_deep_it_is_and_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "f").write_text("kept")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(kept)
    (tree / "closed").mkdir(mode=0)
    nest(tree, "d" * 20, link_to=kept)
    remove_directory(tree)
    assert not tree.exists()
    assert (kept / "f").read_text() == "kept"


EXCHANGES = """
import ctypes, sys
entry, other = (name.encode() for name in sys.argv[1:])
exchange = ctypes.CDLL(None).renameat2
while True:
    exchange(-100, entry, -100, other, 2)
"""


@pytest.mark.parametrize("exchanged", ["a file", "a directory"])
def test_copied_layer_holds_nothing_of_the_host_while_the_box_exchanges_entries_for_links(
    tmp_path: Path, exchanged: str
) -> None:
    host, tree = tmp_path / "host", tmp_path / "tree"
    (host / "place").mkdir(parents=True)
    (host / "place" / "file").write_text("secret")
    tree.mkdir()
    if exchanged == "a file":
        (tree / "entry").write_text("of the box")
        (tmp_path / "link").symlink_to(host / "place" / "file")
    else:
        (tree / "entry").mkdir()
        (tmp_path / "link").symlink_to(host / "place")
    with subprocess.Popen([sys.executable, "-c", EXCHANGES, tree / "entry", tmp_path / "link"]) as box:
        try:
            for number in range(500):
                copy = tmp_path / "copies" / str(number)
                copy.parent.mkdir(exist_ok=True)
                with contextlib.suppress(OSError):
                    copy_layer(tree, copy)
                for found in copy.rglob("*"):
                    assert found.is_symlink() or found.is_dir() or "secret" not in found.read_text()
        finally:
            box.kill()


def test_layer_whose_directories_are_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    nest(tmp_path / "tree", "d")
    with pytest.raises(OSError, match="nested too deeply"):
        copy_layer(tmp_path / "tree", tmp_path / "copy")
    for made in ("tree", "copy"):
        remove_directory(tmp_path / made)


async def test_files_of_a_spec_wait_for_no_pipe_that_an_image_has_in_their_place(place: LocalPlace) -> None:
    first = await place.create()
    await place.run(first, "mkfifo /opt/pipe")
    await place.provider.commit(first, "with-pipe", {})
    with pytest.raises(SandboxCreateError, match="/opt/pipe"):
        async with asyncio.timeout(20):
            await place.provider.create(SandboxSpec(image="with-pipe", files={"/opt/pipe": "text"}))


async def test_target_of_a_mount_that_climbs_out_of_the_box_is_refused(place: LocalPlace, tmp_path: Path) -> None:
    mounts = [Mount(source=str(tmp_path), target="/../oldroot/tmp/made")]
    with pytest.raises(SandboxCreateError, match=r"must not contain '\.\.'"):
        await place.provider.create(SandboxSpec(mounts=mounts))


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory of the host that every user may write to, by a path that every user may enter."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    "links",
    [
        "ln -s /oldroot{outside} /srv/data",
        "ln -s ../../../oldroot{outside} /srv/data",
        "ln -s /oldroot{outside}/x /srv/data; mkdir /oldroot; ln -s /srv/data /oldroot{top}",
        "rm -r /etc/resolv.conf; ln -s /oldroot{outside}/file /etc/resolv.conf",
        "ln -s /proc/1/root/oldroot{outside} /srv/data",
    ],
)
async def test_links_of_an_image_lead_no_mount_to_the_host(
    place: LocalPlace, tmp_path: Path, outside: Path, links: str
) -> None:
    first = await place.create()
    await place.run(first, links.format(outside=outside, top=Path(*outside.parts[:2])))
    await place.provider.commit(first, "linked", {})
    mounts = [Mount(source=str(tmp_path), target="/srv/data/made/there")]
    with contextlib.suppress(SandboxCreateError):
        box = await place.create(image="linked", mounts=mounts, network=NetworkPolicy.OPEN)
        assert await place.run(box, "ls -A /srv/data/made/there") != ""
    assert not [*outside.iterdir()]


def test_link_that_cannot_be_read_for_the_length_of_its_path_is_no_place(tmp_path: Path) -> None:
    root, path = Path(tmp_path, *["r" * 200] * 16), "/p" * 500
    assert place_in_image(str(tmp_path), path) == path
    with pytest.raises(OSError, match="too long"):
        place_in_image(str(root), path)


async def test_mount_appears_where_links_of_the_image_lead(place: LocalPlace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mounted")
    first = await place.create()
    await place.run(first, "mkdir -p /opt/real; ln -s ../opt/real /srv/data; ln -sf ../run/r/conf /etc/resolv.conf")
    await place.provider.commit(first, "linked", {})
    # A link of the image below /run is not in the box, where that is a file system of its own.
    (layer,) = (tmp_path / "images" / "layers").iterdir()
    (layer / "root" / "run").mkdir(exist_ok=True)
    (layer / "root" / "run" / "r").symlink_to("/opt/elsewhere")
    mounts = [Mount(source=str(tmp_path / "file"), target="/srv/data/a/b")]
    box = await place.create(image="linked", mounts=mounts, network=NetworkPolicy.OPEN)
    assert await place.run(box, "cat /opt/real/a/b; stat -c %a /opt/real/a /run/r") == "mounted755\n755\n"
    assert await place.run(box, "cat /etc/resolv.conf /run/r/conf") == 2 * Path("/etc/resolv.conf").read_text()


@pytest.mark.parametrize("target", ["/proc/data", "/dev/data", "/srv/loop/data", "/srv/root"])
async def test_mount_on_a_place_that_is_not_the_images_is_refused(
    place: LocalPlace, tmp_path: Path, target: str
) -> None:
    first = await place.create()
    await place.run(first, "ln -s loop /srv/loop; ln -s / /srv/root")
    await place.provider.commit(first, "linked", {})
    with pytest.raises(SandboxCreateError, match=f"nothing can be mounted on {target}"):
        await place.create(image="linked", mounts=[Mount(source=str(tmp_path), target=target)])


async def test_path_that_is_hidden_stays_hidden_when_its_parent_was_renamed_and_committed(tmp_path: Path) -> None:
    hidden = "/usr/share/common-licenses"
    async with local_place(tmp_path, hide=[hidden]) as place:
        first = await place.create()
        assert await place.run(first, f"ls -A {hidden}") == ""
        await place.run(first, "mv /usr/share /usr/moved || true")
        await place.provider.commit(first, "moved", {})
        again = await place.create(image="moved")
        assert await place.run(again, "ls -A /usr/moved/common-licenses 2> /dev/null || true") == ""


def test_layer_is_copied_between_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "d" / "f").write_text("content")
    monkeypatch.chdir(tmp_path)
    copy_layer(Path("tree"), Path("copy"))
    assert (tmp_path / "copy" / "d" / "f").read_text() == "content"
    assert Path.cwd() == tmp_path


async def test_layers_of_boxes_are_for_their_owner_alone(place: LocalPlace) -> None:
    box = await place.create()
    await place.run(box, "touch /opt/f")
    await place.provider.commit(box, "one", {})
    root = Path(place.provider.options.image_dir)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in ("layers", "staging")] == [0o700, 0o700]
