// What pages share: asking the server, showing text as text, figures, small components.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.mjs";

export { html };

export async function ask(path, words = {}) {
  const query = new URLSearchParams(Object.entries(words || {}).filter(([, value]) => value !== "" && value != null));
  const response = await fetch(`${path}${query.size ? `?${query}` : ""}`, { credentials: "same-origin" });
  if (response.ok) return response;
  let said = `${response.status} ${response.statusText}`;
  try { said = (await response.json()).error || said; } catch { /* not JSON: the status says enough */ }
  throw new Error(said);
}
export const askJson = async (path, words) => (await ask(path, words)).json();

// The answer to a question, asked again when `key` changes; the last answer stays until the next one is there.
export function useAnswer(path, words, key = "") {
  const [answer, setAnswer] = useState({ value: null, error: null, path: null });
  const question = `${path}?${new URLSearchParams(words || {})}`;
  useEffect(() => {
    let left = false;
    if (!path) return undefined;
    askJson(path, words).then(
      (value) => { if (!left) setAnswer({ value, error: null, path: question }); },
      (error) => { if (!left) setAnswer({ value: null, error: error.message, path: question }); },
    );
    return () => { left = true; };
  }, [question, key]);
  return answer;
}

// A number that changes whenever the run does, and the run's progress.
export function useLive(run) {
  const [state, setState] = useState({ version: 0, progress: null });
  useEffect(() => {
    let left = false;
    let timer = 0;
    const look = async () => {
      if (!document.hidden) {
        try {
          const found = await askJson(`/api/runs/${run}/state`);
          if (!left) setState(found);
        } catch { /* the page that needs it says so */ }
      }
      if (!left) timer = setTimeout(look, 1500);
    };
    look();
    return () => { left = true; clearTimeout(timer); };
  }, [run]);
  return state;
}

// Characters that would change how the text around them is shown, or that show nothing.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\u{e0000}-\u{e0fff}]/gu;
const codeOf = (char) => char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
const pictured = (char) => {
  const code = char.codePointAt(0);
  return code < 0x20 ? `^${String.fromCharCode(code + 64)}` : `U+${codeOf(char)}`;
};

// The same for places that take no elements.
export const plain = (text) => String(text ?? "").replace(HIDDEN, pictured);

// Text of a model, a box or a dataset. Characters that show nothing are made visible.
export function Text({ children }) {
  const text = [children].flat(Infinity).filter((part) => part != null && part !== false).join("");
  if (text.search(HIDDEN) < 0) return text;
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found[0] === "\r" && text[found.index + 1] === "\n") { parts.push(text.slice(end, found.index)); end = found.index + 1; continue; }
    parts.push(text.slice(end, found.index));
    parts.push(html`<span class="hidden-char" title=${`U+${codeOf(found[0])}`}>${pictured(found[0])}</span>`);
    end = found.index + found[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

const FOLDED_LINES = 14;

// A text that is folded when it is long; `all` fetches what the server left out.
export function LongText({ of, all, label, lines = FOLDED_LINES }) {
  const [open, setOpen] = useState(false);
  const [whole, setWhole] = useState(null);
  const [error, setError] = useState(null);
  const text = whole ?? of.text;
  const rows = text.split("\n");
  const isLong = rows.length > lines + 4 || text.length > 3000;
  const shown = open || !isLong ? text : rows.slice(0, lines).join("\n").slice(0, 3000);
  const isCut = of.chars > of.text.length && whole === null;
  const fetchAll = async () => {
    try { setWhole(await (await all(of.where)).text()); setOpen(true); } catch (failed) { setError(failed.message); }
  };
  return html`<div class="long-text">
    <pre tabindex="0" role="region" aria-label=${label || "text"}><${Text}>${shown}<//></pre>
    ${isLong && html`<button class="fold" onClick=${() => setOpen(!open)}>${open ? "fold" : `show ${rows.length} lines`}</button>`}
    ${open && isCut && all && html`<button class="fold" onClick=${fetchAll}>show all ${count(of.chars)} characters</button>`}
    ${error && html`<span class="problem">${error}</span>`}
  </div>`;
}

export const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const count = (value) => value == null ? "–" : Number(value).toLocaleString("en");
export const figure = (value, digits = 3) => value == null ? "–" : Number.isInteger(value) ? String(value) : value.toFixed(digits);
export const signed = (value, digits) => `${value < 0 ? "−" : "+"}${figure(Math.abs(value), digits)}`;
export function large(value) {
  if (value == null) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= size) return `${(value / size).toFixed(value >= size * 100 ? 0 : 1)} ${unit}`;
  return String(value);
}
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}
export const when = (seconds) => seconds == null ? "–" : new Date(seconds * 1000).toLocaleString("sv").slice(0, 16);

export function Reward({ value }) {
  const kind = value == null ? "none" : value >= 1 ? "full" : value > 0 ? "part" : "zero";
  return html`<span class=${`reward ${kind}`}>${value == null ? "–" : figure(value, 2)}</span>`;
}

// A mean with its 95 % interval on the scale from 0 to 1.
export function Interval({ of }) {
  if (!of) return html`<span class="faint">–</span>`;
  const at = (value) => `${Math.max(0, Math.min(1, value)) * 100}%`;
  const isUnit = of.value >= 0 && of.value <= 1;
  const text = `${of.value.toFixed(3)}${of.std_err == null ? "" : ` ± ${(1.96 * of.std_err).toFixed(3)}`}`;
  return html`<span class="interval" title=${`95 % interval over ${of.tasks} tasks`}>
    <span class="interval-text">${text}</span>
    ${isUnit && html`<span class="interval-bar" aria-hidden="true">
      ${of.low != null && html`<span class="interval-range" style=${{ left: at(of.low), width: `calc(${at(of.high)} - ${at(of.low)})` }}></span>`}
      <span class="interval-mean" style=${{ left: at(of.value) }}></span>
    </span>`}
  </span>`;
}

export function Progress({ of }) {
  if (!of || of.note || !of.total) return of?.note ? html`<p class="note">${of.note}</p>` : null;
  const done = of.ended / of.total;
  const state = of.collecting ? "running" : of.ended < of.total ? "stopped" : "finished";
  return html`<div class="progress">
    <span class=${`state ${state}`}>${state}</span>
    <progress max=${of.total} value=${of.ended} aria-label="rollouts that have ended">${Math.round(done * 100)} %</progress>
    <span>${count(of.ended)} of ${count(of.total)}</span>
    ${of.collecting && html`<span>${of.running_count} running, ${count(of.queued)} waiting${of.retried ? `, ${of.retried} tried again` : ""}</span>`}
    ${of.collecting && of.per_minute != null && html`<span>${figure(of.per_minute, 1)} per minute</span>`}
    ${of.seconds_left != null && html`<span>about ${duration(of.seconds_left)} left</span>`}
  </div>`;
}

export const Problem = ({ children }) => html`<p class="problem" role="alert"><${Text}>${children}<//></p>`;
export const Loading = ({ what = "" }) => html`<p class="faint" aria-busy="true">Reading${what ? ` ${what}` : ""} …</p>`;

// Keys of a page, while no field has the focus.
export function useKeys(keys) {
  const held = useRef(keys);
  held.current = keys;
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const act = held.current[event.key];
      if (act) { event.preventDefault(); act(); }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

export const link = (path, words = {}) => {
  const query = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "" && value != null && value !== false));
  return `#${path}${query.size ? `?${query}` : ""}`;
};
export const go = (path, words) => { location.hash = link(path, words); };
