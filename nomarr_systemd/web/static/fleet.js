// All hosts that share the store: whether each is there, how its workers are, what died last.
import { h, put, plain, duration, command, ago } from "./dom.js";
import { known, question, readFleet } from "./store.js";

const LOOK_MS = 5000; // while this view is open
const TONES = { lost: "bad", stale: "bad", error: "bad", degraded: "warn", healthy: "good" };
const HOST = /^[A-Za-z0-9][A-Za-z0-9._-]*$/; // of a command that a person may paste into a shell
const WORKER = /^[a-z][a-z0-9_]*-[0-9]+$/;
const WORDS = {
  lost: "Its lease is over, and the other hosts have settled its jobs. What is shown is as it was.",
  stale: "Its lease is over. If it stays away, the other hosts settle its jobs. What is shown is as it was.",
};

function word(host) {
  return host.state === "up" ? host.system || "unknown" : host.state;
}

export class FleetView {
  constructor(root) {
    this.body = h("div", { class: "cards" });
    this.sum = h("p", { class: "soft" });
    put(root, h("h1", {}, "Fleet"), this.sum, this.body);
    this.timer = setInterval(() => { if (!document.hidden) readFleet(); }, LOOK_MS);
    readFleet();
  }

  draw(filter) {
    const { fleet } = known;
    const key = JSON.stringify([fleet.hosts, fleet.error?.message, fleet.shared, filter, known.scope]);
    if (key === this.key) return;
    this.key = key;
    const wanted = filter.toLowerCase();
    const hosts = fleet.hosts.filter((each) => `${each.name} ${word(each)}`.toLowerCase().includes(wanted));
    const states = new Map();
    for (const each of fleet.hosts) states.set(word(each), (states.get(word(each)) || 0) + 1);
    put(this.sum, fleet.hosts.length
      ? `${fleet.hosts.length} hosts: ${[...states].map(([name, count]) => `${count} ${name}`).join(", ")}${fleet.cut ? "; there are more" : ""}`
      : "");
    const error = fleet.error && h("p", { class: "warn" }, plain(fleet.error.message));
    if (!fleet.shared && !error) {
      put(this.body, fleet.readAt
        ? h("p", { class: "empty" }, "The store is for one host: there is no fleet.")
        : h("p", { class: "empty" }, "Reading the hosts …"));
      return;
    }
    put(this.body, error, hosts.map((host) => this.card(host)),
      !hosts.length && !error && h("p", { class: "empty" }, "No host matches the filter."));
  }

  card(host) {
    const tone = TONES[word(host)] || "idle";
    const pools = Object.entries(host.pools).map(([pool, states]) => [plain(pool),
      Object.entries(states).sort().map(([name, count]) => `${count} ${plain(name)}`).join(", ") || "no workers"]);
    const last = host.crashes[0];
    return h("section", { class: `card ${tone === "bad" ? "tone-bad" : ""}`, "data-host": host.name },
      h("div", { class: "card-head" }, h("h2", {}, plain(host.name), host.host === known.fleet.host && " (this host)"),
        h("span", { class: `pill tone-${tone}` }, plain(word(host)))),
      WORDS[host.state] && h("p", { class: "bad" }, WORDS[host.state]),
      h("dl", {}, [["seen", `${duration(host.age_ms / 1000)} ago`], ...pools,
        ["trouble", host.trouble.length ? host.trouble.map((each) => `${plain(each.worker)} ${plain(each.status)}`).join(", ") : null],
        ["died last", last && [`${plain(last.worker)}, `, ago(last.wall_ms), `: ${plain(last.cause)}`]],
        ["version", plain(host.version)]]
        .filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      last && HOST.test(host.name) && WORKER.test(last.worker)
        && command(question(`--fleet why ${last.worker}@${host.name}`), "what is on record of it"));
  }

  close() {
    clearInterval(this.timer);
  }
}
