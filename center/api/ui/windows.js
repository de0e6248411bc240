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
export function take(series, answer, { measure, value: name }, group) {
  const row = f.rowOf(answer.data, group);
  if (!row) return null;
  if (f.list(answer, measure, row)) series.listed = { answer, group: row.group };
  const found = f.values(answer, measure, row), value = found.find((v) => v.name === name) || found[0];
  if (value) series.add({
    start: Date.parse(answer.window.start), end: Date.parse(answer.window.end), phase: answer.phase, revision: answer.revision,
    estimate: value.estimate, lower: value.lower, upper: value.upper, not_finite: value.not_finite, ratio: answer.quality.completeness.ratio, given: Date.parse(answer.given_at),
    startText: answer.window.start,
  });
  return row;
}

/** The group of an answer whose first value has the widest interval. */
export const widest = (answer, measure) => [...answer.data].sort((a, b) => f.width(f.values(answer, measure, b)[0]) - f.width(f.values(answer, measure, a)[0]))[0]?.group ?? null;

/** The group to show when none is chosen: the widest of the newest of these windows that has any. Null: none has. */
async function groupIn(path, measure, questions, windows, series) {
  for (const start of windows.slice(-LOOKED_AT).reverse()) {
    const answer = await get(`${path}/windows/${encodeURIComponent(start)}`, [["measure", measure], ...questions]), group = widest(answer, measure);
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
 * @param {{measure: string, value?: ?string, start?: ?string, end?: ?string, every?: ?string, zone?: ?string, window?: ?number}} choice
 * @param {?object} group whose values are added; null: the widest group of the newest windows
 * @param {() => boolean} wanted  whether the series is still shown; called before each page
 * @returns {Promise<?object>} the group */
export async function loadWindows(path, choice, group, questions, series, wanted, redraw) {
  let params = [["start", choice.start], ["end", choice.end], ["every", choice.every], ["zone", choice.every && choice.zone], ["limit", 1000]];
  series.ranged = Boolean(choice.start || choice.end);
  const matrix = choice.every && group ? null : await get(`${path}/completeness`, [["limit", WINDOWS], ["start", choice.start], ["end", choice.end]]);
  if (matrix && !matrix.windows.length) return group;
  const asked = group ?? await groupIn(path, choice.measure, questions, matrix.windows, series);
  if (!choice.every) {
    series.answered = matrix.windows.length;
    params = [["start", choice.start ?? matrix.windows[0]], ["end", new Date(Date.parse(matrix.windows.at(-1)) + 1).toISOString()], ["limit", WINDOWS]];
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
