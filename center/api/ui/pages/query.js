// One query: a value over its windows with its band, and the last answer's groups.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { download, get, live, send, url } from "../api.js";
import { BandChart, PointTable, Series, zoomed } from "../chart.js";
import * as f from "../format.js";
import { MOST, loadWindows, nothing, readZoom, take as added, widest, byNeed } from "../windows.js";
import { Bars, Completeness, Confirm, Contract, Interval, Phase, Problem, Staleness, When, seconds, navigate, setSearch, useData, useThrottled } from "../parts.js";

const SHOWN_GROUPS = 25;
const AGAIN_MS = 5000;
const written = (group) => (group ? JSON.stringify(group) : null);
const EVERY = ["1h", "day", "week", "month", "quarter", "year"];

export function QueryPage({ args: [name], search }) {
  const path = `/v1/queries/${encodeURIComponent(name)}`;
  const asked = useMemo(() => new URLSearchParams(search), []);
  const [detail, problem] = useData(() => get(path), [name], 5000);
  const [choice, setChoice] = useState({ measure: asked.get("measure"), group: written(f.readGroup(asked.getAll("group"))), value: asked.get("value"), confidence: asked.get("confidence") || "",
    start: asked.get("start"), end: asked.get("end"), every: asked.get("every") || "", zone: asked.get("zone") || "", version: asked.get("version"), unit: asked.get("unit") });
  const latest = useRef(null);
  const kept = useRef(readZoom(asked.get("zoom")));
  const series = useRef(new Series());
  const held = useRef([]);
  const [failure, setFailure] = useState(null);
  const redraw = useThrottled();
  const measures = detail ? Object.keys(detail.spec.measures) : [];
  const measure = choice.measure && measures.includes(choice.measure) ? choice.measure : measures[0];

  const choose = (changes) => { setChoice({ ...choice, ...changes }); setSearch(changes); };
  const questions = [...(choice.confidence ? [["confidence", choice.confidence]] : [])];
  // The group is that of the address, or the one with the widest interval when the page opens.
  const chosen = useRef(choice.group === null ? null : JSON.parse(choice.group));
  const take = (answer) => {
    if (choice.version && !choice.every && String(answer.version) !== choice.version) return;
    if (!latest.current || answer.window.start >= latest.current.window.start) latest.current = answer;
    // Until the windows are loaded, only these choose the group: a line is of one group.
    if (!chosen.current && series.current.loaded) chosen.current = widest(answer, measure);
    const start = Date.parse(answer.window.start);
    if (!choice.every && !(start < Date.parse(choice.start)) && !(start >= Date.parse(choice.end))) {
      series.current.answered ||= 1;
      if (chosen.current) added(series.current, answer, { measure, value: choice.value }, chosen.current);
    }
    series.current.keepLast(MOST);
    series.current.open = choice.every ? null : opened(series.current, held.current);
    redraw();
  };

  useEffect(() => {
    if (!measure) return undefined;
    series.current = new Series();
    series.current.zoom = kept.current;
    kept.current = null;
    latest.current = null;
    setFailure(null);
    chosen.current = choice.group === null ? null : JSON.parse(choice.group);
    live.open(url(`${path}/live`, [...questions, ["changes", "true"]]), {
      answer: take,
      progress(data) {
        held.current = data.queries[0]?.edges || [];
        series.current.open = choice.every ? null : opened(series.current, held.current);
        redraw();
      },
      gap() { const last = series.current.points.at(-1); if (last) series.current.gaps.push(last.end); redraw(); },
    });
    const mine = series.current;
    const load = () => loadWindows(path, { ...choice, measure }, chosen.current, questions, mine, () => mine === series.current, redraw).then((group) => {
      if (mine !== series.current) return;
      chosen.current = group;
      mine.loaded = true;
      if (latest.current) take(latest.current);
      mine.open = choice.every ? null : opened(mine, held.current);
      setFailure(null);
      redraw();
    }, (error) => { mine.loaded = true; if (mine === series.current) setFailure(error); });
    load();
    const timer = choice.every ? setInterval(() => document.hidden || load(), AGAIN_MS) : 0; // no stream has intervals
    return () => { clearInterval(timer); live.close(); };
  }, [name, measure, choice.group, choice.value, choice.confidence, choice.start, choice.end, choice.every, choice.zone, choice.version]);

  const zoom = (range) => { series.current.zoom = range; setSearch({ zoom: range ? range.map(seconds).join("_") : null }); redraw(); };
  /** Of an interval, the windows; of a window, the reasons. */
  const opens = (p) => (choice.every ? url(`/ui/queries/${encodeURIComponent(name)}`, [["measure", measure], ["group", JSON.stringify(group)], ["start", seconds(p.start / 1000)], ["end", seconds(p.end / 1000)]]) : explained(p));

  const answer = latest.current;
  const group = chosen.current || {};
  const isRatio = measure && detail.spec.measures[measure].includes("/");
  const unit = isRatio ? choice.unit || (f.isShare(answer, measure) ? "percent" : "plain") : "plain";
  const writes = (m) => f.writer(answer, m, m === measure ? unit : null);
  series.current.write = writes(measure);
  const explained = (p) => url(`/ui/queries/${encodeURIComponent(name)}/${p.startText || new Date(p.start).toISOString()}`, [["measure", measure], ...f.groupParams(group)]);
  const valueNames = answer ? f.values(answer, measure, answer.data[0]).map((v) => v.name) : [];
  return html`<main id="main"><div class="title"><h1>${name}</h1>
      ${answer && html`<${Phase} phase=${answer.phase} revision=${answer.revision} /><${Completeness} quality=${answer.quality} /><${Contract} contract=${answer.contract} />`}<span class="space"></span>
      <${Share} address=${() => shared(name, measure, chosen.current)} />
      <a class="button" href=${`/ui/dashboard?add=${encodeURIComponent(shared(name, measure, chosen.current).slice("/ui/queries/".length))}`}>Add to dashboard</a>
      <a class="button" href=${`/ui/budget/${encodeURIComponent(name)}`}>Budget</a> <a class="button" href=${`/ui/edit/${encodeURIComponent(name)}`}>Edit</a> <${Delete} name=${name} path=${path} /></div>
    <${Problem} error=${problem || failure} />
    ${detail && html`<${Spec} detail=${detail} />`}
    <form class="choices card" onSubmit=${(e) => e.preventDefault()}>
      <label>Measure <select value=${measure} onChange=${(e) => choose({ measure: e.target.value, value: null })}>${measures.map((m) => html`<option value=${m}>${m} = ${detail.spec.measures[m]}</option>`)}</select></label>
      ${valueNames.length > 1 && html`<label>Value <select value=${choice.value || valueNames[0]} onChange=${(e) => choose({ value: e.target.value })}>${valueNames.map((v) => html`<option value=${v}>${v || measure}</option>`)}</select></label>`}
      ${answer && Object.keys(group).length > 0 && html`<label>Group <select value=${JSON.stringify(group)} onChange=${(e) => choose({ group: e.target.value })}>${groupsOf(answer, group).map((g) => html`<option value=${JSON.stringify(g)}>${f.group(g)}</option>`)}</select></label>`}
      ${isRatio && html`<label>Unit <select value=${unit} onChange=${(e) => choose({ unit: e.target.value })}><option value="percent">percent</option><option value="plain">plain number</option></select></label>`}
      ${detail?.versions.length > 1 && !choice.every && html`<label>Version <select value=${choice.version || ""} onChange=${(e) => choose({ version: e.target.value || null })}><option value="">all</option>${[...detail.versions].reverse().map((v) => html`<option value=${v.version}>${v.version}</option>`)}</select></label>`}
      <label>Confidence <select value=${choice.confidence} onChange=${(e) => choose({ confidence: e.target.value })}><option value="">as registered</option>${["0.9", "0.95", "0.99"].map((c) => html`<option value=${c}>${f.percent(Number(c))}</option>`)}</select></label>
      <${When} label="From" at=${choice.start} set=${(start) => choose({ start })} /><${When} label="To" at=${choice.end} set=${(end) => choose({ end })} />
      <label>Roll up <select value=${choice.every} onChange=${(e) => choose({ every: e.target.value })}><option value="">no: windows</option>${[...new Set([...EVERY, choice.every].filter(Boolean))].map((e) => html`<option value=${e}>every ${e}</option>`)}</select></label>
      ${choice.every && html`<${Zone} zone=${choice.zone} set=${(zone) => choose({ zone })} />`}
      ${answer && html`<span class="muted">${f.confidence(answer)}</span>`}
    </form>
    <section class="card" aria-label="Chart"><h2>${measure}${choice.value ? ` ${choice.value}` : ""} <small>${chosen.current ? f.group(group) : ""}</small></h2>${series.current.listed && html`<p>${nothing(series.current, measure, group)} The newest lists are below.</p>`}
      <div class="zoom" role="group" aria-label="Zoom"><button onClick=${() => zoom(zoomed(series.current, 0.5))}>Zoom in</button> <button disabled=${!series.current.zoom} onClick=${() => zoom(zoomed(series.current, 2))}>Zoom out</button>
        <button disabled=${!series.current.zoom} onClick=${() => zoom(zoomed(series.current, 1, -0.5))}>Earlier</button> <button disabled=${!series.current.zoom} onClick=${() => zoom(zoomed(series.current, 1, 0.5))}>Later</button>
        <button disabled=${!series.current.zoom} onClick=${() => zoom(null)}>All</button> <small class="muted">${series.current.zoom ? `${f.time(seconds(series.current.zoom[0]))} … ${f.time(seconds(series.current.zoom[1]))}` : "or drag over the chart"}${series.current.byStart.size >= MOST ? `; the first ${f.number(MOST)} windows of the range` : ""}</small></div>
      <${BandChart} onZoom=${zoom} series=${series.current} label=${`${measure} of ${f.group(group)}, ${series.current.byStart.size} windows`} onPick=${(p) => navigate(opens(p))} />
      <p class="legend"><span>times in UTC</span><span>◇ early</span><span>◼ complete</span><span>● final</span><span class="unknown">? bounds unknown</span>${series.current.open && html`<span class="dashed">dashed: open window${waitsFor(held.current, series.current.open)}</span>`}</p></section>
    <${PointTable} series=${series.current} href=${opens} text=${choice.every ? "windows" : "explain"} empty=${series.current.loaded ? nothing(series.current, measure, chosen.current) : "The windows are being loaded."} />
    ${detail?.versions.length > 1 && html`<${Versions} path=${path} versions=${detail.versions} chosen=${choice.version} choose=${choose} />`}
    ${answer && html`<${Groups} answer=${answer} measures=${measures} choose=${choose} current=${group} writes=${writes} grouped=${detail.spec.group_by?.length > 0} />`}
    ${answer && html`<${Lists} answer=${answer} measures=${measures} />`}
    ${answer && html`<${Exports} path=${path} name=${name} measure=${measure} group=${group} questions=${questions} series=${series.current} />`}
  </main>`;
}

