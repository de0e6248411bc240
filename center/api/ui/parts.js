// Small parts that several pages share.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { center, events, get } from "./api.js";
import * as f from "./format.js";

export function navigate(href) {
  history.pushState(null, "", href);
  dispatchEvent(new PopStateEvent("popstate"));
  scrollTo(0, 0);
}

/** Changes the search part of the address without a new entry in the history. */
export function setSearch(changes) {
  const search = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes))
    if (value === null || value === "") search.delete(name);
    else search.set(name, value);
  history.replaceState(null, "", `${location.pathname}${search.size ? `?${search}` : ""}`);
}

export const Link = ({ children, ...rest }) => html`<a ...${rest}>${children}</a>`;

/** When the center was heard last, if it does not answer now; null: it answers. */
export function useLost() {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    events.addEventListener("reached", changed);
    return () => events.removeEventListener("reached", changed);
  }, []);
  return center.lostSince;
}

export const lostText = (since) => `not reachable since ${f.time(new Date(since).toISOString().slice(0, 19) + "Z")}`;

/** A state as the center gives it now: grey, and without the state, while the center is not reachable. */
export function State({ kind, title, children }) {
  const lost = useLost();
  if (lost !== null) return html`<span class="badge" data-lost>${lostText(lost)}</span>`;
  return html`<span class=${`badge ${kind}`} title=${title || ""}>${children}</span>`;
}

const PHASES = { early: ["◇", "early"], complete: ["◼", "complete"], final: ["●", "final"] };
export function Phase({ phase, revision }) {
  const [shape, word] = PHASES[phase];
  return html`<span class=${`badge phase-${phase}`}><span aria-hidden="true">${shape}</span> ${word}${revision > 1 ? html` <small>rev. ${revision}</small>` : ""}</span>`;
}

export function Completeness({ quality }) {
  const c = quality.completeness;
  const lacking = [...c.missing, ...(c.left || [])];
  const title = lacking.length ? `records of ${lacking.join(", ")} may be missing` : [c.after_final && `${c.after_final} records came when it was final`, c.rejected && `sources rejected ${c.rejected} records`, c.guessed && `edges guessed: ${Object.entries(c.guessed).map(([reason, n]) => `${reason} ${n}`).join(", ")}`].filter(Boolean).join("; ") || "every expected edge";
  const delivery = Object.entries(c.delivery || {}).map(([edge, each]) => `${edge} counts ${each.join(", ")}`);
  return html`<span class=${`badge ${c.ratio >= 1 ? "ok" : "warn"}`} title=${[title, ...delivery].join("; ")}>${c.reported}/${c.expected}<span class="sr"> edges</span>${lacking.length ? html` <small>without ${lacking.slice(0, 2).join(", ")}${lacking.length > 2 ? ", …" : ""}</small>` : ""}${c.rejected ? html` <small>${f.number(c.rejected)} rejected</small>` : ""}${c.guessed ? html` <small>${f.number(Object.values(c.guessed).reduce((sum, n) => sum + n, 0))} on a guess</small>` : ""}${delivery.length ? html` <small>${[...new Set(Object.values(c.delivery).flat())].sort().join(", ")}</small>` : ""}</span>`;
}

export function Contract({ contract }) {
  const allows = contract.may_change ? "late records may follow, and the bounds allow for them" : undefined;
  if (contract.met) return html`<${State} kind="ok" title=${allows}>${allows && contract.requested.exact ? "met; may change" : "met"}<//>`;
  const text = contract.violations.map((v) => v.message).join("\n");
  return html`<${State} kind="bad" title=${text}>${contract.violations.map((v) => v.code).join(", ")}<//>`;
}

/** How old an answer is. A budget applies to the window's first answer, so only that one is compared with it. */
export function Staleness({ answer }) {
  const { staleness_ms: age, first_staleness_ms: first } = answer.quality;
  const budget = answer.contract.requested.staleness_ms;
  if (budget === undefined) return f.duration(age);
  const title = `The budget of ${f.duration(budget)} applies to the first answer to the window, which came ${f.duration(first)} after its end.`;
  return html`<span class=${first > budget ? "late" : ""} title=${title}>${f.duration(first)} <small>of ${f.duration(budget)}</small></span>${
    age !== first && html`<br /><small class="muted">this revision ${f.duration(age)}</small>`}`;
}

export const Interval = ({ value, write }) => html`<span class="interval"><b>${f.estimate(value, write)}</b> <small class=${value && value.lower === null ? "unknown" : ""}>${f.interval(value, write)}</small></span>`;

