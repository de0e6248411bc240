// The windows of a query as points of a chart: those of a range, or merged into longer intervals.

import { get } from "./api.js";
import * as f from "./format.js";

const WINDOWS = 120;
export const MOST = 2000;

export function point(answer, measure, group, name) {
  const key = JSON.stringify(group);
  const row = answer.data.find((r) => JSON.stringify(r.group) === key);
  const found = row && f.values(row[measure]);
  const value = found && (found.find((v) => v.name === name) || found[0]);
  return value && {
    start: Date.parse(answer.window.start), end: Date.parse(answer.window.end), phase: answer.phase, revision: answer.revision,
    estimate: value.estimate, lower: value.lower, upper: value.upper, ratio: answer.quality.completeness.ratio, given: Date.parse(answer.given_at),
    startText: answer.window.start,
  };
}

/** The group of an answer whose first value has the widest interval. */
export const widest = (answer, measure) => [...answer.data].sort((a, b) => f.width(f.values(b[measure])[0]) - f.width(f.values(a[measure])[0]))[0]?.group ?? null;

/** Adds the points of a choice to a series, page by page.
 * @param {{measure: string, value?: ?string, start?: ?string, end?: ?string, every?: ?string, zone?: ?string, window?: ?number}} choice
 * @param {() => Promise<object>} group of which the values are
 * @param {() => boolean} wanted  whether the series is still shown; called before each page */
export async function loadWindows(path, choice, group, questions, series, wanted, redraw) {
  let params = [["start", choice.start], ["end", choice.end], ["every", choice.every], ["zone", choice.every && choice.zone], ["limit", 1000]];
  if (!choice.every) {
    const matrix = await get(`${path}/completeness`, [["limit", WINDOWS], ["start", choice.start], ["end", choice.end]]);
    if (!matrix.windows.length) return;
    params = [["start", choice.start ?? matrix.windows[0]], ["end", new Date(Date.parse(matrix.windows.at(-1)) + 1).toISOString()], ["limit", WINDOWS]];
  }
  const asked = await group();
  params.push(["measure", choice.measure], ...f.groupParams(asked), ...questions);
  for (let cursor = null, more = true; more && wanted() && series.byStart.size < MOST; more = cursor !== null) {
    const page = await get(`${path}/${choice.every ? "rollup" : "windows"}`, cursor ? [...params, ["cursor", cursor]] : params);
    for (const a of page.answers) { const p = point(a, choice.measure, asked, choice.value); if (p) series.add(p); }
    cursor = page.next_cursor;
    redraw();
  }
  series.ghosts = [];
}
