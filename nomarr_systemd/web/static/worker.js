// One worker: its state, its time line, each death with its post-mortem, frames, jobs, and what
// another policy would have done.
import { h, put, putAfter, plain, duration, ago, moment, command, shortName } from "./dom.js";
import { axis, budget, timeline, tone } from "./charts.js";
import { get, stream } from "./transport.js";
import { known, jobStart, command as ctl, question, readWorker } from "./store.js";
import { pill, countdown, jobAge } from "./workers.js";

const SPANS = [["6 h", 6], ["24 h", 24], ["7 days", 168], ["30 days", 720], ["1 year", 8760]];
const MAX_FRAMES = 60;
const WORDS = { on_exhausted: ["mask", "cooldown"], on_clean_exit: ["restart", "stay"] };

export class WorkerView {
  constructor(root, name) {
    this.name = name;
    this.hours = 24;
    this.frames = [];
    this.head = h("div", { class: "worker-head" });
    this.actions = h("section", { class: "card" });
    this.time = h("section", { class: "card wide" });
    this.deaths = h("section", { class: "card wide" });
    this.box = h("section", { class: "card" });
    this.jobs = h("section", { class: "card" });
    this.trial = h("section", { class: "card wide" });
    put(root,
      h("p", {}, h("a", { href: "/", "data-nav": true, "data-list": true }, "← all workers")),
      h("div", { class: "cards" }, this.head, this.actions, this.time, this.deaths, this.box, this.jobs, this.trial),
    );
    this.spans = h("div", { class: "spans", role: "group", "aria-label": "Span of time" }, SPANS.map(([label, hours]) =>
      h("button", { type: "button", "data-hours": hours, onclick: () => { this.hours = hours; this.readHistory(); } }, label)));
    this.timeHead = h("div", { class: "card-head" }, h("h2", {}, "Health, deaths and decisions"), this.spans);
    this.drawFrames();
    readWorker(name).then((worker) => this.begin(worker), (error) => {
      put(this.head, h("h1", {}, plain(name)), h("p", { class: "bad" }, `${error.message}. ${error.hint || ""}`));
    });
  }

  get worker() {
    return [...known.workers.values()].find((each) => [each.instance, each.component, each.unit].includes(this.name));
  }

  begin({ policy }) {
    this.draw();
    this.drawTrial(policy);
    this.readHistory();
    this.readJobs();
    const topic = `${this.worker.component}:frames`;
    this.following = stream([topic], (event) => this.takeFrames(event), () => {});
  }

