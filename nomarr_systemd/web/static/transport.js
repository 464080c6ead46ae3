// All requests to the server. Another server for the page (a Cockpit plugin, say) replaces
// this module: `get` answers a question, `stream` follows topics until it is closed.

const TOKEN = "nomarr-token";
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8000;
const SILENCE_MS = 40000; // heartbeats come every 15 s

export class Refused extends Error {
  constructor(status, error, hint) {
    super(error);
    this.status = status;
    this.hint = hint || "";
  }
}

// A token may come with a link, after the #, which is not sent to the server.
export function takeToken() {
  const match = /^#token=(.+)$/.exec(location.hash);
  if (match) {
    sessionStorage.setItem(TOKEN, decodeURIComponent(match[1]));
    history.replaceState(null, "", location.pathname + location.search);
  }
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export async function get(path, signal) {
  const answer = await fetch(path, { headers: headers({ Accept: "application/json" }), signal });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok && !(answer.status === 404 && body.schema)) {
    throw new Refused(answer.status, body.error || `HTTP ${answer.status}`, body.hint);
  }
  return body;
}

// `onEvent(event)` for each event, `onState({state, retryAt})` when the link changes: connecting,
// live, lost, hidden or refused. Resumes where it was; a hidden page does not stream.
export function stream(topics, onEvent, onState) {
  const path = `/events?topics=${topics.map(encodeURIComponent).join(",")}`;
  let lastId = "";
  let control = null;
  let timer = 0;
  let retryMs = FIRST_RETRY_MS;
  let closed = false;

  async function run() {
    clearTimeout(timer);
    if (closed || document.hidden) return;
    const mine = (control = new AbortController());
    let watch = 0;
    const stillThere = () => {
      clearTimeout(watch);
      watch = setTimeout(() => mine.abort(), SILENCE_MS);
    };
    try {
      onState({ state: "connecting" });
      const answer = await fetch(path, {
        headers: headers({ Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) }),
        signal: mine.signal,
        cache: "no-store",
      });
      if (!answer.ok) {
        const body = await answer.json().catch(() => ({}));
        throw new Refused(answer.status, body.error || `HTTP ${answer.status}`, body.hint);
      }
      onState({ state: "live" });
      retryMs = FIRST_RETRY_MS;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        stillThere();
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          let data = "";
          for (const line of block.split("\n")) {
            if (line.startsWith("id: ")) lastId = line.slice(4);
            else if (line.startsWith("data: ")) data = line.slice(6);
          }
          if (data) onEvent(JSON.parse(data));
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status !== 503) {
        onState({ state: "refused", error });
        return;
      }
    } finally {
      clearTimeout(watch);
    }
    if (closed || mine !== control || document.hidden) return;
    onState({ state: "lost", retryAt: Date.now() + retryMs });
    timer = setTimeout(run, retryMs);
    retryMs = Math.min(retryMs * 2, LAST_RETRY_MS);
  }

  function turn() {
    if (closed) return;
    if (document.hidden) {
      clearTimeout(timer);
      control?.abort();
      control = null;
      onState({ state: "hidden" });
    } else if (!control || control.signal.aborted) {
      run();
    }
  }

  document.addEventListener("visibilitychange", turn);
  run();
  return {
    retry() {
      retryMs = FIRST_RETRY_MS;
      control?.abort();
      run();
    },
    close() {
      closed = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", turn);
      control?.abort();
    },
  };
}
