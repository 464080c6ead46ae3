// Building the page. Text of workers is only inserted as text: there is no innerHTML anywhere.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...only(children));
  return element;
}

function only(children) {
  return children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false);
}

// Replaces what is in an element; lists are flattened; null, undefined and false are skipped.
export function put(element, ...children) {
  element.replaceChildren(...only(children));
}

// As put, but the first child stays where it is, and the focus in it.
export function putAfter(element, first, ...children) {
  if (element.firstChild !== first) element.replaceChildren(first);
  while (first.nextSibling) first.nextSibling.remove();
  element.append(...only(children));
}

// A long path is shown by its last part.
export function shortPath(text) {
  const parts = text.split("/");
  return plain(parts.length > 2 ? `…/${parts.at(-1)}` : text, 120);
}

// worker:tag:0 → tag-0, as everywhere else on the page.
export function shortName(id) {
  return plain(String(id).replace(/^worker:([a-z0-9_]+):([0-9]+)$/, "$1-$2"), 60);
}

// Replaces all such names in a text.
export function shortNames(text) {
  return String(text ?? "").replace(/worker:([a-z0-9_]+):([0-9]+)/g, "$1-$2");
}

// Control characters and those that turn text around are made visible, as nomarrctl does.
export function plain(text, most = 300) {
  const shown = String(text ?? "").replace(
    /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

const STEPS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  for (const [index, [size, unit]] of STEPS.entries()) {
    if (whole >= size * (index < 3 ? 1 : 0)) {
      const next = STEPS[index + 1];
      const rest = next ? Math.floor((whole % size) / next[0]) : 0;
      return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${next[1]}` : ""}`;
    }
  }
  return "0 s";
}

export function moment(ms) {
  const date = new Date(ms);
  const pad = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

export function ago(ms) {
  return h("time", { datetime: new Date(ms).toISOString(), title: moment(ms), "data-ago": ms }, age(ms));
}

// In one unit: the title has the moment.
export function age(ms) {
  return `${duration((Date.now() - ms) / 1000).split(" ").slice(0, 2).join(" ")} ago`;
}

// A button that copies a command: the page itself changes nothing. Where a browser does not let a
// page copy (plain HTTP from another machine), the command is shown, selected.
export function copier(text, label = "copy", code = null) {
  const button = h("button", {
    type: "button", class: "copy", title: text, "aria-label": `Copy: ${text}`,
    onclick: async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
      } catch {
        if (!code) button.textContent = text;
        getSelection().selectAllChildren(code || button);
        if (!code) return;
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = label; }, 1500);
    },
  }, label);
  return button;
}

export function command(text, why) {
  const code = h("code", {}, text);
  return h("div", { class: "command" }, h("div", { class: "line" }, code, copier(text, "copy", code)), why && h("small", {}, why));
}
