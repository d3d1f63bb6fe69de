// Conversations as files and as Markdown. A file from outside is not trusted: only known fields of the right types are taken, ids
// are assigned anew, and nothing is kept unless all of it is valid.
const FORMAT = "larder-conversations-1";
const FILE_MOST = 64 * 2 ** 20;
const TITLE_MOST = 200;
const MOST = { conversations: 10_000, messages: 20_000 };
const ENDS = ["stop", "length", "stopped", "failed"];

/** Saves conversations to a file: those with these ids. */
async function exportConversations(ids, name) {
  const all = [];
  for (const id of ids) all.push(await kept(store.read(id)));
  const exported = { format: FORMAT, conversations: all.filter(Boolean).map(exportOf) };
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(exported, null, 1)], { type: "application/json" }));
  link.download = `larder-${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "") || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function exportOf({ record, messages }) {
  const iso = (time) => new Date(time).toISOString();
  const { title, created, updated, leaf, settings } = record;
  const ofMessage = ({ conversation: _, created, ...message }) => ({ ...message, created: iso(created) });
  const ordered = messages.sort((a, b) => a.created - b.created).map(ofMessage);
  return { title, created: iso(created), updated: iso(updated), leaf, settings, messages: ordered };
}

/** Adds the conversations of a file. */
async function importFile(file) {
  showNote("Importing …");
  try {
    const conversations = conversationsIn(await textOf(file));
    await store.add(conversations);
    const count = conversations.length;
    showNote(count === 1 ? "1 conversation was imported." : `${count} conversations were imported.`);
    tellChange(null);
  } catch (error) {
    showNote(`${file.name}: ${error.message || error.name}`, true);
  }
}

async function textOf(file) {
  if (file.size > FILE_MOST) throw new Error(`the file is larger than ${FILE_MOST / 2 ** 20} MiB, so nothing was imported.`);
  return file.text();
}

/** The conversations of a file's text, with new ids. */
function conversationsIn(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON, so nothing was imported.");
  }
  check(file?.format === FORMAT, `the file is not an export of conversations: "format" must be "${FORMAT}"`);
  check(Array.isArray(file.conversations), '"conversations" must be a list');
  check(file.conversations.length <= MOST.conversations, `the file has more than ${MOST.conversations} conversations`);
  return file.conversations.map((conversation, i) => conversationOf(conversation, `conversation ${i + 1}`));
}

function check(isValid, problem) {
  if (!isValid) throw new Error(`${problem}, so nothing was imported.`);
}

function conversationOf(source, where) {
  check(source && Array.isArray(source.messages), `${where} has no list of messages`);
  check(source.messages.length <= MOST.messages, `${where} has more than ${MOST.messages} messages`);
  check(typeof source.title === "string", `the title of ${where} is not a text`);
  const id = newId();
  const ids = new Map([[null, null]]);
  const roles = new Map([[null, "assistant"]]);
  let last = 0;
  const messages = source.messages.map((message, i) => {
    const made = messageOf(message, `message ${i + 1} of ${where}`, ids, roles);
    // Versions are in the order of their times, also where a file has none.
    last = Math.max(made.created, last + 1);
    return { ...made, conversation: id, created: last };
  });
  const [created, updated] = [timeOf(source.created), timeOf(source.updated)];
  const record = { id, title: wellFormed(source.title).slice(0, TITLE_MOST) || "Untitled", created, updated, settings: settingsIn(source.settings) };
  return { record: { ...record, leaf: ids.get(source.leaf) ?? null }, messages };
}

/** A message; `ids` and `roles` are those of the messages before it, one of which it follows. */
function messageOf(source, where, ids, roles) {
  check(source && typeof source.id === "string" && !ids.has(source.id), `${where} has no id of its own`);
  check(typeof source.text === "string", `the text of ${where} is not a text`);
  const parent = source.parent ?? null;
  check(ids.has(parent), `${where} follows none of the messages before it`);
  const role = roles.get(parent) === "user" ? "assistant" : "user";
  check(source.role === role, `${where} must be of the role "${role}"`);
  const id = newId();
  ids.set(source.id, id);
  roles.set(source.id, role);
  const optional = (field, isValid) => (isValid(source[field]) ? { [field]: source[field] } : {});
  const isText = (value) => typeof value === "string" && value.length < 1000;
  return {
    id, parent: ids.get(parent), role, text: wellFormed(source.text), created: timeOf(source.created),
    reasoning: typeof source.reasoning === "string" ? wellFormed(source.reasoning) : "",
    end: ENDS.includes(source.end) ? source.end : null,
    ...optional("attachments", areAttachments),
    ...optional("error", isText), ...optional("model", isText),
    ...optional("timings", numbers("tokens", "tokens_per_second", "ttft_seconds")),
    ...optional("use", numbers("tokens", "size")),
  };
}

/** A test for an object of numbers, these among them. */
function numbers(...fields) {
  const isNumber = (value) => Number.isFinite(value) && value >= 0;
  return (object) => Boolean(object) && fields.every((field) => isNumber(object[field])) && Object.values(object).every(isNumber);
}

/** A time; the present one where there is none. */
function timeOf(text) {
  const time = typeof text === "string" ? Date.parse(text) : NaN;
  return Number.isFinite(time) ? Math.min(time, Date.now()) : Date.now();
}

/** A text without halves of characters, which a request cannot have. */
function wellFormed(text) {
  return text.toWellFormed?.() ?? text;
}

/** Copies the shown branch of a conversation. */
async function copyConversation(id) {
  const found = await kept(store.read(id));
  const isCopied = found && (await copy(markdownOf(chatOf(found))));
  showNote(isCopied ? "The conversation was copied as Markdown." : "The conversation could not be copied.", !isCopied);
}

/** The path to the leaf as Markdown. */
function markdownOf({ title, tree, leaf, settings }) {
  const part = (name, text) => `**${name}**\n\n${text.trim()}\n`;
  const system = settings.system ? [part("System", settings.system)] : [];
  const files = ({ attachments = [] }) => attachments.map(({ name }) => `[${name}]\n\n`).join("");
  const said = tree.path(leaf).map((message) => part(message.role === "user" ? "User" : (message.model ?? "Assistant"), files(message) + message.text));
  return [`# ${title}\n`, ...system, ...said].join("\n");
}

$("export-all").onclick = async () => {
  const all = (await kept(store.list())) ?? [];
  exportConversations(all.map(({ id }) => id), "conversations");
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  for (const file of $("import-file").files) await importFile(file);
  $("import-file").value = "";
};
