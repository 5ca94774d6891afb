"""No code asks which agent or which environment it has before it: what they can do is declared, and that is asked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"agent": "responses_api_agents", "environment": "resources_servers"}
CODE = ("nemo_gym", "responses_api_agents", "resources_servers", "responses_api_models")
GROUP = "sandbox"
"""The broker's folder has the name of a configuration group, which is compared with."""


def names() -> frozenset[str]:
    """Every agent and environment, by folder and by the file that chooses it."""
    folders = {app.parent.name for folder in KINDS.values() for app in ROOT.glob(f"{folder}/*/app.py")}
    files = {path.stem for group in KINDS for path in ROOT.glob(f"configs/{group}/*.yaml")}
    return frozenset(folders | files) - {GROUP}


def compared(tree: ast.AST) -> Iterator[tuple[int, object]]:
    """Line and value of each constant that something is compared with, alone or in a collection."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        else:
            continue
        for part in parts:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant):
                    yield inner.lineno, inner.value


def test_comparison_with_the_name_of_an_agent_is_found() -> None:
    tree = ast.parse("if agent == 'codex': pass\nmatch name:\n    case 'math': pass\nx = name in ('a', 'oracle')")
    assert [line for line, value in compared(tree) if value in names()] == [1, 4, 3]


def test_no_code_compares_anything_with_the_name_of_an_agent_or_an_environment() -> None:
    known = names()
    assert {"claude_code", "codex_agent", "swe_bench", "math"} <= known
    found = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            code = path.read_text()
            if "tests" not in path.relative_to(ROOT).parts and any(name in code for name in known):
                found += [f"{path.relative_to(ROOT)}:{n} {v!r}" for n, v in compared(ast.parse(code)) if v in known]
    assert found == []
