// A patch in colours: what it takes away and adds, and the words of the language it is in.
import { html, Text } from "./parts.mjs";

const WORDS = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda None nonlocal not or pass raise return True False try while with yield match case",
  script: "async await break case catch class const continue default delete do else export extends false finally for function if import in instanceof let new null of return static super switch this throw true try typeof undefined var void while yield interface type",
  other: "if else for while return break continue switch case default struct enum fn let mut pub impl use func package import type const var true false null nil void int char static class public private new try catch throw def end do then",
};
const LANGUAGES = new Map(Object.entries({ py: "python", pyi: "python", js: "script", mjs: "script", jsx: "script", ts: "script", tsx: "script" }));
const KEYWORDS = Object.fromEntries(Object.entries(WORDS).map(([name, words]) => [name, new Set(words.split(" "))]));
const PARTS = {
  python: /(#.*$)|("""|'''|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g,
  script: /(\/\/.*$|\/\*.*?(?:\*\/|$))|(`(?:[^`\\]|\\.)*`?|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|(\b\d[\w.]*)|([A-Za-z_$][\w$]*)/g,
};

function coloured(line, language) {
  if (line.length > 2000) return html`<${Text}>${line}<//>`;
  const parts = [];
  let end = 0;
  for (const found of line.matchAll(PARTS[language] || PARTS.script)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "digit" : KEYWORDS[language].has(found[0]) ? "keyword" : "";
    if (!kind) continue;
    if (found.index > end) parts.push(html`<${Text}>${line.slice(end, found.index)}<//>`);
    parts.push(html`<span class=${kind}><${Text}>${found[0]}<//></span>`);
    end = found.index + found[0].length;
  }
  if (end < line.length) parts.push(html`<${Text}>${line.slice(end)}<//>`);
  return parts;
}

export function filesOf(text) {
  const files = [];
  for (const line of text.replace(/\n$/, "").split("\n")) {
    if (line.startsWith("diff --git ") || !files.length) {
      const name = line.match(/ b\/(.*)$/)?.[1] || "patch";
      files.push({ name, lines: [], added: 0, removed: 0, inHunk: false });
    }
    const file = files[files.length - 1];
    let kind = "context";
    if (line.startsWith("@@")) { kind = "hunk"; file.inHunk = true; }
    else if (!file.inHunk) kind = "head";
    else if (line.startsWith("+")) { kind = "added"; file.added += 1; }
    else if (line.startsWith("-")) { kind = "removed"; file.removed += 1; }
    file.lines.push({ kind, text: line });
  }
  return files;
}

export function Diff({ text }) {
  return filesOf(text).map((file) => {
    const language = LANGUAGES.get(file.name.split(".").pop()) || "other";
    return html`<details class="file" open=${file.lines.length < 600}><summary><code><${Text}>${file.name}<//></code> <span class="good">+${file.added}</span> <span class="bad">−${file.removed}</span></summary>
      <pre class="diff" tabindex="0" role="region" aria-label=${`changes of ${file.name}`}>${file.lines.map((line) => html`<span class=${`line ${line.kind}`}>${line.kind === "hunk" || line.kind === "head" || !line.text
        ? html`<${Text}>${line.text}<//>` : html`<span class="sign">${line.text[0]}</span>${coloured(line.text.slice(1), language)}`}${"\n"}</span>`)}</pre></details>`;
  });
}
