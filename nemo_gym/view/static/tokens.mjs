// A chain's tokens: which were sampled, how likely each was, and where turns begin. Blocks are made when they are seen.
import { useEffect, useRef, useState } from "./vendor/htm-preact.mjs";
import { Loading, Problem, Text, ask, count, html } from "./parts.mjs";

const BLOCK = 512;
const SHADES = 8;

async function chainOf(run, id, number) {
  const buffer = await (await ask(`/api/runs/${run}/chain`, { id, number })).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  const take = (type, size) => { const held = new type(buffer, at, size); at += held.byteLength; return held; };
  const prompt = take(Int32Array, head.prompt);
  const response = take(Int32Array, head.response);
  const logprobs = head.has_logprobs ? take(Float32Array, head.response) : null;
  return { ...head, prompt_ids: prompt, response_ids: response, logprobs, mask: take(Uint8Array, head.response) };
}

// The less likely, the darker: e⁰ is shade 0, below e⁻⁵ is the last.
const shadeOf = (logprob) => Math.min(SHADES - 1, Math.max(0, Math.round((-logprob / 5) * (SHADES - 1))));

export function Chain({ run, id, number }) {
  const [chain, setChain] = useState(null);
  const [error, setError] = useState(null);
  const [asIds, setAsIds] = useState(false);
  const [told, setTold] = useState("");
  useEffect(() => { chainOf(run, id, number).then(setChain, (failed) => setError(failed.message)); }, [run, id, number]);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!chain) return html`<${Loading} what="tokens" />`;
  const hasTexts = Object.keys(chain.texts).length > 0;
  const tell = (event) => {
    const held = event.target.dataset?.at;
    if (held === undefined) return;
    const place = Number(held);
    const inResponse = place - chain.prompt;
    const token = inResponse < 0 ? chain.prompt_ids[place] : chain.response_ids[inResponse];
    const sampled = inResponse >= 0 && chain.mask[inResponse] === 1;
    const logprob = sampled && chain.logprobs ? chain.logprobs[inResponse] : null;
    const text = hasTexts ? ` ${JSON.stringify(chain.texts[token])}` : "";
    setTold(`token ${place}: id ${token}${text}, ${inResponse < 0 ? "prompt" : sampled ? "sampled" : "given"}${logprob === null ? "" : `, logprob ${logprob.toFixed(4)} (p = ${Math.exp(logprob).toFixed(4)})`}`);
  };
  const total = chain.prompt + chain.response;
  const blocks = [];
  for (let start = 0; start < total; start += BLOCK) blocks.push(start);
  return html`<section class="chain" aria-label=${`tokens of chain ${number}`}>
    <p class="actions"><span class="legend"><span class="token given">given</span> <span class="token sampled s0">sampled, sure</span> <span class="token sampled s4">less</span> <span class="token sampled s7">unlikely</span></span>
      ${hasTexts && html`<button aria-pressed=${asIds} onClick=${() => setAsIds(!asIds)}>${asIds ? "as text" : "as ids"}</button>`}
      ${chain.prompt > 0 && chain.response > 0 && html`<button onClick=${() => document.getElementById(`block-${Math.floor(chain.prompt / BLOCK)}`)?.scrollIntoView()}>to the response</button>`}
      ${!hasTexts && html`<span class="faint">ids only: the policy's tokenizer is not on this machine</span>`}</p>
    <p class="told" role="status"><${Text}>${told || `${count(total)} tokens; point at one`}<//></p>
    <div class=${`tokens ${hasTexts && !asIds ? "as-text" : "as-ids"}`} onMouseOver=${tell} onClick=${tell} tabindex="0" role="region" aria-label="tokens">
      ${blocks.map((start) => html`<${Block} key=${`${start}${asIds}`} chain=${chain} start=${start} end=${Math.min(total, start + BLOCK)} texts=${hasTexts && !asIds ? chain.texts : null} first=${start < BLOCK * 4} />`)}
    </div></section>`;
}

function Block({ chain, start, end, texts, first }) {
  const place = useRef(null);
  const [seen, setSeen] = useState(first);
  useEffect(() => {
    if (seen) return undefined;
    const watch = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) setSeen(true); }, { rootMargin: "800px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [seen]);
  if (!seen) return html`<div class="block unseen-block" id=${`block-${start / BLOCK}`} ref=${place}></div>`;
  const turnAt = new Map(chain.turns.map((turn, number) => [turn.start, number + 1]));
  const parts = [];
  for (let at = start; at < end; at += 1) {
    const inResponse = at - chain.prompt;
    const sampled = inResponse >= 0 && chain.mask[inResponse] === 1;
    const token = inResponse < 0 ? chain.prompt_ids[at] : chain.response_ids[inResponse];
    if (inResponse === 0) parts.push(html`<span class="mark">response</span>`);
    if (turnAt.has(inResponse)) {
      const turn = chain.turns[turnAt.get(inResponse) - 1];
      parts.push(html`<span class="mark">turn ${turnAt.get(inResponse)} · ${turn.finish_reason}${turn.weights_version ? ` · weights ${turn.weights_version}` : ""}</span>`);
    }
    const kind = sampled ? `token sampled s${chain.logprobs ? shadeOf(chain.logprobs[inResponse]) : 0}` : inResponse < 0 ? "token prompt" : "token given";
    parts.push(html`<span class=${kind} data-at=${at}>${texts ? html`<${Text}>${texts[token]}<//>` : token}</span>`);
  }
  return html`<div class="block" id=${`block-${start / BLOCK}`} ref=${place}>${parts}</div>`;
}