/** The address of what is shown, also of a group that was not chosen by hand. */
function shared(name, measure, group) {
  const search = new URLSearchParams(location.search);
  if (measure) search.set("measure", measure);
  if (group && Object.keys(group).length) search.set("group", JSON.stringify(group));
  return `/ui/queries/${encodeURIComponent(name)}?${search}`;
}

/** The time zone of intervals. What is being typed has its own state: the page is drawn again with each answer. */
function Zone({ zone, set }) {
  const [text, setText] = useState(zone);
  return html`<label>Zone <input list="zones" size="16" placeholder="UTC" value=${text} onInput=${(e) => setText(e.target.value)} onChange=${(e) => set(e.target.value.trim())} /></label><datalist id="zones">${Intl.supportedValuesOf("timeZone").map((z) => html`<option value=${z} />`)}</datalist>`;
}

function Share({ address }) {
  const [said, setSaid] = useState("");
  const copy = () => { const text = location.origin + address(); const shown = () => setSaid(text); return navigator.clipboard ? navigator.clipboard.writeText(text).then(() => setSaid("copied"), shown) : shown(); };
  return html`<span role="status" class="muted">${said}</span><button onClick=${copy}>Copy link</button>`;
}

function Delete({ name, path }) {
  const act = () => send("DELETE", path, null, {}).then(() => navigate("/ui/"));
  return html`<${Confirm} label="Delete" title=${`Delete ${name}?`} text="All its versions and all their answers are deleted. This cannot be undone." keep="Keep it" yes="Delete the query and its answers" act=${act} />`;
}

