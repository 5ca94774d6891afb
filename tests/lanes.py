"""Assign each test to a lane by its path and its fixtures: nobody marks tests by hand.

The fast lane holds the tests without any of the marks below. `Guard` keeps the tables correct: a test that starts a
box, a container or a stack without the matching mark fails. `Schedule` spreads tests over processes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from nemo_gym.sandbox.providers.local.supervisor.main import OPTIONS_VARIABLE, SOCKET_NAME

MARKS = {
    "box": "starts boxes of the local provider or of Apptainer",
    "docker": "needs a Docker Engine",
    "stack": "starts commands, brokers, servers, engines or workers as processes",
    "cli": "runs the CLI of an agent, which `make clis` installs",
}

PLACES: Mapping[str, str] = {
    "resources_servers/example_mcp_weather/tests/test_box.py": "box",
    "resources_servers/math/tests": "stack",
    "resources_servers/sandbox/tests": "box stack",
    "resources_servers/swe_bench/tests/test_app.py": "box",
    "resources_servers/swe_bench/tests/test_apply.py": "box",
    "resources_servers/swe_bench/tests/test_confirm.py": "box",
    "resources_servers/swe_bench/tests/test_confirm_javascript.py::test_values_earn": "box",
    "resources_servers/swe_bench/tests/test_example_tasks.py": "box",
    "resources_servers/swe_bench/tests/test_prepare_images.py": "box",
    "resources_servers/swe_bench/tests/test_prepare_shims.py": "stack",
    "resources_servers/swe_bench/tests/test_running.py": "box",
    "resources_servers/swe_bench/tests/test_twins.py": "box",
    "responses_api_agents/composite_agent/tests": "box",
    "responses_api_agents/mini_swe_agent/tests": "box",
    "responses_api_agents/opencode_agent/tests/test_app.py::test_example_task": "box stack cli",
    "responses_api_agents/oracle_agent/tests": "box",
    "responses_api_agents/qwen_code_agent/tests/test_app.py::test_example_task": "box stack cli",
    "tests/acceptance": "box stack",
    "tests/acceptance/clis": "box stack cli",
    "tests/acceptance/matrix": "box stack cli docker",
    "tests/architecture/test_dependency_direction.py": "stack",
    "tests/architecture/test_docs.py::test_capability_table": "box",
    "tests/architecture/test_docs.py::test_example_agent_does_its_command": "box stack",
    "tests/architecture/test_docs.py::test_example_environment": "box stack",
    "tests/architecture/test_docs.py::test_example_provider": "box",
    "tests/architecture/test_docs.py::test_readme_example": "box stack",
    "tests/architecture/test_python_api_page.py": "stack",
    "tests/architecture/test_sampling_page.py": "stack",
    "tests/architecture/test_service_page.py": "stack",
    "tests/architecture/test_wheel.py": "stack",
    "tests/cli": "stack",
    "tests/config/test_compatibility.py::test_capability": "box",
    "tests/config/test_compatibility.py::test_provider_that_can": "box",
    "tests/config/test_ray.py::test_nodes_settings": "stack",
    "tests/faults": "box stack",
    "tests/faults/gateway": "stack",
    "tests/gateway/capture/test_files.py::test_killed": "stack",
    "tests/gateway/journal/test_kill.py": "stack",
    "tests/gateway/routing/test_killed_processes.py": "stack",
    "tests/gateway/test_ablation.py": "stack",
    "tests/gateway/test_restart.py": "stack",
    "tests/gateway/testing/test_tiny_engine.py": "stack",
    "tests/gateway/testing/test_tiny_truth.py": "stack",
    "tests/harness/test_agent_clis.py": "box cli",
    "tests/harness/test_isolation.py": "box",
    "tests/harness/test_odd_images.py": "box cli",
    "tests/harness/test_provision.py": "stack",
    "tests/harness/test_python_tree.py": "stack",
    "tests/harness/test_repository_settings.py": "box cli",
    "tests/harvest": "box",
    "tests/prorl/test_page.py": "stack",
    "tests/prorl/test_service.py": "stack",
    "tests/prorl/test_slurm_example.py": "stack",
    "tests/prorl/test_suite_handlers.py": "stack",
    "tests/prorl/test_swe_bench.py": "box stack",
    "tests/rollouts": "stack",
    "tests/sandbox/opensandbox/test_conformance_opensandbox.py": "box",
    "tests/sandbox/opensandbox/test_opensandbox_hazards.py": "box",
    "tests/sandbox/test_apptainer": "box",
    "tests/sandbox/test_conformance": "box",
    "tests/sandbox/test_docker": "docker",
    "tests/sandbox/test_egress.py::test_box_of_the_local": "box",
    "tests/sandbox/test_limits.py": "box",
    "tests/sandbox/test_local": "box",
    "tests/sandbox/test_remote_brokers.py": "box stack",
    "tests/sandbox/test_remote_faults.py": "box stack",
    "tests/sandbox/test_syscall_filter.py": "box",
    "tests/sandbox/test_user_limits.py": "box",
    "tests/servers/test_facade.py": "box stack",
    "tests/servers/test_owned_boxes.py": "box stack",
    "tests/servers/test_worker_pool.py": "stack",
    "tests/service": "stack",
    "tests/stack": "stack",
    "tests/telemetry/test_dashboard.py": "box stack",
    "tests/telemetry/test_servers.py": "stack",
    "tests/topology": "box",
    "tests/topology/test_lent_world.py": "box stack",
    "tests/view/test_chromium.py": "stack",
    "tests/view/test_docs_site.py::test_pages_look": "stack",
    "tests/view/test_export.py::test_mlflow": "stack",
    "tests/view/test_export.py::test_wandb": "stack",
    "tests/view/test_runs_walked.py": "box stack",
    "tests/view/test_watched_service.py": "stack",
    "tests/view/test_why_causes.py": "box stack",
}
"""The marks of the tests whose id begins with the key. The longest matching key counts."""

FULL = (
    "resources_servers/sandbox/tests/test_conformance.py",
    "resources_servers/sandbox/tests/test_execs.py::test_output_is_dropped_a_while",
    "resources_servers/sandbox/tests/test_killed.py::test_nothing_is_lost_leaked_or_run_twice_when_the_broker_is_killed"
    "_at_some_boundaries",
    "resources_servers/swe_bench/tests/test_app.py::test_hanging_patch",
    "resources_servers/swe_bench/tests/test_app.py::test_verdicts_are_the_same",
    "resources_servers/swe_bench/tests/test_confirm.py::test_making_leaves_out",
    "resources_servers/swe_bench/tests/test_confirm.py::test_solution_is_confirmed_when_the_script_checks_out",
    "resources_servers/swe_bench/tests/test_confirm_javascript.py::test_values_earn",
    "resources_servers/swe_bench/tests/test_example_tasks.py::test_right_edits",
    "resources_servers/swe_bench/tests/test_prepare_images.py::test_a_killed_preparation",
    "resources_servers/swe_bench/tests/test_prepare_images.py::test_a_second_row",
    "resources_servers/swe_bench/tests/test_prepare_images.py::test_an_image_is_built_again",
    "resources_servers/swe_bench/tests/test_prepare_images.py::test_packages_that_the_project_requires",
    "resources_servers/swe_bench/tests/test_twins.py::test_reports_that_lie",
    "resources_servers/swe_bench/tests/test_twins.py::test_solutions_are_confirmed_by_twins",
    "resources_servers/swe_bench/tests/test_twins.py::test_twins_control_what_cannot_be_blinded",
    "tests/acceptance/clis/test_clis.py::test_cli_run_with_sub_agent_and_compaction_has_every_sampled_token_once",
    "tests/acceptance/hosts/test_separate_hosts.py::test_examples_pass_when_every_role_has_two_hosts[math]",
    "tests/acceptance/matrix/test_matrix.py::test_cli_solves_an_example_task_from_within_a_box_without_a_network"
    "[claude_code-docker]",
    "tests/acceptance/matrix/test_matrix.py::test_cli_solves_an_example_task_from_within_a_box_without_a_network"
    "[codex-docker]",
    "tests/acceptance/matrix/test_matrix.py::test_cli_uses_the_environments_mcp_tool_from_a_box_without_a_network"
    "[claude_code-docker]",
    "tests/acceptance/matrix/test_matrix.py::test_cli_uses_the_environments_mcp_tool_from_a_box_without_a_network"
    "[codex-docker]",
    "tests/acceptance/test_lent_boxes.py::test_agent_solves_a_task_in_a_box_that_the_environment_made_and_lent",
    "tests/acceptance/test_lent_boxes.py::test_box_is_gone_within_its_lease",
    "tests/architecture/test_docs.py::test_example_provider_passes_the_conformance_suite_as_printed[]",
    "tests/cli/test_commands.py::test_environment_whose_gold_is_rewarded",
    "tests/cli/test_commands.py::test_marker_keeps_the_providers",
    "tests/cli/test_commands.py::test_ports_of_servers",
    "tests/faults/broker/test_crash.py::test_broker_killed_at_a_boundary",
    "tests/faults/broker/test_crash.py::test_killed_broker_loses_leaks_and_repeats_nothing_whatever_its_boxes_do[postgres",
    "tests/faults/gateway/test_fuzz.py::test_nothing_a_caller_sends_is_answered_with_5xx_or_without_form",
    "tests/faults/gateway/test_restart.py::test_full_disk",
    "tests/faults/gateway/test_restart.py::test_killed_gateway_loses_and_doubles_no_token[power_loss]",
    "tests/faults/gateway/test_unread_answers.py::test_slow_answer",
    "tests/faults/tampering/test_campaign.py::test_sample_of_the_corpus",
    "tests/gateway/test_ablation.py",
    "tests/harness/test_docker.py::test_agent_that_is_stopped",
    "tests/harness/test_docker.py::test_hanging_agent",
    "tests/harness/test_docker.py::test_work_that_its_harvest_box_has_no_disk_for",
    "tests/harvest/test_git_diff.py*[docker]",
    "tests/sampling/test_killed.py",
    "tests/sandbox/test_conformance_apptainer.py",
    "tests/sandbox/test_conformance_detects.py",
    "tests/sandbox/test_local_lease.py::test_burst_of_a_hundred_boxes",
    "tests/sandbox/test_local_ordinary_user.py::test_ordinary_user_passes_the_same_tests",
    "tests/topology/test_unseen_cells.py::test_same_agent_works_in_every_topology",
)
"""Only `make test-full` runs the tests whose id begins with an entry (and contains the text after a star). Each takes
ten seconds or more, and either similar tests stay in `make test` or a campaign tests more than it does."""
_FULL = [(start, later) for start, _, later in (place.partition("*") for place in FULL)]

FIXTURES: Mapping[str, str] = {
    "docker_engine": "docker",
    "real_server": "docker",
    "local": "box",
}

SPREAD = (
    "resources_servers/sandbox/tests/test_killed.py",
    "resources_servers/swe_bench/tests/test_example_tasks.py",
    "tests/acceptance/clis",
    "tests/acceptance/test_lent_boxes.py",
    "tests/architecture/test_docs.py",
    "tests/cli",
    "tests/faults",
    "tests/harvest",
    "tests/servers/test_owned_boxes.py",
    "tests/stack/test_supervision.py",
    "tests/stack/test_venvs.py",
)
"""Files with slow tests that share nothing: each test goes to any free process, instead of the file as a whole."""

LONGEST = (
    "tests/acceptance",
    "tests/faults",
    "resources_servers/swe_bench",
    "resources_servers/sandbox",
    "tests/cli",
    "tests/servers/test_model_limits.py",
    "tests/servers/test_slow_senders.py",
    "responses_api_agents/simple_agent/tests",
    "responses_api_models/openai_model/tests",
)
"""These tests start first, so that no process is still busy with one of them when all others are done. Files that
mostly wait are not in `SPREAD`: one process waits while the others work."""


ROOT = Path(__file__).parents[1]
BROKER = str(ROOT / "resources_servers" / "sandbox" / "app.py")


def lanes_of(item: pytest.Item) -> set[str]:
    """The marks of one test."""
    name = item.nodeid  # which pytest computes anew each time
    fitting = [place for place in PLACES if name.startswith(place)]
    marks = set(PLACES[max(fitting, key=len)].split()) if fitting else set()
    for fixture in getattr(item, "fixturenames", ()):
        marks.update(FIXTURES.get(fixture, "").split())
    parameters = getattr(item, "callspec", None)
    if parameters is not None and "docker" in parameters.id.split("-"):
        marks.add("docker")
    return marks


def has_no_fast_test(path: Path) -> bool:
    """Whether every test of a file, or of a directory's files, has a mark."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name.startswith(tuple(place for place in PLACES if "::" not in place))


