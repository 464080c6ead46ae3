// Queues: depth, rate, time left, and what failed or was set aside, with the evidence.
import { h, put, plain, duration, command, moment, ago, shortName } from "./dom.js";
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
        ? "There are no queues." : "The supervisor does not answer: nothing is known of the queues."));
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

export class IncidentsView {
  constructor(root) {
    this.body = h("div", { class: "cards" });
    put(root, h("h1", {}, "Incidents"),
      h("p", { class: "soft" }, "Many workers of a pool died alike: one outage, not their fault. One of them, the canary, is tried first; the others are held, and their restarts are given back."), this.body);
  }

  draw() {
    const key = JSON.stringify([known.incidents, known.incidentNotes, known.scope]);
    if (key === this.key) return;
    this.key = key;
    const cards = known.incidents.map((each) => h("section", { class: `card wide ${each.open ? "tone-bad" : ""}` },
      h("div", { class: "card-head" }, h("h2", {}, plain(each.pool)), h("span", { class: `pill tone-${each.open ? "bad" : "good"}` }, each.open ? "open" : "over")),
      h("p", {}, plain(each.text, 400)),
      h("dl", {}, [["canary", each.canary && h("a", { href: `/?worker=${encodeURIComponent(each.canary)}`, "data-nav": true }, shortName(each.canary))],
        ["opened", each.opened_ms && ago(each.opened_ms)], ["closed", each.closed_ms && ago(each.closed_ms)], ["how", each.closed && plain(each.closed, 400)],
        ["held", each.held.length ? each.held.map((id) => [h("a", { href: `/?worker=${encodeURIComponent(id)}`, "data-nav": true }, shortName(id)), " "]).flat() : null]]
        .filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      each.open && each.canary && command(question(`why ${shortName(each.canary)}`), "what ended the canary"),
      each.open && command(ctl(`resume ${each.pool}`), "do not wait for the canary")));
    put(this.body, ...(cards.length ? cards : [h("p", { class: "empty" }, "No incident is on record.")]),
      ...(known.incidentNotes || []).map((note) => h("p", { class: "warn" }, plain(note, 400))));
  }

  close() {}
}
