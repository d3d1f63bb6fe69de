// The engine panel: the grid of experts and rates.
const SAMPLES = 100;
const SAMPLE_MS = 200;
const IDLE_MS = 700;
const history = [];
let grid = null;
let latest = null;
let lastStep = 0;
let lastEventAt = 0;
let isIdle = true;

/** Receives the engine's events while the page is open; after each connection the full state is fetched. */
async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 8000)) {
    try {
      const response = await fetchWithKey("/events");
      if (!response.ok) throw new Error(await errorMessage(response));
      await refreshState();
      pause = 500;
      for await (const line of linesOf(response)) if (line.startsWith("data: ")) handleEvent(JSON.parse(line.slice(6)));
    } catch {
      // Shown as a status below, and retried.
    }
    showStatus("lost", "disconnected");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Fetches the engine's state. */
async function refreshState() {
  const state = await fetchJson("/engine");
  if (!grid) begin(state);
  grid.setResident(state.resident);
  showRouting(state);
  showResidentCount();
  setIdle(state.active);
}

function begin(state) {
  $("model").textContent = state.model;
  document.title = `${state.model} · larder`;
  const [layers, experts] = [state.layers.length, state.experts];
  $("geometry").textContent = `${layers} layers × ${experts} experts, ${state.experts_per_token} per token`;
  if (state.welcome) showWelcome(state.welcome);
  contextSize = state.context ?? 0;
  grid = new Grid($("grid"), state.layers, experts);
  grid.describe = describeCell;
  beginLambda(state);
}

function handleEvent(event) {
  if (event.step !== lastStep + 1 && lastStep) refreshState().catch(() => {});
  lastStep = event.step;
  lastEventAt = performance.now();
  latest = event;
  grid.halfLife = Math.min(0.4, Math.max(0.06, 2.5 / (event.tokens_per_second || 1)));
  for (const visit of event.layers) grid.visit(visit);
  if (isIdle) {
    isIdle = false;
    $("engine").classList.remove("resting");
  }
}

/** Updates the numbers a few times per second, however fast tokens arrive. */
function sample() {
  if (!latest || isIdle) return;
  if (performance.now() - lastEventAt > IDLE_MS) {
    refreshState().catch(() => {});
    return;
  }
  showStatus("busy", latest.queued ? `generating, ${latest.queued} queued` : latest.kind === "prompt" ? "prefill" : "generating");
  $("hit-rate").textContent = latest.hit_rate === null ? "–" : `${formatNumber(100 * latest.hit_rate)} %`;
  $("ssd").replaceChildren(...rateOf(latest.bytes_per_second));
  showResidentCount();
  if (latest.kind !== "token" || !latest.tokens_per_second) return;
  $("speed").textContent = formatNumber(latest.tokens_per_second);
  addSample(latest);
}

function setIdle(active) {
  isIdle = true;
  $("engine").classList.add("resting");
  if (active) showStatus("busy", "generating");
  else showStatus("idle", "ready");
}

function showStatus(state, text) {
  $("state").className = `pill ${state}`;
  // Screen readers announce a status each time it is set.
  if ($("state").textContent !== text) $("state").textContent = text;
}

function rateOf(bytes) {
  const [unit, size] = bytes >= 1e9 ? ["GB/s", 1e9] : ["MB/s", 1e6];
  return [bytes ? formatNumber(bytes / size) : "0", make("small", "", ` ${unit}`)];
}

function showResidentCount() {
  if (grid.cursor >= 0) return describeCell(grid.cursor);
  $("cell").textContent = `${grid.count()} of ${grid.kind.length} experts in memory`;
}

function describeCell(cell) {
  if (cell < 0) return showResidentCount();
  const layer = grid.layers[Math.floor(cell / grid.experts)];
  const uses = grid.uses[cell];
  const text = `layer ${layer}, expert ${cell % grid.experts}: ${grid.resident[cell] ? "in memory" : "on the SSD"}, used ${uses} ${uses === 1 ? "time" : "times"}`;
  if ($("cell").textContent !== text) $("cell").textContent = text;
}

function addSample({ tokens_per_second: speed, agreement, lambda }) {
  history.push({ speed, agreement: agreement ?? 1, lambda });
  if (history.length > SAMPLES) history.shift();
  const fastest = Math.max(...history.map((sample) => sample.speed));
  const lowest = Math.min(...history.map((sample) => sample.agreement));
  plot("speed-line", (sample) => sample.speed / (1.15 * fastest));
  const floor = Math.min(0.8, Math.floor(10 * lowest - 0.5) / 10);
  plot("agreement-line", (sample) => (sample.agreement - floor) / (1.04 - floor));
  $("speed-now").textContent = `${formatNumber(speed)} tokens/s`;
  $("agreement-now").textContent = `${(100 * (agreement ?? 1)).toFixed(1)} %`;
}

/** Plots the last twenty seconds of decode, with a dashed line at each change of λ. */
function plot(id, height) {
  const x = (i) => i + SAMPLES - history.length;
  const points = history.map((sample, i) => `${x(i)} ${(39 - 38 * height(sample)).toFixed(2)}`);
  const changes = history.flatMap((sample, i) => (i && sample.lambda !== history[i - 1].lambda ? [`M${x(i) - 0.5} 0V40`] : []));
  $(id).querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  $(id).querySelector(".mark").setAttribute("d", changes.join(""));
}

setInterval(sample, SAMPLE_MS);
listen();
