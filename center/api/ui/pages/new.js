// A new query: what the center, and each edge, would say of it, while it is written.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { get, live, post } from "../api.js";
import * as f from "../format.js";
import { navigate, useData } from "../parts.js";

const EXAMPLE = (stream, columns) => {
  const text = columns.find((c) => c.type === "string"), amount = columns.find((c) => c.type !== "string" && c.type !== "bool" && !/time|date|year|month|day|hour/.test(c.name));
  return `name: my_query
from: ${stream || "a_stream"}
${text ? `group_by: [${text.name}]\n` : ""}measures:
  records: count()
${amount ? `  total: sum(${amount.name})\n` : ""}window: {tumbling: 60s}
# budget: {error: {records: 100}, staleness: 2s}    # one or both; none: exact
lateness: 10m
`;
};

/** The line of a field such as `window.tumbling`; 0-based, -1: not found. */
export function lineOf(text, field) {
  const lines = text.split("\n");
  let from = 0, at = -1, indent = -1;
  for (const name of field.split(".")) {
    const key = new RegExp(`^(\\s*)(?:.*[{,]\\s*)?["']?${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}["']?\\s*:`);
    let found = -1;
    for (let i = from; i < lines.length; i += 1) {
      if (/^\s*#/.test(lines[i])) continue;
      if (at >= 0 && i > at && lines[i].trim() && lines[i].search(/\S/) <= indent) break;
      if (key.test(lines[i])) { found = i; break; }
    }
    if (found < 0) break;
    at = found;
    indent = lines[found].search(/\S/);
    from = found;
  }
  return at;
}

export function NewQuery() {
  const [streams] = useData(() => get("/v1/streams").then((d) => d.streams), []);
  const [functions] = useData(() => get("/v1/functions").then((d) => d.functions), []);
  const [text, setText] = useState(null);
  const [checked, setChecked] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const editor = useRef(null), gutter = useRef(null);
  useEffect(() => live.close(), []);
  useEffect(() => { if (streams && text === null) setText(EXAMPLE(streams[0]?.stream, streams[0]?.columns || [])); }, [streams]);

  useEffect(() => {
    if (!text) return undefined;
    let stale = false;
    const timer = setTimeout(async () => {
      try {
        const result = await post("/v1/queries?dry_run=true", text);
        if (!stale) { setChecked(result); setProblem(null); }
      } catch (error) {
        if (!stale) { setChecked(null); setProblem(error); }
      }
    }, 400);
    return () => { stale = true; clearTimeout(timer); };
  }, [text]);

  const register = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const query = await post("/v1/queries", text);
      navigate(`/ui/queries/${encodeURIComponent(query.name)}`);
    } catch (error) {
      setProblem(error);
    }
    setBusy(false);
  };
  const field = problem?.details?.field;
  const line = field && text ? lineOf(text, field) : -1;
  const insert = (what) => {
    const box = editor.current, at = box.selectionStart;
    box.setRangeText(what, at, box.selectionEnd, "end");
    setText(box.value);
    box.focus();
  };
  const lines = (text || "").split("\n");
  return html`<main id="main"><h1>New query</h1><div class="columns"><form onSubmit=${register} class="card">
    <label for="spec">Query <small>YAML or JSON, checked while you write</small></label>
    <div class="editor"><pre class="gutter" ref=${gutter} aria-hidden="true">${lines.map((_, i) => html`<span class=${i === line ? "bad" : ""}>${i + 1}</span>`)}</pre>
      <textarea id="spec" ref=${editor} rows=${Math.max(14, lines.length + 1)} spellcheck="false" autocomplete="off" value=${text || ""} onInput=${(e) => setText(e.target.value)}
        onScroll=${(e) => { gutter.current.scrollTop = e.target.scrollTop; }} aria-invalid=${problem ? "true" : "false"} aria-describedby="verdict"></textarea></div>
    <div id="verdict" role="status" data-checked=${problem ? "refused" : checked ? "accepted" : ""}>${problem && html`<div class="problem"><b>${field ? `${field}${line >= 0 ? `, line ${line + 1}` : ""}` : problem.details?.title || "Refused"}</b>
        ${problem.details?.accepted ? html`: ${problem.details.value !== undefined && problem.details.value !== null ? html`<code>${String(typeof problem.details.value === "string" ? problem.details.value : JSON.stringify(problem.details.value))}</code> is not accepted.` : ""}<br />Expected: ${problem.details.accepted}${problem.details.reason ? html`<br />${problem.details.reason}` : ""}` : html`<br />${problem.message}`}</div>`}
      ${checked && (checked.refused ? html`<p class="problem">${checked.refused}</p>` : html`<p class="fine">${checked.registered ? "The same query is registered already." : "The center accepts it."}</p>`)}</div>
    <p><button class="primary" disabled=${busy || !checked || Boolean(checked.refused)}>Register</button></p></form>
    <div>${checked && html`<section class="card" aria-label="Edges"><h2>Edges</h2>${!checked.edges.length && html`<p class="late">No edge serves stream ${checked.spec.from}: the query would wait for one.</p>`}
      <ul class="plain">${checked.edges.map((e) => html`<li><span class=${`badge ${e.accepted ? "ok" : e.accepted === null ? "" : "bad"}`}>${e.accepted ? "would answer" : e.accepted === null ? "unknown" : "would refuse"}</span> ${e.edge}${e.message && html`<br /><small>${e.message}</small>`}</li>`)}</ul>
      <h2>Size of a group <small>in a frame, about; sparse synopses grow</small></h2><table><tbody>${Object.entries(checked.entry_bytes).map(([m, n]) => html`<tr><th scope="row">${m}</th><td class="n">${f.bytes(n)}</td></tr>`)}
        <tr><th scope="row">together</th><td class="n"><b>${f.bytes(Object.values(checked.entry_bytes).reduce((a, b) => a + b, 0))}</b></td></tr></tbody></table>
      ${checked.notes.length > 0 && html`<h2>Notes</h2><ul>${checked.notes.map((n) => html`<li>${n}</li>`)}</ul>`}</section>`}
    <details class="card" open><summary>Streams</summary>${(streams || []).map((s) => html`<h3>${s.stream} <small>${s.edges.join(", ") || "no edge"}; ${f.short(s.records)} records</small></h3><p class="chips">${s.columns.map((c) => html`<button type="button" class="chip" title=${`insert ${c.name}`} onClick=${() => insert(c.name)}>${c.name} <small>${c.type}</small></button>`)}</p>`)}
      ${streams && !streams.length && html`<p class="empty">No edge has connected.</p>`}</details>
    <details class="card"><summary>Functions</summary><table><thead><tr><th>Function</th><th>Interval</th><th>Error budget</th></tr></thead><tbody>${(functions || []).map((g) => html`<tr><th scope="row"><button type="button" class="link" onClick=${() => insert(`${g.name}()`)}>${g.name}</button> <small>${g.parameters.map((p) => p.name).join(", ")}</small></th><td>${g.interval || f.UNKNOWN}</td><td>${g.error_budget ? "yes" : "no"}</td></tr>`)}</tbody></table></details></div></div></main>`;
}
