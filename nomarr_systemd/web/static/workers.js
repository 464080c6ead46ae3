// The first view: a summary, then every worker, the worst first.
import { h, put, putAfter, plain, copier, duration, ago, shortPath, shortNames } from "./dom.js";
import { budget, sparkline, tone, ORDER } from "./charts.js";
import { known, byWorst, command as ctl, jobStart, rank } from "./store.js";

const NEXT = {
  masked: (w) => `reset ${w.instance} --start`,
  held: (w) => `resume ${w.instance}`,
  paused: (w) => `resume ${w.instance}`,
};

const PARTS = ["pending", "running", "completed", "errors", "quarantined"];

export function matches(worker, text) {
  return text.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const exact = word.replace(/^(state|pool):/, "");
    if (word.startsWith("state:")) return worker.state === exact;
    if (word.startsWith("pool:")) return worker.pool === exact;
    return [worker.instance, worker.component, worker.pool, worker.state, worker.job, worker.phase, worker.last_crash?.word]
      .some((each) => each && String(each).toLowerCase().includes(word));
  });
}

export function pill(state) {
  return h("span", { class: `pill tone-${tone(state)}` }, state);
}

// How long the job in hand has taken; a lower bound if only frames name it.
export function jobAge(worker) {
  const { began, seen } = jobStart(worker);
  if (began) return h("span", { class: "soft age", "data-since": began }, duration((Date.now() - began) / 1000));
  return h("span", { class: "soft age", "data-seen": seen, title: "It began before nomarr-web was started." }, atLeast(seen));
}

export function atLeast(seen) {
  return `≥ ${duration((Date.now() - seen) / 1000)}`;
}

// One worker of the list. It is drawn again only when something of it has changed.
class WorkerRow extends HTMLElement {
  show(worker) {
    const text = JSON.stringify([worker, jobStart(worker), known.lines.workers[worker.component]], (name, value) =>
      ["at", "uptime_s", "next_restart_in_s"].includes(name) ? undefined
        : name === "restartAt" && value ? Math.round(value / 1000) : value);
    if (text === this.text) return;
    this.text = text;
    const crash = worker.last_crash;
    const line = known.lines.workers[worker.component];
    const next = NEXT[worker.state]?.(worker);
    this.className = `row tone-${tone(worker.state)}`;
    this.dataset.worker = worker.instance;
    const ran = worker.restartAt && crash?.run_ms ? `it ran for ${duration(crash.run_ms / 1000)}` : "";
    const reason = shortNames(worker.held || worker.failure_reason || ran);
    const isAlone = Boolean(reason) && !worker.job && !worker.phase;
    this.link ||= h("a", { href: `/?worker=${worker.instance}`, "data-nav": true, class: "name" }, worker.instance);
    putAfter(this, this.link,
      h("span", { class: "state" }, pill(worker.state),
        worker.disagreement && h("span", { class: "note" }, plain(worker.disagreement, 40))),
      !isAlone && h("span", { class: "phase soft" }, plain(worker.phase, 30)),
      h("span", { class: isAlone ? "job alone" : "job" },
        worker.job ? [h("span", { class: "path", title: plain(worker.job) }, shortPath(worker.job)),
          jobAge(worker)]
          : reason && h("span", { class: "soft reason", title: plain(reason, 400) }, plain(reason, 200))),
      budget(worker),
      line ? sparkline(line, known.lines.since_ms, known.lines.step_ms, worker.crashes) : h("span", { class: "spark soft" }),
      h("span", { class: crash ? "crash" : "crash soft never" }, crash
        ? [h("span", { class: "word" }, plain(crash.word, 24)), " ", ago(crash.wall_ms)] : "never died"),
      h("span", { class: "next" }, worker.restartAt
        ? h("span", { class: "count", "data-until": worker.restartAt }, countdown(worker.restartAt))
        : next ? copier(ctl(next), next) : ""),
    );
  }
}
customElements.define("nomarr-worker", WorkerRow);

export function countdown(at) {
  const left = (at - Date.now()) / 1000;
  return left > 0 ? `restart in ${duration(Math.ceil(left))}` : "restart is due";
}

class PoolSection extends HTMLElement {
  constructor() {
    super();
    this.rows = new Map();
  }

  show(pool, workers, isOnly) {
    if (!this.list) {
      this.head = h("div", { class: "pool-head" });
      this.list = h("div", { class: "rows" });
      this.append(this.head, this.list);
    }
    const counts = {};
    for (const worker of workers) counts[worker.state] = (counts[worker.state] || 0) + 1;
    const queue = known.queues.get(pool);
    const incident = known.incidents.find((each) => each.open && each.pool === pool);
    const jobs = queue && PARTS.reduce((sum, name) => sum + (queue[name] || 0), 0);
    put(this.head,
      h("h2", {}, isOnly ? pool : h("a", { href: `/?pool=${pool}`, "data-nav": true }, pool)),
      h("span", { class: "counts" }, Object.entries(counts).sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b))
        .map(([state, count]) => h("span", { class: `count-of tone-${tone(state)}` }, `${count} ${state}`))),
      jobs > 0 && h("span", { class: "soft queue" }, `${queue.pending} pending, ${queue.running} running`
        + (queue.errors ? `, ${queue.errors} failed` : "") + (queue.quarantined ? `, ${queue.quarantined} quarantined` : "")
        + (queue.eta ? `, done in ${duration(queue.eta)}` : "")),
      incident && h("a", { href: "/?view=incidents", "data-nav": true, class: "pill tone-bad" }, "incident"),
    );
    const wanted = workers.map((worker) => {
      let row = this.rows.get(worker.component);
      if (!row) this.rows.set(worker.component, (row = h("nomarr-worker")));
      row.show(worker);
      return row;
    });
    // Rows are moved only where the order differs.
    wanted.forEach((row, place) => {
      if (this.list.children[place] !== row) this.list.insertBefore(row, this.list.children[place] || null);
    });
    while (this.list.children.length > wanted.length) this.list.lastChild.remove();
  }
}
customElements.define("nomarr-pool", PoolSection);

