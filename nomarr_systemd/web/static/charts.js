// Inline SVG: the budget of restarts, a sparkline of health, and a timeline. Each says in words
// what it shows.
import { h, s, moment, duration } from "./dom.js";

// Worst first: rows are ordered by it, and each state has a colour of its own in style.css.
export const ORDER = ["masked", "failed", "crashed", "restarting", "waiting", "unhealthy", "recovering", "held",
  "paused", "activating", "starting", "deactivating", "stopping", "inactive", "stopped", "finished", "unknown", "active", "healthy"];

export function tone(state) {
  if (["masked", "failed", "crashed"].includes(state)) return "bad";
  if (["restarting", "waiting", "unhealthy"].includes(state)) return "warn";
  if (["recovering", "activating", "starting", "stopping", "deactivating"].includes(state)) return "busy";
  if (["held", "paused"].includes(state)) return "held";
  return ["healthy", "active"].includes(state) ? "good" : "idle";
}

export function budget(worker) {
  const { window, lifetime } = worker;
  if (window.used === null) {
    return h("span", { class: "restarts soft", title: "The ledger cannot be read" }, "not known");
  }
  const many = Math.max(1, window.limit);
  const parts = [];
  const share = 100 / Math.min(many, 20);
  for (let n = 0; n < Math.min(many, 20); n += 1) {
    const used = n < (window.used / many) * Math.min(many, 20);
    parts.push(s("rect", { x: n * share + 0.6, y: 1, width: Math.max(1, share - 1.2), height: 10, rx: 1.5,
      class: used ? (window.used >= window.limit ? "full" : "used") : "free" }));
  }
  const life = lifetime.limit ? Math.min(1, lifetime.used / lifetime.limit) : 0;
  const words = `${window.used} of ${window.limit} restarts in ${duration(window.window_s)}; `
    + (lifetime.limit ? `${lifetime.used} of ${lifetime.limit} since the last reset` : `${lifetime.used} since the last reset, no limit`);
  const gauge = s("svg", { class: "budget", viewBox: "0 0 100 22", role: "img", "aria-label": words, preserveAspectRatio: "none" },
    s("title", {}, words), parts,
    s("rect", { x: 0.6, y: 15, width: 98.8, height: 5, rx: 2, class: "free" }),
    life > 0 && s("rect", { x: 0.6, y: 15, width: Math.max(2, 98.8 * life), height: 5, rx: 2, class: life >= 1 ? "full" : "life" }));
  return h("span", { class: "restarts", title: words }, gauge,
    h("span", { class: window.used && window.used >= window.limit ? "bad" : "soft", "aria-hidden": "true" }, `${window.used}/${window.limit}`));
}

const LETTERS = { h: "healthy", s: "starting", t: "stopping", o: "stopped", r: "recovering", u: "unhealthy", c: "crashed", f: "failed" };

export function sparkline(line, since, step, crashes) {
  const size = line.length || 1;
  const seen = {};
  const bars = [...line].map((letter, n) => {
    if (letter === "-") return null;
    const word = LETTERS[letter] || "stopped";
    seen[word] = (seen[word] || 0) + 1;
    const height = word === "healthy" ? 8 : word === "stopped" ? 4 : 16;
    return s("rect", { x: n * 4, y: 20 - height, width: 3, height, class: `fill-${tone(word)}` });
  });
  const inside = crashes.filter((at) => at >= since && at < since + step * size);
  const marks = inside.map((at) => {
    const x = ((at - since) / (step * size)) * size * 4;
    return s("path", { d: `M${x - 2.5} 0h5l-2.5 4.500z`, class: "fill-bad" });
  });
  const words = Object.entries(seen).map(([word, count]) => `${word} ${Math.round((100 * count) / size)} %`).join(", ");
  const label = `Last ${duration((step * size) / 1000)}: ${words || "no samples"}; ${inside.length} crashes`;
  return s("svg", { class: "spark", viewBox: `0 0 ${size * 4} 21`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    s("title", {}, label), bars, marks);
}

// Health over time as columns, deaths and acts of people as marks on it. `width` is that of the
// place for it, so that marks keep their shape.
export function timeline(history, width, pick) {
  const { since_ms: since, until_ms: until, health, records } = history;
  const x = (ms) => ((ms - since) / (until - since)) * width;
  const inside = (ms) => Math.max(6, Math.min(width - 6, x(ms))).toFixed(1);
  const gap = history.step_ms || 30000;
  const columns = health.map((bucket) => {
    const total = Object.values(bucket.states).reduce((sum, each) => sum + each, 0);
    let top = 14;
    return ORDER.filter((word) => bucket.states[word]).reverse().map((word) => {
      const height = (86 * bucket.states[word]) / total;
      const left = Math.max(0, x(bucket.at_ms));
      const rect = s("rect", { x: left.toFixed(1), y: (114 - top - height).toFixed(1), width: Math.max(1, x(bucket.at_ms + gap) - x(bucket.at_ms)).toFixed(1),
        height: height.toFixed(1), class: `fill-${tone(word)}` });
      top += height;
      return rect;
    });
  });
  const deaths = records.filter((each) => each.kind && each.action !== "refund");
  const acts = records.filter((each) => !each.kind);
  const marks = [
    ...deaths.map((each) => s("path", { d: `M${inside(each.at_ms)} 11l-5.500-10h11z`, class: `death fill-${each.action === "fail" ? "bad" : "warn"}`,
      onclick: () => pick(each) }, s("title", {}, `${moment(each.at_ms)} ${each.kind}: ${each.action}`))),
    ...acts.map((each) => s("circle", { cx: inside(each.at_ms), cy: 107, r: 3.5, class: "act" },
      s("title", {}, `${moment(each.at_ms)} ${each.action}${each.by ? ` by ${each.by}` : ""}`))),
  ];
  const label = `Health from ${moment(since)} to ${moment(until)}: ${deaths.length} deaths, ${acts.length} acts of people`;
  return s("svg", { class: "timeline", viewBox: `0 0 ${width} 114`, role: "img", "aria-label": label, preserveAspectRatio: "none" },
    s("title", {}, label), s("rect", { x: 0, y: 14, width, height: 86, class: "ground" }), columns, marks);
}

// Moments below a time line, five of them; the first has its day.
export function axis({ since_ms: since, until_ms: until }) {
  const days = (until - since) / 86400000;
  const label = (ms, first) => (days > 60 ? moment(ms).slice(0, 7) : days > 2 ? moment(ms).slice(5, 10) : moment(ms).slice(first ? 5 : 11, 16));
  return h("div", { class: "axis soft", "aria-hidden": "true" }, [0, 1, 2, 3, 4].map((n) => {
    const ms = since + (n / 4) * (until - since);
    return h("span", { title: moment(ms) }, n === 4 ? "now" : label(ms, n === 0));
  }));
}
