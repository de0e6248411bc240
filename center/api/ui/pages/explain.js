// Why a value is what it is: its error by cause, what each edge had stated, its revisions, and the contract.

import { html, useMemo } from "../vendor/preact.js";
import { get, live, url } from "../api.js";
import * as f from "../format.js";
import { Bars, Contract, Interval, Phase, Problem, State, useData } from "../parts.js";

const CAUSES = {
  sketch: "the synopsis", sampling: "sampling", withheld: "withheld at the edges", straggler: "records still to come", missing: "missing edges or records", measures: "the measures that it reads",
};

export function Explain({ args: [name, start], search }) {
  const params = useMemo(() => [...new URLSearchParams(search)], [search]);
  const path = `/v1/queries/${encodeURIComponent(name)}/windows/${encodeURIComponent(start)}/explain`;
  const [told, problem] = useData(async () => {
    live.close();
    const explained = await get(path, params);
    if (explained.estimate !== null || explained.not_finite) return explained;
    // A list has no number, so the explanation has none: the answer says which it is.
    const answer = await get(path.replace(/\/explain$/, ""), [["measure", explained.measure], ["revision", explained.revision], ...f.groupParams(explained.group)]);
    return { ...explained, answer: f.list(answer, explained.measure, f.rowOf(answer.data, explained.group)) && answer };
  }, [path, search], 5000);
  const back = url(`/ui/queries/${encodeURIComponent(name)}`, [["measure", told?.measure], ["group", told && JSON.stringify(told.group)]]);
  if (!told) return html`<main id="main"><h1>Explain</h1><${Problem} error=${problem} /></main>`;
  const write = f.writer({ shapes: { [told.measure]: told.shapes } }, told.measure);
  const at = (changes) => url(`/ui/queries/${encodeURIComponent(name)}/${start}`, [["measure", told.measure], ...f.groupParams(told.group), ...changes]);
  return html`<main id="main"><p class="crumbs"><a href="/ui/">Overview</a> › <a href=${back}>${name}</a> › ${f.time(told.window.start)}</p>
    <div class="title"><h1>${told.answer ? `What is in ${told.measure}?` : `Why is ${told.measure}${told.value ? ` (${told.value})` : ""} ${f.estimate(told, write)}?`}</h1><${Phase} phase=${told.phase} revision=${told.revision} /><${Contract} contract=${told.contract} /></div>
    <${Problem} error=${problem} />
    <p>${f.group(told.group)} from ${f.time(told.window.start)} to ${f.time(told.window.end)} UTC, given ${f.time(told.given_at)}: ${told.answer ? "a list, whose values have intervals of their own" : html`<${Interval} value=${told} write=${write} />`}
      ${told.answer ? "" : told.confidence === null ? " – no bound is known" : told.confidence === 1 ? " – the bounds always hold" : ` – with ${f.percent(told.confidence)} confidence ${told.contract.requested.scope === "all" ? "for all groups at once" : "for each value"}`}${told.coverage !== null ? `; of recent windows, ${f.percent(told.coverage)} of first intervals contained the true value` : ""}.
      ${told.groups > 1 ? ` The group has the widest interval of ${told.groups} groups.` : ""}</p>
    ${told.answer && html`<section class="card" aria-label="List"><${Bars} answer=${told.answer} measure=${told.measure} group=${told.group} /></section>`}
    <${ErrorParts} told=${told} write=${write} />
    ${told.contract.violations.length > 0 && html`<section class="card alarm" aria-label="Violations"><h2>Violations of the contract</h2><ul>${told.contract.violations.map((v) => html`<li><b>${v.code}</b> ${v.message}</li>`)}</ul></section>`}
    <section class="card flush" aria-label="Revisions"><h2>Revisions</h2><${Closing} revisions=${told.revisions} write=${write} /><div class="scroll"><table><thead><tr><th>Revision</th><th>Phase</th><th>Given</th><th class="n">Estimate</th><th class="n">Lower</th><th class="n">Upper</th></tr></thead>
      <tbody>${[...told.revisions].reverse().map((r) => html`<tr key=${r.revision} class=${r.revision === told.revision ? "current" : ""}><td><a href=${at([["revision", r.revision]])}>${r.revision}</a></td><td><${Phase} phase=${r.phase} /></td><td>${f.time(r.given_at)}</td>
        <td class="n">${f.estimate(r, write)}</td><td class="n">${write(r.lower)}</td><td class="n">${write(r.upper)}</td></tr>`)}</tbody></table></div></section>
    <section class="card flush" aria-label="Edges"><h2>Edges <small>what each had stated when the answer was given; state and watermark are those of now</small></h2><div class="scroll"><table>
      <thead><tr><th>Edge</th><th>Now</th><th>Watermark</th><th>Window closed</th><th class="n">Late records</th><th class="n">Withheld above</th><th class="n">Withheld below</th><th class="n">Sampling rate</th></tr></thead>
      <tbody>${told.edges.map((e) => html`<tr key=${e.edge}><th scope="row">${e.edge}</th><td><${State} kind=${e.state === "up" ? "ok" : "bad"}>${e.state.replaceAll("_", " ")}<//></td><td>${e.ended ? "ended" : e.watermark ? f.time(e.watermark) : "–"}</td>
        <td>${e.closed === null ? f.UNKNOWN : e.closed ? "yes" : html`<span class="late">no${e.closed_until ? `: closed until ${f.time(e.closed_until)}` : ""}</span>`}</td>
        <td class="n">${f.number(e.late)}</td><td class="n">${f.number(e.withheld?.above)}</td><td class="n">${f.number(e.withheld?.below)}</td><td class="n">${e.rate === null ? "–" : f.percent(e.rate)}</td></tr>`)}</tbody></table></div></section>
    <details class="card"><summary>What was requested</summary><pre>${JSON.stringify(told.contract.requested, null, 2)}</pre></details>
  </main>`;
}