/** The first entries of a list: bars, and the values as text. */
export function Bars({ answer, measure, group, most = 20 }) {
  const { entries } = f.list(answer, measure, f.rowOf(answer.data, group)), first = entries.slice(0, most), largest = Math.max(...first.map((e) => e.upper ?? e.estimate ?? 0), 1e-9);
  return html`<table class="bars"><tbody>${first.map((e, i) => html`<tr>
    <th scope="row">${f.entry(e, i)}</th>
    <td><span class="bar"><i style=${`width:${Math.max(0, (100 * (e.estimate ?? 0)) / largest)}%`}></i></span></td><td class="n"><${Interval} value=${e} /></td></tr>`)}</tbody></table>`;
}

export const Problem = ({ error }) => error && html`<p class="problem" role="alert">${error.message || String(error)}</p>`;

/** A button that asks before it acts. `act` returns a promise; what it fails of is shown. */
export function Confirm({ label, title, text, keep, yes, act }) {
  const dialog = useRef(null);
  const [failure, setFailure] = useState(null);
  const run = () => act().then(() => dialog.current?.close(), setFailure);
  return html`<button onClick=${() => dialog.current.showModal()}>${label}</button><dialog ref=${dialog} class="card" aria-label=${title}><h2>${title}</h2>
    <p>${text}</p><${Problem} error=${failure} />
    <p><button autofocus onClick=${() => dialog.current.close()}>${keep}</button> <button class="danger" onClick=${run}>${yes}</button></p></dialog>`;
}

export const seconds = (s) => new Date(Math.round(s) * 1000).toISOString().replace(".000", "");

/** A time in UTC; empty: null. */
export function When({ label, at, set }) {
  const ms = Date.parse(at);
  const changed = (e) => set(e.target.value ? seconds(Date.parse(`${e.target.value}Z`) / 1000) : null);
  return html`<label>${label} <small>UTC</small> <input type="datetime-local" step="1" aria-label=${`${label}, UTC`} value=${Number.isNaN(ms) ? "" : new Date(ms).toISOString().slice(0, 19)} onChange=${changed} /></label>`;
}

/** Loads data, again every `every` ms, and when `keys` change. @returns {[any, any, Function]} */
export function useData(load, keys, every = 0) {
  const [state, setState] = useState([null, null]);
  const latest = useRef(null);
  const run = () => {
    const mine = (latest.current = {});
    return load().then((data) => mine === latest.current && setState([data, null]),
                       (error) => mine === latest.current && setState(([old]) => [old, error]));
  };
  useEffect(() => {
    run();
    const timer = every ? setInterval(() => document.hidden || run(), every) : 0;
    return () => { latest.current = null; clearInterval(timer); };
  }, keys);
  return [state[0], state[1], run];
}

export const useQueries = () => useData(() => get("/v1/queries").then((d) => d.queries), [], 10000);

/** Calls back at most ten times a second. */
export function useThrottled() {
  const [, again] = useState(0);
  const timer = useRef(0), last = useRef(-Infinity);
  useEffect(() => () => clearTimeout(timer.current), []);
  return () => {
    if (timer.current) return;
    const draw = () => { timer.current = 0; last.current = performance.now(); again((n) => n + 1); };
    timer.current = setTimeout(draw, Math.max(0, last.current + 100 - performance.now()));
  };
}

/** A line with its band as SVG: unknown bounds break the band. */
export function Sparkline({ points, label }) {
  const known = points.filter((p) => p.estimate !== null);
  if (known.length < 2) return html`<span class="muted">${known.length ? "one number" : "–"}</span>`;
  const [w, h] = [132, 30];
  const all = known.flatMap((p) => [p.estimate, p.lower, p.upper].filter((x) => x !== null));
  const [lo, hi] = [Math.min(...all), Math.max(...all)];
  const x = (i) => (2 + (i * (w - 4)) / (known.length - 1)).toFixed(1);
  const y = (v) => (hi === lo ? h / 2 : h - 3 - ((v - lo) * (h - 6)) / (hi - lo)).toFixed(1);
  const bands = [];
  let run = [];
  known.forEach((p, i) => {
    if (p.lower === null || p.upper === null) { if (run.length) bands.push(run); run = []; }
    else run.push([i, p]);
  });
  if (run.length) bands.push(run);
  return html`<svg class="spark" width=${w} height=${h} role="img" aria-label=${label}>
    ${bands.map((b) => html`<path class="band" d=${`M${b.map(([i, p]) => `${x(i)} ${y(p.upper)}`).join("L")}L${[...b].reverse().map(([i, p]) => `${x(i)} ${y(p.lower)}`).join("L")}Z`} />`)}
    <path class="line" d=${`M${known.map((p, i) => `${x(i)} ${y(p.estimate)}`).join("L")}`} />
    <circle cx=${x(known.length - 1)} cy=${y(known[known.length - 1].estimate)} r="2.4" class=${`dot ${known[known.length - 1].phase}`} />
  </svg>`;
}
