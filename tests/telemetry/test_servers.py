"""Real servers of a small run: their metrics, and one trace over all of them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
import pytest_asyncio

from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
from nemo_gym.contract.verdict import ROLLOUT_ID_KEY
from nemo_gym.http.telemetry import METRICS_PATH, render
from tests.architecture.docs import PAGES, ROOT, table
from tests.telemetry.collector import Got, collecting
from tests.telemetry.runs import WEATHER, Run, observed_run

PAGE = PAGES / "metrics.md"
ELSEWHERE = re.compile(r"brokers|gateways|service|pipelines with places")
"""Servers that this run has none of; `test_dashboard` has."""


def families(text: str) -> set[str]:
    """The metrics in an exposition, by the names that the page has."""
    return {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+) \w+$", text, re.MULTILINE)}


def value_of(name: str, text: str) -> float:
    """Of one metric in an exposition; 0 before it was counted."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Mapping[str, str], Sequence[Got]]:
    """A run that was traced, what each of its servers exposed, and its spans."""
    directory = tmp_path_factory.mktemp("seen")
    before = render().decode()  # of this process, in which the pipeline runs and others' have run
    with collecting() as collector:
        words = (*WEATHER, f"observability.traces.endpoint={collector.url}")
        async with observed_run(directory, words) as run:
            assert (run.result.valid, run.result.invalid) == (5, 0)
            exposed = {"before": before}
            for server, url in run.targets().items():
                status, exposed[server] = await run.scrape(url)
                assert status == 200
            await wrong_callers_are_refused(run)
        return run, exposed, collector.spans


async def wrong_callers_are_refused(run: Run) -> None:
    keys = StackKeys.from_hex(run.stack.root_key)
    for server, url in run.targets().items():
        assert (await run.scrape(url, "wrong"))[0] == 401
        if server == "pipeline":
            continue
        for role, expected in ((Role.AGENT, 403), (Role.PIPELINE, 200), (Role.OPERATOR, 200)):
            headers = {CREDENTIAL_HEADER: keys.caller(role, "somebody", server)}
            assert (await run.scrape(url, "wrong", headers))[0] == expected
        # The token reads metrics and nothing else.
        assert (await run.scrape(url.removesuffix(METRICS_PATH) + "/sessions"))[0] == 401


def test_the_page_lists_what_servers_expose(seen: tuple[Run, Mapping[str, str], Sequence[Got]]) -> None:
    _, exposed, _ = seen
    page = table(PAGE, "metric")
    found = set().union(*map(families, exposed.values()))
    assert found - set(page) == set(), "exposed, but not on the page"
    here = {name for name, cells in page.items() if not ELSEWHERE.search(cells[2]) and "trace" not in name}
    transient = {name for name in here if "_stage_" in name and not name.endswith("seconds")}  # gone with the pipeline
    assert here - transient - found == set(), "on the page, but nobody exposes it"


def test_types_on_the_page_are_true(seen: tuple[Run, Mapping[str, str], Sequence[Got]]) -> None:
    page = table(PAGE, "metric")
    for text in seen[1].values():
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
            assert page[name.removesuffix("_total")][0] == kind, name


def test_counts_are_those_of_the_run(seen: tuple[Run, Mapping[str, str], Sequence[Got]]) -> None:
    run, exposed, _ = seen
    pipeline, model = exposed["pipeline"], exposed["policy_model"]
    for name, expected in (('nemo_gym_rollouts_finished_total{state="done"}', 5), ("nemo_gym_rollouts_reward_sum", 4)):
        assert value_of(name, pipeline) - value_of(name, exposed["before"]) == expected, name
    assert 'nemo_gym_acts_total{outcome="completed"} 5.0' in exposed["simple_agent"]
    assert 'nemo_gym_verdicts_total{outcome="valid"} 5.0' in exposed["example_mcp_weather"]
    assert 'route="/sessions/{session_id}/finalize",status="200"} 5.0' in model
    rows = [json.loads(line) for line in run.result.files.output.read_text().splitlines()]
    used = sum(row["response"]["usage"]["output_tokens"] for row in rows)
    assert f'nemo_gym_model_tokens_total{{direction="output"}} {used:.1f}' in model


def test_each_rollout_is_one_trace_over_all_servers(seen: tuple[Run, Mapping[str, str], Sequence[Got]]) -> None:
    run, _, spans = seen
    rows = [json.loads(line) for line in run.result.files.output.read_text().splitlines()]
    traces: dict[str, list[Got]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    assert len(traces) == len(rows) == 5
    for trace in traces.values():
        ids = {span.span_id for span in trace}
        (root,) = (span for span in trace if not span.parent_id)
        assert (root.server, root.name, root.kind) == ("pipeline", "rollout", 1)
        assert {span.parent_id for span in trace} - {""} <= ids
        assert {span.attributes["rollout_id"] for span in trace} == {root.attributes["rollout_id"]}
        # A server's span ends behind its answer, which may be the rollout's last.
        assert all(root.start_ns <= span.start_ns <= min(span.end_ns, root.end_ns) for span in trace)
        assert all(span.end_ns <= root.end_ns for span in trace if span.server == "pipeline")
        names = {(span.server, span.name) for span in trace}
        assert names >= {
            ("pipeline", "rollout"),
            *(("example_mcp_weather", name) for name in ("seed", "verify")),
            ("simple_agent", "invoke_agent simple_agent"),
            ("policy_model", "chat scripted-policy"),
        }
        called = {"simple_agent": 0, "example_mcp_weather": 0}
        for span in trace:
            if span.name.startswith("execute_tool "):
                called[span.server] += 1
                assert span.attributes["gen_ai.tool.name"] == span.name.removeprefix("execute_tool ")
        assert called["simple_agent"] == called["example_mcp_weather"] > 0
    found = {trace[0].attributes["rollout_id"] for trace in traces.values()}
    assert found == {row[ROLLOUT_ID_KEY] for row in rows}


def test_model_calls_have_the_attributes_of_the_conventions(
    seen: tuple[Run, Mapping[str, str], Sequence[Got]],
) -> None:
    acts = {span.span_id: span for span in seen[2] if span.name.startswith("invoke_agent")}
    calls = [span for span in seen[2] if span.name.startswith("chat ")]
    for call in calls:
        assert call.parent_id in acts
        assert call.attributes["gen_ai.operation.name"] == "chat"
        assert call.attributes["gen_ai.request.model"] == "scripted-policy"
        assert call.attributes["gen_ai.usage.output_tokens"] > 0
    assert {act.attributes["gen_ai.agent.name"] for act in acts.values()} == {"simple_agent"}


def test_spans_hold_nothing_of_the_task(seen: tuple[Run, Mapping[str, str], Sequence[Got]]) -> None:
    told = json.dumps([dict(span.attributes) for span in seen[2]])
    assert "Helsinki" not in told
    assert "expected" not in told


def test_every_metric_on_the_page_stands_in_the_code() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "nemo_gym").rglob("*.py"))
    sources += (ROOT / "responses_api_models/gateway/app.py").read_text(encoding="utf-8")
    for name in table(PAGE, "metric"):
        short = name.removeprefix("nemo_gym_rollouts_").removeprefix("stage_").removeprefix("server_")
        assert name.startswith("process_") or name in sources or f'"{short}"' in sources or f"}}{short}" in sources
