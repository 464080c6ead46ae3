// The first view: a summary, then every worker, the worst first.
import { h, put, plain, duration, ago, shortPath } from "./dom.js";
import { budget, sparkline, tone, ORDER } from "./charts.js";
import { known, byWorst, command as ctl, jobStart, rank } from "./store.js";

const NEXT = {
  masked: (w) => ctl(`reset ${w.instance} --start`),
  held: (w) => ctl(`resume ${w.instance}`),
  paused: (w) => ctl(`resume ${w.instance}`),
};

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
  return h("span", { class: "soft age", "data-seen": seen, title: "Since this page saw it: its frames do not say when it began." }, atLeast(seen));
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
    put(this, 
      h("a", { href: `/?worker=${worker.instance}`, "data-nav": true, class: "name" }, worker.instance),
      h("span", { class: "state" }, pill(worker.state),
        worker.disagreement && h("span", { class: "note" }, plain(worker.disagreement, 40))),
      h("span", { class: "job" },
        worker.job ? [h("span", { class: "path", title: plain(worker.job) }, shortPath(worker.job)),
          jobAge(worker)]
          : h("span", { class: "soft" }, plain(worker.phase || worker.held || worker.failure_reason || "", 120))),
      h("span", { class: "phase soft" }, worker.job ? plain(worker.phase || "", 30) : ""),
      budget(worker),
      line ? sparkline(line, known.lines.since_ms, known.lines.step_ms, worker.crashes) : h("span", { class: "spark soft" }),
      h("span", { class: "crash" }, crash
        ? [h("span", { class: "word" }, plain(crash.word, 24)), " ", ago(crash.wall_ms)] : h("span", { class: "soft" }, "never died")),
      h("span", { class: "next" }, worker.restartAt
        ? h("span", { class: "count", "data-until": worker.restartAt }, countdown(worker.restartAt))
        : next ? h("code", {}, next) : ""),
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
    put(this.head, 
      h("h2", {}, isOnly ? pool : h("a", { href: `/?pool=${pool}`, "data-nav": true }, pool)),
      h("span", { class: "counts" }, Object.entries(counts).sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b))
        .map(([state, count]) => h("span", { class: `count-of tone-${tone(state)}` }, `${count} ${state}`))),
      queue && h("span", { class: "soft queue" }, `${queue.pending} pending, ${queue.running} running`
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
    // Rows are moved only where the order differs, so that the focus is kept.
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
    this.heads = h("div", { class: "heads", "aria-hidden": "true" },
      ["worker", "state", "job", "phase", "restarts", "last 6 h", "last crash", "next"].map((each) => h("span", {}, each)));
    put(root, h("h1", { class: "unseen" }, "Workers"), this.summary, this.heads, this.list);
  }

  draw(filter, pool) {
    const all = [...known.workers.values()];
    const shown = all.filter((worker) => (!pool || worker.pool === pool) && matches(worker, filter));
    this.drawSummary(all, shown, filter, pool);
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
          : "Nothing is known of the workers yet."));
      return;
    }
    sections.forEach((section, place) => {
      if (this.list.children[place] !== section) this.list.insertBefore(section, this.list.children[place] || null);
    });
    while (this.list.children.length > sections.length) this.list.lastChild.remove();
  }

  drawSummary(all, shown, filter, pool) {
    const counts = new Map();
    for (const worker of all) counts.set(worker.state, (counts.get(worker.state) || 0) + 1);
    const states = [...counts].sort(([one], [other]) => rank({ state: one }) - rank({ state: other }));
    const queue = known.queues.get("");
    const open = known.incidents.filter((each) => each.open).length;
    const key = JSON.stringify([states, queue, open, shown.length, filter, pool]);
    if (key === this.key) return;
    this.key = key;
    put(this.summary, 
      h("div", { class: "stack", role: "img", "aria-label": states.map(([state, count]) => `${count} ${state}`).join(", ") },
        states.map(([state, count]) => {
          const part = h("span", { class: `part fill-${tone(state)}` });
          part.style.flexGrow = count;
          return part;
        })),
      h("ul", { class: "chips" },
        states.map(([state, count]) => h("li", {}, h("button", { type: "button", class: `chip tone-${tone(state)}`, "data-filter": `state:${state}`,
          "aria-pressed": String(filter === `state:${state}`) }, h("b", {}, String(count)), ` ${state}`))),
        queue && h("li", {}, h("a", { class: "chip", href: "/?view=queues", "data-nav": true }, h("b", {}, String(queue.pending)), " jobs pending")),
        queue?.quarantined > 0 && h("li", {}, h("a", { class: "chip tone-bad", href: "/?view=queues", "data-nav": true },
          h("b", {}, String(queue.quarantined)), " quarantined")),
        open > 0 && h("li", {}, h("a", { class: "chip tone-bad", href: "/?view=incidents", "data-nav": true }, h("b", {}, String(open)), " open incident")),
        (filter || pool) && h("li", { class: "soft" }, `${shown.length} of ${all.length} shown `,
          h("a", { href: "/", "data-nav": true, "data-clear": true }, "show all"))),
    );
  }

  close() {}
}
