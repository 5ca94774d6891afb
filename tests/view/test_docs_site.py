"""The documentation as a site: it builds, works from a disk and under /docs, and what is broken fails the build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nemo_gym.contract.errors import ConfigError
from nemo_gym.view.docs import SOURCE, DiagramError, Site, faults_of, main, sequence_diagram
from nemo_gym.view.runs import Runs
from nemo_gym.view.server import viewer
from tests.view.serving import Look, browsing, viewing

NAVIGATION = (
    "title: A site\nnavigation:\n  - section: One\n    contents:\n      - {page: First, path: pages/first.md}\n"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own pages, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "nemo_gym.view.docs", str(SOURCE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def written(tmp_path: Path, text: str, name: str = "first.md") -> Path:
    (tmp_path / "fern" / "pages").mkdir(parents=True, exist_ok=True)
    (tmp_path / "fern" / "docs.yml").write_text(NAVIGATION)
    (tmp_path / "fern" / "pages" / name).write_text(text)
    return tmp_path / "fern"


def test_every_page_is_there_and_every_address_in_it_leads_somewhere(site: Path) -> None:
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    assert {f"{path.stem}.html" for path in (SOURCE / "pages").glob("*.md")} <= {str(path) for path in pages}
    for path, text in pages.items():
        ids = set(re.findall(r' id="([^"]+)"', text))
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            file = (site / path).parent / name if name else site / path
            assert file.is_file(), (path, target)
            if anchor:
                there = ids if not name else set(re.findall(r' id="([^"]+)"', file.read_text()))
                assert anchor in there, (path, target)
        assert "<script" not in text and " style=" not in text and "mermaid" not in text, path


def test_pages_look_right_from_a_disk(site: Path) -> None:
    with browsing() as browser:
        for scheme, width in (("light", 1280), ("dark", 390)):
            options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
            look = Look.at(browser, (site / "index.html").as_uri(), **options)
            page = look.page
            for name in ("index", "seeing-a-run", "figures"):
                page.goto((site / f"{name}.html").as_uri())
                assert page.locator("h1").count() == 1
                assert look.wrong == []
                look.shot(f"docs-{name}-{scheme}-{width}")
                assert (name, look.faults()) == (name, [])
                look.wrong.clear()  # axe asks for the style sheet, which a page of a disk may not
                wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert (name, page.evaluate(wide)) == (name, 0)
            assert [each for each in look.requested if not each.startswith(site.as_uri())] == []
        page.goto((site / "index.html").as_uri())
        page.get_by_role("link", name="SessionDescriptor").first.click()
        assert page.url.endswith("/session-contract.html")


def test_viewer_serves_the_site_to_who_has_its_token(site: Path, tmp_path: Path) -> None:
    runs = Runs([tmp_path])

    def client_of(docs: Path) -> TestClient:
        app, token = viewer(runs, "127.0.0.1", None, docs)
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.get("/docs/").status_code == 403
        client.get(f"/?token={token}")
        return client

    missing = client_of(tmp_path / "nowhere").get("/docs/")
    assert (missing.status_code, "'make docs' does" in missing.text) == (404, True)
    client = client_of(site)
    assert "First rollouts" in client.get("/docs").text
    assert client.get("/docs/docs.css").headers["content-type"].startswith("text/css")
    assert client.get("/docs/images/../../../secret").status_code == 404


def test_pages_look_right_in_the_viewer(site: Path, tmp_path: Path) -> None:
    with viewing(tmp_path, "--docs", site) as url, browsing() as browser:
        look = Look.at(browser, url)
        look.page.get_by_role("link", name="Documentation").click()
        look.page.wait_for_selector("nav[aria-label=pages]")
        look.page.get_by_role("link", name="Boxes behind a broker").first.click()
        look.page.wait_for_selector("svg.sequence")
        assert look.faults() == []
        look.go("docs/sandboxes.html", "table")
        assert look.faults() == []
        assert look.wrong == []
        assert [each for each in look.requested if not each.startswith(look.base)] == []


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("# A\n\nSee [this](gone.md).\n", 3, "there is no file 'gone.md'"),
        ("# A\n\nSee\n[this](#gone).\n", 4, "'first.md' has no heading '#gone'"),
        ("# A\n\n[x](javascript:alert(1))\n", 3, "leads to https, http and mailto only"),
        ("# A\n\n[x](../../../../etc/passwd)\n", 3, "there is no file '../../../../etc/passwd'"),
        ("# A\n\n<Card>\nx\n</Card>\n", 3, "unknown component <Card>; pages may use <Note>"),
        ("# A\n\ntext <Callout> text\n", 3, "unknown component <Callout>"),
        ("# A\n\n<Note>\n\nx\n", 3, "<Note> is not closed"),
        ("# A\n\n```python\nx = 1\ny = = 2\n```\n", 5, "python that does not parse: invalid syntax"),
        ("# A\n\n```json\n{\n  'a': 1}\n```\n", 5, "json that does not parse"),
        ("# A\n\n```yaml\na: 1\nb: [1\n```\n", 6, "yaml that does not parse"),
        ("# A\n\n```bash\necho a\nif true; then\n```\n", 6, "bash that does not parse: syntax error"),
        ("# A\n\n```klingon\nx\n```\n", 3, "unknown language 'klingon'"),
        ("# A\n\n```mermaid\nsequenceDiagram\nA->>B: x\n```\n", 5, "no participant is named 'A'"),
        ("# A\n\n![](a.png)\n", 3, "there is no file 'a.png'"),
    ],
)
def test_what_is_broken_fails_with_page_and_line(
    text: str, line: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, text)
    assert main([str(source), str(tmp_path / "site")]) == 1
    said = capsys.readouterr().err
    assert f"{source / 'pages' / 'first.md'}:{line}: " in said
    assert says in said
    assert not (tmp_path / "site").exists()


def test_pages_that_the_navigation_does_not_hold_and_pages_that_are_not_there_are_said(tmp_path: Path) -> None:
    source = written(tmp_path, "# Other\n", "other.md")
    site = Site(source)
    assert [(each.path.name, each.line, each.what) for each in sorted(site.problems)] == [
        ("docs.yml", 5, "there is no page 'pages/first.md'"),
        ("other.md", 1, "docs.yml does not list this page"),
    ]
    (source / "docs.yml").write_text("title: x\n")
    with pytest.raises(ConfigError, match="is not the navigation of a site"):
        Site(source)


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    source = written(tmp_path, "# A\n\n<Warning>\n\nMind *this*.\n\n</Warning>\n\n<!-- not shown -->\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "work.txt").write_text("mine")
    assert main([str(source), str(tmp_path / "site")]) == 2
    assert (tmp_path / "site" / "work.txt").read_text() == "mine"
    assert main([str(source), str(tmp_path / "new")]) == 0
    text = (tmp_path / "new" / "first.html").read_text()
    assert '<aside class="warning"><b>Warning</b>' in text and "not shown" not in text


def test_lines_of_a_list_of_rows_are_checked_one_by_one() -> None:
    rows = "\n".join(json.dumps({"n": n}) for n in range(3))
    assert [*faults_of("json", rows, "rows.jsonl")] == []
    assert [place for place, _ in faults_of("json", f"{rows}\nx", "rows.jsonl")] == [4]


def test_blocks_of_a_diagram_need_an_end() -> None:
    drawn = sequence_diagram("sequenceDiagram\nparticipant A as one <b>\nparticipant B\nA->>B: hello\nB-->>A: yes")
    assert "one &lt;b&gt;" in drawn and 'class="reply"' in drawn
    with pytest.raises(DiagramError, match="'loop for ever' has no end"):
        sequence_diagram("sequenceDiagram\nparticipant A\nloop for ever\nA->>A: x")
