"""The documentation as a site of static pages: `python -m nemo_gym.view.docs [fern] [site]`, or `make docs`.

Pages are Markdown in the order of fern's `docs.yml`. They become HTML that needs no script and no network, works from
a disk, and is served by `ng_view` under /docs. The build fails, naming page and line, for broken links and anchors,
pages that the navigation omits or that do not exist, unknown components, and code blocks that do not parse.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym.contract.errors import ConfigError

SOURCE = INSTALL_ROOT / "fern"
SITE = INSTALL_ROOT / "fern" / "site"
STATIC = Path(__file__).parent / "static"
COMPONENTS = {"Note": "Note", "Tip": "Tip", "Info": "Note", "Warning": "Warning"}
"""fern's components that pages may use → the word that begins the box."""
_COMPONENT = re.compile(r"\s*<(/?)([A-Za-z][\w.-]*)\s*(/?)>\s*")
_COMMENT = re.compile(r"\s*<!--.*?-->\s*", re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')
_SHOWN_AS_TEXT = {".yaml", ".yml", ".sh", ".sub", ".py", ".toml", ".jsonl", ".txt", ""}
COLUMN, LEFT, ROW, HEAD = 170, 90, 34, 44
CHAR_WIDTH = 6.4
_PARTICIPANT = re.compile(r"(?:participant|actor)\s+(\w+)(?:\s+as\s+(.+))?")
_MESSAGE = re.compile(r"(\w+)\s*(-->>|->>|-->|->)\s*(\w+)\s*:\s*(.+)")
_BLOCK = re.compile(r"(loop|alt|opt|par)\s+(.+)")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is broken, and where."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(slots=True)
class Page:
    """One Markdown file and where it goes in the site."""

    source: Path
    name: str
    title: str
    section: str | None
    tokens: list[Any] = field(repr=False, default_factory=list)
    anchors: dict[int, str] = field(default_factory=dict)
    """Anchors of headings, by the headings' indices in ``tokens``."""


class Site:
    """Reads pages, collects what is wrong with them, and writes them."""

    def __init__(self, source: Path) -> None:
        from markdown_it import MarkdownIt

        self.source = source.resolve()
        self.root = self.source.parent
        self.problems: list[Problem] = []
        self._markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        setattr(self._markdown, "validateLink", lambda url: True)  # noqa: B010 - `_link` reports bad links
        self.pages: dict[Path, Page] = {}
        self.title = "Documentation"
        self._files: dict[Path, str] = {}
        self._read()

    # Reading

    def _read(self) -> None:
        path = self.source / "docs.yml"
        try:
            navigation = yaml.safe_load(path.read_text(encoding="utf-8"))
            self.title = str(navigation["title"])
            entries = [
                (str(section["section"]), each) for section in navigation["navigation"] for each in section["contents"]
            ]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path}' is not the navigation of a site: {type(error).__name__}: {error}") from error
        lines = path.read_text(encoding="utf-8").splitlines()
        for section, each in entries:
            file = self.source / str(each["path"])
            line = next((number for number, text in enumerate(lines, 1) if str(each["path"]) in text), 1)
            if not file.is_file():
                self.problems.append(Problem(path, line, f"there is no page '{each['path']}'"))
            elif file in self.pages:
                self.problems.append(Problem(path, line, f"'{each['path']}' is listed twice"))
            else:
                self._add(file, f"{file.stem}.html", str(each["page"]), section)
        for file in sorted((self.source / "pages").glob("*.md")):
            if file not in self.pages:
                self.problems.append(Problem(file, 1, "docs.yml does not list this page"))
                self._add(file, f"{file.stem}.html", file.stem, None)

    def _add(self, file: Path, name: str, title: str, section: str | None) -> Page:
        page = Page(file, name, title, section, self._markdown.parse(file.read_text(encoding="utf-8")))
        seen: dict[str, int] = {}
        for place, token in enumerate(page.tokens):
            if token.type == "heading_open":
                words = "".join(each.content for each in page.tokens[place + 1].children)
                anchor = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
                again = seen[anchor] = seen.get(anchor, -1) + 1
                page.anchors[place] = anchor if not again else f"{anchor}-{again}"
        self.pages[file] = page
        return page

    # Checking and rendering

    def render(self) -> dict[str, str]:
        """Return every page's HTML by its name in the site; add everything that is wrong to `problems`."""
        bodies: dict[str, str] = {}
        pending = [*self.pages.values()]
        while pending:
            page = pending.pop(0)
            known_pages = set(self.pages)
            self._prepare(page)
            pending += [self.pages[path] for path in self.pages if path not in known_pages]  # files that pages link to
            bodies[page.name] = self._markdown.renderer.render(page.tokens, self._markdown.options, {})
        order = [page for page in self.pages.values() if page.section is not None]
        return {page.name: self._page_html(page, bodies[page.name], order) for page in self.pages.values()}

    def _prepare(self, page: Page) -> None:
        """Replace a page's tokens with those to render, and record what is wrong with them."""
        opened: list[tuple[str, int]] = []
        prefix = "../" * page.name.count("/")
        for place, token in enumerate(page.tokens):
            line = token.map[0] + 1 if token.map else 1
            if token.type == "heading_open":
                token.attrSet("id", page.anchors[place])
            elif token.type in ("th_open", "td_open") and "style" in token.attrs:
                # The viewer's content security policy would refuse an inline style.
                token.attrSet("class", str(token.attrs.pop("style")).rpartition(":")[2])
            elif token.type == "fence":
                token.type, token.content = "html_block", self._code(page, token, line)
            elif token.type == "code_block":
                token.type, token.content = "html_block", _scrolling("code", f"<pre>{escape(token.content)}</pre>")
            elif token.type == "html_block":
                token.content = self._html(page, token.content, line, opened)
            elif token.type == "inline":
                at = line
                for child in token.children:
                    if child.type in ("softbreak", "hardbreak"):
                        at += 1
                    elif child.type == "link_open":
                        child.attrSet("href", self._link(page, str(child.attrGet("href") or ""), at, prefix))
                    elif child.type == "image":
                        child.attrSet("src", self._link(page, str(child.attrGet("src") or ""), at, prefix))
                        if not child.content:
                            self._add_problem(page, at, "an image has no text in place of it")
                    elif child.type == "html_inline":
                        child.content = self._html(page, child.content, at, opened)
        for name, line in opened:
            self._add_problem(page, line, f"<{name}> is not closed")

    def _html(self, page: Page, text: str, line: int, opened: list[tuple[str, int]]) -> str:
        """Render HTML in a page. Only components and comments are allowed."""
        text = _COMMENT.sub("", text)
        written = []
        while text.strip():
            match = _COMPONENT.match(text)
            name = match[2] if match else (re.search(r"<\s*/?\s*([\w.-]+)", text) or ["", text.strip()[:40]])[1]
            if match is None or name not in COMPONENTS or match[3]:
                components = ", ".join(f"<{each}>" for each in COMPONENTS)
                self._add_problem(
                    page, line, f"unknown component <{name}>; pages may use {components}, each on lines of its own"
                )
                return ""
            if not match[1]:
                opened.append((name, line))
                written.append(f'<aside class="{COMPONENTS[name].lower()}"><b>{COMPONENTS[name]}</b> ')
            elif opened and opened[-1][0] == name:
                opened.pop()
                written.append("</aside>")
            else:
                self._add_problem(page, line, f"</{name}> closes nothing")
            text = text[match.end() :]
        return "".join(written)

    def _link(self, page: Page, target: str, line: int, prefix: str) -> str:
        """Return where a link leads within the site."""
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            if not target.startswith(("https:", "http:", "mailto:")):
                self._add_problem(page, line, f"link '{target}': a page leads to https, http and mailto only")
            return target
        name, _, anchor = unquote(target).partition("#")
        file = (page.source.parent / name).resolve() if name else page.source
        if not file.is_file() or not file.is_relative_to(self.root):
            self._add_problem(page, line, f"link '{target}': there is no file '{name}'")
            return "#"
        if file.suffix != ".md":
            return prefix + self._file(file)
        other = self.pages.get(file)
        if other is None:
            other = self._add(
                file, f"files/{file.relative_to(self.root).with_suffix('.html')}", file.parent.name, None
            )
        if anchor and anchor not in other.anchors.values():
            self._add_problem(page, line, f"link '{target}': '{file.name}' has no heading '#{anchor}'")
        return f"{prefix}{other.name}" + (f"#{anchor}" if anchor else "")

    def _file(self, file: Path) -> str:
        """Return the path within the site of a file to copy."""
        within = file.relative_to(self.source if file.is_relative_to(self.source) else self.root)
        name = f"files/{within}" + (".txt" if file.suffix in _SHOWN_AS_TEXT and file.suffix != ".txt" else "")
        self._files[file] = name
        return name

    def _code(self, page: Page, token: Any, line: int) -> str:
        language, _, attributes = str(token.info).strip().partition(" ")
        title = _TITLE.search(attributes)
        name = title["title"] if title else ""
        for number, what in faults_of(language, token.content, name):
            self._add_problem(page, line + number, f"{language} that does not parse: {what}")
        if language == "mermaid":
            try:
                diagram = sequence_diagram(token.content)
            except DiagramError as error:
                self._add_problem(page, line + error.line, f"mermaid that does not parse: {error}")
                return ""
            return _scrolling("diagram", diagram)
        highlighted = self._highlighted(page, token.content, language, line)
        caption = f"<figcaption>{escape(name)}</figcaption>" if name else ""
        code = _scrolling(name or "code", f"<pre><code>{highlighted}</code></pre>")
        return f'<figure class="code">{caption}{code}</figure>\n'

    def _highlighted(self, page: Page, code: str, language: str, line: int) -> str:
        if not language or language == "text":
            return escape(code)
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound

        try:
            lexer = get_lexer_by_name(language, stripnl=False)
        except ClassNotFound:
            self._add_problem(page, line, f"code block of an unknown language '{language}'")
            return escape(code)
        return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))

    def _add_problem(self, page: Page, line: int, what: str) -> None:
        self.problems.append(Problem(page.source, line, what))

    # Writing

    def _page_html(self, page: Page, body: str, order: Sequence[Page]) -> str:
        prefix = "../" * page.name.count("/")
        sections: dict[str, list[Page]] = {}
        for each in order:
            sections.setdefault(str(each.section), []).append(each)
        listed = "".join(
            f"<h2>{escape(name)}</h2><ul>"
            + "".join(
                f'<li><a href="{prefix}{each.name}"{CURRENT if each is page else ""}>{escape(each.title)}</a></li>'
                for each in pages
            )
            + "</ul>"
            for name, pages in sections.items()
        )
        headings = [
            (page.anchors[place], "".join(each.content for each in page.tokens[place + 1].children))
            for place, token in enumerate(page.tokens)
            if token.type == "heading_open" and token.tag == "h2"
        ]
        contents = "".join(f'<li><a href="#{anchor}">{escape(words)}</a></li>' for anchor, words in headings)
        here = order.index(page) if page in order else len(order)
        before, after = order[:here][-1:] if page in order else [], order[here + 1 :][:1]
        links = "".join(
            f'<a rel="{rel}" href="{prefix}{each.name}">{arrow.format(escape(each.title))}</a>'
            for pages, rel, arrow in ((before, "prev", "← {}"), (after, "next", "{} →"))
            for each in pages
        )
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(page.title)} · {escape(self.title)}</title>"
            f'<link rel="icon" href="{prefix}icon.svg">'
            f'<link rel="stylesheet" href="{prefix}docs.css"></head><body>'
            f'<header><a href="{prefix}index.html">{escape(self.title)}</a></header>'
            f'<div class="columns"><nav aria-label="pages"><details><summary>Pages</summary>{listed}</details>'
            f'<div class="wide">{listed}</div></nav>'
            f"<main>{_tables_scroll(body)}"
            + (f'<nav class="around" aria-label="next and previous page">{links}</nav>' if links else "")
            + "</main>"
            + (f'<nav class="contents" aria-label="on this page"><ul>{contents}</ul></nav>' if headings else "")
            + "</div></body></html>\n"
        )

    def write(self, site: Path) -> int:
        """Make the folder ``site`` anew with all pages; return their number. If anything is wrong, write nothing and
        return 0."""
        pages = self.render()
        if self.problems:
            return 0
        if site.exists() and not (site / "docs.css").exists():
            raise ConfigError(
                f"'{site}' exists and is not a site made by this program; name another folder, or remove it"
            )
        shutil.rmtree(site, ignore_errors=True)
        for name, text in pages.items():
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for file, name in self._files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, site / name)
        for name in ("docs.css", "icon.svg"):
            shutil.copyfile(STATIC / name, site / name)
        return len(pages)