const SHOWN_VERSIONS = 10;
const plain = (value) => (value === undefined ? "nothing" : typeof value === "string" ? value : f.plain(value));

/** The newest versions of a query, their windows, and what each has changed. */
function Versions({ path, versions, chosen, choose }) {
  const shown = versions.slice(-SHOWN_VERSIONS);
  const [specs] = useData(() => Promise.all(shown.map((v) => get(path, [["version", v.version]]).then((d) => d.spec))), [shown.at(-1).version]);
  const changes = (i) => (specs && i > 0 ? [...new Set([...Object.keys(specs[i - 1]), ...Object.keys(specs[i])])].filter((k) => k !== "until" && plain(specs[i - 1][k]) !== plain(specs[i][k])) : []);
  return html`<details class="card" open><summary>Versions <small>${shown.length} of ${versions.length}</small></summary><div class="scroll"><table aria-label="Versions"><thead><tr><th>Version</th><th>Windows from (UTC)</th><th>until (UTC)</th><th>Changed</th><th></th></tr></thead>
    <tbody>${shown.map((v, i) => [v, i]).reverse().map(([v, i]) => html`<tr key=${v.version} data-version=${v.version}><th scope="row">${v.version}</th><td>${v.begins ? f.time(v.begins) : "all"}</td><td>${v.until ? f.time(v.until) : "no end"}</td>
      <td>${changes(i).map((k) => html`<div><b>${k}</b> <del>${plain(specs[i - 1][k])}</del> <ins>${plain(specs[i][k])}</ins></div>`)}${Object.entries(v.tables).map(([table, number]) => html`<div class="muted">table ${table}, version ${number}</div>`)}</td>
      <td><button aria-pressed=${chosen === String(v.version) ? "true" : "false"} onClick=${() => choose({ every: "", version: chosen === String(v.version) ? null : String(v.version) })}>${chosen === String(v.version) ? "Show all" : "Show only this"}<span class="sr"> version ${v.version}</span></button></td></tr>`)}</tbody></table></div></details>`;
}

