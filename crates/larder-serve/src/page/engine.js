// The engine as it works: its grid, its figures, and λ.
const SAMPLES = 100;
const SAMPLE_MS = 200;
const IDLE_MS = 700;
const history = [];
let grid = null;
let latest = null;
let lastStep = 0;
let lastHeard = 0;
let isResting = true;

/** Listens for as long as the page is there; what was missed is asked for. */
async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 8000)) {
    try {
      const response = await ask("/events");
      if (!response.ok) throw new Error(await refusal(response));
      await catchUp();
      pause = 500;
      for await (const line of linesOf(response)) if (line.startsWith("data: ")) hear(JSON.parse(line.slice(6)));
    } catch {
      // The pill says so, and it is tried again.
    }
    pill("lost", "no connection");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** How everything stands, told by the server. */
async function catchUp() {
  const state = await askJson("/engine");
  if (!grid) begin(state);
  grid.settle(state.resident);
  routed(state);
  tellMemory();
  rest(state.active);
}

function begin(state) {
  $("model").textContent = state.model;
  document.title = `${state.model} · larder`;
  const [layers, experts] = [state.layers.length, state.experts];
  $("geometry").textContent = `${layers} layers × ${experts} experts, ${state.experts_per_token} for each token`;
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"]]) {
    const usual = state.sampling?.[name];
    if (usual !== undefined) $(id).placeholder = String(+usual.toFixed(3));
  }
  grid = new Grid($("grid"), state.layers, experts);
  grid.describe = tellCell;
  if (state.streams) $("lambda").disabled = false;
  else $("lambda-note").textContent = "All experts are in memory for good: nothing is read, and there is nothing to prefer.";
}

function hear(event) {
  if (event.step !== lastStep + 1 && lastStep) catchUp().catch(() => {});
  lastStep = event.step;
  lastHeard = performance.now();
  latest = event;
  grid.halfLife = Math.min(0.4, Math.max(0.06, 2.5 / (event.tokens_per_second || 1)));
  for (const visit of event.layers) grid.visit(visit);
  if (isResting) {
    isResting = false;
    $("engine").classList.remove("resting");
  }
}

/** The figures change a few times a second, whatever the engine's pace. */
function sample() {
  if (!latest || isResting) return;
  if (performance.now() - lastHeard > IDLE_MS) {
    catchUp().catch(() => {});
    return;
  }
  pill("busy", latest.queued ? `writing, ${latest.queued} waiting` : latest.kind === "prompt" ? "reading" : "writing");
  $("hit-rate").textContent = latest.hit_rate === null ? "–" : `${figure(100 * latest.hit_rate)} %`;
  $("ssd").replaceChildren(...rateOf(latest.bytes_per_second));
  tellMemory();
  if (latest.kind !== "token" || !latest.tokens_per_second) return;
  $("speed").textContent = figure(latest.tokens_per_second);
  remember(latest);
}

function rest(active) {
  isResting = true;
  $("engine").classList.add("resting");
  if (active) pill("busy", "writing");
  else pill("idle", "ready");
}

function pill(state, text) {
  $("state").className = `pill ${state}`;
  // A status that is written again is read out again.
  if ($("state").textContent !== text) $("state").textContent = text;
}

function rateOf(bytes) {
  const [unit, size] = bytes >= 1e9 ? ["GB/s", 1e9] : ["MB/s", 1e6];
  return [bytes ? figure(bytes / size) : "0", make("small", "", ` ${unit}`)];
}

function tellMemory() {
  if (grid.cursor >= 0) return tellCell(grid.cursor);
  $("cell").textContent = `${grid.count()} of ${grid.kind.length} experts are in memory`;
}

function tellCell(cell) {
  if (cell < 0) return tellMemory();
  const layer = grid.layers[Math.floor(cell / grid.experts)];
  const uses = grid.uses[cell];
  const told = `layer ${layer}, expert ${cell % grid.experts}: ${grid.resident[cell] ? "in memory" : "on the SSD"}, seen ${uses} ${uses === 1 ? "time" : "times"}`;
  if ($("cell").textContent !== told) $("cell").textContent = told;
}

function remember({ tokens_per_second: speed, agreement, lambda }) {
  history.push({ speed, agreement: agreement ?? 1, lambda });
  if (history.length > SAMPLES) history.shift();
  const fastest = Math.max(...history.map((one) => one.speed));
  const least = Math.min(...history.map((one) => one.agreement));
  plot("speed-line", (one) => one.speed / (1.15 * fastest));
  const floor = Math.min(0.8, Math.floor(10 * least - 0.5) / 10);
  plot("agreement-line", (one) => (one.agreement - floor) / (1.04 - floor));
  $("speed-now").textContent = `${figure(speed)} tokens/s`;
  $("agreement-now").textContent = `${(100 * (agreement ?? 1)).toFixed(1)} %`;
}

/** A line of the last twenty seconds of writing; dashes where λ was changed. */
function plot(id, height) {
  const x = (i) => i + SAMPLES - history.length;
  const points = history.map((one, i) => `${x(i)} ${(39 - 38 * height(one)).toFixed(2)}`);
  const changes = history.flatMap((one, i) => (i && one.lambda !== history[i - 1].lambda ? [`M${x(i) - 0.5} 0V40`] : []));
  $(id).querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  $(id).querySelector(".mark").setAttribute("d", changes.join(""));
}

/** What the server says of its routing. */
function routed({ lambda, routing }) {
  if (wished !== null) return;
  if (lambda !== null) {
    $("lambda").max = Math.max($("lambda").max, lambda);
    $("lambda").value = lambda;
  }
  $("lambda-value").textContent = lambda === null ? routing : (+lambda).toFixed(2);
}

let wished = null;

$("lambda").oninput = () => {
  const isAsking = wished !== null;
  wished = $("lambda").valueAsNumber;
  $("lambda-value").textContent = wished.toFixed(2);
  if (!isAsking) setTimeout(choose, 120);
};

/** Tells the server the newest wish until there is none that is newer. */
async function choose() {
  const note = $("lambda-note");
  note.usual ??= note.textContent;
  while (wished !== null) {
    const lambda = wished;
    let state = null;
    try {
      state = await askJson("/engine", { lambda });
      note.textContent = note.usual;
    } catch (error) {
      note.textContent = error.message;
    }
    note.classList.toggle("wrong", !state);
    if (wished !== lambda) continue;
    wished = null;
    routed(state ?? latest ?? { lambda: 0 });
  }
}

setInterval(sample, SAMPLE_MS);
listen();
