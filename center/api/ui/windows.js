// The windows of a query as points of a chart: those of a range, or merged into longer intervals.

import { get } from "./api.js";
import * as f from "./format.js";

const WINDOWS = 120;
const LOOKED_AT = 20;
export const MOST = 2000;

/** The range of the chart in an address, in s; null: there is none, or it cannot be read. */
export function readZoom(text) {
  const range = text?.split("_").map((t) => Date.parse(t) / 1000);
  return range?.length === 2 && range.every(Number.isFinite) ? range : null;
}

/** Adds what an answer has of a group to a series. @returns {?object} the group's row */
export function take(series, answer, { measure, value: name, unit }, group) {
  const row = f.rowOf(answer.data, group);
  if (!row) return null;
  if (f.list(answer, measure, row)) series.listed = { answer, group: row.group };
  const found = f.values(answer, measure, row), value = found.find((v) => v.name === name) || found[0];
  series.write = f.writer(answer, measure, unit);
  if (value) series.add({
    start: Date.parse(answer.window.start), end: Date.parse(answer.window.end), phase: answer.phase, revision: answer.revision,
    estimate: value.estimate, lower: value.lower, upper: value.upper, not_finite: value.not_finite, ratio: answer.quality.completeness.ratio, given: Date.parse(answer.given_at),
    startText: answer.window.start, version: answer.version,
  });
  return row;
}

/** Orders rows of an answer: the widest interval first, and of equal ones the largest value. */
export const byNeed = (answer, measures) => {
  const first = (r) => measures.map((m) => f.values(answer, m, r)[0]);
  const width = (r) => Math.max(0, ...first(r).map(f.width).filter((w) => w !== undefined));
  const value = (r) => first(r).find((v) => typeof v?.estimate === "number")?.estimate ?? -Infinity;
  const down = (a, b) => (a === b ? 0 : a < b ? 1 : -1); // not a difference: both may be infinite
  return [...answer.data].map((r) => [width(r), value(r), r]).sort(([a, u], [b, v]) => down(a, b) || down(u, v)).map(([, , r]) => r);
};

/** The group to show when none is chosen. */
export const widest = (answer, measure) => byNeed(answer, [measure])[0]?.group ?? null;

/** The group to show when none is chosen: the widest of the newest of these windows that has any. Null: none has. */
async function groupIn(path, { measure, version }, questions, windows, series) {
  for (const start of windows.slice(-LOOKED_AT).reverse()) {
    const answer = await get(`${path}/windows/${encodeURIComponent(start)}`, [["measure", measure], ["version", version], ...questions]), group = widest(answer, measure);
    if (group) return group;
    series.held ||= f.isHeld(answer);
  }
  return null;
}

/** Why a series has no points, as one sentence. */
export function nothing(series, measure, group) {
  if (!series.answered) return series.ranged ? "No window of the range has an answer." : "No window has an answer.";
  const windows = series.answered === 1 ? "One window has an answer" : `${f.number(series.answered)} windows have an answer`;
  if (series.listed) return `${windows}: ${measure} is a list, which has no line.`;
  if (group) return `${windows}, but none has a value of ${measure} for ${f.group(group)}.`;
  return `${windows}, but the newest have no group${series.held ? ": edges withhold them under the budget" : ""}.`;
}

/** Adds the points of a choice to a series, page by page.
 * @param {{measure: string, version?: ?string, value?: ?string, start?: ?string, end?: ?string, every?: ?string, zone?: ?string, window?: ?number}} choice
 * @param {?object} group whose values are added; null: the widest group of the newest windows
 * @param {() => boolean} wanted  whether the series is still shown; called before each page
 * @returns {Promise<?object>} the group */
export async function loadWindows(path, choice, group, questions, series, wanted, redraw) {
  let params = [["start", choice.start], ["end", choice.end], ["every", choice.every], ["zone", choice.every && choice.zone], ["limit", 1000]];
  series.ranged = Boolean(choice.start || choice.end);
  const matrix = choice.every && group ? null : await get(`${path}/completeness`, [["limit", WINDOWS], ["start", choice.start], ["end", choice.end], ["version", choice.version]]);
  if (matrix && !matrix.windows.length) return group;
  const asked = group ?? await groupIn(path, choice, questions, matrix.windows, series);
  if (!choice.every) {
    series.answered = matrix.windows.length;
    params = [["start", choice.start ?? matrix.windows[0]], ["end", new Date(Date.parse(matrix.windows.at(-1)) + 1).toISOString()], ["limit", WINDOWS], ["version", choice.version]];
  }
  if (!asked) return null;
  params.push(["measure", choice.measure], ...f.groupParams(asked), ...questions);
  let chosen = asked;
  for (let cursor = null, more = true; more && wanted() && series.byStart.size < MOST; more = cursor !== null) {
    const page = await get(`${path}/${choice.every ? "rollup" : "windows"}`, cursor ? [...params, ["cursor", cursor]] : params);
    for (const a of page.answers) chosen = take(series, a, choice, asked)?.group ?? chosen;
    if (choice.every) series.answered += page.answers.length;
    cursor = page.next_cursor;
    redraw();
  }
  series.ghosts = [];
  return chosen;
}
