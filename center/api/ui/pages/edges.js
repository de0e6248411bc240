// The edges, how far each has come, and which windows of a query have which edges.

import { html, useEffect, useState } from "../vendor/preact.js";
import { get, live, send } from "../api.js";
import * as f from "../format.js";
import { Confirm, Problem, State, setSearch, useData, useQueries } from "../parts.js";

const WORDS = { c: "closed", w: "not closed yet", m: "missing", i: "input may be lost", s: "state lost", l: "left", "-": "not expected", "?": "unknown" };
const PHASES = { e: "early", c: "complete", f: "final" };
const WINDOWS = 60;

export function Edges({ search }) {
  useEffect(() => live.close(), []);
  const [data, problem, again] = useData(() => get("/v1/edges"), [], 2000);
  const [streams] = useData(() => get("/v1/streams"), [], 10000);
  const edges = data?.edges || [];
  const marks = edges.flatMap((e) => e.streams.map((s) => s.watermark && Date.parse(s.watermark))).filter(Boolean);
  const newest = marks.length ? Math.max(...marks) : null;
  return html`<main id="main"><h1>Edges</h1><${Problem} error=${problem} />
    <div class="scroll card flush"><table><thead><tr><th>Edge</th><th>State</th><th>Streams and watermarks</th><th class="n">Backlog</th><th class="n">Bandwidth</th><th class="n">RTT</th><th class="n">Clock</th><th>Dropped</th><th>Rejected</th></tr></thead>
    <tbody>${edges.map((e) => html`<tr key=${e.edge} data-edge=${e.edge}><th scope="row">${e.edge}${Object.keys(e.labels).length > 0 && html`<br /><small class="muted">${f.group(e.labels)}</small>`}${e.release && html`<br /><small class="muted" data-release>${e.release}</small>`}</th>
      <td><${State} kind=${e.state === "up" ? "ok" : e.state === "retired" ? "" : "bad"}>${e.state}<//>${e.state !== "up" && html`<br /><small>since ${f.time(e.last_seen)}</small>`}<br /><${Retire} edge=${e} again=${again} /></td>
      <td>${e.streams.map((s) => html`<div>${s.name} <b>${s.ended ? "ended" : s.watermark ? f.time(s.watermark) : "no records"}</b> <small>${s.watermark && newest ? `${f.duration(newest - Date.parse(s.watermark))} behind the first, ` : ""}${f.records(s.records)}, ${s.delivery.join(", ")}</small></div>`)}</td>
      <td class="n">${f.bytes(e.backlog_bytes)}</td><td class="n">${e.bandwidth_bytes_s ? `${f.bytes(e.bandwidth_bytes_s)}/s` : "–"}</td><td class="n">${f.duration(e.rtt_ms)}</td>
      <td class=${`n ${Math.abs(e.clock_offset_ms) > 1000 ? "late" : ""}`}>${f.duration(e.clock_offset_ms)}</td>
      <td>${Object.entries(e.drops).filter(([, n]) => n > 0).map(([reason, n]) => html`<div class="late">${reason}: ${f.number(n)}</div>`)}</td>
      <td>${e.streams.flatMap((s) => s.rejected.map((r) => html`<div class="late" title=${`${s.name}, ${r.source}`}>${r.reason}: ${f.number(r.records)} <small>${r.source}</small></div>`))}
        ${e.streams.flatMap((s) => s.null_columns.map((c) => html`<div class="late" title=${`${s.name}, ${c.source}`}>${c.column} is null <small>${c.source}</small></div>`))}</td></tr>`)}
    ${data && !edges.length && html`<tr><td colspan="9" class="empty">No edge has connected.</td></tr>`}</tbody></table></div>
    <${Map} edges=${edges} />
    <${Matrix} search=${search} up=${edges.filter((e) => e.state === "up").map((e) => e.edge)} />
    ${streams?.streams.some((s) => s.differing.length) && html`<section class="card alarm"><h2>Columns differ</h2><ul>${streams.streams.flatMap((s) => s.differing).map((t) => html`<li>${t}</li>`)}</ul></section>`}
  </main>`;
}

/** Retires an edge that does not come back, or reinstates it. */
function Retire({ edge: { edge, state }, again }) {
  const path = `/v1/edges/${encodeURIComponent(edge)}`;
  if (state === "retired") return html`<${Confirm} label="Reinstate" title=${`Reinstate ${edge}?`} text="Queries expect it again, and windows wait for it. Restart its agent." keep="Leave it retired" yes="Reinstate the edge" act=${() => send("POST", `${path}/reinstate`, null, {}).then(again)} />`;
  return html`<${Confirm} label="Retire" title=${`Retire ${edge}?`} text="Windows no longer wait for it, and the center refuses it until it is reinstated. Answers say that it has left. What it has not sent yet is in no answer." keep="Keep it" yes="Retire the edge" act=${() => send("DELETE", path, null, {}).then(again)} />`;
}

