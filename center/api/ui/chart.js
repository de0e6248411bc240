// The band chart of one value over its windows, and the same as a table.
//
// A point per window: hollow (early), square (complete), disc (final). Unknown bounds break the band and are marked; they are never
// drawn as zero. The open window is dashed. A revision leaves a ghost of the old value for three seconds; a gap in the stream is a line.

import { html, useEffect, useRef } from "./vendor/preact.js";
import * as f from "./format.js";

const GHOST_MS = 3000;
const REDRAW_MS = 100;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** One value's windows, by start.
 * @typedef {{start: number, end: number, phase: string, revision: number, estimate: ?number, lower: ?number, upper: ?number, ratio: number, given: number}} Point */
export class Series {
  constructor() { this.byStart = new Map(); this.ghosts = []; this.gaps = []; this.open = null; this.zoom = null; this.answered = 0; this.write = f.number; this.ranged = false; this.listed = null; this.loaded = false; this.held = false; }

  /** @param {Point} point */
  add(point) {
    const old = this.byStart.get(point.start);
    if (old && old.revision >= point.revision) return;
    if (old && old.estimate !== point.estimate && old.estimate !== null) this.ghosts.push({ start: old.start, estimate: old.estimate, until: performance.now() + GHOST_MS });
    this.byStart.set(point.start, point);
  }

  /** How many versions of the query the points are of. */
  get versions() { return new Set([...this.byStart.values()].map((p) => p.version)).size; }

  get points() { return [...this.byStart.values()].sort((a, b) => a.start - b.start); }

  keepLast(n) {
    const extra = this.byStart.size - n;
    if (extra > 0) for (const p of this.points.slice(0, extra)) this.byStart.delete(p.start);
  }
}

/** @param {{series: Series, label: string, onPick: (p: Point) => void, tick: number}} props */
export function BandChart({ series, label, onPick, onZoom, height = 320, more = "The table below has the same values." }) {
  const box = useRef(null), plot = useRef(null), state = useRef({ timer: 0, last: 0 });
  state.current.series = series;
  state.current.onPick = onPick;
  state.current.onZoom = onZoom;

  const draw = () => {
    const s = state.current;
    s.timer = 0;
    s.last = performance.now();
    s.series.ghosts = s.series.ghosts.filter((g) => g.until > s.last);
    if (!plot.current) return;
    const points = (s.points = withBreaks(s.series.points));
    const bound = (p, name) => (p.lower === null || p.upper === null ? null : p[name]);
    plot.current.setData([points.map((p) => p.start / 1000), points.map((p) => p.estimate), points.map((p) => bound(p, "lower")), points.map((p) => bound(p, "upper"))]);
    if (s.series.ghosts.length) schedule(Math.max(REDRAW_MS, Math.min(...s.series.ghosts.map((g) => g.until)) - s.last));
  };
  const schedule = (after = 0) => {
    const s = state.current;
    const wait = Math.max(after, REDRAW_MS - (performance.now() - s.last), 0);
    const due = performance.now() + wait;
    if (s.timer && s.due <= due) return;
    clearTimeout(s.timer);
    s.due = due;
    s.timer = setTimeout(draw, wait);
  };

  useEffect(() => {
    const build = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(box.current.clientWidth || 600, height, state.current), [[], [], [], []], box.current);
      draw();
    };
    build();
    const size = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height }));
    size.observe(box.current);
    addEventListener("theme", build);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", build);
    return () => {
      size.disconnect();
      removeEventListener("theme", build);
      dark.removeEventListener("change", build);
      clearTimeout(state.current.timer);
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => schedule());
  return html`<div class="chart" ref=${box} role="img" style=${`min-height:${height}px`} aria-label=${`${label}. ${more}`} data-drawn=""></div>`;
}

/** The points, with an empty one wherever a window between two of them has no value: neither line nor band goes across. */
function withBreaks(points) {
  const result = [];
  for (const p of points) {
    const last = result.at(-1);
    if (last && p.start > last.end) result.push({ start: last.end, end: p.start, estimate: null, lower: null, upper: null, phase: "", revision: 0, ratio: null, given: 0 });
    result.push(p);
  }
  return result;
}

const two = (n) => String(n).padStart(2, "0");

/** Times of the axis in UTC: hours and minutes with the day below where it begins, or days with the year below. */
function ticks(_, seconds, __, ___, step) {
  let before = "";
  return seconds.map((t) => {
    const d = new Date(t * 1000), year = String(d.getUTCFullYear()), day = `${two(d.getUTCMonth() + 1)}-${two(d.getUTCDate())}`;
    const clock = `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}${step < 60 ? `:${two(d.getUTCSeconds())}` : ""}`;
    const [above, below] = step >= 86400 ? [day, year] : [clock, `${year}-${day}`];
    const first = below !== before;
    before = below;
    return first ? `${above}\n${below}` : above;
  });
}