function groupsOf(answer, current) {
  const groups = answer.data.map((r) => r.group).slice(0, 500);
  return groups.some((g) => JSON.stringify(g) === JSON.stringify(current)) ? groups : [current, ...groups];
}

/** The window after the last answered one, if an edge has got into it. */
function opened(series, edges) {
  const last = series.points.at(-1);
  if (!last) return null;
  const marks = edges.map((e) => e.watermark).filter(Boolean).map(Date.parse);
  const size = last.end - last.start;
  return marks.some((m) => m >= last.end) || last.phase === "early" ? { start: last.phase === "early" ? last.start : last.end, end: (last.phase === "early" ? last.start : last.end) + size } : null;
}

/** Whom the open window waits for; if all edges are past it, their frames are on the way, or it has no records. */
function waitsFor(edges, open) {
  const behind = edges.filter((e) => !e.ended && (!e.watermark || Date.parse(e.watermark) < open.end));
  if (!behind.length) return edges.length ? ", all edges are past its end: it gets an answer if it has records" : "";
  const shown = behind.sort((a, b) => ((a.watermark || "") < (b.watermark || "") ? -1 : 1)).slice(0, 3);
  return `, waits for ${shown.map((e) => (e.watermark ? `${e.edge} (at ${f.time(e.watermark)})` : e.edge)).join(", ")}${behind.length > 3 ? ", …" : ""}`;
}