/** How the interval closed: the revisions in order of time, each with its interval, and the newest value as a line through all of them. */
function Closing({ revisions, write }) {
  const shown = revisions.filter((r) => r.estimate !== null);
  if (shown.length < 2) return null;
  const last = shown.at(-1), first = shown.find((r) => r.lower !== null && r.upper !== null), begin = Date.parse(shown[0].given_at);
  const after = (r) => Date.parse(r.given_at) - begin, span = after(last) || 1;
  // An interval that is far wider than most is cut at the border: the others stay readable.
  const widths = shown.map((r) => f.width(r)).filter((w) => w > 0 && w < Infinity).sort((a, b) => a - b);
  const estimates = shown.map((r) => r.estimate), room = (widths[widths.length >> 1] || Math.max(...estimates) - Math.min(...estimates) || Math.abs(last.estimate) || 1) * 1.5;
  const near = [...estimates, ...shown.flatMap((r) => [r.lower, r.upper])].filter((v) => v !== null && Math.abs(v - last.estimate) <= Math.max(room, ...estimates.map((e) => Math.abs(e - last.estimate))));
  const [low, high] = [Math.min(...near), Math.max(...near)], pad = (high - low) * 0.08 || 1;
  const x = (r) => 90 + (after(r) / span) * 560, y = (v) => Math.min(176, Math.max(14, 170 - ((v - low + pad) / (high - low + 2 * pad)) * 150));
  const mark = (r) => { const [px, py] = [x(r), y(r.estimate)]; return r.phase === "final" ? html`<circle cx=${px} cy=${py} r="4.5" />` : r.phase === "complete" ? html`<rect x=${px - 4} y=${py - 4} width="8" height="8" />` : html`<path d=${`M${px},${py - 6} L${px + 6},${py} L${px},${py + 6} L${px - 6},${py} Z`} />`; };
  const bounds = (r, i) => { const to = i + 1 < shown.length ? x(shown[i + 1]) : 680, [above, below] = [r.upper === null ? 14 : y(r.upper), r.lower === null ? 176 : y(r.lower)];
    return html`<rect class=${r.lower === null || r.upper === null ? "open" : "band"} x=${x(r)} y=${above} width=${Math.max(1, to - x(r))} height=${Math.max(1, below - above)} /><line class="whisker" x1=${x(r)} x2=${x(r)} y1=${above} y2=${below} />`; };
  const held = first && first.lower <= last.estimate && last.estimate <= first.upper;
  const told = !first ? "No revision has an interval." : first === last ? "Only the newest revision has an interval." :
    `The first interval, ${f.interval(first, write)} (${first.phase}), ${held ? "contains" : "does not contain"} the newest value ${write(last.estimate)} (${last.phase}), which came ${f.duration(Date.parse(last.given_at) - Date.parse(first.given_at))} later.`;
  return html`<figure class="closing"><svg viewBox="0 0 760 206" role="img" aria-label=${`How the interval closed. ${told}`}>
    ${shown.map(bounds)}<line class="newest" x1="90" x2="680" y1=${y(last.estimate)} y2=${y(last.estimate)} />
    ${shown.map((r) => html`<g class=${`phase-${r.phase}`} data-revision=${r.revision}><title>${`${r.phase}, revision ${r.revision}: ${write(r.estimate)}, ${f.interval(r, write)}`}</title>${mark(r)}</g>`)}
    ${[high, last.estimate, low].filter((v, i, all) => all.slice(0, i).every((w) => Math.abs(y(w) - y(v)) > 12)).map((v) => html`<text x="82" y=${y(v) + 4} text-anchor="end">${Math.abs(v) < 1e10 ? write(v) : f.short(v)}</text>`)}
    ${shown.filter((r, i) => i === 0 || r === last || x(r) - x(shown[i - 1]) > 60 && x(last) - x(r) > 60).map((r) => html`<text x=${x(r)} y="196" text-anchor="middle">${r === shown[0] ? f.time(r.given_at).slice(11, 19) : `+${f.duration(after(r))}`}</text>`)}
    </svg><figcaption>${told} <span class="legend"><span>◇ early</span><span>◼ complete</span><span>● final</span><span class="unknown">dashed: bounds unknown</span></span></figcaption></figure>`;
}

function ErrorParts({ told, write }) {
  const widest = Math.max(...told.parts.flatMap((p) => [p.above, p.below]).filter((x) => x !== null), 0) || 1;
  const side = (x, kind) => html`<td class=${`side ${kind}`}>${x === null ? html`<span class="hatched" title="unknown"></span><small class="unknown">unknown</small>` : html`<span class="amount" style=${`width:${(x / widest) * 100}px`}></span><small>${write(x)}</small>`}</td>`;
  return html`<section class="card flush" aria-label="Error by cause"><h2>Error by cause <small>bounds side by side: in general they do not add up to the interval</small></h2>
    <div class="scroll"><table class="causes"><thead><tr><th>Cause</th><th>True value may lie below by</th><th>above by</th><th></th></tr></thead>
    <tbody>${told.parts.map((p) => html`<tr key=${p.cause}><th scope="row">${CAUSES[p.cause]}</th>${side(p.below, "below")}${side(p.above, "above")}<td>${p.says}</td></tr>`)}</tbody></table></div></section>`;
}