  draw(_filter, _pool, what, id) {
    const worker = this.worker;
    if (!worker) return;
    if (what === "crash" && id === worker.component) {
      setTimeout(() => { this.readHistory(); this.readJobs(); }, 400);
    }
    if (what === "lines") this.readHistory(); // it goes on while the page stays open
    const key = JSON.stringify([worker, jobStart(worker)]);
    if (key === this.key) return;
    this.key = key;
    const facts = [
      ["health", worker.health || "not known"], ["phase", worker.phase], ["unit", [...new Set([worker.active, worker.sub, worker.load])].join(", ")],
      ["pid", worker.pid], ["up for", worker.uptime_s === null ? null : duration(worker.uptime_s)],
      ["held", worker.held], ["failed", worker.failure_reason], ["ledger", worker.ledger_problem],
      ["disagreement", worker.disagreement],
      ["restarts", worker.window.used === null ? null : `${worker.window.used} of ${worker.window.limit} in ${duration(worker.window.window_s)}; `
        + `${worker.lifetime.used}${worker.lifetime.limit ? ` of ${worker.lifetime.limit}` : ""} since the last reset; ${worker.total_restarts} ever, ${worker.recoveries} recovered`],
    ];
    this.head.className = `worker-head tone-${tone(worker.state)}`;
    put(this.head,
      h("div", { class: "title" }, h("h1", {}, worker.instance), pill(worker.state),
        worker.restartAt && h("span", { class: "count", "data-until": worker.restartAt }, countdown(worker.restartAt))),
      worker.job && h("p", { class: "job" }, "job ", h("span", { class: "path" }, plain(worker.job)),
        " ", jobAge(worker)),
      budget(worker),
      h("dl", {}, facts.filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))])),
    );
    this.drawActions(worker);
  }

  drawActions(worker) {
    const { instance, state } = worker;
    const offers = [[question(`why ${instance}`), "the post-mortem in a terminal"]];
    if (["masked", "failed"].includes(state)) offers.push([ctl(`reset ${instance} --start`), "when it is mended: forget its failures, unmask and start it"]);
    if (["held", "paused"].includes(state)) offers.push([ctl(`resume ${instance}`), "let it run again"]);
    else offers.push([ctl(`pause ${instance}`), "let it finish its job and keep it down"]);
    if (worker.active === "active") offers.push([ctl(`restart ${instance}`), "stop it after its job and start it"]);
    offers.push([`journalctl ${known.scope === "user" ? "--user " : ""}--unit ${worker.unit}`, "all that it logged"]);
    put(this.actions, h("h2", {}, "What you can do"), ...offers.map(([text, why]) => command(text, why)));
  }

  async readHistory() {
    const until = Date.now();
    const worker = this.worker;
    const path = `/api/workers/${worker.instance}/history?since_ms=${until - this.hours * 3600000}&until_ms=${until}&points=400`;
    let history;
    try {
      history = await get(path);
    } catch (error) {
      history = { since_ms: until - this.hours * 3600000, until_ms: until, health: [], records: [], notes: [error.message] };
    }
    for (const each of this.spans.children) each.setAttribute("aria-pressed", String(Number(each.dataset.hours) === this.hours));
    putAfter(this.time, this.timeHead,
      timeline(history, Math.max(280, this.time.clientWidth - 36), (record) => this.open(record)),
      axis(history),
      h("p", { class: "legend soft" }, [["good", "healthy"], ["busy", "starting, recovering"], ["warn", "unhealthy"], ["bad", "crashed, failed"], ["idle", "stopped"]]
        .map(([name, words]) => h("span", {}, h("span", { class: `swatch fill-${name}` }), ` ${words}`)), h("span", {}, "▼ death"), h("span", {}, "● act of a person")),
      ...history.notes.map((note) => h("p", { class: "warn" }, plain(note, 400))),
    );
    const key = JSON.stringify(history.records);
    if (key === this.records) return; // an open post-mortem stays as it is
    this.records = key;
    this.drawDeaths(history.records);
  }

  drawDeaths(records) {
    const open = new Set([...this.deaths.querySelectorAll("details[open]")].map((each) => each.dataset.run));
    const items = [...records].reverse().slice(0, 200).map((record) => {
      const line = [ago(record.at_ms), h("b", { class: record.action === "fail" ? "bad" : "" }, plain(record.word || record.action, 40)),
        !record.text.startsWith(record.action) && h("span", {}, record.kind ? record.action : `by ${plain(record.by || "unknown", 60)}`),
        h("span", { class: "soft" }, plain(record.text, 160))];
      if (!record.kind || !record.invocation) return h("li", { class: "act-line" }, line);
      const body = h("div", { class: "why" });
      const details = h("details", { "data-run": record.invocation, ontoggle: () => { if (details.open && !body.hasChildNodes()) this.readWhy(record, body); } },
        h("summary", {}, line), body);
      if (open.has(record.invocation)) details.open = true;
      return h("li", {}, details);
    });
    put(this.deaths, h("h2", {}, "Deaths and acts"),
      items.length ? h("ol", { class: "deaths" }, items) : h("p", { class: "soft" }, "Nothing is on record in this span."));
  }

  open(record) {
    const found = [...this.deaths.querySelectorAll("details")].find((each) => each.dataset.run === record.invocation);
    if (found) {
      found.open = true;
      found.querySelector("summary").focus();
      found.scrollIntoView({ block: "nearest" });
    }
  }

  async readWhy(record, body) {
    put(body, h("p", { class: "soft" }, "Asking systemd, the journal, the ledger and the supervisor …"));
    try {
      const why = await get(`/api/workers/${this.worker.instance}/why?format=json&invocation=${encodeURIComponent(record.invocation)}`);
      put(body, ...showWhy(why));
    } catch (error) {
      put(body, h("p", { class: "bad" }, plain(`${error.message}. ${error.hint || ""}`)));
    }
  }

  takeFrames(event) {
    if (!event.frames) return;
    if (event.type === "snapshot") this.frames = [];
    this.frames = [...this.frames, ...event.frames].slice(-MAX_FRAMES);
    this.drawFrames();
  }

  drawFrames() {
    const lines = this.frames.slice().reverse().map((line) => plain(line.replace(/^HEALTH\|/, ""), 600));
    put(this.box, h("h2", {}, "Black box ", h("small", { class: "soft" }, "last frames, newest first")),
      lines.length ? h("pre", { class: "frames", tabindex: "0", "aria-label": "Frames" }, lines.join("\n"))
        : h("p", { class: "soft" }, "The supervisor has no frames of this worker."));
  }

  async readJobs() {
    const worker = this.worker;
    const found = [];
    let note = null;
    for (const status of ["running", "error", "quarantined"]) {
      try {
        const answer = await get(`/api/jobs?pool=${worker.pool}&status=${status}&limit=200`);
        found.push(...answer.jobs.filter((job) => job.component_id === worker.component
          || (job.crashes || []).some((each) => each.component_id === worker.component)));
      } catch (error) {
        note = error.message;
      }
    }
    put(this.jobs, h("h2", {}, "Its jobs"), note ? h("p", { class: "warn" }, plain(note))
      : found.length ? h("ul", { class: "jobs" }, found.map(showJob)) : h("p", { class: "soft" }, "No job of this worker is running, failed or quarantined."));
  }

  drawTrial(policy) {
    const out = h("div", { role: "status" });
    const fields = Object.entries(policy).map(([name, { value }]) => h("label", {}, h("span", {}, name), field(name, value)));
    const form = h("form", { onsubmit: async (event) => {
      event.preventDefault();
      const wanted = new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim() !== "")
        .map(([name, value]) => [name, Array.isArray(policy[name].value) ? `[${value}]` : value]));
      try {
        put(out, showTrial(await get(`/api/workers/${this.worker.instance}/simulate?${wanted}`)));
      } catch (error) {
        put(out, h("p", { class: "bad" }, plain(`${error.message} ${error.hint || ""}`)));
      }
    } }, fields, h("button", { type: "submit" }, "Try"));
    put(this.trial, h("h2", {}, "What would another policy have done?"),
      h("p", { class: "soft" }, "The failures on record under other rules; what is left empty stays as it is. Nothing is changed."), form, out);
  }

  close() {
    this.following?.close();
  }
}

