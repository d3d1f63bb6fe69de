// The models of the server, where there are several: the choice of a conversation.
const modelChoice = $("model-choice");

/** Fetches the models; the choice is there only if there are several. */
async function refreshModels() {
  const { data: models } = await fetchJson("/v1/models");
  $("model-field").hidden = models.length < 2;
  const chosen = modelChoice.value;
  const option = ({ id, status }) => new Option(status?.value === "loaded" ? `${id} (loaded)` : id, id);
  modelChoice.replaceChildren(new Option(`Default: ${models[0].id}`, ""), ...models.map(option));
  chooseModel(chosen);
}

/** Shows the model of a conversation, also one that the server does not have any more. */
function chooseModel(id) {
  if (![...modelChoice.options].some(({ value }) => value === id)) modelChoice.add(new Option(`${id} (not on this server)`, id));
  modelChoice.value = id;
}

// Which are loaded changes without this page.
$("settings-button").addEventListener("click", () => refreshModels().catch(() => {}));
refreshModels().catch(() => {});