CURRENT = ' aria-current="page"'


def _scrolling(label: str, inner: str) -> str:
    """A box that scrolls sideways, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inner}</div>'


def _tables_scroll(body: str) -> str:
    opened = '<div class="scroll" tabindex="0" role="region" aria-label="table"><table'
    return body.replace("<table", opened).replace("</table>", "</table></div>")


def faults_of(language: str, code: str, title: str = "") -> Iterator[tuple[int, str]]:
    """Yield the first syntax error of a code block, if any: its line within the block, from 1, and its message."""
    try:
        match language:
            case "python":
                compile(code, title or "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "json" if title.endswith(".jsonl"):
                for number, line in enumerate(code.splitlines()):
                    try:
                        json.loads(line)
                    except json.JSONDecodeError as error:
                        yield number + 1, error.msg
                        return
            case "json":
                json.loads(code)
            case "toml":
                tomllib.loads(code)
            case "yaml":
                for _ in yaml.compose_all(code, Loader=yaml.SafeLoader):
                    pass
            case "bash" | "sh":
                checked = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
                if checked.returncode:
                    message = checked.stderr.strip().splitlines()[0]
                    match = re.search(r"line (\d+): (.*)", message)
                    yield (int(match[1]), match[2]) if match else (1, message)
    except SyntaxError as error:
        yield error.lineno or 1, error.msg
    except json.JSONDecodeError as error:
        yield error.lineno, error.msg
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"line (\d+)", str(error))
        yield int(match[1]) if match else 1, str(error)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        yield (mark.line + 1 if mark else 1), str(getattr(error, "problem", None) or error)


def main(words: Sequence[str] | None = None) -> int:
    """Build the site. Return 1 if pages have problems, printed one per line; 2 if the site cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_gym.view.docs", description="Build the documentation's site."
    )
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, help="folder with docs.yml")
    parser.add_argument("site", nargs="?", type=Path, default=SITE, help="folder to write, made anew")
    chosen = parser.parse_args(words)
    site = chosen.site
    try:
        builder = Site(chosen.source)
        count = builder.write(site)
    except ConfigError as error:
        sys.stderr.write(f"docs: error: {error.message}\n")
        return 2
    for problem in sorted(builder.problems):
        sys.stderr.write(f"{problem}\n")
    if builder.problems:
        return 1
    sys.stdout.write(f"{count} pages: {site / 'index.html'}\n")
    return 0


