// The rules of a sink of the kind `alerts`: changed, and tried on the stored answers before they are saved.

import { html, useEffect, useState } from "../vendor/preact.js";
import { get, live, send } from "../api.js";
import * as f from "../format.js";
import { Problem, useData } from "../parts.js";
import { yaml } from "./new.js";

export function AlertRules({ args: [name] }) {
  const path = `/v1/sinks/${encodeURIComponent(name)}`;
  const [sink, problem] = useData(() => get(path), [name]);
  useEffect(() => live.close(), []);
  return html`<main id="main"><p class="crumbs"><a href="/ui/">Overview</a> › ${name}</p><h1>Alert rules of ${name}</h1><${Problem} error=${problem} />
    ${sink && (sink.definition ? html`<${Rules} path=${path} first=${yaml(sink.definition)} />` : html`<p>The sink is in the center's file, and is changed there.</p>`)}</main>`;
}

function Rules({ path, first }) {
  const [text, setText] = useState(first);
  const [tried, setTried] = useState(null);
  const [saved, setSaved] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const ask = (method, where, take) => {
    setBusy(true);
    setProblem(null);
    setSaved(null);
    send(method, where, text).then((reply) => take({ of: text, reply }), setProblem).then(() => setBusy(false));
  };
  const { field, accepted, reason, value } = problem?.details ?? {};
  return html`<form class="card" onSubmit=${(e) => { e.preventDefault(); ask("PUT", path, setSaved); }}>
      <label for="rules">Definition <small>YAML; a rule per line of <code>rules</code></small></label>
      <textarea id="rules" class="plain" rows=${Math.max(10, text.split("\n").length + 1)} spellcheck="false" autocomplete="off" value=${text} onInput=${(e) => setText(e.target.value)} aria-invalid=${problem ? "true" : "false"} aria-describedby="verdict"></textarea>
      <div id="verdict" role="status">${problem && html`<p class="problem">${accepted ? html`<b>${field}</b>: ${value !== undefined && html`<code>${JSON.stringify(value)}</code> is not accepted.`} Expected: ${accepted}${reason && `; ${reason}`}` : problem.message}</p>`}
        ${saved?.of === text && html`<p class="fine">Saved. The rules apply to answers from now on.</p>`}</div>
      <p><button type="button" disabled=${busy} onClick=${() => ask("POST", "/v1/alerts/check", setTried)}>Try on stored answers</button> <button class="primary" disabled=${busy || text === first}>Save</button> <small>Trying notifies nobody.</small></p></form>
    ${tried?.of === text && html`<${Tried} check=${tried.reply} />`}`;
}

const SHOWN = 20;

/** What the rules would have done. */
function Tried({ check }) {
  return html`<section class="card" aria-label="Result"><h2>On ${f.number(check.answers)} stored answers <small>${check.is_whole ? "" : "the first ones: there are more"}</small></h2>
    <div class="scroll"><table><thead><tr><th>Rule</th><th>Query</th><th>Condition</th><th class="n">Would have fired</th><th>First changes (UTC)</th></tr></thead>
    <tbody>${check.rules.map((r) => html`<tr key=${r.rule} data-tried=${r.rule}><th scope="row">${r.rule}</th><td>${r.query}</td><td><code>${r.condition}</code>${r.problem && html`<p class="problem">${r.problem}</p>`}</td><td class="n">${f.number(r.fired)}</td>
      <td>${r.changes.slice(0, SHOWN).map((c) => html`<div>${f.time(c.at)} ${c.status} ${f.group(Object.fromEntries(Object.entries(c.labels).filter(([k]) => !["alertname", "query"].includes(k))))}</div>`)}${r.changes.length > SHOWN && "…"}</td></tr>`)}</tbody></table></div></section>`;
}
