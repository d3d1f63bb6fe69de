// The slider for λ, with what each value costs.
const LOCK_KEY = "larder-lambda-locked";
const LAMBDA_NOTE = $("lambda-note").textContent;
/** The largest value and the step where costs were not measured. */
const LAMBDA_SCALE = [$("lambda").max, $("lambda").step];
let lambdaCosts = null;
let pendingLambda = null;
/** Whether λ has an effect, and whether the server refuses changes. */
let lambdaWorks = false;
let serverLocks = false;

/** Prepares the slider for the engine's first state. */
function beginLambda({ streams, lambda_costs: costs }) {
  lambdaWorks = streams;
  $("lambda-note").textContent = LAMBDA_NOTE;
  [$("lambda").max, $("lambda").step] = LAMBDA_SCALE;
  if (!streams) {
    $("lambda-source").textContent = "";
    $("lambda-note").textContent = "All experts fit into memory: nothing is read, so λ has no effect.";
    return;
  }
  if (isLocked()) $("lambda-lock").setAttribute("aria-pressed", "true");
  if (!costs) return;
  $("lambda").max = costs.scale.at(-1).lambda;
  $("lambda").step = costs.scale[1].lambda;
}

/** Shows the routing strategy that the server reports, and its cost. */
function showRouting({ streams, lambda, routing, output, quality, routing_locked: locked = serverLocks, lambda_cost: cost, lambda_costs: costs }) {
  lambdaCosts = costs;
  serverLocks = locked;
  showOutputLoss(output, quality);
  fitLock();
  if (streams) $("lambda-source").textContent = costs?.source ?? "What λ costs this model was not measured: larder tune does it.";
  if (pendingLambda !== null) return;
  if (lambda !== null) {
    $("lambda").max = Math.max($("lambda").max, lambda);
    $("lambda").value = lambda;
  }
  $("lambda-value").textContent = lambda === null ? routing : (+lambda).toFixed(2);
  showCost(lambda === 0 ? costAt(0) : costs && cost);
}

/** The cost of a value of the slider: between two measurements on the line from one to the other, as the server says it. */
function costAt(lambda) {
  const scale = lambdaCosts?.scale;
  return scale && scale[Math.min(scale.length - 1, Math.round((lambda / scale.at(-1).lambda) * (scale.length - 1)))];
}

/** Shows how far the outputs are from those of the model's own routing, as far as that was measured or is expected. */
function showOutputLoss(output, quality) {
  const text = (value, digits) => value.toFixed(digits);
  const interval = output?.kl_half_interval == null ? "" : ` ± ${text(output.kl_half_interval, 4)}`;
  const measured = output && [
    `Output, measured at ${output.measured} ${output.measured === 1 ? "token" : "tokens"}: KL ${text(output.kl, 4)}${interval} nats,`,
    `same likeliest token ${text(100 * output.agreement, 1)} %.`,
  ];
  const expected = quality && `Expected: KL ${text(quality.expected_kl, 4)} nats, ${quality.budget} allowed.`;
  $("output-loss").textContent = [...(measured || []), ...(expected ? [expected] : [])].join(" ");
}

function showCost(note) {
  const { cost = "", warning } = note ?? {};
  $("lambda-cost").textContent = cost && cost[0].toUpperCase() + cost.slice(1) + ".";
  const text = warning ? `Warning: ${warning}` : "";
  // Screen readers announce a status each time it is set.
  if ($("lambda-warning").textContent !== text) $("lambda-warning").textContent = text;
}

/** Whether the slider is locked in this browser. */
function isLocked() {
  try {
    return localStorage.getItem(LOCK_KEY) === "1";
  } catch {
    return $("lambda-lock").getAttribute("aria-pressed") === "true";
  }
}

/** Enables or disables slider and lock. */
function fitLock() {
  const isPressed = $("lambda-lock").getAttribute("aria-pressed") === "true";
  $("lambda-lock").disabled = !lambdaWorks;
  $("lambda-lock").hidden = serverLocks;
  $("lambda").disabled = !lambdaWorks || serverLocks || isPressed;
  $("lambda-locked").textContent = serverLocks ? "Locked by the server: it was started with --lock-routing." : "";
}

$("lambda-lock").onclick = () => {
  const lock = $("lambda-lock").getAttribute("aria-pressed") !== "true";
  $("lambda-lock").setAttribute("aria-pressed", String(lock));
  try {
    localStorage.setItem(LOCK_KEY, lock ? "1" : "0");
  } catch {
    // The lock then holds until the page is closed.
  }
  fitLock();
};

// Another tab locks this one too.
window.addEventListener("storage", ({ key }) => {
  if (key !== LOCK_KEY) return;
  $("lambda-lock").setAttribute("aria-pressed", String(isLocked()));
  fitLock();
});

$("lambda").oninput = () => {
  const isSending = pendingLambda !== null;
  pendingLambda = $("lambda").valueAsNumber;
  $("lambda-value").textContent = pendingLambda.toFixed(2);
  showCost(costAt(pendingLambda));
  if (!isSending) setTimeout(sendLambda, 120);
};

/** Sends the slider's value until the server has the newest one. */
async function sendLambda() {
  const note = $("lambda-note");
  const path = modelPath("/engine", modelOf(chat) && shownModel);
  while (pendingLambda !== null) {
    const lambda = pendingLambda;
    let state = null;
    try {
      state = await fetchJson(path, { lambda });
      note.textContent = LAMBDA_NOTE;
    } catch (error) {
      note.textContent = error.message;
    }
    note.classList.toggle("wrong", !state);
    if (pendingLambda !== lambda) continue;
    pendingLambda = null;
    if (state?.model === shownModel) showRouting(state);
    else refreshState().catch(() => {});
  }
}
