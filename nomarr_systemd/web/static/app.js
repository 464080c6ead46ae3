// The frame of the page: views and links between them, the filter, the state of the stream, keys.
import { h, put, plain, age, duration } from "./dom.js";
import { stream, takeToken, setToken } from "./transport.js";
import { known, begin, listen, take, readAll } from "./store.js";
import { WorkersView, atLeast, countdown } from "./workers.js";
import { WorkerView } from "./worker.js";
import { QueuesView, IncidentsView } from "./queues.js";
import { FleetView } from "./fleet.js";

const TOPICS = ["worker:*:status", "queue:status", "queue:*:status", "queue:jobs", "system:health"];
const root = document.getElementById("content");
const filter = document.getElementById("filter");
const MOST_ERRORS = 3;
let view = null;
let route = "";
let pool = "";
let list = "/"; // the list of workers as it was seen last
let link = { state: "connecting" };
let following = null;

class LinkState extends HTMLElement {
  show(state, words) {
    this.className = `link ${state}`;
    if (this.textContent !== words) this.textContent = words;
  }
}
customElements.define("nomarr-link", LinkState);

class Alert extends HTMLElement {
  show(...parts) {
    const text = parts.map((each) => each.textContent ?? each).join("");
    if (this.dataset.text === text) return;
    this.dataset.text = text;
    put(this, ...parts);
  }
}
customElements.define("nomarr-alert", Alert);

function go() {
  const query = new URLSearchParams(location.search);
  const wanted = query.get("worker") ? `worker=${query.get("worker")}` : query.get("view") || "workers";
  pool = query.get("pool") || "";
  if (filter.value.trim() !== (query.get("q") || "")) filter.value = query.get("q") || "";
  if (wanted === "workers") list = location.pathname + location.search;
  if (wanted !== route) {
    view?.close();
    route = wanted;
    if (query.get("worker")) view = new WorkerView(root, query.get("worker"));
    else view = new ({ queues: QueuesView, incidents: IncidentsView, fleet: FleetView }[wanted] || WorkersView)(root);
  }
  for (const each of document.querySelectorAll("nav [data-view]")) {
    if (each.dataset.view === (query.get("worker") ? "workers" : wanted)) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = query.get("worker") ? `${query.get("worker")} – nomarr` : "nomarr";
  draw();
}

function visit(href) {
  const from = document.querySelector(".worker-head h1")?.textContent;
  history.pushState(null, "", href);
  go();
  scrollTo(0, 0);
  // The keyboard continues in the new view, and returns to the row where it was.
  const row = route === "workers" && from && document.querySelector(`[data-worker="${CSS.escape(from)}"] .name`);
  (row || root).focus({ preventScroll: !row });
}

let waiting = false;
function drawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function draw(what, id) {
  view?.draw(filter.value.trim(), pool, what, id);
  drawLink();
}

function systemctl(words) {
  return `systemctl ${known.scope === "user" ? "--user " : ""}${words}`;
}

function drawLink() {
  const place = document.getElementById("link");
  const alert = document.getElementById("alert");
  const seen = known.readAt ? ` The page shows what was known ${duration((Date.now() - known.readAt) / 1000)} ago.` : "";
  if (link.state === "refused") {
    place.show("lost", "refused");
    if (link.error.status === 401) alert.show(askForToken());
    else alert.show(plain(`${link.error.message}. ${link.error.hint}`));
  } else if (link.state === "lost" || (link.state === "connecting" && link.wasLost)) {
    place.show("lost", "offline");
    alert.show(`The connection to nomarr-web is lost; the page retries.${seen} If it stays lost: ${systemctl("status nomarr-web.service")}`);
  } else if (!known.supervisor.answers) {
    place.show("lost", "no supervisor");
    const isStopped = known.supervisor.unit === "inactive";
    alert.show(`The supervisor ${isStopped ? "was stopped" : "does not answer"}: health, phase and jobs are as they were last. `
      + (isStopped ? `To start it: ${systemctl("start nomarr-supervisor.service")}` : `systemd restarts it: ${systemctl("status nomarr-supervisor.service")}`));
  } else if (known.error) {
    place.show("lost", "no data");
    alert.show(plain(`${known.error.message}. ${known.error.hint || ""}${seen}`, 500));
  } else {
    place.show(link.state === "live" ? "live" : "wait", { live: "live", hidden: "paused" }[link.state] || "connecting");
    const errors = known.system.errors || [];
    const more = errors.length > MOST_ERRORS ? `; and ${errors.length - MOST_ERRORS} more` : "";
    alert.show(...errors.length ? [plain(errors.slice(0, MOST_ERRORS).join("; ") + more, 400)] : []);
  }
}

let tokenForm = null;
function askForToken() {
  if (tokenForm) return tokenForm;
  const input = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "Token" });
  tokenForm = h("form", { onsubmit: (event) => { event.preventDefault(); setToken(input.value); tokenForm = null; follow(); readAll(); } },
    "This page needs a token: ", input, h("button", { type: "submit" }, "Use it"));
  return tokenForm;
}

