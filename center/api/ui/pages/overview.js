// A row per query: its last value with the interval, its phase, what it lacks, how old it is, and whether it keeps its contract.

import { html, useEffect, useMemo, useRef } from "../vendor/preact.js";
import { get, live } from "../api.js";
import * as f from "../format.js";
import { Completeness, Contract, Interval, Phase, Problem, Sparkline, Staleness, State, useData, useLost, useQueries, useThrottled } from "../parts.js";

const HISTORY = 40;
const FILLED = 12;

/** A token may read queries but no alarms. Of other failures, the alarms that are known stay. */
function readable(error) {
  if (error.status === 403) return null;
  throw error;
}

/** The value that a row shows: the first measure's, of the group with the widest interval. */
function headline(answer) {
  let best = null;
  for (const row of answer.data)
    for (const measure of Object.keys(row).filter((k) => k !== "group").slice(0, 1)) {
      const value = f.values(answer, measure, row)[0];
      if (value && (!best || f.width(value) > f.width(best.value))) best = { measure, value, group: row.group };
    }
  return best;
}

class Row {
  constructor(query) { this.query = query; this.answer = null; this.points = new Map(); this.head = null; this.key = null; }

  take(answer) {
    const shown = headline(answer);
    if (this.answer && answer.window.start < this.answer.window.start) return;
    // The line stays that of one group, as long as that is in the answers.
    const held = this.key && answer.data.find((r) => JSON.stringify(r.group) === this.key);
    const value = held ? f.values(answer, this.head.measure, held)[0] : shown?.value;
    if (value) {
      if (!held) { this.points.clear(); this.key = JSON.stringify(shown.group); }
      this.head = held ? { ...this.head, value } : shown;
      this.points.set(answer.window.start, { ...value, phase: answer.phase });
      if (this.points.size > HISTORY) this.points.delete([...this.points.keys()].sort()[0]);
    }
    this.isEmpty = !value;
    this.answer = answer;
  }
}

async function fill(row) {
  const { answer, head } = row;
  if (!answer || !head) return;
  const matrix = await get(`/v1/queries/${answer.query}/completeness`, [["limit", HISTORY]]);
  const page = await get(`/v1/queries/${answer.query}/windows`, [["start", matrix.windows[0]], ["limit", HISTORY], ["measure", head.measure], ...f.groupParams(head.group)]);
  const points = new Map();
  for (const a of page.answers) {
    const value = f.values(a, head.measure, a.data[0])[0];
    if (value) points.set(a.window.start, { ...value, phase: a.phase });
  }
  for (const [start, point] of row.points) points.set(start, point);
  row.points = new Map([...points].sort(([a], [b]) => (a < b ? -1 : 1)).slice(-HISTORY));
}

export function Overview() {
  const rows = useRef(new Map());
  const progress = useRef(new Map());
  const redraw = useThrottled();
  const [queries, problem] = useQueries();
  const [parts] = useData(() => get("/readyz", [], { anyStatus: true }), [], 5000);
  const [alarms] = useData(() => get("/v1/alarms", [["limit", 5]]).catch(readable), [], 5000);
  const [alerts] = useData(() => get("/v1/alerts"), [], 2000);
  const [rules] = useData(() => get("/v1/alerts/rules"), [], 5000);
  const [sinks] = useData(() => get("/v1/sinks").catch(readable), [], 5000);
  const filling = useRef(0);

  useEffect(() => {
    live.open("/v1/live?summary=true", {
      answer(answer) {
        let row = rows.current.get(answer.query);
        if (!row) rows.current.set(answer.query, (row = new Row(answer.query)));
        const first = !row.answer;
        row.take(answer);
        if (first && filling.current < FILLED) {
          filling.current += 1;
          fill(row).then(redraw, () => {});
        }
        redraw();
      },
      progress(data) { for (const q of data.queries) progress.current.set(q.query, q.edges); redraw(); },
    });
    return () => live.close();
  }, []);
  const listed = useMemo(() => queries || [], [queries]);
  return html`<main id="main"><div class="title"><h1>Overview</h1><${Parts} parts=${parts} /><span class="space"></span><a class="button primary" href="/ui/new">New query</a></div>
    <${Problem} error=${problem} />
    ${alarms?.alarms.length > 0 && html`<section class="card alarm" aria-label="Alarms"><h2>Alarms</h2><ul>${alarms.alarms.map((a) => html`<li key=${a.kind + a.message}>
      <b>${a.kind}</b> ${a.message} <small>${a.times > 1 ? `${a.times} times, ` : ""}last ${f.time(a.last_at)}</small></li>`)}</ul></section>`}
    ${alerts?.alerts.length > 0 && html`<${Alerts} alerts=${alerts.alerts} />`}
    <div class="scroll card flush"><table class="rows"><thead><tr><th>Query</th><th>Last window (UTC)</th><th>Value and interval</th><th>Recent windows</th><th>Phase</th><th>Edges</th><th class="n">Staleness</th><th>Contract</th></tr></thead>
    <tbody>${listed.map((q) => [q, q.name]).map(([q, name]) => html`<${QueryRow} key=${name} query=${q} name=${name} row=${rows.current.get(name)} answer=${rows.current.get(name)?.answer} edges=${progress.current.get(name)} />`)}
    ${queries && !listed.length && html`<tr><td colspan="8" class="empty">No query is registered. <a href="/ui/new">Register one</a>.</td></tr>`}</tbody></table></div>
    ${rules?.rules.length > 0 && html`<${Rules} rules=${rules.rules} />`}
    ${sinks?.sinks.length > 0 && html`<${Sinks} sinks=${sinks.sinks} />`}
  </main>`;
}

