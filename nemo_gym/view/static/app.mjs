// The viewer's frame: which page the address names, the theme, and the keys that work everywhere.
import { render, useEffect, useState } from "./vendor/htm-preact.mjs";
import { go, html, useKeys } from "./parts.mjs";
import { ComparePage, RunPage, RunsPage } from "./pages.mjs";
import { RolloutPage } from "./rollout.mjs";

function place() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), words: Object.fromEntries(new URLSearchParams(query || "")) };
}

const KEYS = [
  ["j / k", "next or previous row, or turn"],
  ["Enter", "open the chosen row"],
  ["/", "search"],
  ["n / p", "next or previous rollout, worst first"],
  ["1 … 7", "the tabs of a rollout"],
  ["u", "one level up"],
  ["t", "dark or light"],
  ["?", "these keys"],
];

function flipTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* for this page only */ }
}

function App() {
  const [at, setAt] = useState(place());
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const moved = () => { setAt(place()); };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const [page, key, part] = at.parts;
  const up = part === "rollout" ? `/run/${key}` : "/";
  useKeys({ t: flipTheme, u: () => go(up), "?": () => setHelp(!help), Escape: () => setHelp(false) });
  let body;
  if (page === "run" && part === "rollout") body = html`<${RolloutPage} key=${`${key} ${at.words.id}`} run=${key} id=${at.words.id} tab=${at.words.tab} />`;
  else if (page === "run") body = html`<${RunPage} key=${key} run=${key} words=${at.words} />`;
  else if (page === "compare") body = html`<${ComparePage} a=${at.words.a} b=${at.words.b} />`;
  else body = html`<${RunsPage} />`;
  return html`
    <header class="bar">
      <a class="home" href="#/">Runs</a>
      <a href="/docs/">Documentation</a>
      <span class="grow"></span>
      <button onClick=${flipTheme} aria-label="switch between dark and light" title="dark or light (t)">◐</button>
      <button onClick=${() => setHelp(!help)} aria-expanded=${help} aria-label="keys" title="keys (?)">?</button>
    </header>
    ${help && html`<section class="help" aria-label="keys"><dl>${KEYS.map(([name, does]) => html`<div><dt><kbd>${name}</kbd></dt><dd>${does}</dd></div>`)}</dl></section>`}
    <main>${body}</main>`;
}

render(html`<${App} />`, document.getElementById("app"));
