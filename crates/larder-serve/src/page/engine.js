// The engine panel: the grid of experts and rates.
const SAMPLE_MS = 200;
const IDLE_MS = 700;
const FOLLOW_MS = 3000;
let grid = null;
/** The model that the panel shows: of several, that of the conversation; null if it is not loaded. */
let shownModel = null;
/** Whether the panel is about to show the model of the conversation. */
let isFollowing = false;
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

/** A path of the server for a model, if it has several. */
function modelPath(path, model) {
  return model === null ? path : `${path}?model=${encodeURIComponent(model)}`;
}

/** Fetches the engine's state, of several models that of the conversation's. */
async function refreshState() {
  const model = modelOf(chat);
  const response = await fetchWithKey(modelPath("/engine", model));
  const isAbsent = response.status === 404;
  if (!response.ok && !isAbsent) throw new Error(await errorMessage(response));
  const state = await response.json();
  // Another conversation may be shown by now.
  if (model !== modelOf(chat)) return;
  if (isAbsent) return showAbsent(model, state.error.code !== "model_not_loaded");
  if (state.model !== shownModel) begin(state);
  grid.setResident(state.resident);
  showRouting(state);
  showGridText();
  setIdle(state.active);
}

/** Shows the model of the conversation where there are several. */
async function followChat() {
  if (models.length < 2 || isFollowing) return;
  isFollowing = true;
  const model = modelOf(chat);
  try {
    await fetchModels();
    if (phaseOf(model) === "loaded") await refreshState();
    else if (model === modelOf(chat)) showAbsent(model);
  } catch {
    // The connection is lost, which `listen` shows.
  }
  isFollowing = false;
  if (model !== modelOf(chat)) followChat();
}

/** Shows that the model of the conversation is not loaded, or has no engine here. */
function showAbsent(model, isElsewhere = phaseOf(model) === undefined) {
  const isLoading = phaseOf(model) === "loading";
  showStatus(isLoading ? "busy" : "idle", isElsewhere ? "elsewhere" : isLoading ? "loading" : "not loaded");
  if (model === null) return;
  const isListed = models.some(({ id }) => id === model);
  const where = isListed ? "runs on another server; this one has no experts of it" : "is not on this server";
  const unloaded = generations.has(chat.id) ? "is waiting to be loaded" : "is not loaded; the next message loads it";
  const text = isElsewhere ? where : isLoading ? "is being loaded" : unloaded;
  showNoteOfEngine(`${model} ${text}.`);
  isIdle = true;
  shownModel = null;
  showName(model);
  forgetRates();
  showPlaceholders({});
}

/** A sentence in place of the panel, or none. */
function showNoteOfEngine(text) {
  const note = $("engine-note");
  note.hidden = !text;
  // Screen readers announce a status each time it is set.
  if (note.textContent !== text) note.textContent = text;
}

function showName(model) {
  $("model").textContent = model;
  document.title = `${model} · larder`;
}

/** Empties what is of the model before. */
function forgetRates() {
  latest = null;
  points.length = 0;
  drawCharts();
  for (const id of ["speed", "hit-rate", "ssd"]) $(id).textContent = "–";
}

function begin(state) {
  showName(state.model);
  showNoteOfEngine("");
  const [layers, experts] = [state.layers.length, state.experts];
  $("geometry").textContent = `${layers} layers × ${experts} experts, ${state.experts_per_token} per token`;
  showWelcome(state.welcome ?? STANDARD_WELCOME);
  contextSize = state.context ?? 0;
  if (grid) grid.setShape(state.layers, experts);
  else grid = new Grid($("grid"), state.layers, experts);
  grid.describe = showGridText;
  forgetRates();
  shownModel = state.model;
  lastStep = 0;
  beginLambda(state);
  showDefaults(modelOf(chat)).catch(() => {});
}

function handleEvent(event) {
  if (event.model !== shownModel) {
    // Of several models at work, the panel shows that of the conversation, which may have been loaded just now.
    if (shownModel === null && event.model === modelOf(chat)) followChat();
    return;
  }
  if (event.step !== lastStep + 1 && lastStep) refreshState().catch(() => {});
  lastStep = event.step;
  lastEventAt = performance.now();
  latest = event;
  grid.halfLife = Math.min(0.4, Math.max(0.06, 2.5 / (event.tokens_per_second || 1)));
  for (const visit of event.layers) grid.visit(visit);
  countVisits(event);
  if (isIdle) {
    isIdle = false;
    $("engine").classList.remove("resting");
  }
}

/** Updates the numbers a few times per second, however fast tokens arrive. */
function sample() {
  showVisits();
  if (!latest || isIdle) return;
  if (performance.now() - lastEventAt > IDLE_MS) {
    refreshState().catch(() => {});
    return;
  }
  showStatus("busy", latest.queued ? `generating, ${latest.queued} queued` : latest.kind === "prompt" ? "prefill" : "generating");
  $("hit-rate").textContent = latest.hit_rate === null ? "–" : `${formatNumber(100 * latest.hit_rate)} %`;
  $("ssd").replaceChildren(...rateOf(latest.bytes_per_second));
  showGridText();
  addPoint(latest);
  showOutputLoss(latest.output, latest.quality);
  if (latest.kind === "token" && latest.tokens_per_second) $("speed").textContent = formatNumber(latest.tokens_per_second);
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

/** The sentence below the grid: of the expert under the cursor, or of all. */
function showGridText() {
  const text = grid.cursor >= 0 ? cellText(grid.cursor) : grid.counts ? visitsText(grid.counts) : `${grid.count()} of ${grid.kind.length} experts in memory`;
  // Screen readers announce the sentence each time it is set.
  if ($("cell").textContent !== text) $("cell").textContent = text;
}

function cellText(cell) {
  if (grid.counts) return `${nameOf(cell)}: visited ${timesOf(grid.counts[cell])} by this chat`;
  return `${nameOf(cell)}: ${grid.resident[cell] ? "in memory" : "on the SSD"}, used ${timesOf(grid.uses[cell])}`;
}

function nameOf(cell) {
  return `layer ${grid.layers[Math.floor(cell / grid.experts)]}, expert ${cell % grid.experts}`;
}

function timesOf(count) {
  return `${count} ${count === 1 ? "time" : "times"}`;
}

setInterval(sample, SAMPLE_MS);
// Models are loaded and unloaded without this page.
setInterval(() => isIdle && !document.hidden && followChat(), FOLLOW_MS);
listen();
