"""A report is one file that loads nothing, and holds what rows say as text."""

from __future__ import annotations

from pathlib import Path

from nemo_gym.view.index import open_result
from nemo_gym.view.queries import summary
from nemo_gym.view.report import report
from tests.view.results import failed, row, write

TEXT = "<script>alert(1)</script> | **bold** `x` \u202egnirts \x1b[31m"


def test_report_holds_figures_failures_and_the_comparison(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", row(0), row(1), row(2, task_id=TEXT, reward_reason=TEXT))
    write(tmp_path / "a_failures.jsonl", failed(9))
    second = write(tmp_path / "b.jsonl", row(0, reward=1.0), row(1))
    indexes = [open_result(first), open_result(second)]
    html = report(indexes, "html")
    assert "default-src 'none'" in html
    assert "<svg" in html
    assert "The model&#x27;s engine does not answer" in html
    assert "1 task better, 0 worse" in html
    assert [part for part in ("<script", "http://", "https://", "\u202e", "\x1b") if part in html] == []
    text = report(indexes, "md")
    assert "| mean reward | 0.333 ± 0.653 |" in text
    assert "\\<script\\>alert(1)" in text
    assert "\\| \\*\\*bold\\*\\*" in text


def test_solved_rollouts_are_no_failures_whatever_way_they_ended(tmp_path: Path) -> None:
    of_nemo_gym = {key: value for key, value in row(1).items() if key not in ("outcome", "valid", "_ng_rollout_id")}
    path = write(tmp_path / "a.jsonl", row(0, reward=1.0, outcome="max_turns"), of_nemo_gym)
    index = open_result(path)
    assert "Failures" not in report([index], "md")
    assert sorted(each["outcome"] for each in summary(index)["outcomes"]) == ["completed", "max_turns"]