const SHOWN_ALERTS = 100;

/** The alerts of rules about answers, with the values and bounds that support them. */
function Alerts({ alerts }) {
  const left = alerts.length - SHOWN_ALERTS;
  return html`<section class="card alarm" aria-label="Alerts"><h2>Alerts</h2><ul>${alerts.slice(0, SHOWN_ALERTS).map((a) => {
    const { alertname, query: _, ...labels } = a.labels;
    const { query } = a;
    const values = Object.entries(a.details).filter(([, v]) => v && typeof v === "object" && "lower" in v);
    return html`<li key=${a.sink + JSON.stringify(a.labels)} data-alert=${alertname}><${State} kind=${a.status === "firing" ? "bad" : "warn"}>${a.status}<//> <b>${alertname}</b> <a href=${`/ui/queries/${encodeURIComponent(query)}`}>${query}</a> ${f.group(labels)}
      ${values.map(([name, v]) => html` ${name} <${Interval} value=${{ estimate: v.value, lower: v.lower, upper: v.upper }} />`)} ${a.annotations.summary} <small>since ${f.time(a.since)}${a.details.condition === "unknown" && "; the last answer neither confirms nor excludes it"}</small></li>`;
  })}</ul>${left > 0 && html`<small>and ${f.number(left)} more: <code>edgewater alerts ls</code></small>`}</section>`;
}

/** The rules of alerts, and how each stands. */
function Rules({ rules }) {
  const kinds = { ok: "ok", pending: "warn", firing: "bad", failing: "bad" };
  return html`<section aria-label="Alert rules"><h2>Alert rules</h2><div class="scroll card flush"><table class="rows"><thead><tr><th>Rule</th><th>Query</th><th>Condition</th><th>State</th><th class="n">Firing</th><th class="n">Pending</th><th>Last window (UTC)</th><th>Sink</th><th>Problem</th></tr></thead>
    <tbody>${rules.map((r) => html`<tr key=${`${r.sink} ${r.rule}`} data-rule=${r.rule}><th scope="row">${r.rule}</th><td><a href=${`/ui/queries/${encodeURIComponent(r.query)}`}>${r.query}</a></td>
      <td><code>${r.condition}</code>${r.for_ms > 0 && html` <small>for ${f.duration(r.for_ms)}</small>`}</td><td><${State} kind=${kinds[r.state]}>${r.state}<//></td>
      <td class="n">${f.number(r.firing)}</td><td class="n">${f.number(r.pending)}</td><td>${r.window ? f.time(r.window.start) : "–"}</td><td><a href=${`/ui/alerts/${encodeURIComponent(r.sink)}`}>${r.sink}<span class="sr">: edit and try its rules</span></a></td><td>${r.problem}</td></tr>`)}</tbody></table></div></section>`;
}

