// The list of runs, one run, and two runs compared.
import { useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.mjs";
import {
  Interval, Loading, Problem, Progress, Reward, Text, count, duration, figure, go, html, large, link, many, plain, signed, useAnswer,
  useKeys, useLive, when,
} from "./parts.mjs";

const titled = (name) => { document.title = name ? `${name} · runs` : "Runs"; };

// ------------------------------------------------------------------------------------------------------------- runs

export function RunsPage() {
  const [tick, setTick] = useState(0);
  const [chosen, setChosen] = useState([]);
  const { value, error } = useAnswer("/api/runs", null, String(tick));
  const table = useRef(null);
  useEffect(() => {
    titled("");
    const timer = setInterval(() => { if (!document.hidden) setTick((n) => n + 1); }, 2500);
    return () => clearInterval(timer);
  }, []);
  useRowKeys(table);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} what="runs" />`;
  const choose = (key) => setChosen(chosen.includes(key) ? chosen.filter((each) => each !== key) : [...chosen, key].slice(-2));
  const services = value.services ?? [];
  return html`
    <h1>Runs</h1>
    ${services.map((service) => html`<${Service} key=${service.url} of=${service} />`)}
    ${!value.runs.length && (services.length ? html`<p>The service has no jobs yet. <code>ng_jobs submit input=rows.jsonl</code> gives it some.</p>`
      : html`<p>There is no result file here yet. A run writes one with <code>ng_run … output=results/rollouts.jsonl</code>.</p>`)}
    ${value.runs.length > 1 && html`<p class="actions">
      <button disabled=${chosen.length !== 2} onClick=${() => go("/compare", { a: chosen[0], b: chosen[1] })}>Compare two runs</button>
      <span class="faint">${chosen.length === 2 ? "" : `choose ${2 - chosen.length} ${chosen.length ? "more" : "of them"}`}</span>
    </p>`}
    ${value.runs.length > 0 && html`<div class="scroll"><table class="rows" ref=${table}>
      <thead><tr><th class="narrow-off"><span class="unseen">choose</span></th><th>run</th><th>progress</th><th class="number">reward</th>
        <th class="number narrow-off">solved</th><th class="number">no verdict</th><th class="number narrow-off">findings</th>
        <th class="number narrow-off">tokens</th><th class="number narrow-off">cost</th><th class="narrow-off">changed</th></tr></thead>
      <tbody>${value.runs.map((run) => html`<${RunRow} key=${run.key} run=${run} chosen=${chosen.includes(run.key)} choose=${choose} />`)}</tbody>
    </table></div>`}`;
}

// A model server's rollouts are counted only where there are several of it to choose from.
const isCounted = (server) => server.kind !== "responses_api_models" || server.busy || server.done;

// What a rollout service says of itself: its stages and servers.
function Service({ of }) {
  const kind = of.problem || of.state === "stopped" ? "stopped" : "running";
  return html`<section class="service" aria-label=${`service ${of.url}`}>
    <p class="progress"><span class=${`state ${kind}`}>${of.problem ? "trouble" : of.state}</span> <b>${of.url}</b>
      <span>${many(of.under_way ?? 0, "rollout")} under way</span></p>
    ${of.problem && html`<p class="note"><${Text}>${of.problem}<//></p>`}
    ${of.failure && html`<p class="problem"><${Text}>${of.failure}<//></p>`}
    <details open><summary>Stages and servers</summary><div class="pair">
      <div class="scroll"><table class="rows"><thead><tr><th>stage</th><th class="number">at work</th><th class="number">wait</th><th class="number">workers</th><th class="number">oldest</th></tr></thead>
        <tbody>${(of.stages ?? []).map((stage) => html`<tr><th scope="row">${stage.stage}</th><td class="number">${count(stage.active)}</td>
          <td class="number">${count(stage.queued)}</td><td class="number">${count(stage.workers)}</td><td class="number">${stage.active ? duration(stage.oldest_s) : "–"}</td></tr>`)}</tbody></table></div>
      <div class="scroll"><table class="rows"><thead><tr><th>server</th><th class="number">busy</th><th class="number narrow-off">places</th><th class="number">done</th><th class="number narrow-off">each</th><th>state</th><th class="narrow-off">at</th></tr></thead>
        <tbody>${(of.servers ?? []).map((server) => html`<tr><th scope="row"><${Text}>${server.server_id}<//></th><td class="number">${isCounted(server) ? count(server.busy) : "–"}</td>
          <td class="number narrow-off">${server.capacity == null ? "any" : count(server.capacity)}</td><td class="number">${isCounted(server) ? count(server.done) : "–"}</td>
          <td class="number narrow-off">${duration(server.seconds_per_rollout)}</td><td><span class=${server.health === "ready" ? "good" : "warned"}>${server.health}</span>
          ${server.reason && html` <span class="faint"><${Text}>${server.reason}<//></span>`}</td><td class="narrow-off faint"><${Text}>${server.url}<//></td></tr>`)}</tbody></table></div>
    </div></details></section>`;
}

function RunRow({ run, chosen, choose }) {
  const of = run.summary;
  const progress = run.progress;
  const share = progress?.total ? `${count(progress.ended)} / ${count(progress.total)}` : of ? count(of.rollouts) : "–";
  return html`<tr>
    <td class="narrow-off"><input type="checkbox" aria-label=${`choose ${run.name}`} checked=${chosen} onChange=${() => choose(run.key)} /></td>
    <th scope="row"><a href=${link(`/run/${run.key}`)} title=${run.path}><${Text}>${run.name}<//></a>
      ${run.problem && html`<${Problem}>${run.problem}<//>`}
      ${run.reading && html`<span class="faint"> reading ${Math.round((100 * run.reading.done) / run.reading.total)} % (${figure(run.reading.mb_per_s, 0)} MB/s)</span>`}
    </th>
    <td>${share} ${progress?.collecting && html`<span class="state running">running</span>`}
      ${progress && !progress.collecting && progress.ended < progress.total && html`<span class="state stopped">stopped</span>`}
      ${progress?.collecting && progress.per_minute != null && html`<div class="faint">${figure(progress.per_minute, 1)} per minute${progress.seconds_left != null ? `, ${duration(progress.seconds_left)} left` : ""}</div>`}</td>
    <td class="number"><${Interval} of=${of?.reward} /></td>
    <td class="number narrow-off">${of ? `${of.solved} / ${of.tasks}` : "–"}</td>
    <td class="number">${of ? (of.rollouts - of.valid ? html`<span class="warned">${count(of.rollouts - of.valid)}</span>` : "0") : "–"}</td>
    <td class="number narrow-off">${of ? (of.with_findings ? html`<span class="warned">${of.with_findings}</span>` : "0") : "–"}</td>
    <td class="number narrow-off">${of ? large(of.tokens_in + of.tokens_out) : "–"}</td>
    <td class="number narrow-off">${of?.cost == null ? "–" : figure(of.cost, 2)}</td>
    <td class="narrow-off faint">${when(run.changed_at)}</td>
  </tr>`;
}

// ---------------------------------------------------------------------------------------------------------- one run

const COLUMNS = [
  ["task_id", "task", ""], ["sample_index", "sample", "number narrow-off"], ["agent", "agent", "narrow-off"],
  ["reward", "reward", "number"], ["outcome", "outcome", "narrow-off"], ["findings", "findings", "number narrow-off"],
  ["turns", "turns", "number narrow-off"], ["seconds", "time", "number"], ["attempts", "attempts", "number narrow-off"],
  ["tokens_out", "tokens out", "number narrow-off"], ["reason", "why", "why"],
];
const PAGE = 100;

export function RunPage({ run, words }) {
  const state = useLive(run);
  const { value, error } = useAnswer(`/api/runs/${run}`, null, String(state.version));
  useEffect(() => { titled(value?.name); }, [value?.name]);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} />`;
  if (!value.summary) return value.problem ? html`<${Problem}>${value.problem}<//>`
    : html`<h1><${Text}>${value.name}<//></h1><p aria-busy="true">Reading ${value.path}
      ${state.reading && html`<progress max=${state.reading.total} value=${state.reading.done} aria-label="bytes read"></progress> ${figure(state.reading.mb_per_s, 0)} MB/s`}</p>`;
  const set = (changes) => { location.replace(link(`/run/${run}`, { ...words, offset: "", ...changes })); };
  return html`
    <h1><${Text}>${value.name}<//></h1>
    <p class="faint path"><${Text}>${value.path}<//></p>
    <${Progress} of=${state.progress ?? value.progress} />
    ${value.summary.notes.map((note) => html`<p class="note"><${Text}>${note}<//></p>`)}
    <${Figures} value=${value} />
    <${Running} of=${state.progress} />
    <${Reasons} run=${run} reasons=${value.reasons} chosen=${words.way} set=${set} />
    <${Filters} value=${value} words=${words} set=${set} />
    ${words.by === "task"
      ? html`<${TaskTable} run=${run} words=${words} version=${state.version} set=${set} />`
      : html`<${RolloutTable} run=${run} words=${words} version=${state.version} set=${set} />`}`;
}

function Figures({ value }) {
  const of = value.summary;
  const rates = Object.entries(of.pass_rates).filter(([name]) => !name.endsWith("/std_err"));
  const shown = rates.length > 2 ? [rates[0], rates[rates.length - 1]] : rates;
  return html`<section class="cards" aria-label="figures">
    <div class="card"><h2>reward</h2><${Interval} of=${of.reward} /><${Histogram} bins=${value.histogram} /></div>
    <div class="card"><h2>tasks solved</h2><b>${of.solved} of ${of.tasks}</b>
      ${shown.map(([name, rate]) => html`<div>${name} ${rate.toFixed(1)} %${of.pass_rates[`${name}/std_err`] != null && html` <span class="faint">± ${of.pass_rates[`${name}/std_err`].toFixed(1)}</span>`}</div>`)}</div>
    <div class="card"><h2>rollouts</h2><b>${count(of.rollouts)}</b>
      <div>${count(of.valid)} with a verdict</div>
      <div class=${of.rollouts - of.valid ? "warned" : ""}>${count(of.rollouts - of.valid)} without</div>
      <div class=${of.with_findings ? "warned" : ""}>${count(of.with_findings)} with findings</div></div>
    <div class="card"><h2>tokens</h2><b>${large(of.tokens_in + of.tokens_out)}</b>
      <div>${large(of.tokens_in)} in, ${large(of.tokens_out)} out</div>
      ${of.cost != null && html`<div>cost ${figure(of.cost, 2)}</div>`}
      <div>${figure(of.turns, 1)} turn${of.turns === 1 ? "" : "s"}, ${duration(of.rollouts ? of.seconds / of.rollouts : null)} each</div></div>
    ${of.agents.length > 1 && html`<div class="card"><h2>agents</h2>
      ${of.agents.map((agent) => html`<div><${Text}>${agent.agent}<//> <${Reward} value=${agent.reward} /> <span class="faint">(${agent.valid})</span></div>`)}</div>`}
  </section>`;
}

function Histogram({ bins }) {
  if (!bins?.length) return null;
  const most = Math.max(...bins.map(([, , held]) => held), 1);
  const width = 160 / bins.length;
  return html`<svg class="histogram" viewBox="0 0 160 40" preserveAspectRatio="none" role="img" aria-label="how often each reward occurs">
    ${bins.map(([, , held], place) => html`<rect x=${place * width + 1} width=${width - 2} y=${held ? 38 - (36 * held) / most : 39.4} height=${held ? (36 * held) / most + 2 : 0.6}><title>${held}</title></rect>`)}
  </svg>`;
}

const MAX_RUNNING = 40;

function Running({ of }) {
  if (!of?.running?.length) return null;
  return html`<details class="running" open><summary>${of.running_count} running now</summary>
    <div class="scroll"><table class="rows"><thead><tr><th>task</th><th>stage</th><th class="number narrow-off">in it for</th><th class="number">under way for</th><th class="narrow-off">at</th><th class="number narrow-off">attempt</th></tr></thead>
      <tbody>${of.running.slice(0, MAX_RUNNING).map((job) => html`<tr key=${job.rollout_id}><th scope="row"><${Text}>${job.task_id}<//> #${job.sample_index}</th>
        <td>${job.stage ?? "ends"}${job.works || !job.stage ? "" : html` <span class="faint">waits</span>`}</td><td class="number narrow-off">${duration(job.stage_seconds)}</td>
        <td class="number">${duration(job.seconds)}</td><td class="narrow-off"><${Text}>${job.server ?? job.agent}<//> ${job.url && html`<span class="faint"><${Text}>${job.url}<//></span>`}</td>
        <td class="number narrow-off">${job.attempt > 1 ? html`<span class="warned">${job.attempt}</span>` : job.attempt}</td></tr>`)}</tbody></table></div>
    ${of.running_count > MAX_RUNNING && html`<p class="faint">the ${MAX_RUNNING} oldest are shown</p>`}</details>`;
}

function Reasons({ run, reasons, chosen, set }) {
  if (!reasons?.length) return null;
  return html`<section aria-label="why rollouts have no reward"><h2>Why</h2><ul class="reasons">
    ${reasons.slice(0, 12).map((reason, place) => html`<li class=${`rank-${reason.rank}`}>
      <button class="plain" aria-pressed=${chosen === reason.way} onClick=${() => set({ way: chosen === reason.way ? "" : reason.way })} title="show these rollouts only">
        <b>${reason.rollouts} ×</b> ${reason.title}</button>
      <span class="faint"> <${Text}>${reason.label}<//></span>${reason.reason && html`: <${Text}>${reason.reason}<//>`}
      ${" "}<span class="faint">(${reason.named.map((each, place) => html`${place ? ", " : ""}<a href=${link(`/run/${run}/rollout`, { id: each.rollout_id })}><${Text}>${each.task_id}<//> #${each.sample_index}</a>`)}${reason.rollouts > reason.named.length ? ", …" : ""})</span>
      ${reason.rank !== 2 && reasons.findIndex((each) => each.cause === reason.cause) === place && html`<p class="helps">${reason.helps}</p>`}
    </li>`)}
  </ul>${reasons.length > 12 && html`<p class="faint">… and ${reasons.length - 12} more</p>`}</section>`;
}

function Filters({ value, words, set }) {
  const search = useRef(null);
  const [q, setQ] = useState(words.q || "");
  const typed = useRef(0);
  useEffect(() => setQ(words.q || ""), [words.q]);
  useKeys({ "/": () => search.current?.focus() });
  const type = (text) => { setQ(text); clearTimeout(typed.current); typed.current = setTimeout(() => set({ q: text }), 250); };
  const pick = (name, label, choices) => html`<label>${label} <select value=${words[name] || ""} onChange=${(event) => set({ [name]: event.target.value })}>
    ${choices.map(([choice, text]) => html`<option value=${choice}>${text}</option>`)}</select></label>`;
  const bound = (name, label) => html`<label>${label} <input class="bound" value=${words[name] || ""} placeholder=">20" onChange=${(event) => set({ [name]: event.target.value.trim() })} /></label>`;
  const outcomes = [...new Set(value.summary.outcomes.map((each) => each.outcome))];
  return html`<search class="filters">
    <label class="search">search <input ref=${search} type="search" value=${q} placeholder="prompt, answer or task (/)" onInput=${(event) => type(event.target.value)} /></label>
    ${pick("reward", "reward", [["", "any"], [">0", "above 0"], ["1", "1"], ["<1", "below 1"], ["0", "0"], ["none", "no verdict"]])}
    ${pick("outcome", "outcome", [["", "any"], ...outcomes.map((each) => [each, plain(each)])])}
    ${value.summary.agents.length > 1 && pick("agent", "agent", [["", "any"], ...value.summary.agents.map((each) => [each.agent, plain(each.agent)])])}
    ${pick("findings", "findings", [["", "any"], ["1", "with findings"]])}
    ${bound("turns", "turns")}${bound("seconds", "time (s)")}
    ${pick("by", "show", [["", "rollouts"], ["task", "tasks side by side"]])}
    ${Object.keys(words).length > 0 && html`<button onClick=${() => location.replace(location.hash.split("?")[0])}>clear</button>`}
  </search>`;
}

const asked = ({ by, ...words }) => words;

function RolloutTable({ run, words, version, set }) {
  const table = useRef(null);
  const offset = Number(words.offset || 0);
  const { value, error, path } = useAnswer(`/api/runs/${run}/table`, { ...asked(words), offset, limit: PAGE }, String(version));
  useRowKeys(table);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} />`;
  const sort = (name) => {
    const first = words.sort !== name;
    set(first ? { sort: name, descending: "" } : words.descending ? { sort: "", descending: "" } : { sort: name, descending: "1" });
  };
  return html`<p class="faint" role="status" data-asked=${path}>${many(value.total, "rollout")}${words.sort ? "" : ", worst first"}</p>
    <div class="scroll"><table class="rows" ref=${table}><thead><tr>
      ${COLUMNS.map(([name, label, kind]) => html`<th class=${kind} aria-sort=${words.sort === name ? (words.descending ? "descending" : "ascending") : "none"}>
        <button class="plain" onClick=${() => sort(name)}>${label}${words.sort === name ? (words.descending ? " ↓" : " ↑") : ""}</button></th>`)}
    </tr></thead><tbody>${value.rows.map((row) => html`<tr key=${row.id} class=${`rank-${row.rank}`}>
      <th scope="row"><a href=${link(`/run/${run}/rollout`, { id: row.rollout_id })}><${Text}>${row.task_id}<//></a><span class="narrow-only faint"> #${row.sample_index}</span></th>
      <td class="number narrow-off">${row.sample_index}</td><td class="narrow-off"><${Text}>${row.agent}<//></td>
      <td class="number"><${Reward} value=${row.reward} /></td><td class="narrow-off"><${Text}>${row.outcome}<//></td>
      <td class="number narrow-off" title=${row.kinds}>${row.findings ? html`<span class="warned">${row.findings}</span>` : ""}</td>
      <td class="number narrow-off">${row.turns ?? "–"}</td><td class="number">${duration(row.seconds)}</td>
      <td class="number narrow-off">${row.attempts > 1 ? html`<span class="warned">${row.attempts}</span>` : row.attempts}</td>
      <td class="number narrow-off">${row.tokens_out == null ? "–" : large(row.tokens_out)}</td>
      <td class="why"><${Text}>${row.kinds || (row.label ? row.reason || row.label : "")}<//></td>
    </tr>`)}</tbody></table></div>
    <${Pager} total=${value.total} offset=${offset} set=${set} />`;
}

function TaskTable({ run, words, version, set }) {
  const offset = Number(words.offset || 0);
  const table = useRef(null);
  const { value, error } = useAnswer(`/api/runs/${run}/tasks`, { ...asked(words), sort: "", offset, limit: PAGE }, String(version));
  useRowKeys(table);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} />`;
  return html`<p class="faint" role="status">${many(value.total, "task")}, the least solved first</p>
    <div class="scroll"><table class="rows" ref=${table}><thead><tr><th>task</th><th class="number">mean reward</th><th>samples</th></tr></thead>
    <tbody>${value.rows.map((task) => html`<tr><th scope="row"><a href=${link(`/run/${run}/rollout`, { id: task.samples[0]?.rollout_id })}><${Text}>${task.task_id}<//></a></th>
      <td class="number"><${Reward} value=${task.mean} /></td>
      <td class="samples">${task.samples.map((sample) => html`<${Sample} run=${run} of=${sample} />`)}</td></tr>`)}</tbody></table></div>
    <${Pager} total=${value.total} offset=${offset} set=${set} />`;
}

export function Sample({ run, of, current = false }) {
  const kind = of.reward == null ? "none" : of.reward >= 1 ? "full" : of.reward > 0 ? "part" : "zero";
  return html`<a class=${`sample ${kind}`} aria-current=${current ? "true" : undefined} href=${link(`/run/${run}/rollout`, { id: of.rollout_id })}
    title=${plain(`${of.agent} #${of.sample_index}: ${of.outcome}${of.reason ? `, ${of.reason}` : ""}`)}>#${of.sample_index} ${of.reward == null ? "–" : figure(of.reward, 2)}${of.findings ? " ⚑" : ""}</a>`;
}

function Pager({ total, offset, set }) {
  if (total <= PAGE) return null;
  return html`<nav class="pager" aria-label="pages">
    <button disabled=${offset <= 0} onClick=${() => set({ offset: Math.max(0, offset - PAGE) || "" })}>previous</button>
    <span>${count(offset + 1)} – ${count(Math.min(total, offset + PAGE))} of ${count(total)}</span>
    <button disabled=${offset + PAGE >= total} onClick=${() => set({ offset: offset + PAGE })}>next</button></nav>`;
}

// j and k move through a table's links; Enter follows the one that has the focus.
function useRowKeys(table) {
  const move = (step) => {
    const links = [...(table.current?.querySelectorAll("tbody th a") || [])];
    if (!links.length) return;
    const now = links.indexOf(document.activeElement);
    const next = links[Math.max(0, Math.min(links.length - 1, now < 0 ? 0 : now + step))];
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
}

// ------------------------------------------------------------------------------------------------------------ compare

export function ComparePage({ a, b }) {
  const [changed, setChanged] = useState(true);
  const { value, error } = useAnswer("/api/compare", { a, b, ...(changed ? { changed: "1" } : {}) });
  useEffect(() => titled("compared"), []);
  const table = useRef(null);
  useRowKeys(table);
  const verdict = useMemo(() => {
    if (!value?.difference) return "No task has a reward in both runs.";
    if (!value.wins && !value.losses) return "No task differs.";
    if (value.p_value < 0.05) return value.wins > value.losses ? "B is better than A." : "A is better than B.";
    return "Chance alone could explain the difference.";
  }, [value]);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} />`;
  const rewards = (list) => list.length ? list.map((reward) => html`<${Reward} value=${reward} /> `) : html`<${Reward} value=${null} />`;
  return html`<h1>Two runs, task by task</h1>
    <p>A <a href=${link(`/run/${a}`)}><${Text}>${value.names[0]}<//></a> · B <a href=${link(`/run/${b}`)}><${Text}>${value.names[1]}<//></a>
      ${" "}<button onClick=${() => go("/compare", { a: b, b: a })}>swap</button></p>
    <section class="cards" aria-label="figures">
      <div class="card"><h2>B − A, mean of tasks</h2><b>${value.difference ? signed(value.difference.value, 3) : "–"}</b>
        ${value.difference?.std_err != null && html`<div class="faint">95 %: ${signed(value.difference.low, 3)} to ${signed(value.difference.high, 3)}</div>`}</div>
      <div class="card"><h2>tasks</h2><b>${value.tasks}</b><div>${value.wins} better in B, ${value.losses} worse</div><div>${value.ties} the same</div></div>
      <div class="card"><h2>flips</h2><b>+${value.gained} −${value.lost}</b><div>solved by B alone, by A alone</div></div>
      <div class="card"><h2>sign test</h2><b>p = ${value.p_value < 0.001 ? value.p_value.toExponential(1) : value.p_value.toFixed(3)}</b><div>${verdict}</div></div>
    </section>
    ${value.only_a + value.only_b > 0 && html`<p class="note">${value.only_a} tasks are in A alone, ${value.only_b} in B alone; they are not compared.</p>`}
    <p><label><input type="checkbox" checked=${changed} onChange=${() => setChanged(!changed)} /> only tasks whose mean reward changed</label></p>
    ${!value.rows.length ? html`<p class="faint">No task changed.</p>` : html`<div class="scroll"><table class="rows" ref=${table}>
      <thead><tr><th>task</th><th>A</th><th>B</th><th class="number">B − A</th></tr></thead>
      <tbody>${value.rows.map((row) => html`<tr><th scope="row"><a href=${link(`/run/${b}/rollout`, { id: row.task_id })}><${Text}>${row.task_id}<//></a></th>
        <td><a class="bare" href=${link(`/run/${a}/rollout`, { id: row.task_id })} aria-label=${`${row.task_id} in A`}>${rewards(row.a)}</a></td><td>${rewards(row.b)}</td>
        <td class=${`number ${row.difference > 0 ? "better" : row.difference < 0 ? "worse" : ""}`}>${row.difference == null ? "–" : signed(row.difference, 2)}</td></tr>`)}</tbody>
    </table></div>`}`;
}
