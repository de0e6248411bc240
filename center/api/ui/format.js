// Numbers, times and intervals as text. Null is "unknown", never 0.

export const UNKNOWN = "unknown";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const part = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 5 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });

/** @param {number|null|undefined} x */
export function number(x) {
  if (x === null || x === undefined) return UNKNOWN;
  return Number.isInteger(x) || Math.abs(x) >= 1e5 ? whole.format(x) : part.format(x);
}

/** @param {number|null|undefined} x */
export const short = (x) => (x === null || x === undefined ? UNKNOWN : Math.abs(x) < 1e5 ? number(x) : compact.format(x));
/** "1 record", "12 records". */
export const records = (n) => `${short(n)} record${n === 1 ? "" : "s"}`;

/** An estimate as text. JSON has no number for NaN and infinities: an answer names them.
 * @param {{estimate: ?number, not_finite: ?string}|null|undefined} v */
export const estimate = (v, write = number) => v?.not_finite ?? write(v?.estimate);

/** @param {{estimate: ?number, lower: ?number, upper: ?number, not_finite: ?string}|null} v */
export function interval(v, write = number) {
  if (!v) return UNKNOWN;
  if (v.not_finite) return "no finite bounds";
  if (v.lower === null && v.upper === null) return "bounds unknown";
  if (v.lower === v.upper && v.lower === v.estimate) return "exact";
  return `${write(v.lower)} … ${write(v.upper)}`;
}

/** @param {string|number|null} t */
export function time(t) {
  if (t === null || t === undefined) return UNKNOWN;
  const text = typeof t === "number" ? new Date(t).toISOString() : t;
  return text.replace("T", " ").replace(/(:\d\d)?(\.\d+)?Z$/, (_, s) => (s && s !== ":00" ? s : ""));
}