function options(width, height, state) {
  const ink = css("--ink"), muted = css("--muted"), line = css("--line"), accent = css("--accent");
  const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
  return {
    width, height, legend: { show: false }, cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => state.onZoom?.(null) } }, tzDate: (t) => uPlot.tzDate(new Date(t * 1000), "Etc/UTC"),
    scales: {
      x: { range: (u, lo, hi) => reach(u, lo, hi, state) },
      y: { range: (u, lo, hi) => (lo === null ? [0, 1] : pad(lo, hi)) },
    },
    axes: [{ ...axis, space: 64, values: ticks }, { ...axis, size: 74, values: (_, ticks) => ticks.map((v) => (state.series.write === f.number ? f.short(v) : state.series.write(v))) }],
    series: [
      {},
      { label: "estimate", stroke: accent, width: 1.6, points: { show: false }, spanGaps: false },
      { label: "lower", stroke: accent, width: 0, points: { show: false }, spanGaps: false },
      { label: "upper", stroke: accent, width: 0, points: { show: false }, spanGaps: false },
    ],
    bands: [{ series: [3, 2], fill: css("--band") }],
    hooks: {
      draw: [(u) => { marks(u, state, { ink, muted, accent, warn: css("--warn"), bad: css("--bad"), paper: css("--card") }); u.root.parentElement.dataset.drawn = `${Date.now()}:${state.points?.length ?? 0}:${state.points?.at(-1)?.given ?? 0}`; }],
      setCursor: [(u) => tip(u, state)],
      setSelect: [(u) => dragged(u, state)],
      ready: [(u) => { u.over.addEventListener("mousedown", () => { state.dragged = false; }); u.over.addEventListener("click", () => { const p = state.points?.[u.cursor.idx]; if (p && p.revision && !state.dragged) state.onPick?.(p); state.dragged = false; }); }],
    },
  };
}

