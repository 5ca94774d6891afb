"""The campaign that shows text shared with other sources finds it, and tells declarations from the rest."""

from __future__ import annotations

from campaigns.compat.overlap import runs

FIELDS = "".join(f"    name_{number}: int = {number}\n" for number in range(7))
STEPS = "".join(f"    total += weigh({number}, total)\n\n    # step {number}\n" for number in range(7))
OURS = f"import os\n\n\nclass Ours:\n{FIELDS}\n\ndef ours(total: int) -> int:\n{STEPS}    return total\n"
THEIRS = f"class Theirs:\n{FIELDS}\n\ndef theirs(total: int) -> int:\n{STEPS.replace('total += ', 'total  +=  ')}"


def test_runs_of_equal_lines_are_found_whatever_their_white_space_and_comments() -> None:
    found = list(runs({"a.py": OURS}, {"b.py": THEIRS, "c.py": "x = 1\n" * 5}))
    assert [(run.ours, run.theirs, run.lines, run.reason) for run in found] == [
        ("a.py:5-11", "b.py:2-8", 7, "declarations: fields"),
        ("a.py:15-33", "b.py:12-30", 7, None),
    ]


def test_five_equal_lines_are_no_run() -> None:
    assert list(runs({"a.py": "\n".join(f"step({n})" for n in range(5))}, {"b.py": OURS})) == []
    five = "\n".join(f"weigh({number})" for number in range(5))
    assert list(runs({"a.py": five}, {"b.py": five})) == []
