"""The tampering corpus is fixed, and nothing in it gains a reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from campaigns.faults.tampering.campaign import Played, campaign, example_rows, figures, upper_bound
from campaigns.faults.tampering.corpus import Entry, RowChange, load_corpus, select
from campaigns.faults.tampering.harness import waves
from resources_servers.swe_bench.row import SweBenchRow

SAMPLE = (
    "conftest_turns_reports_green",
    "prints_results_and_leaves",
    "solution_with_pytest_configuration",
    "ratebox_number_subclasses",
)


@pytest.fixture(scope="module")
def instances() -> list[str]:
    return sorted(example_rows())


def test_corpus_has_attacks_and_honest_work(instances: list[str]) -> None:
    entries = load_corpus(instances)
    assert Counter(entry.kind for entry in entries if entry.source == "own")["attack"] >= 40
    assert Counter(entry.source for entry in entries if entry.kind == "attack")["redteam"] >= 45
    honest = Counter(entry.instance for entry in entries if entry.kind == "honest" and not entry.gold)
    assert sum(honest.values()) >= 60
    assert all(honest[instance] >= 12 for instance in instances)


def test_entry_that_happens_everywhere_is_an_entry_for_each_instance(instances: list[str]) -> None:
    entries = select(load_corpus(instances), ["knows_nothing_of_its_task"])
    assert [entry.instance for entry in entries] == instances
    assert len({entry.run for entry in entries}) == 1


def test_parts_of_scripts_stand_where_they_are_named(instances: list[str]) -> None:
    entries = load_corpus(instances)
    assert not [entry.id for entry in entries if re.search(r"^\s*<<< \w+$", entry.run, re.MULTILINE)]
    (entry,) = select(entries, ["r01_"])
    assert "def _controlled():" in entry.run
    assert "def _green_pytest():" in entry.run


def test_entries_are_selected_by_beginning_pattern_and_source(instances: list[str]) -> None:
    entries = load_corpus(instances)
    assert {entry.id for entry in select(entries, ["r0*_green"])} == {"r04_coin_flip_green", "r05_clock_green"}
    assert {entry.id for entry in select(entries, ["r31", "r32"])} == {
        "r31_frame_peek_parametrized",
        "r32_xfail_where_the_file_says_xfail",
    }
    assert {entry.source for entry in select(entries, source="redteam")} == {"redteam"}


def test_row_of_an_entry_keeps_the_image_and_drops_what_is_not_named(instances: list[str]) -> None:
    rows = example_rows()
    (entry,) = select(load_corpus(instances), ["r31_"])
    raw = entry.row_of(rows)
    row, old = SweBenchRow.from_mapping(raw), SweBenchRow.from_mapping(rows[entry.instance])
    assert (row.instance_id, row.repo, row.base_commit) == (old.instance_id, old.repo, old.base_commit)
    assert row.fail_to_pass == tuple(test for test in old.fail_to_pass if test.startswith("tests/test_lexer.py"))
    assert row.test_patch in row.eval_script
    assert "pytest -rA tests/test_lexer.py\n" in row.eval_script
    assert "test_parser" not in row.eval_script


def test_row_change_that_finds_nothing_to_change_is_refused() -> None:
    row = next(iter(example_rows().values()))
    with pytest.raises(ValueError, match="is not in the test patch"):
        RowChange(replace={"no such text": ""}).apply(row)


def test_corpus_of_another_version_is_refused(tmp_path: Path, instances: list[str]) -> None:
    (tmp_path / "old.yaml").write_text(json.dumps({"version": 1, "source": "own", "entries": []}))
    with pytest.raises(ValueError, match="version is 1, not 2"):
        load_corpus(instances, tmp_path)


def test_rate_that_is_still_possible_shrinks_with_what_was_played() -> None:
    assert upper_bound(0, 77) == pytest.approx(1 - 0.05 ** (1 / 77))
    assert upper_bound(1, 100) == pytest.approx(0.0466, abs=0.0001)  # scipy.stats.beta.ppf(0.95, 2, 99)
    assert upper_bound(3, 3) == upper_bound(0, 0) == 1.0


def test_figures_count_an_attack_that_gains_once_however_often_it_is_played() -> None:
    coin = Entry("coin", "attack", "i", "redteam", tries=3)
    plays = [Played("coin", "attack", "redteam", attempt, reward=float(attempt != 2)) for attempt in (1, 2, 3)]
    plays.append(Played("work", "honest", "own", 1, reward=1.0, official=True, official_s=2.0, controls_s=5.0))
    counted = figures(plays, [coin, Entry("work", "honest", "i", "own")])
    assert (counted["attacks"], counted["attack_plays"], counted["gains"]) == (1, 3, 1)
    assert counted["gains_by_source"] == {"redteam": 1}
    assert (counted["honest"], counted["false_findings"], counted["control_cost_ratio"]) == (1, 0, 2.5)


def test_finding_is_missed_only_where_the_official_run_was_fooled() -> None:
    names = ("lost", "lies", "bought", "found", "refused", "vain")
    entries = [Entry(name, "attack", "i", "own", finding=True) for name in names]
    plays = [
        Played("lost", "attack", "own", 1, reward=0.0, official=False),  # a coin that fell badly, once …
        Played("lost", "attack", "own", 2, reward=0.0, official=True, findings=["values_not_confirmed"]),
        Played("lies", "attack", "own", 1, reward=0.0, official=True),
        Played("bought", "attack", "own", 1, reward=1.0, official=True),
        Played("found", "attack", "own", 1, reward=0.0, official=True, findings=["values_not_confirmed"]),
        Played("refused", "attack", "own", 1, reward=0.0, official=False, findings=["git_directory_changed"]),
        Played("vain", "attack", "own", 1, reward=0.0, official=False),
    ]
    counted = figures(plays, entries)
    assert (counted["missed_findings"], counted["gains"], counted["vain"]) == (2, 1, 1)


def test_harness_plays_attacks_and_honest_work_with_each_instance_once_a_run(instances: list[str]) -> None:
    played = waves(load_corpus(instances), 18)
    assert sum(map(len, played)) == 18
    assert all(len({entry.instance for entry in wave}) == len(wave) for wave in played)
    assert [wave[0].kind for wave in played] == ["attack", "attack", "honest", "attack"]
    assert all(entry.row is None for wave in played for entry in wave)


async def test_sample_of_the_corpus_gains_nothing() -> None:
    result = await campaign("local", SAMPLE, concurrency=1)
    assert result["passed"], result


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sandbox", ["local", "docker"])
async def test_whole_corpus_gains_nothing_but_what_is_known_to_be_open(
    sandbox: str, request: pytest.FixtureRequest
) -> None:
    if sandbox == "docker":
        request.getfixturevalue("docker_engine")
    result = await campaign(sandbox, through_harness=18)
    known = result["figures"]["open_gains"]
    over = {name: result["figures"][name] - bar for name, bar in result["bars"].items()}
    assert all(over[name] <= (known if name in ("gains", "missed_findings") else 0) for name in over), result
