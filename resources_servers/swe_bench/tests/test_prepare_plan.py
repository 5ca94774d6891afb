"""What is read from rows, environments files and the command line, before anything is built."""

from __future__ import annotations

import dataclasses
import functools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, RowError
from resources_servers.swe_bench.preparation.boxes import add_tree, cause_of, pip_settings, registry_access
from resources_servers.swe_bench.preparation.environments import skip_member
from resources_servers.swe_bench.preparation.plan import (
    Environment,
    PipInstall,
    RowPlan,
    Runtime,
    install_steps,
    make_plans,
    read_environments,
)
from resources_servers.swe_bench.prepare import Options, Prepared, _plans, summary
from resources_servers.swe_bench.row import SweBenchRow

PRELUDE = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
git status
git show
git -c core.fileMode=false diff 0123456789abcdef
source /opt/miniconda3/bin/activate
conda activate testbed
"""
TESTS = """git checkout 0123456789abcdef tests/test_a.py
git apply -v - <<'EOF_1'
+python -m pip install not-this
EOF_1
: '>>>>> Start Test Output'
pytest -rA tests/test_a.py
: '>>>>> End Test Output'
"""


def make_row(**changes: Any) -> SweBenchRow:
    row = SweBenchRow(
        instance_id="a__b-1",
        repo="a/b",
        base_commit="0" * 40,
        problem_statement="",
        patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        eval_script=PRELUDE + "python -m pip install -e .\n" + TESTS,
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
        version="7.2",
    )
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("python -m pip install -e .", PipInstall(True)),
        ("python -m pip install -e '.[dev]'", PipInstall(True, "[dev]")),
        ("python -m pip install -e .[test]", PipInstall(True, "[test]")),
        ("python -m pip install .", PipInstall(False)),
        ("pip install --verbose --no-build-isolation --editable .", PipInstall(True)),
        ("python setup.py build_ext --inplace", "python setup.py build_ext --inplace"),
        ("python -m pip install -r requirements.txt", "python -m pip install -r requirements.txt"),
        ("pip install 'unclosed", "pip install 'unclosed"),
    ],
)
def test_install_steps_are_those_before_the_tests(line: str, step: PipInstall | str) -> None:
    assert install_steps(f"{PRELUDE}{line}\n{TESTS}") == (step,)


def test_install_steps_are_none_when_the_script_only_resyncs_node_packages() -> None:
    script = "cd /testbed\nsource $NVM_DIR/nvm.sh\nrm -f test/a.html\ngit apply -v - <<'E'\nE\nnpm test\n"
    assert install_steps(script) == ()


def test_summary_counts_rows_and_tests_by_how_well_they_are_controlled() -> None:
    rows = [
        Prepared("a", "i", "built", "repository", 1.0, None, "strong", {"strong": 2, "weak": 0, "none": 0}),
        Prepared("b", "i", "cached", "repository", 0.0, None, "weak", {"strong": 1, "weak": 1, "none": 0}, ("twins",)),
        Prepared("c", "i", "failed", "repository", 0.0, "no such commit"),
    ]
    counted = summary(rows)
    assert counted["controls"] == {"strong": 1, "weak": 1, "none": 0}
    assert counted["tests"] == {"strong": 3, "weak": 1, "none": 0}
    assert [row.get("left_out") for row in counted["rows"]] == [None, ("twins",), None]


@pytest.mark.parametrize("text", ["0", "soon", "-1", "nan"])
def test_budget_of_controls_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(ConfigError, match="controls_budget_s"):
        Options.parse(["rows=r", "sandbox=local", f"controls_budget_s={text}"])


@pytest.mark.parametrize(
    ("runtime", "version", "accepted"),
    [
        ("python 3.11", "3.11.7", True),
        ("python 3.1", "3.11.7", False),
        ("node 20", "20.20.2", True),
        ("python", "3.13.0", True),
        ("node 20.20.2", "20.20.1", False),
        ("python 3", "2.7.18", False),
    ],
)
def test_runtime_accepts_versions_by_whole_components(runtime: str, version: str, accepted: bool) -> None:
    assert Runtime.parse(runtime, where="here").accepts(version) is accepted


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"runtime": "ruby 3"}, "runtime"),
        ({"runtime": "python >=3"}, "runtime"),
        ({"packages": []}, "runtime"),
        ({"runtime": "python", "packages": "pytest"}, "packages"),
        ({"runtime": "python", "packages": ["--index-url=x"]}, "packages"),
        ({"runtime": "python", "pakages": []}, "did you mean 'packages'"),
        ({"runtime": "python", "env": {"A B": "x"}}, "env"),
    ],
)
def test_environments_name_the_entry_and_the_field_when_wrong(
    entry: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "environments.json"
    path.write_text(json.dumps([{"instance_id": "a__b-1", **entry}]))
    with pytest.raises(ConfigError, match=named) as caught:
        read_environments(path)
    assert "a__b-1" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{}", '[{"runtime": "python"}]', "[1]"])
def test_environments_say_what_they_should_be_when_of_another_shape(text: str, tmp_path: Path) -> None:
    path = tmp_path / "environments.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="environments="):
        read_environments(path)


def plan(row: SweBenchRow, environment: Environment | None = None) -> RowPlan:
    return make_plans([row], {row.instance_id: environment} if environment else {})[0]


def test_content_key_is_the_same_when_only_grading_material_differs() -> None:
    other = make_row(patch="x", test_patch="y", eval_script=make_row().eval_script.replace("test_a", "test_b"))
    assert plan(make_row()).content_key("e") == plan(other).content_key("e")


@pytest.mark.parametrize(
    "changes",
    [
        {"base_commit": "1" * 40},
        {"version": "8.0"},
        {"eval_script": PRELUDE + "python -m pip install .\n" + TESTS},
        {"eval_script": make_row().eval_script.replace("pytest -rA", "tox --current-env --")},
    ],
)
def test_content_key_differs_when_the_image_would(changes: dict[str, Any]) -> None:
    assert plan(make_row()).content_key("e") != plan(make_row(**changes)).content_key("e")


def test_a_row_without_an_environment_takes_the_runtime_its_script_uses() -> None:
    assert plan(make_row()).environment == Environment(Runtime("python"))
    node = make_row(eval_script="source $NVM_DIR/nvm.sh\n: '>>>>> Start Test Output'\n")
    assert plan(node).environment == Environment(Runtime("node"))


@pytest.mark.parametrize(
    ("version", "pretended"), [("7.2", "7.2.0.dev0"), ("2022.09", "2022.9.0.dev0"), ("", "0.0.0.dev0")]
)
def test_pretended_version_comes_from_the_row(version: str, pretended: str) -> None:
    assert plan(make_row(version=version)).pretended_version == pretended


def test_pip_settings_prefer_the_environment() -> None:
    listing = ":env:.index-url='https://one.example/simple'\nglobal.index-url='https://two.example/simple'\nnoise\n"
    assert pip_settings(listing) == {"index-url": "https://one.example/simple"}


def test_registry_access_takes_the_first_ca_bundle_that_exists(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    access = registry_access({"PIP_CERT": str(tmp_path / "none"), "SSL_CERT_FILE": str(bundle)})
    assert access.ca_bundle == bundle
    assert str(tmp_path) not in json.dumps(dict(access.env)), "a path of this machine must not enter the box"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sandbox=local"], "rows="),
        (["rows=x"], "sandbox="),
        (["rows=x", "sandbox=local", "enviroments=y"], "environments"),
        (["rows=x", "sandbox=local", "workers=none"], "workers=none"),
        (["rows=x", "sandbox=local", "repos=/does/not/exist"], "repos=/does/not/exist"),
        (["rows"], "key=value"),
    ],
)
def test_options_name_the_word_when_wrong(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Options.parse(words)


EXAMPLE = json.loads((Path(__file__).parents[1] / "data" / "example.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    "row",
    [
        EXAMPLE,
        {"responses_create_params": {"input": [], "metadata": {"instance_dict": json.dumps(EXAMPLE)}}},
        {"responses_create_params": {"input": []}, "verifier_metadata": {"instance_dict": EXAMPLE}},
    ],
)
def test_every_row_that_a_run_takes_can_be_prepared(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"rows={tmp_path}/rows.jsonl", "sandbox=local", f"instances={EXAMPLE['instance_id']}"]
    assert [plan.row.instance_id for plan in _plans(Options.parse(words))] == [EXAMPLE["instance_id"]]


def test_rows_are_found_where_a_run_finds_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = "resources_servers/swe_bench/data/example.jsonl"
    plans = _plans(Options.parse([f"rows={relative}", "sandbox=local", f"instances={EXAMPLE['instance_id']}"]))
    assert [plan.row.instance_id for plan in plans] == [EXAMPLE["instance_id"]]
    (tmp_path / relative).parent.mkdir(parents=True)
    (tmp_path / relative).write_text(json.dumps({**EXAMPLE, "instance_id": "my__own-1"}) + "\n")
    plans = _plans(Options.parse([f"rows={relative}", "sandbox=local"]))
    assert [plan.row.instance_id for plan in plans] == ["my__own-1"]


def test_row_whose_tests_need_files_that_no_patch_carries_is_refused() -> None:
    assets = {"problem_statement": ["a.png"], "patch": [], "test_patch": []}
    assert SweBenchRow.from_mapping({**EXAMPLE, "image_assets": assets})
    with pytest.raises(RowError, match=r"image_assets\.test_patch"):
        SweBenchRow.from_mapping({**EXAMPLE, "image_assets": json.dumps({**assets, "test_patch": ["b.png"]})})


def test_options_leave_the_sandboxs_settings_to_the_composition() -> None:
    options = Options.parse(["rows=r", "sandbox=local", "++sandbox.local.image_dir=/x", "workers=3", "instances=a,b"])
    assert options.sandbox == ("sandbox=local", "++sandbox.local.image_dir=/x")
    assert (options.workers, options.instances) == (3, frozenset({"a", "b"}))


NPM_ERROR = "".join(
    f"npm error {line}".rstrip() + "\n"
    for line in (
        "code EUSAGE",
        "",
        "`npm ci` can only install packages when your package.json and package-lock.json are in sync.",
        "",
        "Missing: is-odd@3.0.1 from lock file",
        "",
        "Clean install a project",
        "",
        "Usage:",
        "npm ci",
        "",
        "Options:",
        *("  --an-option\nnpm error     What the option is good for." for _ in range(100)),
        "",
        'Run "npm help ci" for more info',
        "A complete log of this run can be found in: /root/.npm/_logs/debug-0.log",
    )
)
PIP_ERROR = (
    "".join(f"Collecting package-{number}\n  Downloading package_{number}-1.0.tar.gz\n" for number in range(100))
    + "  error: subprocess-exited-with-error\n  × Getting requirements to build wheel did not run successfully.\n"
    + "".join(f"      File 'frame_{number}.py', line 1, in frame\n" for number in range(100))
    + "      ModuleNotFoundError: No module named 'numpy'\n      [end of output]\n"
)


def test_error_of_a_step_is_its_cause_and_no_help_text() -> None:
    said = cause_of(NPM_ERROR)
    assert said.startswith("npm error code EUSAGE")
    assert "Missing: is-odd@3.0.1 from lock file" in said
    assert "--an-option" not in said


def test_error_of_a_long_step_has_where_it_began_and_how_it_ended() -> None:
    said = cause_of(PIP_ERROR)
    assert said.startswith("error: subprocess-exited-with-error") or said.startswith("  error: subprocess")
    assert "No module named 'numpy'" in said
    assert len(said) < 1600
    assert cause_of("x" * 5000).endswith("x" * 900)


def test_copied_runtime_holds_no_link_to_this_hosts_files(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").symlink_to("/etc/python3.11/sitecustomize.py")
    (tmp_path / "site.py").write_text("")
    (tmp_path / "alias.py").symlink_to("site.py")
    with tarfile.open(tmp_path / "runtime.tar", "w") as tar:
        add_tree(tar, tmp_path, "/opt/python", functools.partial(skip_member, tmp_path))
        assert {name for name in tar.getnames() if name.endswith(".py")} == {
            "opt/python/alias.py",
            "opt/python/site.py",
        }
