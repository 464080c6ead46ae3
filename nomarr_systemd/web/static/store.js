// What the page knows: workers, queues, jobs in hand, the system; kept up to date by events.
import { get } from "./transport.js";
import { ORDER } from "./charts.js";

const REFRESH_MS = 30000;
const BLIND_MS = 5000; // while nothing is streamed, for the supervisor is away
const SOON_MS = 250;
const MANY = 8; // workers that are read one by one
const LOOK_MS = 1500; // what the server says of all workers at once may be a second old

export const known = {
  workers: new Map(), // component → worker of /api/workers, with `at`: when it was read
  queues: new Map(), // pool → queue; "" is all of them
  jobs: new Map(), // component → job in hand
  said: new Map(), // component → what the stream said of it last
  lines: { since_ms: 0, step_ms: 1, workers: {} },
  system: { status: "", errors: [] },
  supervisor: { answers: true },
  scope: "system",
  incidents: [],
  fleet: { shared: false, hosts: [], readAt: 0 },
  error: null,
  readAt: 0,
};

const listeners = new Set();
const dirty = new Set(); // workers to read again
let timer = 0;
let allTimer = 0;
let incidentTimer = 0;

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(what, id) {
  for (const listener of listeners) listener(what, id);
}

export function rank(worker) {
  const place = ORDER.indexOf(worker.state);
  return place < 0 ? ORDER.length - 2 : place;
}

export function byWorst(one, other) {
  return rank(one) - rank(other) || one.pool.localeCompare(other.pool) || number(one) - number(other);
}

function number(worker) {
  return Number(worker.component.split(":")[2]);
}

export async function readAll(again = true) {
  const late = [];
  try {
    const answer = await get("/api/workers");
    const skew = Date.now() - answer.now_ms;
    const there = new Set();
    for (const worker of answer.workers) {
      there.add(worker.component);
      put(worker, skew);
      if (differs(known.said.get(worker.component), worker)) late.push(worker.component);
    }
    for (const id of known.workers.keys()) if (!there.has(id)) known.workers.delete(id);
    known.supervisor = answer.supervisor;
    known.scope = answer.scope;
    known.error = null;
    known.readAt = Date.now();
  } catch (error) {
    known.error = error;
  }
  // The answer may be a second old, and older than what the stream has said already.
  if (again && late.length > MANY) setTimeout(() => readAll(false), LOOK_MS);
  else if (again) late.forEach(readSoon);
  tell("all");
}

function differs(said, worker) {
  return said && (said.status !== worker.health || said.invocation !== (worker.invocation || ""));
}

export async function readLines() {
  try {
    known.lines = await get("/api/sparklines");
    tell("lines");
  } catch { /* rows have no sparkline */ }
}

export async function readFleet() {
  try {
    known.fleet = { ...await get("/api/fleet"), readAt: Date.now() };
  } catch (error) {
    known.fleet = { ...known.fleet, error };
  }
  tell("fleet");
}

export async function readIncidents() {
  try {
    const answer = await get("/api/incidents");
    known.incidents = answer.incidents;
    known.incidentNotes = answer.notes;
    tell("incidents");
  } catch { /* the view keeps what it has */ }
}

// A hold that begins or ends may mean that an incident opened or closed.
function incidentsSoon() {
  clearTimeout(incidentTimer);
  incidentTimer = setTimeout(readIncidents, LOOK_MS);
}

export async function readWorker(id) {
  const worker = await get(`/api/workers/${encodeURIComponent(id)}`);
  put(worker, 0);
  tell("worker", worker.component);
  return worker;
}

function put(worker, skew) {
  const before = known.workers.get(worker.component);
  if (before && before.held !== worker.held) incidentsSoon();
  worker.at = Date.now();
  worker.restartAt = worker.next_restart_in_s === null ? null : Date.now() + worker.next_restart_in_s * 1000;
  const isSame = before && before.job === worker.job && before.invocation === worker.invocation;
  worker.jobBegan = worker.job_seen_from_start ? worker.job_seen_ms + skew : isSame ? before.jobBegan : null;
  worker.jobSeen = worker.job_seen_ms ? worker.job_seen_ms + skew : isSame ? before.jobSeen : Date.now();
  worker.crashes = worker.crashes.map((at) => at + skew);
  known.workers.set(worker.component, worker);
}

function readSoon(id) {
  dirty.add(id);
  if (timer) return;
  timer = setTimeout(async () => {
    timer = 0;
    const ids = [...dirty];
    dirty.clear();
    if (ids.length > MANY) allTimer ||= setTimeout(() => { allTimer = 0; readAll(); }, LOOK_MS);
    else await Promise.allSettled(ids.map(readWorker));
  }, SOON_MS);
}

// An event of the stream.
export function take(event) {
  if (event.type === "supervisor_lost" || event.type === "supervisor_back") {
    known.supervisor = { ...known.supervisor, answers: event.type === "supervisor_back" };
    tell("all");
    readAll();
  } else if (event.type === "lost") {
    readAll();
  } else if (event.worker) {
    takeWorker(event);
  } else if (event.queue) {
    known.queues.set(event.topic === "queue:status" ? "" : event.queue.queue, event.queue);
    tell("queue");
  } else if (event.system) {
    known.system = event.system;
    tell("system");
  } else if (event.jobs) {
    known.jobs = new Map(event.jobs.filter((job) => job.worker).map((job) => [job.worker, job]));
    tell("jobs");
  } else if (event.job) {
    takeJob(event.job);
  }
}

function takeWorker(event) {
  const said = event.worker;
  known.said.set(said.component, said);
  const worker = known.workers.get(said.component);
  if (!worker) {
    if (known.readAt) readSoon(said.component);
    return;
  }
  const job = said.current_job === null ? null : String(said.current_job);
  if (job !== worker.job) {
    worker.jobSeen = Date.now();
    worker.jobBegan = event.type === "snapshot" ? null : worker.jobSeen;
  }
  const other = differs(said, worker);
  Object.assign(worker, { health: said.status, phase: said.phase, job, disagreement: said.disagreement || null });
  if (worker.active === "active" && worker.load !== "masked") worker.state = said.status;
  // The ledger and systemd know the rest: the decision, the budget, the backoff.
  if ((other || event.type === "worker:crash") && event.type !== "snapshot") readSoon(said.component);
  if (event.type === "worker:crash") tell("crash", said.component);
  tell("worker", said.component);
}

function takeJob(job) {
  for (const [id, each] of known.jobs) if (each.id === job.id) known.jobs.delete(id);
  if (job.status === "running" && job.worker) known.jobs.set(job.worker, job);
  tell("jobs", job.worker);
}

// When the job in hand began, as the store of jobs says, or by the first frame that named it; of
// a job that began before that, since when it is known.
export function jobStart(worker) {
  const job = known.jobs.get(worker.component);
  if (job && job.path === worker.job && job.started_ms) return { began: job.started_ms };
  return worker.jobBegan ? { began: worker.jobBegan } : { seen: worker.jobSeen };
}

// The command that changes something, and the one that shows something.
export function command(words) {
  return known.scope === "user" ? question(words) : `sudo ${question(words)}`;
}

export function question(words) {
  return known.scope === "user" ? `nomarrctl --user ${words}` : `nomarrctl ${words}`;
}

export function begin() {
  readAll();
  readLines();
  readIncidents();
  readFleet();
  setInterval(() => { if (!document.hidden && !known.supervisor.answers) readAll(); }, BLIND_MS);
  setInterval(() => { if (!document.hidden) { readAll(); readLines(); readIncidents(); readFleet(); } }, REFRESH_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) readAll(); });
}
