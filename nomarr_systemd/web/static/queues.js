// Queues: depth, rate, time left, and what failed or was set aside, with the evidence.
import { h, put, plain, duration, command, moment, ago, shortName, shortNames } from "./dom.js";
import { get } from "./transport.js";
import { known, command as ctl, question } from "./store.js";
import { showJob } from "./worker.js";

const PARTS = [["completed", "good"], ["running", "busy"], ["pending", "idle"], ["errors", "warn"], ["quarantined", "bad"]];
const RATE_S = 60;

function count(queue) {
  return PARTS.reduce((sum, [name]) => sum + (queue[name] || 0), 0);
}

function brief(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : duration(seconds);
}

function ending(seconds) {
  const at = moment(Date.now() + seconds * 1000);
  return seconds > 72000 ? at.slice(5, 16) : at.slice(11, 16);
}

export class QueuesView {
  constructor(root) {
    this.seen = new Map(); // pool → [[moment, completed], …]
    this.lists = new Map();
    this.body = h("div", { class: "cards" });
    put(root, h("h1", {}, "Queues"), this.body);
  }

  draw(filter) {
    const pools = [...known.queues.values()].filter((each) => each.queue && each.queue.includes(filter.replace(/^pool:/, "")));
    if (!pools.length) {
      put(this.body, h("p", { class: "empty" }, known.supervisor.answers
        ? "There are no queues." : `The supervisor does not answer: nothing is known of the queues. ${ctl("jobs list")} reads the store itself.`));
      return;
    }
    const key = JSON.stringify([pools, known.scope]);
    if (key === this.key) return;
    this.key = key;
    const trouble = (queue) => Boolean(queue.failed) * 4 + Boolean(queue.quarantined) * 2 + Boolean(queue.errors);
    pools.sort((one, other) => trouble(other) - trouble(one) || one.queue.localeCompare(other.queue));
    const idle = pools.filter((queue) => !count(queue) && !queue.failed);
    put(this.body, ...pools.filter((queue) => !idle.includes(queue)).map((queue) => this.card(queue)),
      idle.length > 0 && h("section", { class: "card wide" }, h("h2", {}, "Without jobs"),
        h("p", {}, idle.map(({ queue }) => [h("a", { href: `/?pool=${queue}`, "data-nav": true }, queue), " "])),
        command(ctl(`jobs add --pool ${idle[0].queue} FILE`), "a job to a pool whose workers take them from the store")));
  }

  card(queue) {
    const total = count(queue);
    const rate = this.rate(queue);
    const list = this.lists.get(queue.queue) || h("div");
    this.lists.set(queue.queue, list);
    const counts = `${queue.errors}/${queue.quarantined}/${known.scope}`;
    if (list.dataset.counts !== counts) {
      list.dataset.counts = counts;
      this.read(queue, list);
    }
    return h("section", { class: "card wide" },
      h("div", { class: "card-head" }, h("h2", {}, queue.queue), h("a", { href: `/?pool=${queue.queue}`, "data-nav": true }, "its workers")),
      queue.failed && h("p", { class: "bad" }, plain(`The pool has failed: ${queue.failed}`, 400)),
      h("div", { class: "stack tall", role: "img", "aria-label": PARTS.map(([name]) => `${queue[name]} ${name}`).join(", ") },
        total ? PARTS.map(([name, kind]) => {
          const part = h("span", { class: `part fill-${kind}` });
          part.style.flexGrow = queue[name] || 0;
          return part;
        }) : null),
      h("dl", { class: "figures" }, [...PARTS.map(([name]) => [name, String(queue[name] ?? "–")]),
        ["each takes", queue.avg_time ? brief(queue.avg_time) : "–"], ["rate", rate === null ? "–" : `${rate.toFixed(1)}/min`],
        ["done in", queue.eta ? duration(queue.eta) : "–"], ["done at", queue.eta ? ending(queue.eta) : "–"]]
        .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      list);
  }

  rate(queue) {
    const seen = this.seen.get(queue.queue) || [];
    const now = Date.now() / 1000;
    seen.push([now, queue.completed]);
    while (seen.length > 2 && now - seen[0][0] > RATE_S) seen.shift();
    this.seen.set(queue.queue, seen);
    const [[first, before]] = seen;
    return now - first < 3 ? null : (Math.max(0, queue.completed - before) / (now - first)) * 60;
  }

  async read(queue, list) {
    const parts = [];
    for (const [status, count, words] of [["quarantined", queue.quarantined, "jobs quarantine release"], ["error", queue.errors, "jobs retry"]]) {
      if (!count) continue;
      try {
        const answer = await get(`/api/jobs?pool=${queue.queue}&status=${status}&limit=50`);
        parts.push(h("h3", {}, status === "error" ? `Failed (${count})` : `Quarantined (${count}): each has killed its workers`),
          h("ul", { class: "jobs" }, answer.jobs.map((job) => h("li", {}, ...showJob(job).childNodes, command(ctl(`${words} ${job.id}`))))),
          answer.jobs.length < count && h("p", { class: "soft" }, `${count - answer.jobs.length} more: ${question(`jobs list --status ${status} --pool ${queue.queue}`)}`));
      } catch (error) {
        parts.push(h("p", { class: "warn" }, plain(error.message)));
        break;
      }
    }
    put(list, ...parts.filter(Boolean));
  }

  close() {}
}

const MOST = 50; // past incidents, until more are asked for

export class IncidentsView {
  constructor(root) {
    this.most = MOST;
    this.body = h("div", { class: "cards" });
    put(root, h("h1", {}, "Incidents"),
      h("p", { class: "soft" }, "Many workers of a pool died alike: one outage, not their fault. One of them, the canary, is tried first; the others are held, and their restarts are refunded."), this.body);
  }