/** Zooms to the part that was selected with the mouse. A click selects nothing. */
function dragged(u, state) {
  const { left, width } = u.select;
  if (width < 8) return;
  state.dragged = true; // the click that ends it opens no window
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  state.onZoom?.([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
}

/** The part of the axis that is in view, in seconds. `by`: factor of its length; `move`: shift, as a fraction of its length. */
export function zoomed(series, by, move = 0) {
  const points = series.points;
  if (!points.length) return null;
  const all = [points[0].start / 1000, (series.open?.end ?? points.at(-1).end) / 1000];
  const [lo, hi] = series.zoom ?? all;
  const half = ((hi - lo) * by) / 2, middle = (lo + hi) / 2 + move * (hi - lo);
  return half * 2 >= all[1] - all[0] ? null : [middle - half, middle + half];
}

function reach(u, lo, hi, state) {
  if (state.series.zoom) return state.series.zoom;
  if (lo === null || hi === null) return [Date.now() / 1000 - 3600, Date.now() / 1000];
  const last = state.series.points.at(-1);
  if (last) [lo, hi] = [state.series.points[0].start / 1000, last.start / 1000]; // of one point the library makes a range of years
  const size = last ? (last.end - last.start) / 1000 : 60;
  const end = state.series.open ? state.series.open.end / 1000 : hi + size / 2;
  return [lo - size / 2, Math.max(end, hi + size / 2)];
}

function pad(lo, hi) {
  const room = (hi - lo) * 0.08 || Math.abs(hi) * 0.05 || 1;
  // Zero belongs to the picture if it is near, and values that are never negative do not go below it.
  const from = lo >= 0 && lo - room < 0 ? 0 : lo - room;
  return [from, hi + room];
}

function marks(u, state, ink) {
  const c = u.ctx, r = devicePixelRatio, points = state.points ?? [];
  c.save();
  c.beginPath();
  c.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  c.clip();
  const x = (ms) => u.valToPos(ms / 1000, "x", true), y = (v) => u.valToPos(v, "y", true);
  const open = state.series.open;
  if (open) {
    c.setLineDash([5 * r, 4 * r]);
    c.strokeStyle = ink.muted;
    c.lineWidth = r;
    const from = (x(open.start) + x(open.start - (open.end - open.start))) / 2;
    c.strokeRect(from, u.bbox.top + r, x(open.end) - from, u.bbox.height - 2 * r);
    c.setLineDash([]);
    c.fillStyle = ink.muted;
    c.font = `${11 * r}px system-ui, sans-serif`;
    const fits = x(open.end) - from > 40 * r;
    c.textAlign = fits ? "left" : "right";
    c.textBaseline = "alphabetic";
    c.fillText("open", from + (fits ? 5 : -5) * r, u.bbox.top + 14 * r);
  }
  for (const at of state.series.gaps) {
    c.strokeStyle = ink.bad;
    c.setLineDash([2 * r, 3 * r]);
    c.beginPath();
    c.moveTo(x(at), u.bbox.top);
    c.lineTo(x(at), u.bbox.top + u.bbox.height);
    c.stroke();
    c.setLineDash([]);
  }
  points.filter((p) => p.version).forEach((p, i, all) => {
    if (!i || p.version === all[i - 1].version) return;
    const at = x(p.start - (p.end - p.start) / 2);
    c.strokeStyle = c.fillStyle = ink.muted;
    c.beginPath();
    c.moveTo(at, u.bbox.top);
    c.lineTo(at, u.bbox.top + u.bbox.height);
    c.stroke();
    c.font = `${11 * r}px system-ui, sans-serif`;
    c.textAlign = "left";
    c.fillText(`version ${p.version}`, at + 4 * r, u.bbox.top + u.bbox.height - 6 * r);
  });
  const dense = points.length > u.bbox.width / r / 5;
  for (const ghost of state.series.ghosts) {
    c.globalAlpha = 0.35;
    c.fillStyle = ink.muted;
    c.beginPath();
    c.arc(x(ghost.start), y(ghost.estimate), 4.5 * r, 0, 7);
    c.fill();
    c.globalAlpha = 1;
  }
  for (const p of points) {
    if (p.estimate === null) continue;
    const [px, py] = [x(p.start), y(p.estimate)], unknown = p.lower === null || p.upper === null;
    if (dense && p.phase === "final" && !unknown) continue;
    c.lineWidth = 1.4 * r;
    c.strokeStyle = c.fillStyle = unknown ? ink.warn : ink.accent;
    if (!dense && p.lower !== p.upper) {
      const [from, to] = [p.lower === null ? py : y(p.lower), p.upper === null ? py : y(p.upper)];
      c.beginPath();
      c.moveTo(px, from); c.lineTo(px, to);
      if (p.lower !== null) { c.moveTo(px - 3 * r, from); c.lineTo(px + 3 * r, from); }
      if (p.upper !== null) { c.moveTo(px - 3 * r, to); c.lineTo(px + 3 * r, to); }
      c.stroke();
    }
    c.beginPath();
    if (p.phase === "complete") c.rect(px - 3.2 * r, py - 3.2 * r, 6.4 * r, 6.4 * r);
    else if (p.phase === "final") c.arc(px, py, 3.4 * r, 0, 7);
    else { c.moveTo(px, py - 5 * r); c.lineTo(px + 5 * r, py); c.lineTo(px, py + 5 * r); c.lineTo(px - 5 * r, py); c.closePath(); }
    if (p.phase === "early") { c.fillStyle = ink.paper; c.fill(); c.stroke(); } else c.fill();
    if (unknown && !dense) {
      c.fillStyle = ink.warn;
      c.font = `${11 * r}px system-ui, sans-serif`;
      c.textAlign = "left";
      c.fillText("?", px + 6 * r, py - 5 * r);
    }
  }
  c.restore();
}

function tip(u, state) {
  const box = u.root.parentElement, p = state.points?.[u.cursor.idx];
  let note = box.querySelector(".tip");
  if (!p || p.estimate === null || u.cursor.left < 0) { note?.remove(); return; }
  if (!note) { note = document.createElement("div"); note.className = "tip"; u.over.append(note); }
  note.textContent = `${f.time(p.start)} · ${p.phase}, revision ${p.revision}${state.series.versions > 1 ? `, version ${p.version}` : ""}\n${f.estimate(p, state.series.write)}   ${f.interval(p, state.series.write)}`;
  const left = Math.min(u.cursor.left + 12, u.over.clientWidth - note.offsetWidth - 4);
  note.style.transform = `translate(${Math.max(0, left)}px, 6px)`;
}

export function PointTable({ series, href, text = "explain", limit = 50, empty }) {
  const points = series.points.slice(-limit).reverse(), several = series.versions > 1;
  return html`<details class="card" open><summary>The same values as a table <small>${points.length} of ${series.byStart.size} windows</small></summary>
  <div class="scroll tall"><table><thead><tr><th>Window (UTC)</th><th>Phase</th><th class="n">Estimate</th><th class="n">Lower</th><th class="n">Upper</th><th class="n">Completeness</th><th></th></tr></thead>
  <tbody>${points.map((p) => html`<tr key=${p.start}><td>${f.time(p.start)}</td><td>${p.phase}, rev. ${p.revision}${several ? `, version ${p.version}` : ""}</td>
    <td class="n">${f.estimate(p, series.write)}</td><td class=${`n ${p.lower === null ? "unknown" : ""}`}>${series.write(p.lower)}</td><td class=${`n ${p.upper === null ? "unknown" : ""}`}>${series.write(p.upper)}</td>
    <td class="n">${f.percent(p.ratio)}</td><td><a href=${href(p)}>${text}<span class="sr"> ${f.time(p.start)}</span></a></td></tr>`)}
  ${points.length === 0 && html`<tr><td colspan="7">${empty}</td></tr>`}</tbody></table></div></details>`;
}