// An input for another value of a rule; it shows the value in force.
function field(name, value) {
  if (typeof value === "string") {
    return h("select", { name }, h("option", { value: "" }, value), (WORDS[name] || []).filter((word) => word !== value).map((word) => h("option", {}, word)));
  }
  if (Array.isArray(value)) return h("input", { name, placeholder: value.join(", ") || "none", pattern: "[0-9, ]*", title: "exit statuses, as in 1, 78" });
  return h("input", { name, type: "number", min: "0", step: "any", placeholder: String(value) });
}

export function showJob(job) {
  const error = job.error || {};
  return h("li", {}, h("div", {}, h("span", { class: `pill tone-${{ running: "busy", error: "warn", quarantined: "bad", done: "good" }[job.status] || "idle"}` }, job.status),
    " ", h("span", { class: "path" }, plain(job.path, 200)), " ", job.updated_wall_ms && ago(job.updated_wall_ms)),
  error.message && !(job.crashes || []).length && h("div", { class: "soft" }, plain(`${error.type || "error"}: ${error.message}`, 400)),
  (job.crashes || []).length > 0 && h("ul", { class: "evidence" }, job.crashes.map((each) => h("li", {},
    "killed ", h("a", { href: `/?worker=${encodeURIComponent(each.component_id)}`, "data-nav": true }, shortName(each.component_id)), " ", ago(each.wall_ms), ": ", plain(each.cause, 200)))));
}

function showWhy(why) {
  const death = why.death || {};
  const facts = [["when", death.at_ms && moment(death.at_ms)], ["after", death.run_ms && duration(death.run_ms / 1000)],
    ["class", death.kind && [...new Set([death.kind, why.decision?.word || death.kind])].join(", ")], ["job", death.job], ["seen before", why.repeats && (why.repeats.times > 1 ? `yes: ${why.repeats.times} of ${why.repeats.deaths} deaths on record were this crash` : "no")],
    ["decision", why.decision?.text]];
  return [
    h("p", {}, h("strong", {}, plain(why.headline, 400))),
    h("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))])),
    why.trace && h("pre", { tabindex: "0", "aria-label": "Trace" }, why.trace.lines.map((line) => plain(line, 500)).join("\n")),
    why.journal.length > 0 && h("pre", { tabindex: "0", "aria-label": "Journal" }, why.journal.slice(-25).map((line) =>
      `${moment(line.at_ms).slice(11)} ${plain(line.text, 500)}`).join("\n")),
    why.frames.length > 0 && h("pre", { tabindex: "0", "aria-label": "Last frames of the run" }, why.frames.map((each) => plain(JSON.stringify(each), 500)).join("\n")),
    ...why.advice.map((each) => (each.command ? command(plain(each.command), plain(each.text, 400).replace(/:$/, "")) : h("p", {}, plain(each.text, 400)))),
    ...why.notes.map((note) => h("p", { class: "warn" }, plain(note, 400))),
  ].filter(Boolean);
}

function showTrial(result) {
  const row = (name, one, other) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, one), h("td", {}, other));
  const { recorded, simulated, saved_s: saved } = result;
  return h("div", {}, h("table", {}, h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "on record"), h("th", { scope: "col" }, "tried"))),
    h("tbody", {}, row("restarts", String(recorded.restarts), String(simulated.restarts)), row("masks", String(recorded.masks), String(simulated.masks)),
      row("did not run", "–", String(simulated.not_run)), row("downtime", duration(recorded.down_s), duration(simulated.down_s)))),
  h("p", {}, saved > 0 ? `It would have saved ${duration(saved)} of downtime.` : saved < 0 ? `It would have cost ${duration(-saved)} more downtime.`
    : "It would have made no difference to the downtime."));
}
