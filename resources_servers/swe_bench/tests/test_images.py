"""Image names: deterministic, valid for every engine, and different exactly when the instance is different."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import RowError
from resources_servers.swe_bench.row import image_slug, official_image, prepared_image, read_rows

# The grammar container engines publish for one path component of a repository name.
COMPONENT = re.compile(r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$")

ROW: dict[str, Any] = {
    "instance_id": "some-org__Some.Repo-12",
    "repo": "some-org/Some.Repo",
    "base_commit": "a" * 40,
    "eval_script": "true",
}


def test_prepared_image_is_a_valid_component_when_the_instance_has_upper_case_and_separators() -> None:
    assert COMPONENT.match(prepared_image(ROW))


@pytest.mark.parametrize("text", ["A__b..c/-._D--e__", "___", "Ünïcode", "x" * 300, "a:b@c", "-._a"])
def test_image_slug_is_a_valid_component_when_the_text_is_odd(text: str) -> None:
    assert COMPONENT.match(image_slug(text))


@pytest.mark.parametrize("field", ["instance_id", "repo", "base_commit"])
def test_prepared_image_differs_when_the_identity_differs(field: str) -> None:
    assert prepared_image(ROW) != prepared_image({**ROW, field: ROW[field] + "x"})


def test_prepared_image_is_the_same_when_only_grading_material_differs() -> None:
    assert prepared_image(ROW) == prepared_image({**ROW, "eval_script": "false", "test_patch": "x"})


@pytest.mark.parametrize("field", ["instance_id", "repo", "base_commit"])
def test_prepared_image_names_the_field_when_it_is_missing(field: str) -> None:
    with pytest.raises(RowError, match=field):
        prepared_image({name: value for name, value in ROW.items() if name != field})


def test_official_image_is_the_rows_own_when_it_has_one() -> None:
    assert official_image({**ROW, "image": "x/y:z"}) == "x/y:z"


def test_official_image_is_the_published_name_when_the_row_is_older() -> None:
    assert official_image(ROW) == "swebench/sweb.eval.x86_64.some-org_1776_some.repo-12:latest"


def test_rows_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"repo": "a"}\n\n{"repo": "b\xc2\x85c"}')
    assert [*read_rows(path)] == [(1, {"repo": "a"}), (3, {"repo": "b\x85c"})]
    for line, told in ((b'{"repo": "\xe9"}', "not UTF-8 (byte 0xe9)"), (b"[1]", "a row is one JSON object")):
        path.write_bytes(b'{"repo": "a"}\n' + line)
        with pytest.raises(RowError, match=re.escape(told)) as refused:
            [*read_rows(path)]
        assert refused.value.details["line"] == 2