export class WorkersView {
  constructor(root) {
    this.pools = new Map();
    this.summary = h("section", { class: "summary", "aria-label": "All workers" });
    this.list = h("div", { class: "pools" });
    this.title = h("h1", { class: "verdict" }, "Workers");
    this.heads = h("div", { class: "heads", "aria-hidden": "true" },
      ["worker", "state", "phase", "job", "restarts", "last 6 h", "last crash", "next"].map((each) => h("span", {}, each)));
    put(root, this.title, this.summary, this.heads, this.list);
  }

  draw(filter, pool) {
    const all = [...known.workers.values()];
    const focused = document.activeElement;
    const shown = all.filter((worker) => (!pool || worker.pool === pool) && matches(worker, filter));
    this.drawSummary(all.filter((worker) => !pool || worker.pool === pool), shown, filter, pool);
    this.heads.hidden = shown.length === 0;
    const groups = new Map();
    for (const worker of shown.sort(byWorst)) {
      if (!groups.has(worker.pool)) groups.set(worker.pool, []);
      groups.get(worker.pool).push(worker);
    }
    const sections = [...groups].map(([name, workers]) => {
      let section = this.pools.get(name);
      if (!section) this.pools.set(name, (section = h("nomarr-pool")));
      section.show(name, workers, Boolean(pool));
      return section;
    });
    if (!sections.length) {
      put(this.list, h("p", { class: "empty" }, all.length
        ? "No worker matches the filter." : known.readAt ? "No workers are configured: add [pool.NAME] to nomarr.toml, then run nomarrctl apply."
          : known.error ? "Nothing is known of the workers yet." : "Reading the workers …"));
      return;
    }
    sections.forEach((section, place) => {
      if (this.list.children[place] !== section) this.list.insertBefore(section, this.list.children[place] || null);
    });
    while (this.list.children.length > sections.length) this.list.lastChild.remove();
    // A row that was moved has lost the focus.
    if (focused !== document.activeElement && this.list.contains(focused)) focused.focus({ preventScroll: true });
  }

  drawSummary(all, shown, filter, pool) {
    const counts = new Map();
    for (const worker of all) counts.set(worker.state, (counts.get(worker.state) || 0) + 1);
    const states = [...counts].sort(([one], [other]) => rank({ state: one }) - rank({ state: other }));
    const queue = known.queues.get(pool);
    const jobs = queue && PARTS.reduce((sum, name) => sum + (queue[name] || 0), 0);
    const open = known.incidents.filter((each) => each.open).length;
    const key = JSON.stringify([states, queue, open, shown.length, filter, pool, known.supervisor.answers]);
    if (key === this.key) return;
    this.key = key;
    this.drawVerdict(all, pool);
    put(this.summary,
      states.length > 0 && h("div", { class: "stack", role: "img", "aria-label": states.map(([state, count]) => `${count} ${state}`).join(", ") },
        states.map(([state, count]) => {
          const part = h("span", { class: `part fill-${tone(state)}` });
          part.style.flexGrow = count;
          return part;
        })),
      h("ul", { class: "chips" },
        states.map(([state, count]) => h("li", {}, h("button", { type: "button", class: `chip tone-${tone(state)}`, "data-filter": `state:${state}`,
          "aria-pressed": String(filter === `state:${state}`) }, h("b", {}, String(count)), ` ${state}`))),
        jobs > 0 && h("li", {}, h("a", { class: "chip", href: "/?view=queues", "data-nav": true }, h("b", {}, String(queue.pending)), " jobs pending")),
        queue?.quarantined > 0 && h("li", {}, h("a", { class: "chip tone-bad", href: "/?view=queues", "data-nav": true },
          h("b", {}, String(queue.quarantined)), " quarantined")),
        open > 0 && h("li", {}, h("a", { class: "chip tone-bad", href: "/?view=incidents", "data-nav": true }, h("b", {}, String(open)), open > 1 ? " open incidents" : " open incident")),
        (filter || pool) && h("li", { class: "soft" }, `${shown.length} of ${known.workers.size} shown `,
          h("a", { href: "/", "data-nav": true }, "show all"))),
    );
  }

  // The answer to the first question, large enough for a screen on the wall.
  drawVerdict(all, pool) {
    const good = all.filter((worker) => tone(worker.state) === "good").length;
    const tones = new Set(all.map((worker) => tone(worker.state)));
    const place = pool ? `${pool}: ` : "";
    this.title.className = `verdict tone-${["bad", "warn", "held", "busy", "idle"].find((each) => tones.has(each)) || "good"}`;
    if (!all.length) this.title.textContent = "Workers";
    else if (!known.supervisor.answers) this.title.textContent = `${place}${all.filter((worker) => worker.active === "active").length} of ${all.length} workers run`;
    else if (good === all.length) this.title.textContent = good === 1 ? `${place}the one worker is healthy` : `${place}all ${good} workers are healthy`;
    else this.title.textContent = `${place}${good} of ${all.length} workers ${good === 1 ? "is" : "are"} healthy`;
  }

  close() {}
}