function Spec({ detail }) {
  const s = detail.spec;
  const facts = [["from", s.from], ["lookup", s.lookup && Object.entries(s.lookup).map(([table, l]) => `${table} by ${f.plain(l.key)}, version ${l.version}`).join("; ")], ["where", s.where], ["group by", s.group_by?.map(f.groupColumn).join(", ")], ["window", f.plain(s.window)], ["budget", s.budget && f.plain(s.budget)],
    ["accuracy", s.accuracy && f.plain(s.accuracy)], ["lateness", s.lateness], ["version", detail.version], ["begins", detail.begins && f.time(detail.begins)], ["ends", detail.until && f.time(detail.until)]].filter(([, v]) => v);
  return html`<dl class="facts">${facts.map(([k, v]) => html`<div><dt>${k}</dt><dd>${v}</dd></div>`)}</dl>
    ${detail.alarms.length > 0 && html`<section class="card alarm"><h2>Alarms about this query</h2><ul>${detail.alarms.slice(0, 5).map((a) => html`<li><b>${a.kind}</b> ${a.message}</li>`)}</ul></section>`}
    ${detail.after_final > 0 && html`<p class="problem">${f.number(detail.after_final)} records came for windows when these were final, and are in no answer.</p>`}
    ${detail.rejected > 0 && html`<p class="problem">${f.number(detail.rejected)} records were rejected by their sources, and are in no answer.</p>`}
    ${detail.guessed > 0 && html`<p class="problem">${f.number(detail.guessed)} records were counted, or left out, on a guess of their edge.</p>`}`;
}

/** The groups of an answer, by what is needed first, by name, or by a measure's first value; unknown ones last. */
function sorted(answer, rows, measures, by) {
  if (by.name === "") return byNeed({ ...answer, data: rows }, measures);
  const value = (r) => f.values(answer, by.name, r)[0]?.estimate ?? null;
  const keyed = rows.map((r) => [by.name === "group" ? f.group(r.group) : value(r), r]);
  const sign = by.down ? -1 : 1;
  keyed.sort(([a], [b]) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign));
  return keyed.map(([, r]) => r);
}

function Groups({ answer, measures, choose, current, writes, grouped }) {
  const [most, setMost] = useState(SHOWN_GROUPS);
  const asked = new URLSearchParams(location.search), order0 = asked.get("sort") || "-";
  const [wanted, setWanted] = useState(asked.get("find") || "");
  const [by, setBy] = useState({ name: order0.replace(/^-/, ""), down: order0[0] === "-" });
  useEffect(() => setSearch({ find: wanted, sort: by.name && `${by.down ? "-" : ""}${by.name}` }), [wanted, by]);
  const found = useMemo(() => answer.data.filter((r) => f.group(r.group).toLowerCase().includes(wanted.trim().toLowerCase())), [answer, wanted]);
  const rows = useMemo(() => sorted(answer, found, measures, by), [found, measures.join(), by]);
  const here = JSON.stringify(current);
  const head = (name, text, down) => html`<th aria-sort=${by.name !== name ? "none" : by.down ? "descending" : "ascending"}><button class="quiet" onClick=${() => setBy(by.name === name ? (by.down === down ? { name, down: !down } : { name: "", down: true }) : { name, down })}
    title="Sort; a third click: the widest intervals, then the largest values first">${text}<span aria-hidden="true">${by.name !== name ? "" : by.down ? " ▼" : " ▲"}</span></button></th>`;
  const order = by.name === "" ? "the widest intervals, then the largest values first" : `by ${by.name}, ${by.down ? "descending" : "ascending"}`;
  return html`<section class="card flush" aria-label="Groups"><h2>Window ${f.time(answer.window.start)} UTC <small>${wanted ? `${f.number(found.length)} of ` : ""}${f.number(answer.data.length)} groups, ${order}; staleness <${Staleness} answer=${answer} /></small></h2>
    ${answer.data.length > 1 && html`<p><input type="search" aria-label="Search groups" placeholder="Search groups" value=${wanted} onInput=${(e) => setWanted(e.target.value)} /></p>`}
    <div class="scroll"><table><thead><tr>${head("group", "Group", false)}${measures.map((m) => head(m, m, true))}</tr></thead>
    <tbody>${rows.slice(0, most).map((r) => html`<tr key=${JSON.stringify(r.group)} class=${JSON.stringify(r.group) === here ? "current" : ""}><th scope="row">
      <button class="link" onClick=${() => choose({ group: JSON.stringify(r.group) })} title="Draw this group">${f.group(r.group)}</button></th>
      ${measures.map((m) => html`<td>${f.values(answer, m, r).slice(0, 4).map((v) => html`<div>${v.name && html`<small>${v.name} </small>`}<${Interval} value=${v} write=${writes(m)} /></div>`)}${f.list(answer, m, r) && html`<small>${f.list(answer, m, r).entries.length} ${f.list(answer, m, r).kind}</small>`}</td>`)}</tr>`)}
    ${!answer.data.length && html`<tr><td colspan=${measures.length + 1} class="empty">${unsent(answer)}</td></tr>`}
    ${answer.data.length > 0 && !rows.length && html`<tr><td colspan=${measures.length + 1} class="empty">No group matches.</td></tr>`}</tbody>
    ${grouped && html`<tfoot><tr><th scope="row">All groups</th>${measures.map((m) => html`<td><${Total} answer=${answer} measure=${m} write=${writes(m)} /></td>`)}</tr></tfoot>`}</table></div>
    ${rows.length > most && html`<p><button onClick=${() => setMost(most + 200)}>Show ${Math.min(200, rows.length - most)} more of ${f.number(rows.length)}</button></p>`}</section>`;
}