  draw() {
    const key = JSON.stringify([known.incidents, known.incidentNotes, known.scope, this.most]);
    if (key === this.key) return;
    this.key = key;
    const open = known.incidents.filter((each) => each.open);
    const past = known.incidents.filter((each) => !each.open);
    put(this.body, ...open.map(showOpen),
      past.length > 0 && h("section", { class: "card wide" }, h("h2", {}, "Past incidents"),
        h("ol", { class: "past" }, past.slice(0, this.most).map(showPast)),
        past.length > this.most && h("form", { onsubmit: (event) => { event.preventDefault(); this.most *= 4; this.draw(); } },
          h("button", { type: "submit" }, `Show more of ${past.length}`))),
      known.incidents.length === 0 && h("p", { class: "empty" }, known.readAt
        ? "No incident is on record. One is opened when at least three workers of a pool, and half of them, die alike within ten seconds." : "Reading the incidents …"),
      ...(known.incidentNotes || []).map((note) => h("p", { class: "warn" }, plain(note, 400))));
  }

  close() {}
}

function workerLink(id) {
  return h("a", { href: `/?worker=${encodeURIComponent(id)}`, "data-nav": true }, shortName(id));
}

function showOpen(each) {
  const facts = [["canary", workerLink(each.canary)], ["tried before", each.tried.map((id) => [workerLink(id), " "])],
    ["opened", ago(each.opened_ms)], ["held", each.held.map((id) => [workerLink(id), " "])]];
  return h("section", { class: "card wide tone-bad" },
    h("div", { class: "card-head" }, h("h2", {}, plain(each.pool)), h("span", { class: "pill tone-bad" }, "open")),
    h("p", {}, `${each.workers} workers died alike: ${plain(each.cause, 200)}`),
    h("dl", {}, facts.filter(([, value]) => !Array.isArray(value) || value.length).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    command(question(`why ${shortName(each.canary)}`), "what ended the canary"),
    command(ctl(`resume ${each.pool}`), "do not wait for the canary"));
}

function showPast(each) {
  const isGood = each.closed.endsWith("is healthy");
  const deaths = each.deaths === null ? "" : `, ${each.deaths} ${each.deaths === 1 ? "death" : "deaths"}`;
  return h("li", {}, ago(each.opened_ms), h("b", {}, h("a", { href: `/?pool=${encodeURIComponent(each.pool)}`, "data-nav": true }, plain(each.pool))),
    h("span", {}, `${each.workers} workers died alike${deaths}`, h("span", { class: "soft" }, `: ${plain(each.cause, 120)}`)),
    h("span", { class: "soft" }, "canary ", [...each.tried, each.canary].slice(-3).map((id, place) => [place > 0 && ", then ", workerLink(id)])),
    h("span", {}, h("span", { class: `pill tone-${isGood ? "good" : "idle"}` }, `over after ${duration((each.closed_ms - each.opened_ms) / 1000)}`), " ",
      plain(shortNames(each.closed), 200)));
}
