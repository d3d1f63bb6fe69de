// The settings of a conversation: in the form, in records and in requests.
const SETTINGS = [
  { id: "model-choice", field: "model", isText: true },
  { id: "system", isText: true },
  { id: "temperature", low: 0, high: 2 },
  { id: "top-p", low: 0, high: 1 },
  { id: "top-k", low: 0, high: 2 ** 32 - 1, isWhole: true },
  { id: "min-p", low: 0, high: 1 },
  { id: "repetition-penalty", low: 0.01, high: 100 },
  { id: "seed", low: 0, high: Number.MAX_SAFE_INTEGER, isWhole: true },
  { id: "max-tokens", low: 1, high: 2 ** 32 - 1, isWhole: true },
  { id: "context-full", choices: ["drop-turns", "shift", "stop"] },
];
/** Names in records and requests. */
for (const setting of SETTINGS) setting.field ??= setting.id.replaceAll("-", "_");
/** What fields show while the server's settings are not known. */
const PLACEHOLDERS = new Map(SETTINGS.map(({ id }) => [id, $(id).placeholder]));

/** What the server does with a full context unless a request says otherwise. */
let serverContextFull = "stop";

/** Whether a value from outside is one that the setting can have. */
function isSetting({ isText, choices, isWhole, low, high }, value) {
  if (isText) return typeof value === "string" && value !== "";
  if (choices) return choices.includes(value);
  return Number.isFinite(value) && value >= low && value <= high && (!isWhole || Number.isSafeInteger(value));
}

/** The settings that an object from outside has. */
function settingsIn(object) {
  const known = SETTINGS.filter((setting) => isSetting(setting, object?.[setting.field]));
  return Object.fromEntries(known.map(({ field }) => [field, object[field]]));
}

/** Fills the form. */
function showSettings(settings) {
  for (const { id, field } of SETTINGS) $(id).value = settings[field] ?? "";
  chooseModel(settings.model ?? "");
}

/** The settings in the form; empty ones are left out, so that the server's hold. */
function settingsInForm() {
  const value = ({ id, low }) => (low === undefined ? $(id).value : $(id).valueAsNumber);
  return settingsIn(Object.fromEntries(SETTINGS.map((setting) => [setting.field, value(setting)])));
}

/** The fields of a request. The versions of an answer differ also where a seed is given, and repeat in their order. */
function requestFields({ system: _, seed, ...settings }, version) {
  const contextFull = settings.context_full ?? standardContextFull();
  return { ...settings, context_full: contextFull, seed: seed === undefined ? undefined : seed + version };
}

/** A chat goes on when its context is full, unless it is told to end. */
function standardContextFull() {
  return serverContextFull === "stop" ? "drop-turns" : serverContextFull;
}

/** Shows the settings of the server, or of a model where it has several, where the form is empty. */
async function showDefaults(model) {
  const { default_generation_settings: { params }, context_full: contextFull, modalities } = await fetchJson(modelPath("/props", model));
  if (model !== modelOf(chat)) return;
  showPlaceholders(params);
  showModalities(modalities);
  serverContextFull = contextFull ?? serverContextFull;
  const choice = $("context-full").querySelector(`[value="${standardContextFull()}"]`);
  $("context-full").options[0].textContent = `Default: ${choice.textContent.toLowerCase()}`;
}

function showPlaceholders(params) {
  for (const { id, field } of SETTINGS) {
    const standard = params[field === "repetition_penalty" ? "repeat_penalty" : field];
    if (PLACEHOLDERS.get(id) !== undefined) $(id).placeholder = Number.isFinite(standard) ? String(+standard.toFixed(3)) : PLACEHOLDERS.get(id);
  }
}

$("settings").onsubmit = (event) => event.preventDefault();
$("settings").oninput = () => {
  if ($("settings").checkValidity()) changeChat({ settings: settingsInForm() });
};