function Matrix({ search, up }) {
  const [queries] = useQueries();
  const [name, setName] = useState(new URLSearchParams(search).get("query"));
  const chosen = name && queries?.some((q) => q.name === name) ? name : queries?.[0]?.name;
  const [matrix, problem] = useData(() => (chosen ? get(`/v1/queries/${encodeURIComponent(chosen)}/completeness`, [["limit", WINDOWS]]) : Promise.resolve(null)), [chosen], 2000);
  if (!queries?.length) return null;
  // An edge that is connected and has not closed a window with an early answer yet is late, not missing.
  const rows = Object.entries(matrix?.edges || {}).map(([edge, states]) => [edge, [...states].map((c, i) => (c === "m" && matrix.phases[i] === "e" && up.includes(edge) ? "w" : c))]);
  const used = [...new Set(rows.flatMap(([, states]) => states))];
  return html`<section class="card" aria-label="Completeness"><h2>Completeness <small>edges × the last windows</small></h2>
    <p class="choices"><label>Query <select value=${chosen} onChange=${(e) => { setName(e.target.value); setSearch({ query: e.target.value }); }}>${queries.map((q) => html`<option value=${q.name} selected=${q.name === chosen}>${q.name}</option>`)}</select></label>
      <span class="legend">${used.map((c) => html`<span><i class=${`cell s-${code(c)}`} aria-hidden="true">${mark(c)}</i> ${WORDS[c]}</span>`)}</span></p>
    <${Problem} error=${problem} />
    ${matrix && !matrix.windows.length && html`<p class="empty">No window has an answer.</p>`}
    ${matrix && matrix.windows.length > 0 && html`<div class="scroll" ref=${toTheNewest}><table class="matrix" data-windows=${matrix.windows.length}><caption class="sr">Which edges had closed which windows of ${chosen}</caption>
      <tbody>${rows.map(([edge, states]) => html`<tr key=${edge}><th scope="row">${edge}</th>${states.map((c, i) => html`<td key=${matrix.windows[i]}><a href=${`/ui/queries/${encodeURIComponent(chosen)}/${matrix.windows[i]}`} class=${`cell s-${code(c)}`}
        title=${`${edge}, ${f.time(matrix.windows[i])}: ${WORDS[c]}`} aria-label=${`${f.time(matrix.windows[i])}: ${WORDS[c]}`}>${mark(c)}</a></td>`)}</tr>`)}
      <tr><th scope="row">phase</th>${[...matrix.phases].map((p, i) => html`<td key=${i} class=${`ph ph-${PHASES[p]}`} title=${`${f.time(matrix.windows[i])}: ${PHASES[p]}`}>${{ e: "◇", c: "◼", f: "●" }[p]}<span class="sr">${PHASES[p]}</span></td>`)}</tr></tbody></table></div>
      <p class="muted">${f.time(matrix.windows[0])} … ${f.time(matrix.windows.at(-1))} UTC${matrix.earlier ? ", earlier windows are not shown" : ""}</p>`}
  </section>`;
}

/** Shows the right end of a wide table when it appears. */
function toTheNewest(box) {
  if (box && !box.dataset.shown) { box.dataset.shown = "1"; box.scrollLeft = box.scrollWidth; }
}

const code = (c) => ({ "-": "none", "?": "unknown" })[c] || c;
const mark = (c) => ({ c: "", w: "…", m: "✕", i: "!", s: "S", l: "L", "-": "", "?": "?" })[c];

/** Edges with labels `lat` and `lon`, on a plain grid. */
function Map({ edges }) {
  const placed = edges.filter((e) => e.labels.lat !== undefined && e.labels.lon !== undefined && Number.isFinite(+e.labels.lat) && Number.isFinite(+e.labels.lon));
  if (!placed.length) return null;
  const x = (lon) => 320 + (lon / 180) * 310, y = (lat) => 160 - (lat / 90) * 150;
  return html`<section class="card"><h2>Map</h2><svg viewBox="0 0 640 320" class="map" role="img" aria-label="Edges by latitude and longitude">
    ${[-120, -60, 0, 60, 120].map((lon) => html`<line x1=${x(lon)} x2=${x(lon)} y1="10" y2="310" />`)}${[-60, -30, 0, 30, 60].map((lat) => html`<line x1="10" x2="630" y1=${y(lat)} y2=${y(lat)} />`)}
    ${placed.map((e) => html`<g><circle cx=${x(+e.labels.lon)} cy=${y(+e.labels.lat)} r="5" class=${e.state} /><text x=${x(+e.labels.lon) + 8} y=${y(+e.labels.lat) + 4}>${e.edge}</text></g>`)}</svg></section>`;
}
