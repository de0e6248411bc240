// Why a value is what it is: its error by cause, what each edge had stated, its revisions, and the contract.

import { html, useMemo } from "../vendor/preact.js";
import { get, live, url } from "../api.js";
import * as f from "../format.js";
import { Contract, Interval, Phase, Problem, State, useData } from "../parts.js";

const CAUSES = {
  sketch: "the synopsis", sampling: "sampling", withheld: "withheld at the edges", straggler: "records still to come", missing: "missing edges or records",
};

export function Explain({ args: [name, start], search }) {
  const params = useMemo(() => [...new URLSearchParams(search)], [search]);
  const path = `/v1/queries/${encodeURIComponent(name)}/windows/${encodeURIComponent(start)}/explain`;
  const [told, problem] = useData(() => { live.close(); return get(path, params); }, [path, search], 5000);
  const back = url(`/ui/queries/${encodeURIComponent(name)}`, [["measure", told?.measure], ["group", told && JSON.stringify(told.group)]]);
  if (!told) return html`<main id="main"><h1>Explain</h1><${Problem} error=${problem} /></main>`;
  const at = (changes) => url(`/ui/queries/${encodeURIComponent(name)}/${start}`, [["measure", told.measure], ...f.groupParams(told.group), ...changes]);
  return html`<main id="main"><p class="crumbs"><a href="/ui/">Overview</a> › <a href=${back}>${name}</a> › ${f.time(told.window.start)}</p>
    <div class="title"><h1>Why is ${told.measure}${told.value ? ` (${told.value})` : ""} ${f.number(told.estimate)}?</h1><${Phase} phase=${told.phase} revision=${told.revision} /><${Contract} contract=${told.contract} /></div>
    <${Problem} error=${problem} />
    <p>${f.group(told.group)} from ${f.time(told.window.start)} to ${f.time(told.window.end)} UTC, given ${f.time(told.given_at)}: <${Interval} value=${told} />
      ${told.confidence === null ? " – no bound is known" : told.confidence === 1 ? " – the bounds always hold" : ` – with ${f.percent(told.confidence)} confidence ${told.contract.requested.scope === "all" ? "for all groups at once" : "for each value"}`}${told.coverage !== null ? `; of recent windows, ${f.percent(told.coverage)} of first intervals contained the true value` : ""}.
      ${told.groups > 1 ? ` It has the widest interval of ${told.groups} groups.` : ""}</p>
    <${ErrorParts} told=${told} />
    ${told.contract.violations.length > 0 && html`<section class="card alarm" aria-label="Violations"><h2>Violations of the contract</h2><ul>${told.contract.violations.map((v) => html`<li><b>${v.code}</b> ${v.message}</li>`)}</ul></section>`}
    <section class="card flush" aria-label="Edges"><h2>Edges <small>what each had stated when the answer was given; state and watermark are those of now</small></h2><div class="scroll"><table>
      <thead><tr><th>Edge</th><th>Now</th><th>Watermark</th><th>Window closed</th><th class="n">Late records</th><th class="n">Withheld above</th><th class="n">Withheld below</th><th class="n">Sampling rate</th></tr></thead>
      <tbody>${told.edges.map((e) => html`<tr key=${e.edge}><th scope="row">${e.edge}</th><td><${State} kind=${e.state === "up" ? "ok" : "bad"}>${e.state.replaceAll("_", " ")}<//></td><td>${e.ended ? "ended" : e.watermark ? f.time(e.watermark) : "–"}</td>
        <td>${e.closed === null ? f.UNKNOWN : e.closed ? "yes" : html`<span class="late">no${e.closed_until ? `: closed until ${f.time(e.closed_until)}` : ""}</span>`}</td>
        <td class="n">${f.number(e.late)}</td><td class="n">${f.number(e.withheld?.above)}</td><td class="n">${f.number(e.withheld?.below)}</td><td class="n">${e.rate === null ? "–" : f.percent(e.rate)}</td></tr>`)}</tbody></table></div></section>
    <section class="card flush" aria-label="Revisions"><h2>Revisions</h2><div class="scroll"><table><thead><tr><th>Revision</th><th>Phase</th><th>Given</th><th class="n">Estimate</th><th class="n">Lower</th><th class="n">Upper</th></tr></thead>
      <tbody>${[...told.revisions].reverse().map((r) => html`<tr key=${r.revision} class=${r.revision === told.revision ? "current" : ""}><td><a href=${at([["revision", r.revision]])}>${r.revision}</a></td><td><${Phase} phase=${r.phase} /></td><td>${f.time(r.given_at)}</td>
        <td class="n">${f.number(r.estimate)}</td><td class="n">${f.number(r.lower)}</td><td class="n">${f.number(r.upper)}</td></tr>`)}</tbody></table></div></section>
    <details class="card"><summary>What was requested</summary><pre>${JSON.stringify(told.contract.requested, null, 2)}</pre></details>
  </main>`;
}

function ErrorParts({ told }) {
  const widest = Math.max(...told.parts.flatMap((p) => [p.above, p.below]).filter((x) => x !== null), 0) || 1;
  const side = (x, kind) => html`<td class=${`side ${kind}`}>${x === null ? html`<span class="hatched" title="unknown"></span><small class="unknown">unknown</small>` : html`<span class="amount" style=${`width:${(x / widest) * 100}px`}></span><small>${f.number(x)}</small>`}</td>`;
  return html`<section class="card flush" aria-label="Error by cause"><h2>Error by cause <small>bounds side by side: in general they do not add up to the interval</small></h2>
    <div class="scroll"><table class="causes"><thead><tr><th>Cause</th><th>True value may lie below by</th><th>above by</th><th></th></tr></thead>
    <tbody>${told.parts.map((p) => html`<tr key=${p.cause}><th scope="row">${CAUSES[p.cause]}</th>${side(p.below, "below")}${side(p.above, "above")}<td>${p.says}</td></tr>`)}</tbody></table></div></section>`;
}
