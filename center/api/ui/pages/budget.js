// How a query's error budget is divided among the edges.

import { html, useEffect } from "../vendor/preact.js";
import { get, live } from "../api.js";
import * as f from "../format.js";
import { Problem, useData, useQueries } from "../parts.js";

export function Budgets() {
  useEffect(() => live.close(), []);
  const [queries, problem] = useQueries();
  return html`<main id="main"><h1>Budget</h1><${Problem} error=${problem} /><div class="card flush scroll"><table><thead><tr><th>Query</th><th>Budget</th><th>Accuracy</th></tr></thead>
    <tbody>${(queries || []).map((q) => html`<tr key=${q.name}><th scope="row"><a href=${`/ui/budget/${encodeURIComponent(q.name)}`}>${q.name}</a></th><td>${q.spec.budget ? f.plain(q.spec.budget) : "none: edges withhold nothing"}</td><td>${q.spec.accuracy ? f.plain(q.spec.accuracy) : "–"}</td></tr>`)}
    ${queries && !queries.length && html`<tr><td colspan="3" class="empty">No query is registered.</td></tr>`}</tbody></table></div></main>`;
}

export function Budget({ args: [name] }) {
  useEffect(() => live.close(), []);
  const [budget, problem] = useData(() => get(`/v1/queries/${encodeURIComponent(name)}/budget`), [name], 2000);
  const measures = budget ? Object.keys(budget.limits) : [];
  return html`<main id="main"><p class="crumbs"><a href="/ui/budget">Budget</a> › <a href=${`/ui/queries/${encodeURIComponent(name)}`}>${name}</a></p><h1>Budget of ${name}</h1><${Problem} error=${problem} />
    ${budget && !budget.budget && html`<p>The query has no budget: edges withhold nothing on purpose.</p>`}
    ${budget?.budget && !measures.length && html`<p>The budget is ${f.plain(budget.budget)}. ${budget.budget.error ? "A relative limit applies to each group's own value at every edge, so nothing is divided." : "It limits how old a first answer is; edges send the most valuable groups first."}</p>`}
    ${measures.map((m) => html`<${Measure} key=${m} name=${m} budget=${budget} />`)}
    ${budget && html`<section class="card flush" aria-label="Edges"><h2>Edges</h2><div class="scroll"><table><thead><tr><th>Edge</th><th class="n">Bytes shipped</th><th class="n">Sampling rate</th><th>Heard</th><th>Withheld of the window ${budget.window ? f.time(budget.window) : ""}</th></tr></thead>
      <tbody>${budget.edges.map((e) => html`<tr key=${e.edge}><th scope="row">${e.edge}</th><td class="n">${f.bytes(e.wire_bytes)}</td><td class="n">${e.rate === null ? "–" : f.percent(e.rate)}</td><td>${e.heard_at ? f.time(e.heard_at) : "–"}</td>
        <td>${e.withheld_last === null ? f.UNKNOWN : Object.entries(e.withheld_last).map(([m, w]) => html`<div>${m}: ${w.above === 0 && w.below === 0 ? "nothing" : `up to ${f.number(w.above)} above, ${f.number(w.below)} below`}</div>`)}</td></tr>`)}</tbody></table></div></section>`}
  </main>`;
}

function Measure({ name, budget }) {
  const limit = budget.limits[name], divided = budget.divided.includes(name), sum = budget.sums[name];
  const most = Math.max(limit, sum || 0, 1e-300);
  const rows = budget.edges.filter((e) => e.in_force || e.granted || e.pending);
  return html`<section class="card" aria-label=${name}><h2>${name} <small>limit ${f.number(limit)}${divided ? "" : ": each edge may use it in full"}</small></h2>
    ${divided && html`<div class="stack" role="img" aria-label=${`shares of ${f.number(sum)} in all`}>${rows.map((e, i) => html`<i class=${`share-${i % 6}`} style=${`width:${(100 * (e.in_force?.[name] || 0)) / most}%`} title=${`${e.edge}: ${f.number(e.in_force?.[name])}`}></i>`)}</div>
      <p>${sum === undefined ? "No edge has reported yet, so none has a share." : html`All edges together may withhold at most <b>${f.number(sum)}</b> of a new slice: ${f.percent(sum / limit)} of the limit${sum <= limit * (1 + 1e-9) ? "" : html`, <b class="late">more than the limit</b>`}.`}</p>`}
    <div class="scroll"><table><thead><tr><th>Edge</th><th class="n">Granted</th><th class="n">In force</th><th>from slice</th><th class="n">Pending</th><th class="n">Withheld above</th><th class="n">below</th></tr></thead>
    <tbody>${budget.edges.map((e, i) => html`<tr key=${e.edge}><th scope="row"><i class=${`key share-${rows.indexOf(e) % 6}`} aria-hidden="true"></i>${e.edge}</th><td class="n">${e.granted ? f.number(e.granted[name] ?? 0) : "–"}</td><td class="n">${e.in_force ? f.number(e.in_force[name] ?? 0) : f.UNKNOWN}</td>
      <td>${e.in_force ? (e.from ? f.time(e.from) : "all") : "–"}</td><td class="n">${e.pending ? f.number(e.pending.shares[name] ?? 0) : "–"}</td><td class="n">${f.number(e.withheld_last?.[name]?.above)}</td><td class="n">${f.number(e.withheld_last?.[name]?.below)}</td></tr>`)}</tbody></table></div></section>`;
}