function follow() {
  following?.close();
  following = stream(TOPICS, take, (state) => {
    const wasLost = link.state === "lost" || (link.wasLost && state.state === "connecting");
    if (state.state === "live" && link.wasLost) readAll();
    link = { ...state, wasLost };
    drawSoon();
  });
}

// Update the times that are shown, also without an event.
setInterval(() => {
  if (document.hidden) return;
  const now = Date.now();
  for (const each of document.querySelectorAll("[data-until]")) each.textContent = countdown(Number(each.dataset.until));
  for (const each of document.querySelectorAll("[data-since]")) each.textContent = duration((now - Number(each.dataset.since)) / 1000);
  for (const each of document.querySelectorAll("[data-seen]")) each.textContent = atLeast(Number(each.dataset.seen));
  for (const each of document.querySelectorAll("[data-ago]")) each.textContent = age(Number(each.dataset.ago));
  drawLink();
}, 1000);

const said = document.getElementById("said");
listen((what, id) => {
  if (what === "fleet") document.getElementById("fleet").hidden = !known.fleet.shared;
  if (what === "crash") {
    const worker = known.workers.get(id);
    said.textContent = worker ? `${worker.instance} died` : "";
    view?.draw(filter.value.trim(), pool, what, id);
  }
  if (what === "lines") view?.draw(filter.value.trim(), pool, what);
  if (what === "all") {
    const names = new Set();
    for (const worker of known.workers.values()) names.add(worker.instance).add(worker.pool).add(`state:${worker.state}`);
    const there = document.getElementById("suggestions");
    const values = [...names].sort().slice(0, 500);
    if (there.dataset.values !== values.join()) put(there, ...values.map((value) => h("option", { value })));
    there.dataset.values = values.join();
  }
  drawSoon();
});

document.addEventListener("click", (event) => {
  const anchor = event.target.closest("a[data-nav]");
  const chip = event.target.closest("[data-filter]");
  if (chip) {
    filter.value = filter.value === chip.dataset.filter ? "" : chip.dataset.filter;
    filter.dispatchEvent(new Event("input"));
  } else if (anchor && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    visit("list" in anchor.dataset ? list : anchor.getAttribute("href"));
  }
});

filter.addEventListener("input", () => {
  const query = new URLSearchParams(location.search);
  if (filter.value.trim()) query.set("q", filter.value.trim());
  else query.delete("q");
  if (query.has("worker")) query.delete("worker");
  history.replaceState(null, "", `/${query.size ? `?${query}` : ""}`);
  go();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (route !== "workers") visit(list);
    else if (pool || filter.value) visit("/");
  } else if (typing || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  } else if (event.key === "/") {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "j" || event.key === "k") {
    const names = [...document.querySelectorAll(".row .name")];
    const place = names.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    names[Math.max(0, Math.min(place, names.length - 1))]?.focus();
  }
});

addEventListener("popstate", go);

const theme = localStorage.getItem("nomarr-theme");
if (theme) document.documentElement.dataset.theme = theme;
document.getElementById("theme").addEventListener("click", () => {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const next = dark ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("nomarr-theme", next);
});
document.getElementById("host").textContent = location.host;

takeToken();
go();
begin();
follow();
