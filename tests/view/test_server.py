"""Who is let in by the viewer's server, and what it answers."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from nemo_gym.contract.errors import ConfigError
from nemo_gym.view.runs import Runs
from nemo_gym.view.server import STATIC, viewer
from tests.view.results import failed, row, write


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    write(tmp_path / "a" / "out.jsonl" if (tmp_path / "a").mkdir() is None else tmp_path, row(0), row(1))
    write(tmp_path / "a" / "out_failures.jsonl", failed(5))
    write(tmp_path / "b.jsonl", row(0), row(1, reward=0.0))
    write(tmp_path / "rows.jsonl", {"question": "no result"})
    found = Runs([tmp_path])
    found.start()
    while any(run.index is None and run.problem is None for run in found.all()):
        time.sleep(0.05)
    yield found
    found.stop()


def client_of(runs: Runs, host: str = "127.0.0.1", password: str | None = None) -> tuple[TestClient, str | None]:
    app, token = viewer(runs, host, password)
    return TestClient(app, base_url="http://127.0.0.1"), token


@pytest.fixture
def client(runs: Runs) -> TestClient:
    found, token = client_of(runs)
    assert found.get(f"/?token={token}").status_code == 200
    return found


def keys(client: TestClient) -> dict[str, str]:
    return {run["name"]: run["key"] for run in client.get("/api/runs").json()["runs"]}


def test_nothing_is_shown_without_the_token(runs: Runs) -> None:
    client, token = client_of(runs)
    for path in ("/", "/api/runs", "/static/app.mjs", "/nowhere"):
        assert client.get(path).status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    opened = client.get(f"/?token={token}&x=1", follow_redirects=False)
    assert (opened.status_code, opened.headers["location"]) == (303, "/?x=1")
    assert "httponly" in opened.headers["set-cookie"].lower()
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("other", ['a={"x": 1}', "a b=c", "a@b=1", 'a="', "word", "expires=1", "a=\xe9"])
def test_cookies_of_other_programs_at_this_address_lock_nobody_out(runs: Runs, other: str) -> None:
    client, token = client_of(runs)
    given = client.get(f"/?token={token}", follow_redirects=False).headers["set-cookie"].partition(";")[0]
    client.cookies.clear()
    for cookies in (f"{other}; {given}", f"{given}; {other}"):
        assert client.get("/api/runs", headers={"cookie": cookies.encode("latin-1")}).status_code == 200


def test_other_names_of_this_machine_and_other_methods_are_refused(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert client.post("/api/runs").status_code == 405


def test_every_answer_keeps_pages_to_themselves(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/static/app.mjs", "/api/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_other_hosts_want_a_password(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"host '0\.0\.0\.0' can be reached from other machines.*NG_VIEW_PASSWORD"):
        viewer(runs, "0.0.0.0", None)
    with pytest.raises(ConfigError, match="fewer than 8 characters"):
        viewer(runs, "0.0.0.0", "short")
    client, token = client_of(runs, "0.0.0.0", "a good password")
    assert token is None
    assert client.get("/api/runs").status_code == 401
    for given, status in (("a good password", 200), ("another one", 401)):
        basic = base64.b64encode(f"me:{given}".encode()).decode()
        assert client.get("/api/runs", headers={"authorization": f"Basic {basic}"}).status_code == status


def test_result_files_below_a_folder_are_found_and_others_are_not(client: TestClient) -> None:
    assert sorted(keys(client)) == ["a/out", "b"]


def test_odd_entries_of_a_folder_hide_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / os.fsdecode(b"no\xffutf8")
    for folder in (odd, tmp_path / "fine", tmp_path / "locked"):
        folder.mkdir()
    write(odd / "a.jsonl", row(0))
    write(tmp_path / "fine" / "b.jsonl", row(0))
    os.mkfifo(tmp_path / "pipe.jsonl")
    is_dir = Path.is_dir

    def refused_where_locked(path: Path) -> bool:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused_where_locked)
    client, token = client_of(Runs([tmp_path]))
    client.get(f"/?token={token}")
    known = keys(client)
    assert sorted(known) == ["fine/b", "no\udcffutf8/a"]
    said = [client.get(f"/api/runs/{key}/table").json()["error"] for key in known.values()]
    assert all(each.endswith("ask again in a moment") for each in said)


def test_a_run_answers_with_figures_reasons_and_rows(client: TestClient) -> None:
    run = f"/api/runs/{keys(client)['a/out']}"
    found = client.get(run).json()
    assert (found["summary"]["rollouts"], found["summary"]["valid"]) == (3, 2)
    assert [(each["cause"], each["rollouts"]) for each in found["reasons"]] == [("engine_down", 1), ("not_solved", 1)]
    rows = client.get(f"{run}/table", params={"q": "basket 1"}).json()
    assert [each["rollout_id"] for each in rows["rows"]] == ["run.1-0"]
    shown = client.get(f"{run}/rollout", params={"id": "run.5-0"}).json()
    assert shown["why"]["cause"] == "engine_down"
    assert [each["reason"] for each in shown["attempts"]] == ["connection refused"]
    raw = client.get(f"{run}/raw", params={"id": "run.1-0"})
    assert raw.headers["content-type"] == "text/plain; charset=utf-8"
    assert json.loads(raw.text) == row(1)
    where = "/response/output/0/content/0/text"
    assert client.get(f"{run}/text", params={"id": "run.1-0", "where": where}).text == "There are 1 pears."


@pytest.mark.parametrize(
    ("path", "params", "status", "says"),
    [
        ("/table", {"colour": "red"}, 400, "'colour' is not a filter"),
        ("/rollout", {}, 400, "id=: is missing"),
        ("/rollout", {"id": "none"}, 404, "there is no rollout 'none'"),
        ("/chain", {"id": "run.1-0", "number": "x"}, 404, "the row has no chain"),
        ("/text", {"id": "run.1-0", "where": "/response/output/9"}, 404, "the row has nothing at"),
    ],
)
def test_what_is_wrong_with_a_question_is_said(
    client: TestClient, path: str, params: dict[str, Any], status: int, says: str
) -> None:
    answer = client.get(f"/api/runs/{keys(client)['a/out']}{path}", params=params)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text
    assert client.get("/api/runs/none").json()["error"].startswith("there is no such run")


def test_two_runs_are_compared(client: TestClient) -> None:
    known = keys(client)
    found = client.get("/api/compare", params={"a": known["a/out"], "b": known["b"], "changed": "1"}).json()
    assert (found["losses"], found["lost"], [each["task_id"] for each in found["rows"]]) == (1, 1, ["task-1"])


def test_what_is_vendored_is_what_its_list_says() -> None:
    listed = json.loads((STATIC / "vendor" / "VENDORED.json").read_text())
    files = {path.name for path in (STATIC / "vendor").iterdir()}
    assert files == {"VENDORED.json", "LICENSE-htm.txt", "LICENSE-preact.txt", *listed}
    for name, about in listed.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == about["sha256"]


def test_missing_paths_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no result file or folder"):
        Runs([tmp_path / "none"])