# Sequence diagrams in Mermaid's syntax as SVG: participants, messages, and loop, alt, opt and par blocks


class DiagramError(ValueError):
    """A line that cannot be drawn."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True, slots=True)
class _Message:
    start: int
    end: int
    text: str
    is_reply: bool


def sequence_diagram(source: str) -> str:
    """Return the drawing as SVG. Raises `DiagramError`."""
    names: dict[str, str] = {}
    drawn: list[str] = []
    blocks: list[tuple[int, str, int]] = []
    y = HEAD + ROW
    first, *lines = [*source.splitlines(), ""]
    if first.strip() != "sequenceDiagram":
        raise DiagramError(1, f"'{first.strip()[:40]}': only sequenceDiagram is drawn")
    for number, line in enumerate(lines, 2):
        text = line.strip()
        if not text or text.startswith("%%"):
            continue
        if match := _PARTICIPANT.fullmatch(text):
            names[match[1]] = match[2] or match[1]
        elif match := _MESSAGE.fullmatch(text):
            unknown = [each for each in (match[1], match[3]) if each not in names]
            if unknown:
                raise DiagramError(number, f"no participant is named '{unknown[0]}'")
            places = [*names]
            message = _Message(places.index(match[1]), places.index(match[3]), match[4], match[2].startswith("--"))
            drawn.append(_arrow(message, y))
            y += ROW
        elif match := _BLOCK.fullmatch(text):
            blocks.append((y - ROW // 2, f"{match[1]} {match[2]}", number))
            y += ROW
        elif text == "end" and blocks:
            top, label, _ = blocks.pop()
            drawn.insert(0, _frame(top, y - ROW // 2, len(names), label))
            y += ROW // 3
        else:
            raise DiagramError(number, f"'{text[:60]}' is neither a participant nor a message nor a block")
    if blocks:
        raise DiagramError(blocks[-1][2], f"'{blocks[-1][1]}' has no end")
    width, height = LEFT * 2 + COLUMN * (len(names) - 1), y + 10
    heads = "".join(_head(place, name, height) for place, name in enumerate(names.values()))
    label = f"sequence of messages between {', '.join(names.values())}"
    return (
        f'<svg class="sequence" role="img" aria-label="{escape(label)}"'
        f' viewBox="0 0 {width} {height}" width="{width}" height="{height}">{heads}{"".join(drawn)}</svg>'
    )


def _x(place: int) -> int:
    return LEFT + COLUMN * place


def _head(place: int, name: str, height: int) -> str:
    x = _x(place)
    return (
        f'<line class="life" x1="{x}" y1="{HEAD}" x2="{x}" y2="{height}"/>'
        f'<rect x="{x - 62}" y="8" width="124" height="{HEAD - 12}" rx="6"/>'
        f'<text x="{x}" y="{HEAD // 2 + 7}" text-anchor="middle">{escape(name)}</text>'
    )


def _arrow(message: _Message, y: int) -> str:
    start, end = _x(message.start), _x(message.end)
    if message.start == message.end:
        end = start + 40
    way = 1 if end > start else -1
    kind = "reply" if message.is_reply else "call"
    # A text that is longer than its arrow is moved right, so that it does not begin outside the drawing.
    centre = (start + end) / 2
    half = len(message.text) * CHAR_WIDTH / 2
    centre = max(centre, half + 4)
    return (
        f'<text class="said" x="{centre:.0f}" y="{y - 6}" text-anchor="middle">{escape(message.text)}</text>'
        f'<line class="{kind}" x1="{start}" y1="{y}" x2="{end - 2 * way}" y2="{y}"/>'
        f'<path class="tip" d="M{end} {y} l{-8 * way} -4 v8 z"/>'
    )


def _frame(top: int, bottom: int, columns: int, label: str) -> str:
    width = COLUMN * (columns - 1) + LEFT + 50
    return (
        f'<rect class="frame" x="20" y="{top}" width="{width}" height="{bottom - top}" rx="4"/>'
        f'<text class="label" x="28" y="{top + 15}">{escape(label)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main())
