"""Runs for other tools: OpenTelemetry's own messages read the spans, the tools' own packages the directories."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

from nemo_gym.cli.profile import write_report
from nemo_gym.contract.errors import ConfigError
from tests.telemetry.collector import collecting, spans_in
from tests.view.results import failed, row, said, write

CALL = {"type": "function_call", "name": "get_weather", "call_id": "c1", "arguments": "{}"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    response = {"output": [CALL, said("cold")], "usage": {"input_tokens": 7, "output_tokens": 3}, "model": "m"}
    write(tmp_path / "a_failures.jsonl", failed(9))
    return write(tmp_path / "a.jsonl", row(0), row(1, response=response))


def test_spans_of_a_run_are_a_file_of_otlp_json(output: Path, tmp_path: Path) -> None:
    assert write_report([str(output), "export=otel", f"to={tmp_path / 'spans.jsonl'}"]) == 0
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    spans = [span for line in lines for span in spans_in(json.loads(line))]
    roots = [span for span in spans if not span.parent_id]
    assert [root.attributes.get("reward") for root in roots] == [0.0, 1.0, None]
    assert [root.failed for root in roots] == [False, False, True]
    assert len({span.trace_id for span in spans}) == 3
    assert len({span.span_id for span in spans}) == len(spans)
    (tool,) = (span for span in spans if span.name == "execute_tool get_weather")
    (agent,) = (span for span in spans if span.span_id == tool.parent_id)
    assert agent.name == "invoke_agent solver"
    assert agent.attributes["gen_ai.usage.output_tokens"] == 3
    assert all(span.start_ns <= span.end_ns for span in spans)
    assert "pears" not in "".join(lines)


def test_spans_of_odd_rows_are_written_like_any_others(tmp_path: Path) -> None:
    odd = {
        "timings": {"init_s": "soon", "run_s": 1e300, "eval_s": -5.0},
        "_ng_attempt_index": [1],
        "outcome": {"a": 1},
        "response": {"output": [{**CALL, "call_id": {"a": 1}}], "usage": {"input_tokens": 2**70}, "model": 5},
    }
    half_a_pair = row(2, response={"output": [said("\ud83d")]})
    output = write(
        tmp_path / "a.jsonl", row(0), row(1, **odd), half_a_pair, b'{"x": 1e999, ' + json.dumps(row(3)).encode()[1:]
    )
    assert write_report([str(output), "export=otel", f"to={tmp_path / 'spans.jsonl'}"]) == 0
    with collecting() as collector:
        assert write_report([str(output), "export=otel", f"to={collector.url}"]) == 0
        sent = [span for span in collector.spans if not span.parent_id]
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    written = [span for line in lines for span in spans_in(json.loads(line)) if not span.parent_id]
    for roots in (written, sent):
        assert [root.attributes["rollout_id"] for root in roots] == ["run.0-0", "run.1-0", "run.2-0"]
        assert all(root.start_ns <= root.end_ns for root in roots)


def test_spans_of_a_run_without_a_verdict_are_written(tmp_path: Path) -> None:
    write(tmp_path / "a_failures.jsonl", failed(9))
    assert write_report([str(tmp_path / "a.jsonl"), "export=otel", f"to={tmp_path / 'spans.jsonl'}"]) == 0
    assert "run.9-0" in (tmp_path / "spans.jsonl").read_text()


def test_spans_of_a_run_go_to_an_endpoint(output: Path) -> None:
    with collecting() as collector:
        assert write_report([str(output), "export=otel", f"to={collector.url}"]) == 0
        assert {span.name for span in collector.spans} >= {"rollout", "init", "eval", "invoke_agent solver"}
        collector.status = 400
        with pytest.raises(ConfigError, match="does not take the spans: answered 400"):
            write_report([str(output), "export=otel", f"to={collector.url}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export=excel"], "export=excel: must be one of mlflow, wandb, otel"),
        (["export=otel", "format=html"], "format= applies to reports only"),
        (["to=x"], "to=x works only with export="),
        (["export=otel", "to=/no/such/place"], "cannot write"),
        ([f"file={'x' * 300}"], "cannot write"),
        (["export=otel", "to=http://127.0.0.1:9"], "does not take the spans"),
    ],
)
def test_wrong_words_are_refused(output: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        write_report([str(output), *words])
    assert said in refused.value.message


def test_endpoint_that_does_not_speak_http_is_named(output: Path) -> None:
    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"220 mail.example.invalid ready\r\n")
            while connection.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=greet, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="does not take the spans: 220 mail"):
            write_report([str(output), "export=otel", f"to={url}"])


@pytest.mark.parametrize("target", ["taken", "taken/below", "/proc/nowhere"])
def test_folder_that_cannot_be_written_is_named(output: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    (output.parent / "taken").touch()
    with pytest.raises(ConfigError, match=f"to=: cannot write '.*{target}'"):
        write_report([str(output), "export=wandb", f"to={output.parent / target}"])


@pytest.mark.parametrize("words", [["file={}"], ["export=otel", "to={}"], ["export=wandb", "to={}"]])
@pytest.mark.parametrize("name", ["a.jsonl", "a_failures.jsonl", "there/../a.jsonl"])
def test_files_of_the_run_itself_are_not_overwritten(output: Path, words: list[str], name: str) -> None:
    (output.parent / "there").mkdir()
    before = {path: path.read_bytes() for path in output.parent.glob("*.jsonl")}
    given = [word.format(output.parent / name) for word in words]
    with pytest.raises(ConfigError, match="is a file of the run itself"):
        write_report([str(output), *given])
    assert {path: path.read_bytes() for path in output.parent.glob("*.jsonl")} == before


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    output: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'nemo-gym-suite\[{name}\]'"):
        write_report([str(output), f"export={name}"])


# ----------------------------------------------------------------------------------------------- the real packages

READ_MLFLOW = """
import os, sys
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
client = mlflow.MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("nemo-gym")
(run,) = client.search_runs([experiment.experiment_id])
print(run.info.run_name, run.info.status, run.data.metrics["mean_reward"], run.data.metrics["rollouts"])
print(*(each.path for each in client.list_artifacts(run.info.run_id)))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has both packages, and this suite's by a path."""
    folder = tmp_path_factory.mktemp("exporters")
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
    where = [folder / "bin/python", "-c", "import site; print(site.getsitepackages()[0])"]
    own = subprocess.check_output(where, text=True).strip()
    here = Path(pytest.__file__).parents[1]
    Path(own, "suite.pth").write_text(f"{here}\n{Path(__file__).parents[2]}\n")
    wanted = ("mlflow-skinny>=3", "wandb>=0.19")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *wanted], check=True)
    return folder / "bin/python"


def export(python: Path, output: Path, *words: str) -> str:
    code = "import sys; from nemo_gym.cli.profile import write_report; sys.exit(write_report(sys.argv[1:]))"
    words_ = [python, "-c", code, output, *words]
    done = subprocess.run(words_, cwd=output.parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_mlflow_reads_what_its_package_wrote(python: Path, output: Path, tmp_path: Path) -> None:
    uri = export(python, output, "export=mlflow", f"to={tmp_path / 'mlruns'}")
    read = subprocess.run([python, "-c", READ_MLFLOW, uri], capture_output=True, text=True, check=True).stdout
    assert read.splitlines() == ["a FINISHED 0.5 3.0", "rollouts.json"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_wandb_writes_an_offline_run(python: Path, output: Path, tmp_path: Path) -> None:
    place = Path(export(python, output, "export=wandb", f"to={tmp_path / 'there'}"))
    (run,) = place.glob("offline-run-*")
    assert [*run.glob("run-*.wandb")]
    (table,) = run.glob("files/media/table/*.json")
    held = json.loads(table.read_text())
    assert held["columns"][:2] == ["task_id", "sample_index"]
    assert len(held["data"]) == 3