/** Why an answer has no group. */
function unsent(answer) {
  const held = Object.entries(answer.rest || {}).filter(([, amount]) => amount);
  if (held.length) return `Edges withhold every group under the budget: ${held.map(([m, amount]) => `${m} ${f.number(amount)}`).join(", ")} in no group.`;
  return "Edges have sent no group of the window.";
}

/** A measure over all groups, and the share of it that edges withhold, so that no group has it. */
function Total({ answer, measure, write }) {
  const total = answer.total[measure], rest = answer.rest[measure];
  if (!total) return null;
  return html`<${Interval} value=${total} write=${write} />${rest && total.estimate ? html`<br /><small>${f.percent(rest / total.estimate)} in no group</small>` : ""}`;
}

/** Top items, buckets of a histogram and the like of the first groups: bars with whiskers, and the values as text. */
function Lists({ answer, measures }) {
  const shown = measures.flatMap((m) => answer.data.slice(0, 3).map((r) => [m, r.group, f.list(answer, m, r)])).filter(([, , l]) => l && l.entries.length);
  return shown.map(([m, g, { kind }]) => html`<section class="card" aria-label=${`${m}, ${kind}`}><h2>${m} <small>${kind} of ${f.group(g)}</small></h2><${Bars} answer=${answer} measure=${m} group=${g} /></section>`);
}

function Exports({ path, name, measure, group, questions, series }) {
  const [copied, setCopied] = useState(""), [said, setSaid] = useState("");
  const points = series.points;
  const range = points.length ? [["start", new Date(points[0].start).toISOString()], ["end", new Date(points.at(-1).start + 1).toISOString()]] : [];
  const params = [...range, ["limit", 1000], ["measure", measure], ...f.groupParams(group), ...questions];
  const labels = Object.entries(group).map(([k, v]) => `${k}=${JSON.stringify(String(v))}`).join(",");
  const texts = [
    ["curl", `curl -H "Authorization: Bearer $EDGEWATER_TOKEN" '${location.origin}${url(`${path}/windows`, [...params, ["format", "csv"]]).replaceAll("'", "%27")}'`],
    ["PromQL", `${name}:${measure}${labels ? `{${labels}}` : ""}`],
    ["Python", `from edgewater.client import Center\nCenter("${location.origin}").query(${JSON.stringify(name)}).latest()`],
  ];
  const save = (format, ending) => download(`${path}/windows`, [...params, ["format", format]], `${name}.${ending}`).then(
    (whole) => setSaid(whole ? "" : "The file has only the first of these windows: the answers are too large for one. The Python client reads all."),
    (error) => setSaid(`The download failed: ${error.message}`));
  return html`<details class="card"><summary>Take it elsewhere</summary><p><button onClick=${() => save("csv", "csv")}>CSV</button> <button onClick=${() => save("arrow", "arrows")}>Arrow</button> of these windows</p><p class="problem" role="status">${said}</p>
    ${texts.map(([what, text]) => html`<div class="snippet"><b>${what}</b><pre>${text}</pre><button class="quiet" onClick=${() => navigator.clipboard.writeText(text).then(() => setCopied(what))}>${copied === what ? "copied" : "copy"}</button></div>`)}</details>`;
}