/** @param {number|null} ms */
export function duration(ms) {
  if (ms === null || ms === undefined) return UNKNOWN;
  const sign = ms < 0 ? "−" : "";
  const s = Math.abs(ms) / 1000;
  if (s < 1) return `${sign}${Math.round(s * 1000)} ms`;
  if (s < 120) return `${sign}${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 7200) return `${sign}${Math.round(s / 60)} min`;
  if (s < 172800) return `${sign}${Math.round(s / 3600)} h`;
  return `${sign}${Math.round(s / 86400)} d`;
}

/** @param {number|null} n */
export function bytes(n) {
  if (n === null || n === undefined) return UNKNOWN;
  for (const [size, unit] of [[1 << 30, "GiB"], [1 << 20, "MiB"], [1 << 10, "KiB"]])
    if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  return `${Math.round(n)} B`;
}

/** A mapping of a query as text: `error miles 6000`. */
export const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value)).replace(/[{}"]/g, "").replaceAll(":", " ").replaceAll(",", ", ");

export const percent = (x) => (x === null || x === undefined ? UNKNOWN : `${part.format(x * 100)} %`);

/** Whether a measure is a share of the records, which has a binomial reading. Other ratios, such as a mean, are plain numbers. */
export const isShare = (answer, measure) => Boolean(answer?.shapes[measure]?.some((shape) => shape.name === "binomial"));

/** How the values of a measure are written: in the chosen unit, `percent` or `plain`; otherwise shares in percent. */
export const writer = (answer, measure, unit = null) => ((unit ? unit === "percent" : isShare(answer, measure)) ? percent : number);

/** A column of `group_by` as text: `country`, or `lower(host) as host`. */
export const groupColumn = (key) => (typeof key === "string" ? key : Object.entries(key).map(([name, text]) => `${text} as ${name}`).join());

/** A group's value as text, as `key_text` of the center: null, and texts that could be mistaken for it, differ. */
const keyText = (v) => (typeof v === "string" && (v === "" || v === "null" || v.startsWith('"')) ? JSON.stringify(v) : String(v));

/** A group as text: `carrier=UA, dest=null`; all groups: "(all)". */
export const group = (g) => Object.entries(g).map(([k, v]) => `${k}=${keyText(v)}`).join(", ") || "(all)";

/** A group as parameters of the API. */
export const groupParams = (g) => Object.entries(g).map(([k, v]) => ["group", `${k}:${keyText(v)}`]);

const textOf = (g) => JSON.stringify(groupParams(g).map(([, text]) => text).sort());

/** The row of a group. A group from an address in the API's notation has texts for values of every type. */
export const rowOf = (rows, g) => rows.find((r) => JSON.stringify(r.group) === JSON.stringify(g)) ?? rows.find((r) => textOf(r.group) === textOf(g));

/** The value of a text key whose `keyText` is `text`; another text is itself, as people write addresses. */
function keyOf(text) {
  if (text === "null") return null;
  try {
    const value = JSON.parse(text);
    if (typeof value === "string" && keyText(value) === text) return value;
  } catch { /* no quoted text */ }
  return text;
}

/** A group from the parameters `group` of an address: the console's own JSON, or `column:value` as in the API and in commands. Null: none. */
export function readGroup(texts) {
  if (!texts.length) return null;
  try {
    const found = JSON.parse(texts[0]);
    if (texts.length === 1 && found && typeof found === "object" && !Array.isArray(found)) return found;
  } catch { /* not the console's own notation */ }
  return Object.fromEntries(texts.map((text) => { const at = text.indexOf(":"); return [text.slice(0, Math.max(at, 0)), keyOf(text.slice(at + 1))]; }));
}

/** How a confidence is to be read. */
export function confidence(answer) {
  const c = answer.confidence;
  if (c === null) return "no bound is known";
  if (c === 1) return "bounds always hold";
  const scope = answer.contract.requested.scope;
  const whose = scope === "all" ? "for all groups at once" : "for each value";
  const coverage = answer.quality.accuracy?.coverage;
  const seen = coverage === null || coverage === undefined ? "" : `; measured ${percent(coverage)}`;
  return `${percent(c)} ${whose}${seen}`;
}

/** The intervals of a measure in a row, each with its name, by the shapes that the answer states; lists are left out.
 * @returns {{name: string, estimate: ?number, lower: ?number, upper: ?number, not_finite: ?string}[]} */
export function values(answer, measure, row) {
  const cell = row?.[measure];
  if (!cell) return [];
  return (answer.shapes[measure] ?? []).flatMap(({ name, shape }) => {
    const member = name ? cell[name] : cell;
    if (shape === "interval") return [{ ...member, name }];
    return shape === "keyed" ? Object.entries(member).map(([key, v]) => ({ ...v, name: `${name} ${key}` })) : [];
  });
}

/** The first list of intervals of a measure in a row, with its name; null: there is none. */
export function list(answer, measure, row) {
  const lists = (answer.shapes[measure] ?? []).filter(({ name, shape }) => ["items", "list"].includes(shape) && row?.[measure]?.[name]);
  const found = lists.map(({ name }) => ({ kind: name, entries: row[measure][name] })).find(({ entries }) => entries.every((e) => e !== null && typeof e === "object"));
  return found ?? null;
}

/** What an entry of a list is about: an item, the ends of a bucket; otherwise its number. */
export function entry(e, i) {
  const keys = Object.entries(e).filter(([k]) => !["estimate", "lower", "upper", "not_finite"].includes(k)).map(([, v]) => v);
  return keys.length > 1 ? keys.map((v) => (typeof v === "number" ? number(v) : v)).join(" … ") : String(keys.length ? keys[0] : i);
}

/** Whether edges withhold a part of an answer that is in no group. */
export const isHeld = (answer) => Object.values(answer.rest || {}).some((amount) => amount);

/** Width of an interval; unknown bounds are the widest. */
export function width(v) {
  return !v || v.lower === null || v.upper === null ? Infinity : v.upper - v.lower;
}
