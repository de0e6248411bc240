// A new query, or a change of one, in YAML or SQL: what the center, and each edge, would say of it, while it is written.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { get, live, send, url } from "../api.js";
import * as f from "../format.js";
import { Problem, When, navigate, useData } from "../parts.js";

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

/** The line that a problem is about: the one that the parser names, the one of the field, or in SQL the one with the measure or the value. */
function badLine(text, language, { field, value, reason }) {
  const named = /\bline (\d+)/.exec(reason || "");
  if (named) return Number(named[1]) - 1;
  if (!field || language === "yaml") return field ? lineOf(text, field) : -1;
  const lines = text.split("\n"), last = field.split(".").at(-1);
  const find = (what) => lines.findIndex((l) => l.toLowerCase().includes(String(what).toLowerCase()));
  return field.startsWith("measures.") ? find(` as ${last}`) : Math.max(find(last), typeof value === "string" ? find(value) : -1);
}

/** A value as flow YAML. What YAML may read as another type is quoted as JSON, which YAML reads. */
function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${flow(k)}: ${flow(v)}`).join(", ")}}`;
  const plain = typeof value === "string" && (/^[A-Za-z_]\w*(\([\w.* ]*\))?$/.test(value) && !/^(y|n|yes|no|on|off|true|false|null)$/i.test(value) || /^\d+(ms|[smhdw])$/.test(value));
  return plain ? value : JSON.stringify(value);
}

export const yaml = (spec) => Object.entries(spec).map(([k, v]) => (k === "rules" ? `${k}:\n${v.map((rule) => `  - ${flow(rule)}\n`).join("")}` : k === "measures" ? `${k}:\n${Object.entries(v).map(([m, e]) => `  ${flow(m)}: ${flow(e)}\n`).join("")}` : `${k}: ${flow(v)}\n`)).join("");

