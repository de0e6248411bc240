// Several queries on one page. The address has its panels, each as the address of a query's page.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { get, live } from "../api.js";
import { BandChart, Series, zoomed } from "../chart.js";
import * as f from "../format.js";
import { Bars, Problem, navigate, useData, useQueries, useThrottled } from "../parts.js";
import { loadWindows, nothing, readZoom } from "../windows.js";

const KEY = "edgewater.dashboard";
const AGAIN_MS = 5000;
const address = (panels) => `/ui/dashboard${panels.length ? `?${new URLSearchParams(panels.map((p) => ["q", p]))}` : ""}`;

/** The panels of the address. Without any, those that this browser had last; `add` adds one to these. */
export function Dashboard({ search }) {
  const params = new URLSearchParams(search), shown = params.getAll("q"), added = params.get("add");
  const last = useMemo(() => new URLSearchParams(localStorage.getItem(KEY) || "").getAll("q"), [search]);
  const panels = shown.length || params.has("empty") ? shown : [...last, ...(added && !last.includes(added) ? [added] : [])];
  const [queries, problem] = useQueries();
  const [name, setName] = useState("");
  useEffect(() => live.close(), []);
  useEffect(() => {
    localStorage.setItem(KEY, address(panels).split("?")[1] || "");
    if (address(panels) !== location.pathname + location.search && panels.length) history.replaceState(null, "", address(panels));
  }, [search]);
  const show = (next) => navigate(next.length ? address(next) : "/ui/dashboard?empty");
  const add = (event) => { event.preventDefault(); const chosen = name || queries[0].name; show([...panels, encodeURIComponent(chosen)]); };
  return html`<main id="main"><div class="title"><h1>Dashboard</h1><span class="space"></span>
      ${queries?.length > 0 && html`<form class="choices" onSubmit=${add}><label>Query <select value=${name || queries[0].name} onChange=${(e) => setName(e.target.value)}>${queries.map((q) => html`<option value=${q.name}>${q.name}</option>`)}</select></label><button>Add</button></form>`}</div>
    <${Problem} error=${problem} />
    ${panels.length === 0 && html`<p class="empty">No query is on the dashboard. Add one here, or with <i>Add to dashboard</i> on its page: then with its measure, group and range. The address has them: share it, or keep it as a bookmark.</p>`}
    <div class="dashboard">${panels.map((p, i) => html`<${Panel} key=${p} panel=${p} remove=${() => show(panels.filter((_, n) => n !== i))} />`)}</div></main>`;
}

function Panel({ panel, remove }) {
  const [encoded, search = ""] = panel.split("?"), name = decodeURIComponent(encoded), asked = new URLSearchParams(search);
  const path = `/v1/queries/${encodeURIComponent(name)}`, series = useRef(new Series()), redraw = useThrottled();
  const [found, problem] = useData(async () => {
    const { spec } = await get(path), confidence = asked.get("confidence"), questions = confidence ? [["confidence", confidence]] : [];
    const measure = asked.get("measure") in spec.measures ? asked.get("measure") : Object.keys(spec.measures)[0];
    const choice = { measure, ...Object.fromEntries(["value", "start", "end", "every", "zone", "unit"].map((k) => [k, asked.get(k)])) };
    const next = new Series();
    next.zoom = series.current.points.length ? series.current.zoom : readZoom(asked.get("zoom"));
    const group = await loadWindows(path, choice, f.readGroup(asked.getAll("group")), questions, next, () => true, () => {});
    series.current = next;
    return { measure, group, every: choice.every };
  }, [panel], AGAIN_MS);
  const last = series.current.points.at(-1), href = `/ui/queries/${panel}`;
  const zoom = (range) => { series.current.zoom = range; redraw(); };
  return html`<section class="card" aria-label=${name} data-panel=${name} data-points=${series.current.byStart.size}><div class="title"><h2><a href=${href}>${name}</a> ${found && html`<small>${found.measure}${found.group ? `, ${f.group(found.group)}` : ""}${found.every ? `, every ${found.every}` : ""}</small>`}</h2><span class="space"></span>
      <button class="quiet" aria-label=${`Zoom in ${name}`} onClick=${() => zoom(zoomed(series.current, 0.5))}>+</button><button class="quiet" aria-label=${`Zoom out ${name}`} disabled=${!series.current.zoom} onClick=${() => zoom(zoomed(series.current, 2))}>−</button><button class="quiet" aria-label=${`Remove ${name}`} onClick=${remove}>✕</button></div>
    <${Problem} error=${problem} />
    ${last && html`<p>${f.time(last.start)}: <b>${f.estimate(last)}</b> <small>${f.interval(last)}, ${last.phase}</small></p>`}
    ${found && (last ? html`<${BandChart} series=${series.current} height=${200} onZoom=${zoom} onPick=${() => navigate(href)} label=${`${found.measure} of ${f.group(found.group ?? {})}, ${series.current.byStart.size} windows`} more=${`Open ${name} for a table.`} />` : html`<p class="empty">${nothing(series.current, found.measure, found.group)}</p>`)}
    ${series.current.listed && html`<${Bars} answer=${series.current.listed.answer} measure=${found.measure} group=${series.current.listed.group} most=${5} />`}</section>`;
}
