// The models of the server, where there are several: the choice of a conversation.
const modelChoice = $("model-choice");
/** As the server lists them, of which the first is the default; empty until they are known. */
let models = [];

async function fetchModels() {
  ({ data: models } = await fetchJson("/v1/models"));
}

/** Fetches the models; the choice is there only if there are several. */
async function refreshModels() {
  await fetchModels();
  $("model-field").hidden = models.length < 2;
  const chosen = modelChoice.value;
  const option = ({ id, status }) => new Option(status?.value === "loaded" ? `${id} (loaded)` : id, id);
  modelChoice.replaceChildren(new Option(`Default: ${models[0].id}`, ""), ...models.map(option));
  chooseModel(chosen);
  if (models.length < 2) return;
  showChat();
  followChat();
}

/** Shows the model of a conversation, also one that the server does not have any more. */
function chooseModel(id) {
  if (![...modelChoice.options].some(({ value }) => value === id)) modelChoice.add(new Option(`${id} (not on this server)`, id));
  modelChoice.value = id;
}

/** The model of a conversation; null if the server has only one. */
function modelOf({ settings }) {
  return models.length > 1 ? (settings.model ?? models[0].id) : null;
}

/** Whether the server says that a model is loaded, being loaded or neither; undefined for models of other servers. */
function phaseOf(model) {
  return models.find(({ id }) => id === model)?.status?.value;
}

/** What a request for a model waits for before it is answered. */
function waitText(model) {
  const texts = { loading: `Loading ${model} …`, unloaded: `Waiting for ${model} to be loaded …` };
  return texts[phaseOf(model)] ?? "";
}

// Which are loaded changes without this page.
$("settings-button").addEventListener("click", () => refreshModels().catch(() => {}));
modelChoice.addEventListener("change", () => followChat());
refreshModels().catch(() => {});
