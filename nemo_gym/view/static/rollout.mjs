// One rollout: what happened, turn by turn, what it left, how it was graded, its tokens and its logs.
import { useEffect, useState } from "./vendor/htm-preact.mjs";
import { Loading, LongText, Problem, Reward, Text, ask, count, duration, go, html, link, many, useAnswer, useKeys, when } from "./parts.mjs";
import { Diff } from "./diff.mjs";
import { Sample } from "./pages.mjs";
import { Chain } from "./tokens.mjs";

export function RolloutPage({ run, id, tab }) {
  const { value, error } = useAnswer(`/api/runs/${run}/rollout`, { id });
  useEffect(() => { if (value) document.title = `${value.task_id} #${value.sample_index} · runs`; }, [value]);
  const tabs = value ? tabsOf(value) : [];
  const open = (name) => location.replace(link(`/run/${run}/rollout`, { id, tab: name }));
  const keys = { n: () => value?.next && go(`/run/${run}/rollout`, { id: value.next, tab }), p: () => value?.previous && go(`/run/${run}/rollout`, { id: value.previous, tab }) };
  tabs.forEach(([name], place) => { keys[String(place + 1)] = () => open(name); });
  useKeys(keys);
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} />`;
  const current = tabs.find(([name]) => name === tab)?.[0] || "overview";
  const all = (where) => ask(`/api/runs/${run}/text`, { id, where });
  return html`
    <nav class="crumbs" aria-label="where this is"><a href=${link(`/run/${run}`)} title="u">← <${Text}>${value.run_name}<//></a>
      <span class="grow"></span>
      ${value.previous && html`<a href=${link(`/run/${run}/rollout`, { id: value.previous, tab })} title="p">← previous</a>`}
      ${value.next && html`<a href=${link(`/run/${run}/rollout`, { id: value.next, tab })} title="n">next →</a>`}</nav>
    <h1><${Text}>${value.task_id}<//> <span class="faint">#${value.sample_index}</span></h1>
    <p class="verdict"><${Reward} value=${value.reward} />
      <span class=${value.reward == null ? "warned" : ""}><${Text}>${value.outcome}<//></span>
      ${value.outcome_detail && html`<span class="faint"><${Text}>${value.outcome_detail}<//></span>`}
      ${value.findings.length > 0 && html`<span class="warned">⚑ ${value.findings.length} finding${value.findings.length > 1 ? "s" : ""}</span>`}
      <span class="faint"><${Text}>${value.agent}<//>${value.topology ? `, ${value.topology}` : ""}${value.validation ? `, validation ${value.validation}` : ""}</span>
      <span class="faint">${many(value.turns.length, "turn")}, ${duration(value.seconds)}, ${count(value.tokens_in)} tokens in, ${count(value.tokens_out)} out</span></p>
    ${value.samples.length > 1 && html`<p class="samples" aria-label="samples of this task">${value.samples.map((sample) => html`<${Sample} run=${run} of=${sample} current=${sample.rollout_id === value.rollout_id} />`)}</p>`}
    <div class="tabs" role="tablist">${tabs.map(([name, label], place) => html`<button role="tab" id=${`tab-${name}`} aria-controls="tab-panel" aria-selected=${name === current} onClick=${() => open(name)} title=${`${place + 1}`}>${label}</button>`)}</div>
    <div role="tabpanel" id="tab-panel" aria-labelledby=${`tab-${current}`}>
      ${!value.is_readable && html`<p class="note">This line cannot be read as a whole; its columns and its text are shown.</p>`}
      ${current === "overview" && html`<${Overview} of=${value} all=${all} />`}
      ${current === "turns" && html`<${Turns} of=${value} all=${all} />`}
      ${current === "diff" && value.artifacts.map((artifact) => html`<${Artifact} of=${artifact} all=${all} />`)}
      ${current === "grading" && html`<${Grading} of=${value} />`}
      ${current === "tokens" && html`<${Tokens} run=${run} of=${value} />`}
      ${current === "logs" && html`<${Logs} run=${run} id=${id} />`}
      ${current === "json" && html`<${Raw} run=${run} of=${value} />`}
    </div>`;
}

function tabsOf(value) {
  return [
    ["overview", "Overview"],
    ["turns", `Turns ${value.turns.length || ""}`],
    value.artifacts.length && ["diff", value.artifacts.some((each) => each.is_diff) ? "Diff" : "Artifacts"],
    (value.evaluation || value.official || value.details) && ["grading", "Grading"],
    value.chains.length && ["tokens", `Tokens ${value.chains.length}`],
    ["logs", "Logs"],
    ["json", "JSON"],
  ].filter(Boolean);
}

function Overview({ of, all }) {
  const needs = of.attempts.length > 1 || of.reward == null;
  return html`
    ${of.why && html`<section class=${`why-box ${of.reward == null || of.findings.length ? "trouble" : ""}`}><h2>${of.why.title}</h2><p>${of.why.happened}</p>
      <ul>${of.why.evidence.map((each) => html`<li><${Text}>${each}<//></li>`)}</ul><p class="helps"><b>What helps:</b> ${of.why.helps}</p></section>`}
    <${Timeline} of=${of} />
    ${of.findings.length > 0 && html`<section><h2>Findings</h2>${of.findings.map((finding) => html`<article class="finding"><h3>⚑ <${Text}>${finding.kind}<//></h3>
      <p><${Text}>${finding.detail}<//></p>${finding.evidence && html`<${LongText} of=${finding.evidence} label="evidence" />`}</article>`)}</section>`}
    ${needs && of.attempts.length > 0 && html`<section><h2>Attempts</h2><ol class="attempts">${of.attempts.map((attempt) => html`<li>
      <b>attempt ${attempt.number}</b>${attempt.stage && html` <span class="faint">${attempt.stage}</span>`} ${attempt.kind ? html`<span class="warned"><${Text}>${attempt.kind}<//></span>` : html`<span class="good">verdict</span>`}
      ${attempt.reason && html`: <${Text}>${attempt.reason}<//>`}${attempt.details && html`<${LongText} of=${attempt.details} label="details" />`}</li>`)}</ol></section>`}
    <section><h2>Prompt</h2>${!of.prompt.length && html`<p class="faint">The row holds no prompt.</p>`}
      ${of.prompt.map((message) => html`<article class="message"><h3><${Text}>${message.role}<//></h3><${LongText} of=${message} all=${all} label=${`prompt, ${message.role}`} /></article>`)}</section>
    ${of.turns.length > 0 && html`<section><h2>Last turn</h2><${Turn} turn=${of.turns[of.turns.length - 1]} all=${all} open /></section>`}`;
}

function Timeline({ of }) {
  const total = of.timings.reduce((sum, each) => sum + each.seconds, 0);
  if (!total) return null;
  const run = of.timings.find((each) => each.stage === "run")?.seconds || 0;
  const span = Math.max(run, ...of.steps.map((step) => step.start_s + step.seconds), 1e-9);
  return html`<section><h2>Timeline</h2><div class="stages" role="img" aria-label=${of.timings.map((each) => `${each.stage} ${duration(each.seconds)}`).join(", ")}>
      ${of.timings.map((each) => html`<span class=${`stage stage-${each.stage}`} style=${{ flexGrow: Math.max(each.seconds / total, 0.02) }}></span>`)}</div>
    <ul class="legend">${of.timings.map((each) => html`<li><span class=${`dot stage-${each.stage}`}></span>${each.stage} ${duration(each.seconds)}</li>`)}
      ${of.finished_at && html`<li class="faint">ended ${when(of.finished_at)}</li>`}</ul>
    ${of.steps.length > 0 && html`<details><summary>${of.steps.length} timed tool calls</summary><ol class="steps">${of.steps.slice(0, 200).map((step) => html`<li>
      <span class="step-name"><${Text}>${step.name}<//></span><span class="step-line" aria-hidden="true"><span class=${`step ${step.status === "completed" ? "" : "bad"}`} style=${{ marginLeft: `${(100 * step.start_s) / span}%`, width: `${Math.max(0.6, (100 * step.seconds) / span)}%` }}></span></span>
      <span class="step-time">${duration(step.seconds)}</span></li>`)}</ol></details>`}</section>`;
}

function Turns({ of, all }) {
  const [only, setOnly] = useState("");
  const [opened, setOpened] = useState(true);
  const move = (step) => {
    const turns = [...document.querySelectorAll(".turn > summary")];
    if (!turns.length) return;
    const now = turns.indexOf(document.activeElement);
    const next = turns[Math.max(0, Math.min(turns.length - 1, now < 0 ? 0 : now + step))];
    next.focus();
    next.scrollIntoView({ block: "start" });
  };
  useKeys({ j: () => move(1), k: () => move(-1) });
  if (!of.turns.length) return html`<p class="faint">The row holds no answer of the model.</p>`;
  const wanted = only.toLowerCase();
  const shown = of.turns.filter((turn) => !wanted || JSON.stringify(turn).toLowerCase().includes(wanted));
  return html`<p class="actions"><label class="search">find <input type="search" value=${only} placeholder="in these turns" onInput=${(event) => setOnly(event.target.value)} /></label>
      <button onClick=${() => setOpened(!opened)}>${opened ? "fold all" : "open all"}</button> <span class="faint">${shown.length} of ${many(of.turns.length, "turn")}</span></p>
    ${shown.map((turn) => html`<${Turn} key=${`${turn.number}${opened}`} turn=${turn} all=${all} open=${opened} />`)}`;
}

function Turn({ turn, all, open = true }) {
  const calls = turn.items.filter((item) => item.kind === "call");
  const first = calls[0]?.arguments.text.split("\n")[0].slice(0, 90) || turn.items[0].text?.split("\n")[0].slice(0, 90) || "";
  return html`<details class="turn" open=${open}><summary><b>Turn ${turn.number}</b> <span class="faint"><${Text}>${calls.length ? calls.map((call) => call.name).join(", ") : "answer"}<//></span> <code><${Text}>${first}<//></code></summary>
    ${turn.items.map((item) => {
      if (item.kind === "call") return html`<div class="call"><h3><span class="tool"><${Text}>${item.name}<//></span>${item.arguments.name && html` <span class="faint"><${Text}>${item.arguments.name}<//></span>`}</h3>
        <${LongText} of=${item.arguments} all=${all} label=${`call of ${item.name}`} />
        ${item.result ? html`<div class="result"><${LongText} of=${item.result} all=${all} label=${`result of ${item.name}`} lines=${10} /></div>` : html`<p class="faint">no result</p>`}</div>`;
      if (item.kind === "result") return html`<div class="result"><${LongText} of=${item} all=${all} label="result" /></div>`;
      return html`<div class=${item.kind}><h3>${item.kind === "reasoning" ? "reasoning" : html`<${Text}>${item.role}<//>`}</h3><${LongText} of=${item} all=${all} label=${item.kind} lines=${30} /></div>`;
    })}</details>`;
}

function Artifact({ of, all }) {
  return html`<section><h2><${Text}>${of.name}<//> <span class="faint">${of.kind}, ${count(of.size)} bytes${of.truncated ? ", truncated" : ""}</span></h2>
    ${of.error && html`<${Problem}>${of.error}<//>`}
    ${of.is_diff ? html`<${Diff} text=${of.text} />${of.chars > of.text.length && html`<p class="note">The first ${count(of.text.length)} of ${count(of.chars)} characters; the whole stands in the JSON.</p>`}`
      : of.chars ? html`<${LongText} of=${of} all=${all} label=${of.name} />` : !of.error && html`<p class="faint">${of.size ? "It is no text; its data stands in the JSON." : "It is empty."}</p>`}</section>`;
}

function Grading({ of }) {
  const [only, setOnly] = useState(false);
  const log = of.evaluation;
  const failing = log ? log.lines.filter((line) => line.mark === "fail" || line.mark === "test").length : 0;
  const jump = () => document.querySelector(".log .fail, .log .test")?.scrollIntoView({ block: "center" });
  return html`${of.tests.length > 0 && html`<section><h2>${of.tests.length} failing tests</h2><ul class="tests">${of.tests.slice(0, 100).map((name) => html`<li class="fail"><${Text}>${name}<//></li>`)}</ul></section>`}
    ${log && html`<section><h2>Evaluation log</h2>${log.is_missing ? html`<p class="note">The log <code><${Text}>${log.path}<//></code> is no longer there.</p>` : html`
      <p class="actions"><span class="faint path"><${Text}>${log.path}<//></span> ${failing > 0 && html`<button onClick=${jump}>first failing line</button>
        <button aria-pressed=${only} onClick=${() => setOnly(!only)}>${only ? "all lines" : `only ${failing} failing lines`}</button>`}</p>
      <pre class="log" tabindex="0" role="region" aria-label="evaluation log">${log.lines.map((line, place) => (!only || line.mark === "fail" || line.mark === "test") && html`<span class=${`line ${line.mark}`}><span class="line-number" aria-hidden="true">${place + 1}</span><${Text}>${line.text}<//>${"\n"}</span>`)}</pre>`}</section>`}
    ${of.official && html`<section><h2>Official verdict</h2><${LongText} of=${of.official} label="official verdict" /></section>`}
    ${of.details && html`<section><h2>Details</h2><${LongText} of=${of.details} label="details" /></section>`}`;
}

function Tokens({ run, of }) {
  const [chosen, setChosen] = useState(of.chains.length === 1 && of.chains[0].response_tokens < 200000 ? 0 : null);
  return html`<div class="scroll"><table class="rows chains"><thead><tr><th>chain</th><th>why it is one of its own</th><th class="number">prompt</th><th class="number">response</th><th class="number">sampled</th><th class="number">turns</th><th>logprobs</th><th>weights</th></tr></thead>
    <tbody>${of.chains.map((chain) => html`<tr><th scope="row"><button class="plain" aria-pressed=${chosen === chain.number} onClick=${() => setChosen(chain.number)}>chain ${chain.number}</button></th>
      <td><${Text}>${chain.split_reason}${chain.split_detail ? `: ${chain.split_detail}` : ""}<//></td><td class="number">${count(chain.prompt_tokens)}</td><td class="number">${count(chain.response_tokens)}</td>
      <td class="number">${count(chain.sampled)}</td><td class="number">${chain.turns}</td><td>${chain.has_logprobs ? "yes" : "no"}</td><td><${Text}>${chain.weights_versions.join(", ") || "–"}<//></td></tr>`)}</tbody></table></div>
    ${chosen !== null && html`<${Chain} key=${chosen} run=${run} id=${of.rollout_id} number=${chosen} />`}`;
}

const LEVELS = ["warning", "error", "critical"]; // those with a colour; a log may hold any text

function Logs({ run, id }) {
  const { value, error } = useAnswer(`/api/runs/${run}/logs`, { id });
  if (error) return html`<${Problem}>${error}<//>`;
  if (!value) return html`<${Loading} what="the servers' logs" />`;
  if (!value.folders.length) return html`<p class="note">The folder with the logs of this run's servers is not known, or no longer there.</p>`;
  return html`<p class="faint path">${value.folders.join(", ")}</p>
    ${!value.lines.length ? html`<p>No server logged anything about this rollout.</p>` : html`<div class="scroll"><table class="rows logs"><thead><tr><th>time</th><th>server</th><th>level</th><th>what</th></tr></thead>
      <tbody>${value.lines.map((line) => html`<tr class=${LEVELS.includes(line.level) ? `level-${line.level}` : ""}><td class="time">${line.timestamp.slice(11, 23)}</td><td><${Text}>${line.server}<//></td><td><${Text}>${line.level}<//></td>
        <td><${Text}>${line.event}<//>${Object.keys(line.more).length > 0 && html`<${LongText} of=${{ text: JSON.stringify(line.more, null, 1).replaceAll("\\n", "\n"), chars: 0 }} label="more" lines=${6} />`}</td></tr>`)}</tbody></table></div>`}`;
}

function Raw({ run, of }) {
  const [text, setText] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    ask(`/api/runs/${run}/raw`, { id: of.rollout_id, indent: 1 }).then((found) => found.text()).then(setText, (failed) => setError(failed.message));
  }, [run, of.rollout_id]);
  const limit = 300000;
  return html`<p class="actions"><span class="faint"><${Text}>${of.file}<//>, line ${of.line}, ${count(of.raw_bytes)} bytes</span>
      <a href=${`/api/runs/${run}/raw?${new URLSearchParams({ id: of.rollout_id })}`} download=${`${of.rollout_id}.json`}>save</a></p>
    ${error && html`<${Problem}>${error}<//>`}
    ${text === null ? html`<${Loading} />` : html`<pre class="raw" tabindex="0" role="region" aria-label="the row as JSON"><${Text}>${text.slice(0, limit)}<//></pre>
      ${text.length > limit && html`<p class="note">The first ${count(limit)} of ${count(text.length)} characters; save it to see all.</p>`}`}`;
}