def is_full(item: pytest.Item) -> bool:
    """Whether only `make test-full` runs the test."""
    name = item.nodeid
    return any(name.startswith(start) and later in name for start, later in _FULL)


def order_of(item: pytest.Item) -> int:
    """Long tests first, the fast lane last."""
    name = item.nodeid
    for position, place in enumerate(LONGEST):
        if name.startswith(place):
            return position
    return len(LONGEST) + (not _is_marked(item))


class Schedule(LoadScopeScheduling):  # type: ignore[misc]
    """Gives files to processes as a whole, because their tests share servers and boxes; tests of `SPREAD` singly."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else nodeid.partition("::")[0]


class Guard:
    """Watches what this process starts, and fails a test that has no mark for it."""

    def __init__(self) -> None:
        self._lanes: set[str] = set()
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            _, argv, _, environment = arguments
            self._started(_texts(argv))
            if OPTIONS_VARIABLE in (environment or ()):
                self._lanes.add("box")
        elif event == "os.posix_spawn":
            self._started(_texts(arguments[1]))
        elif event == "socket.connect" and isinstance(arguments[1], str | bytes):
            self._connected(os.path.basename(os.fsdecode(arguments[1])))  # noqa: PTH119 - may be abstract

    def _started(self, argv: Iterable[str]) -> None:
        for argument in argv:
            if "nemo_gym.cli" in argument or "nemo_gym.stack.nursery" in argument or argument == BROKER:
                self._lanes.add("stack")
            elif argument.endswith("/scripts/dockerd"):
                self._lanes.add("docker")

    def _connected(self, name: str) -> None:
        if name in ("docker.sock", "engine.sock"):
            self._lanes.add("docker")
        elif name == SOCKET_NAME:
            self._lanes.add("box")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        self._lanes.clear()
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
        yield
        if nextitem is not None and _is_marked(item) and not _is_marked(nextitem):
            gc.collect()  # now, because in the next lane a ResourceWarning about leftovers of this one is an error
        unmarked = sorted(lane for lane in self._lanes if item.get_closest_marker(lane) is None)
        if unmarked:
            pytest.fail(f"this test needs the mark {' and '.join(unmarked)}: add its place to tests/lanes.py", False)


def _is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in MARKS)


def _texts(argv: Any) -> list[str]:
    return [os.fsdecode(arg) for arg in ([argv] if isinstance(argv, str | bytes | os.PathLike) else argv)]