/** What may be written at a place of the text: streams after `from`, and else the columns of the query's stream, and functions. */
function offers(before, text, streams, functions) {
  const word = /\w*$/.exec(before)[0], line = before.slice(before.lastIndexOf("\n") + 1);
  const stream = /\bfrom:?\s+["']?(\w+)/i.exec(text)?.[1], known = streams.filter((s) => s.stream === stream);
  const all = /\bfrom:?\s+["']?\w*$/i.test(line) ? streams.map((s) => ({ name: s.stream, what: "stream" }))
    : [...(known.length ? known : streams).flatMap((s) => s.columns.map((c) => ({ name: c.name, what: c.type }))), ...functions.map((g) => ({ name: g.name, what: "function", more: "(" }))];
  const shown = all.filter((o) => o.name.toLowerCase().startsWith(word.toLowerCase()) && o.name !== word);
  return { word, shown: [...new Map(shown.map((o) => [o.name + o.what, o])).values()].slice(0, 12) };
}

/** The text, with numbers of lines, and a list of what may follow: Ctrl+Space or a letter opens it, the arrows choose, Enter takes, Escape closes. */
function Editor({ text, setText, line, bad, streams, functions, box }) {
  const gutter = useRef(null);
  const [list, setList] = useState(null);
  const lines = text.split("\n");
  const open = (target, always) => {
    const before = target.value.slice(0, target.selectionStart);
    const { word, shown } = offers(before, target.value, streams, functions);
    setList((word || always) && shown.length ? { word, shown, at: -1, row: before.split("\n").length, column: before.length - before.lastIndexOf("\n") - 1 - word.length, from: target.scrollTop } : null);
  };
  const take = (o) => {
    const at = box.current.selectionStart;
    box.current.setRangeText(o.name + (o.more || ""), at - list.word.length, at, "end");
    setText(box.current.value);
    setList(null);
    box.current.focus();
  };
  const key = (e) => {
    if (e.key === " " && e.ctrlKey) { e.preventDefault(); open(e.target, true); return; }
    if (!list) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if (step) { e.preventDefault(); setList({ ...list, at: (list.at + step + list.shown.length) % list.shown.length }); }
    else if (e.key === "Enter" && list.at >= 0) { e.preventDefault(); take(list.shown[list.at]); }
    else if (["Escape", "Enter", "ArrowLeft", "ArrowRight"].includes(e.key)) setList(null);
  };
  return html`<div class="editor"><pre class="gutter" ref=${gutter} aria-hidden="true">${lines.map((_, i) => html`<span class=${i === line ? "bad" : ""}>${i + 1}</span>`)}</pre>
    <textarea id="spec" ref=${box} rows=${Math.max(14, lines.length + 1)} spellcheck="false" autocomplete="off" value=${text} onInput=${(e) => { setText(e.target.value); open(e.target, false); }}
      onKeyDown=${key} onBlur=${() => setList(null)} onScroll=${(e) => { gutter.current.scrollTop = e.target.scrollTop; }} aria-invalid=${bad ? "true" : "false"} aria-describedby="verdict"
      aria-autocomplete="list" aria-controls="offers" aria-activedescendant=${list && list.at >= 0 ? `offer-${list.at}` : null}></textarea>
    ${list && html`<ul id="offers" class="offers" role="listbox" aria-label="Completions" style=${`top: calc(10px + ${list.row * 1.55}em - ${list.from}px); left: calc(46px + ${list.column}ch)`}>${list.shown.map((o, i) => html`<li id=${`offer-${i}`} role="option" aria-selected=${i === list.at ? "true" : "false"}
      onMouseDown=${(e) => { e.preventDefault(); take(o); }}>${o.name} <small>${o.what}</small></li>`)}</ul>`}</div>`;
}

const SQL = { "Content-Type": "application/sql" };

export function NewQuery() {
  const [streams] = useData(() => get("/v1/streams").then((d) => d.streams), []);
  return html`<main id="main"><h1>New query</h1>${streams && html`<${Form} first=${EXAMPLE(streams[0]?.stream, streams[0]?.columns || [])} streams=${streams} />`}</main>`;
}

/** The newest version of a query, to be changed: the change is refused if somebody else has changed the query meanwhile. */
export function EditQuery({ args: [name] }) {
  const path = `/v1/queries/${encodeURIComponent(name)}`;
  const [found, problem] = useData(async () => { const reply = await get(path, [], { raw: true }); return { etag: reply.headers.get("etag"), detail: await reply.json(), streams: (await get("/v1/streams")).streams }; }, [name]);
  return html`<main id="main"><p class="crumbs"><a href="/ui/">Overview</a> › <a href=${`/ui/queries/${encodeURIComponent(name)}`}>${name}</a> › Edit</p><h1>Edit ${name} ${found && html`<small class="muted">version ${found.detail.version}</small>`}</h1><${Problem} error=${problem} />
    ${found && html`<${Form} first=${yaml(found.detail.spec)} streams=${found.streams} path=${path} etag=${found.etag} />`}</main>`;
}

function Form({ first, streams, path, etag }) {
  const [functions] = useData(() => get("/v1/functions").then((d) => d.functions), []);
  const [text, setText] = useState(first);
  const [language, setLanguage] = useState("yaml");
  const [at, setAt] = useState(null);
  const [accepted, setAccepted] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const [done, setDone] = useState(null);
  const editor = useRef(null);
  useEffect(() => live.close(), []);
  // What the center said of an earlier text is not shown beside the present one, and is not registered in its place.
  const present = JSON.stringify([text, language, at]), checked = accepted?.of === present ? accepted.result : null;
  const put = (dry, given) => send("PUT", url(path, [["at", at], ["dry_run", dry]]), given ? JSON.stringify(given) : text, { "Content-Type": given ? "application/json" : "application/yaml", "If-Match": etag });
  const check = async () => {
    const explained = language === "sql" ? await send("POST", "/v1/sql", `EXPLAIN ${text}`, SQL) : null;
    return path ? put(true, explained?.spec) : explained || send("POST", "/v1/queries?dry_run=true", text);
  };

  useEffect(() => {
    let stale = false;
    const timer = setTimeout(async () => {
      try {
        const result = await check();
        if (!stale) { setAccepted({ of: present, result }); setProblem(null); }
      } catch (error) {
        if (!stale) setProblem(error);
      }
    }, 400);
    return () => { stale = true; clearTimeout(timer); };
  }, [text, language, at]);

  const register = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      if (path) setDone(await put(null, language === "sql" ? checked.spec : null));
      else navigate(`/ui/queries/${encodeURIComponent((await (language === "sql" ? send("POST", "/v1/sql", text, SQL) : send("POST", "/v1/queries", text))).name)}`);
    } catch (error) {
      setProblem(error);
    }
    setBusy(false);
  };
  /** The other language has the same query, if the center accepts it. */
  const translate = (to) => {
    setText(to === "sql" ? (path ? checked.sql.replace("CREATE ", "CREATE OR REPLACE ") : checked.sql) : yaml(checked.spec));
    setLanguage(to);
  };
  const details = problem?.details, field = details?.field;
  const line = details ? badLine(text, language, details) : -1;
  const insert = (what) => {
    const box = editor.current, at = box.selectionStart;
    box.setRangeText(what, at, box.selectionEnd, "end");
    setText(box.value);
    box.focus();
  };
  if (done) return html`<section class="card" role="status" data-version=${done.version}><p>${done.name} has version ${done.version}${done.begins ? html`. It has the windows that start at <b>${f.time(done.begins)} UTC</b> or later; earlier windows keep the version before` : ""}.</p><p><a class="button primary" href=${`/ui/queries/${encodeURIComponent(done.name)}`}>Open it</a></p></section>`;
  return html`<div class="columns"><form onSubmit=${register} class="card">
    <fieldset class="choices"><legend class="sr">Language</legend>${[["yaml", "YAML or JSON"], ["sql", "SQL"]].map(([value, name]) => html`<label><input type="radio" name="language" value=${value} checked=${language === value} disabled=${language !== value && !checked} onChange=${() => translate(value)} /> ${name}</label>`)}</fieldset>
    <label for="spec">Query <small>checked while you write; Ctrl+Space completes</small></label>
    <${Editor} text=${text} setText=${setText} line=${line} bad=${Boolean(problem)} streams=${streams} functions=${functions || []} box=${editor} />
    <div id="verdict" role="status" data-checked=${problem ? "refused" : checked ? "accepted" : ""}>${problem && html`<div class="problem"><b>${field || details?.title || "Refused"}${line >= 0 ? `, line ${line + 1}` : ""}</b>
        ${details?.accepted ? html`: ${field && field !== "sql" && details.value !== undefined && details.value !== null ? html`<code>${String(typeof details.value === "string" ? details.value : JSON.stringify(details.value))}</code> is not accepted.` : ""}<br />Expected: ${details.accepted}${details.reason ? html`<br />${details.reason}` : ""}` : html`<br />${problem.message}`}</div>`}
      ${checked && !problem && (checked.refused ? html`<p class="problem">${checked.refused}</p>` : html`<p class="fine">${checked.registered ? "The same query is registered already." : "The center accepts it."}</p>`)}</div>
    ${path && html`<p><${When} label="Border" at=${at} set=${setAt} /> <small>Windows that start at the border or later have the new version, and earlier ones keep the old one. No answer is deleted. Empty: the next start of a window at least 10 s from now.</small></p>`}
    <p><button class="primary" disabled=${busy || !checked || Boolean(problem) || Boolean(checked.refused)}>${path ? "Change" : "Register"}</button></p></form>
    <div>${checked && html`<section class="card" aria-label="Edges"><h2>Edges</h2>${!checked.edges.length && html`<p class="late">No edge serves stream ${checked.spec.from}: the query would wait for one.</p>`}
      <ul class="plain">${checked.edges.map((e) => html`<li><span class=${`badge ${e.accepted ? "ok" : e.accepted === null ? "" : "bad"}`}>${e.accepted ? "would answer" : e.accepted === null ? "unknown" : "would refuse"}</span> ${e.edge}${e.message && html`<br /><small>${e.message}</small>`}</li>`)}</ul>
      <h2>Size of a group <small>in a frame, about; sparse synopses grow</small></h2><table><tbody>${Object.entries(checked.entry_bytes).map(([m, n]) => html`<tr><th scope="row">${m}</th><td class="n">${f.bytes(n)}</td></tr>`)}
        <tr><th scope="row">together</th><td class="n"><b>${f.bytes(Object.values(checked.entry_bytes).reduce((a, b) => a + b, 0))}</b></td></tr></tbody></table>
      ${checked.notes.length > 0 && html`<h2>Notes</h2><ul>${checked.notes.map((n) => html`<li>${n}</li>`)}</ul>`}</section>`}
    <details class="card" open><summary>Streams</summary>${(streams || []).map((s) => html`<h3>${s.stream} <small>${s.edges.join(", ") || "no edge"}; ${f.records(s.records)}</small></h3><p class="chips">${s.columns.map((c) => html`<button type="button" class="chip" title=${`insert ${c.name}`} onClick=${() => insert(c.name)}>${c.name} <small>${c.type}</small></button>`)}</p>`)}
      ${streams && !streams.length && html`<p class="empty">No edge has connected.</p>`}</details>
    <details class="card"><summary>Functions</summary><table><thead><tr><th>Function</th><th>Interval</th><th>Error budget</th></tr></thead><tbody>${(functions || []).map((g) => html`<tr><th scope="row"><button type="button" class="link" onClick=${() => insert(`${g.name}()`)}>${g.name}</button> <small>${g.parameters.map((p) => p.name).join(", ")}</small></th><td>${g.interval || f.UNKNOWN}</td><td>${g.error_budget ? "yes" : "no"}</td></tr>`)}</tbody></table></details></div></div>`;
}
