// The shell: routes, login, theme, and the state of the connection.

import { html, render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";
import { events, get, live, token } from "./api.js";
import { Overview } from "./pages/overview.js";
import { QueryPage } from "./pages/query.js";
import { Explain } from "./pages/explain.js";
import { Edges } from "./pages/edges.js";
import { Budget, Budgets } from "./pages/budget.js";
import { Dashboard } from "./pages/dashboard.js";
import { AlertRules } from "./pages/alerts.js";
import { EditQuery, NewQuery } from "./pages/new.js";
import { Link, Problem, lostText, navigate, useLost } from "./parts.js";

const ROUTES = [
  [/^\/ui\/?$/, Overview, "Overview"],
  [/^\/ui\/queries\/([^/]+)\/?$/, QueryPage, "Query"],
  [/^\/ui\/queries\/([^/]+)\/([^/]+)\/?$/, Explain, "Explain"],
  [/^\/ui\/edges\/?$/, Edges, "Edges"],
  [/^\/ui\/budget\/?$/, Budgets, "Budget"],
  [/^\/ui\/budget\/([^/]+)\/?$/, Budget, "Budget"],
  [/^\/ui\/dashboard\/?$/, Dashboard, "Dashboard"],
  [/^\/ui\/alerts\/([^/]+)\/?$/, AlertRules, "Alert rules"],
  [/^\/ui\/new\/?$/, NewQuery, "New query"],
  [/^\/ui\/edit\/([^/]+)\/?$/, EditQuery, "Edit"],
];
const STATES = {
  live: ["ok", "Live"], connecting: ["wait", "Connecting"], reconnecting: ["bad", "Reconnecting"],
  unauthenticated: ["bad", "Signed out"], refused: ["bad", "Refused"], closed: ["", "Refreshing"],
};

function useLocation() {
  const [at, setAt] = useState(location.pathname + location.search);
  useEffect(() => {
    const moved = () => setAt(location.pathname + location.search);
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  return at;
}

function Connection() {
  const [, again] = useState(0);
  useEffect(() => {
    const changed = () => again((n) => n + 1);
    events.addEventListener("live", changed);
    return () => events.removeEventListener("live", changed);
  }, []);
  const lost = useLost();
  useEffect(() => { document.documentElement.toggleAttribute("data-lost", lost !== null); }, [lost]);
  const [kind, text] = lost === null || live.state === "unauthenticated" ? STATES[live.state] : ["bad", `The center is ${lostText(lost)}`];
  return html`<span class=${`connection ${kind}`} role="status" title=${live.detail || ""} data-live=${live.state}><i aria-hidden="true"></i>${text}</span>`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("edgewater.theme") || "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("edgewater.theme", theme);
    dispatchEvent(new Event("theme"));
  }, [theme]);
  const next = { "": "dark", dark: "light", light: "" }[theme];
  return html`<button class="quiet" onClick=${() => setTheme(next)} title="Colours: as the system, dark, light">
    <span aria-hidden="true">◐</span> ${{ "": "Auto", dark: "Dark", light: "Light" }[theme]}<span class="sr"> colours</span></button>`;
}

function Login({ onDone }) {
  const [problem, setProblem] = useState(token.get() ? "The token is no longer accepted: it is wrong, or has expired." : "");
  const submit = async (event) => {
    event.preventDefault();
    token.set(new FormData(event.target).get("token").trim());
    try {
      await get("/v1/queries");
      onDone();
    } catch (error) {
      setProblem(error.status === 401 ? "The center does not accept this token." : error.message);
    }
  };
  return html`<main class="login" id="main"><form onSubmit=${submit} class="card">
    <h1>Sign in</h1>
    <p>This center asks for a token: one of its configuration (<code>api.token</code>, <code>api.principals</code>), or a JWT of its issuer.
      It is kept in this tab only.</p>
    <label for="token">Token</label>
    <input id="token" name="token" type="password" autocomplete="off" required autofocus aria-describedby="login-problem" />
    <p id="login-problem" class="problem" role="alert">${problem}</p>
    <button class="primary">Sign in</button>
  </form></main>`;
}

/** A page; instead of a page that fails, what it failed of. */
function Shown({ Page, args, search }) {
  const [failure] = useErrorBoundary();
  if (failure) return html`<main id="main"><h1>This page cannot be shown</h1><${Problem} error=${failure} /><p>A part of its address may be wrong. The <a href="/ui/">overview</a> has all queries.</p></main>`;
  return html`<${Decoded} Page=${Page} args=${args} search=${search} />`;
}

/** A component of its own, so that an address which cannot be decoded is a failure of the page. */
const Decoded = ({ Page, args, search }) => html`<${Page} args=${args.map(decodeURIComponent)} search=${search} />`;

function App() {
  const at = useLocation();
  const [signedOut, setSignedOut] = useState(false);
  useEffect(() => {
    const out = () => { live.close(); setSignedOut(true); };
    events.addEventListener("unauthenticated", out);
    return () => events.removeEventListener("unauthenticated", out);
  }, []);
  const path = at.split("?")[0];
  const found = ROUTES.map(([pattern, Page, title]) => [path.match(pattern), Page, title]).find(([m]) => m);
  useEffect(() => { document.title = found ? `${found[2]} – Edgewater` : "Edgewater"; }, [path]);
  const nav = [["/ui/", "Overview"], ["/ui/dashboard", "Dashboard"], ["/ui/edges", "Edges"], ["/ui/budget", "Budget"], ["/ui/new", "New query"]];
  let page = html`<main id="main"><h1>Not found</h1><p>There is no page at <code>${path}</code>.</p></main>`;
  if (signedOut) page = html`<${Login} onDone=${() => setSignedOut(false)} />`;
  else if (found) page = html`<${Shown} key=${at} Page=${found[1]} args=${found[0].slice(1)} search=${at.slice(path.length + 1)} />`;
  return html`
    <a class="skip" href="#main">Skip to content</a>
    <header><${Link} class="brand" href="/ui/"><img src="/ui/icon.svg" alt="" width="22" height="22" />Edgewater<//>
      <nav aria-label="Pages">${nav.map(([href, text]) => html`<${Link} href=${href}
        aria-current=${(href === "/ui/" ? path === "/ui/" || path === "/ui" || path.startsWith("/ui/queries") : path.startsWith(href)) ? "page" : null}>${text}<//>`)}</nav>
      <span class="space"></span>
      <${Connection} /><${Theme} />
      ${token.get() && !signedOut && html`<button class="quiet" onClick=${() => { token.set(null); setSignedOut(true); live.close(); }}>Sign out</button>`}
      <a href="/docs">API</a>
    </header>
    ${page}`;
}

addEventListener("click", (event) => {
  const a = event.target instanceof Element ? event.target.closest("a[href]") : null;
  if (!a || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const target = new URL(a.href);
  if (target.origin !== location.origin || !target.pathname.startsWith("/ui") || a.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  navigate(target.pathname + target.search);
});

document.getElementById("app").textContent = "";
render(html`<${App} />`, document.getElementById("app"));