/** How far each sink is. */
function Sinks({ sinks }) {
  const kinds = { running: "ok", waiting: "warn", paused: "warn", failing: "bad" };
  return html`<section aria-label="Sinks"><h2>Sinks</h2><div class="scroll card flush"><table class="rows"><thead><tr><th>Sink</th><th>State</th><th class="n">Behind</th><th class="n">Rows written</th><th>Problem</th></tr></thead>
    <tbody>${sinks.map((s) => html`<tr key=${s.name} data-sink=${s.name}><th scope="row">${s.name}</th><td><${State} kind=${kinds[s.state]}>${s.state}<//></td>
      <td class="n">${s.behind_answers ? f.duration(s.behind_ms) : "–"}</td><td class="n">${f.number(s.rows)}</td><td>${s.problem}${s.gap && html` <small>answers ${s.gap.first} to ${s.gap.last} were deleted before it had them</small>`}</td></tr>`)}</tbody></table></div></section>`;
}

function Parts({ parts }) {
  const lost = useLost();
  if (lost !== null) return html`<span class="parts"><${State} /></span>`;
  if (!parts?.components) return null;
  return html`<span class="parts">${Object.entries(parts.components).map(([name, part]) => html`<${State} kind=${part.ready ? "ok" : "bad"} title=${part.reason}>${name} ${part.ready ? "ready" : "not ready"}<//>`)}</span>`;
}

/** The version of a query, the border at which it begins or will begin, and the end that it has. */
function Version({ query }) {
  if (query.version === 1 && !query.until) return null;
  return html`<br /><small class="muted">version ${query.version}${query.begins && ` from ${f.time(query.begins)}`}${query.until && `, ends at ${f.time(query.until)}`}</small>`;
}

function QueryRow({ query, name, row, answer, edges }) {
  const href = `/ui/queries/${encodeURIComponent(name)}`;
  if (!answer) return html`<tr data-query=${name}><th scope="row"><a href=${href}>${name}</a><${Version} query=${query} /></th><td colspan="7"><${Waiting} name=${name} /></td></tr>`;
  const head = row.head;
  const points = [...row.points.entries()].sort(([a], [b]) => (a < b ? -1 : 1)).map(([, p]) => p);
  const down = (edges || []).filter((e) => e.state !== "up" && !e.ended).map((e) => e.edge);
  return html`<tr data-query=${name} data-given=${answer.given_at}><th scope="row"><a href=${href}>${name}</a><${Version} query=${query} /></th>
    <td class="at">${f.time(answer.window.start)}</td>
    <td class="value">${head ? html`${row.isEmpty ? html`<span class="muted">${f.isHeld(answer) ? "withheld: in no group" : answer.phase === "early" ? "no record yet" : "no record"}</span>` : html`<${Interval} value=${head.value} write=${f.writer(answer, head.measure)} />`}<br /><small>${head.measure}${head.value.name ? ` ${head.value.name}` : ""}${Object.keys(head.group).length ? html`, ${f.group(head.group)} <span class="muted">(of ${answer.groups} groups)</span>` : ""}</small>` : html`<span class="muted">${!answer.groups && f.isHeld(answer) ? "withheld: in no group" : `${f.number(answer.groups)} ${answer.groups === 1 ? "group" : "groups"}${answer.groups ? ", lists" : ""}`}</span>`}</td>
    <td>${head && html`<${Sparkline} points=${points} label=${`${head.measure} of the last ${points.length} windows`} />`}</td>
    <td><${Phase} phase=${answer.phase} revision=${answer.revision} /></td>
    <td><${Completeness} quality=${answer.quality} />${down.length > 0 && html`<br /><small class="late">down: ${down.join(", ")}</small>`}</td>
    <td class="n"><${Staleness} answer=${answer} /></td>
    <td><${Contract} contract=${answer.contract} /></td></tr>`;
}

function Waiting({ name }) {
  const [status] = useData(() => get(`/v1/queries/${name}/status`), [name], 3000);
  if (!status) return html`<span class="muted">no answer yet</span>`;
  return html`<span class="badge warn">${status.state.replaceAll("_", " ")}</span> ${status.reason} ${status.since && html`<small>since ${f.time(status.since)}</small>`}
    ${status.remedy && html`<br /><small>What to do: ${status.remedy}</small>`}`;
}
