// The REST API and its live stream. The token is kept in sessionStorage, and never in a URL.

const KEY = "edgewater.token";
export const token = { get: () => sessionStorage.getItem(KEY), set: (t) => (t ? sessionStorage.setItem(KEY, t) : sessionStorage.removeItem(KEY)) };

export const events = new EventTarget();

/** Whether the center answers. `lostSince`: when it was heard last, if it does not answer now; null: it does. */
export const center = { lostSince: null, heard: Date.now() };

function reached(answers) {
  const before = center.lostSince;
  if (answers) center.heard = Date.now();
  center.lostSince = answers ? null : (before ?? center.heard);
  if (before !== center.lostSince) events.dispatchEvent(new Event("reached"));
}

/** Fetches from the center, and notes whether it answers: a proxy may answer in its place. */
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name !== "AbortError") reached(false);
    throw error;
  }
  reached(![502, 503, 504].includes(response.status) || /json/.test(response.headers.get("content-type") || ""));
  return response;
}

/** A refusal of the API: RFC 9457 problem details. */
export class Problem extends Error {
  constructor(status, details) {
    super(details.detail || `HTTP ${status}`);
    this.status = status;
    this.details = details;
  }
}

function headers(more = {}) {
  const t = token.get();
  return t ? { ...more, Authorization: `Bearer ${t}` } : more;
}

/** JSON of the center. An integer in a group stays a text if a number would round it, because another group may have that number. */
function parse(text) {
  if (!/\d{16}/.test(text)) return JSON.parse(text); // a reviver takes several times as long
  const exact = new Map(), mended = (group) => (exact.has(group) ? { ...group, ...exact.get(group) } : group);
  return JSON.parse(text, function (key, value, context) {
    if (typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")) exact.set(this, { ...exact.get(this), [key]: context.source });
    return key === "group" ? mended(value) : key === "removed" && Array.isArray(value) ? value.map(mended) : value;
  });
}

async function refused(response) {
  let details = {};
  try { details = await response.json(); } catch { /* not a problem's body */ }
  if (response.status === 401) events.dispatchEvent(new Event("unauthenticated"));
  return new Problem(response.status, details);
}

/** @param {string} path @param {[string, any][]} [params] */
export function url(path, params = []) {
  const query = new URLSearchParams(params.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => [k, String(v)]));
  return query.size ? `${path}?${query}` : path;
}

export async function get(path, params, options = {}) {
  const { raw, anyStatus, ...more } = options;
  const response = await ask(url(path, params), { headers: headers(), signal: raw ? null : AbortSignal.timeout(SILENCE_MS), ...more });
  if (!response.ok && !anyStatus) throw await refused(response);
  return raw ? response : parse(await response.text());
}

/** Sends a change. @returns {Promise<any>} what the center replies; null: nothing */
export async function send(method, path, body, more = { "Content-Type": "application/yaml" }) {
  const response = await ask(path, { method, headers: headers(more), body });
  if (!response.ok) throw await refused(response);
  return response.status === 204 ? null : response.json();
}

/** Saves a page of answers as a file. @returns {Promise<boolean>} whether the page has all answers that were asked for */
export async function download(path, params, name) {
  const response = await get(path, params, { raw: true });
  const a = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await response.blob()), download: name });
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  return !response.headers.has("link");
}

export const FIRST_WAIT_MS = 1000;
export const LONGEST_WAIT_MS = 30000;
/** A stream has an event every few seconds. A stream that is silent for this time is broken. */
export const SILENCE_MS = 30000;
const MOST_WHOLE = 64; // windows; the center sends changes of fewer

/** The tab's only stream: it reconnects after the last answer that it has, and is replaced when another page opens. */
class Live {
  constructor() {
    this.state = "closed";
    this.path = null;
    this.lastId = null;
    this.heard = 0;
    this.ids = [];
  }

  /** @param {string|null} path @param {{answer?: Function, progress?: Function, gap?: Function}} handlers */
  open(path, handlers) {
    this.close();
    this.path = path;
    this.handlers = handlers;
    this.lastId = null;
    this.ids = [];
    this.whole = new Map();
    this.abort = new AbortController();
    this.#run(this.abort);
  }

  close() {
    this.abort?.abort();
    this.abort = null;
    this.#become("closed");
  }

  async #run(abort) {
    let wait = FIRST_WAIT_MS;
    while (!abort.signal.aborted) {
      try {
        this.#become(this.heard ? "reconnecting" : "connecting");
        const more = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
        const response = await ask(this.path, { headers: headers(more), signal: abort.signal, cache: "no-store" });
        if (!response.ok) throw await refused(response);
        this.#become("live");
        wait = FIRST_WAIT_MS;
        await this.#read(response.body.getReader(), abort);
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error instanceof Problem && [401, 403, 404, 422].includes(error.status)) {
          this.#become(error.status === 401 ? "unauthenticated" : "refused", error.message);
          return;
        }
      }
      if (abort.signal.aborted) return;
      this.#become("reconnecting");
      await new Promise((done) => setTimeout(done, wait * (0.75 + Math.random() / 2)));
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }

  async #read(reader, abort) {
    const decoder = new TextDecoder();
    let held = "";
    for (;;) {
      const silent = setTimeout(() => { reached(false); reader.cancel(); }, SILENCE_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(silent));
      if (done || abort.signal.aborted) return;
      reached(true);
      held += decoder.decode(value, { stream: true });
      const blocks = held.split(/\r?\n\r?\n/);
      held = blocks.pop() ?? "";
      for (const block of blocks) this.#take(block);
    }
  }

  #take(block) {
    const field = { event: "message", data: "", id: null };
    for (const line of block.split(/\r?\n/)) {
      const colon = line.indexOf(":");
      if (colon > 0) field[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
    }
    if (!field.data) return;
    this.heard = Date.now();
    const data = parse(field.data);
    if (field.id !== null) {
      this.lastId = field.id;
      this.ids.push(Number(field.id));
      if (this.ids.length > 5000) this.ids.splice(0, 1000);
    }
    if (field.event === "gap") this.lastId = String(data.through);
    this.handlers[field.event]?.(field.event === "answer" ? this.#whole(data) : data);
  }

  /** The answer with all its groups: with `changes=true`, the center sends those that differ from revision `base`. */
  #whole(answer) {
    if (!/[?&]changes=true/.test(this.path)) return answer;
    const window = `${answer.query} ${answer.window.start}`;
    const had = this.whole.get(window);
    this.whole.delete(window);
    if (answer.base !== undefined && had?.revision !== answer.base) throw new Error(`changes of revision ${answer.base}, which is not here`);
    const rows = answer.base === undefined ? new Map() : new Map(had.rows);
    for (const group of answer.removed || []) rows.delete(JSON.stringify(group));
    for (const row of answer.data) rows.set(JSON.stringify(row.group), row);
    if (answer.phase !== "final") this.whole.set(window, { revision: answer.revision, rows });
    if (this.whole.size > MOST_WHOLE) this.whole.delete(this.whole.keys().next().value);
    return { ...answer, data: [...rows.values()] };
  }

  #become(state, detail = "") {
    if (state === this.state && detail === this.detail) return;
    this.state = state;
    this.detail = detail;
    events.dispatchEvent(new Event("live"));
  }
}

export const live = new Live();
