"""`ng_view` as a process, and a browser that looks at it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "results" / "screenshots"
DEADLINE_MS = 30_000


def chromium() -> str:
    """Debian's browser; Playwright's own is not fetched."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "chromium is missing: scripts/install-system --with-tests"
    return found


@contextmanager
def viewing(*words: str | Path, env: dict[str, str] | None = None) -> Iterator[str]:
    """The URL of a viewer."""
    command = [str(Path(sys.executable).with_name("ng_view")), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), process.stderr.read()
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=30)


@contextmanager
def browsing() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Look:
    """A page of the viewer, and what went wrong while it was looked at."""

    page: Page
    base: str
    wrong: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    @classmethod
    def at(cls, browser: Browser, url: str, **options: Any) -> Look:
        page = browser.new_page(**options)
        page.set_default_timeout(DEADLINE_MS)
        look = cls(page, url.partition("?")[0])
        page.on("pageerror", lambda error: look.wrong.append(str(error)))
        page.on("console", lambda said: look.wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: look.requested.append(request.url))
        page.goto(url)
        return look

    def go(self, place: str, selector: str) -> None:
        self.page.goto(f"{self.base}{place}")
        self.page.wait_for_selector(selector)

    def runs(self) -> dict[str, str]:
        """Keys by name."""
        return {run["name"]: run["key"] for run in self.ask("/api/runs")["runs"]}

    def ask(self, path: str) -> Any:
        return orjson.loads(self.page.evaluate("path => fetch(path).then((r) => r.text())", path))

    def shot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def faults(self) -> list[str]:
        """What axe-core finds serious, or worse, on the page as it is."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
