// The conversation that is shown, and the field for messages.
const TITLE_LENGTH = 60;
let chat = newChat();
const views = new Map();
let frame = null;
let opening = 0;

/** A conversation that is kept from its first message on. */
function newChat() {
  return { id: newId(), isNew: true, leaf: null, settings: {}, tree: new MessageTree() };
}

/** A record of a message that follows `parent`. */
function newMessage(parent, role, text) {
  return { id: newId(), conversation: chat.id, parent, role, text, reasoning: "", end: null, created: Date.now() };
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  sendPrompt();
};
$("prompt").onkeydown = (event) => {
  if (!isSendKey(event)) return;
  event.preventDefault();
  sendPrompt();
};
$("prompt").oninput = () => fitHeight($("prompt"));
$("stop").onclick = () => generations.get(chat.id)?.stop.abort();
document.addEventListener("keydown", (event) => {
  const isTaken = event.defaultPrevented || document.querySelector("dialog[open], :popover-open");
  if (event.key === "Escape" && !isTaken) generations.get(chat.id)?.stop.abort();
});

function sendPrompt() {
  if (!sendMessage($("prompt").value, undefined, attached)) return;
  takeAttached();
  $("prompt").value = "";
  fitHeight($("prompt"));
}

/** Adds a message behind the answer that is shown last, or behind `parent`, and requests its answer; false if it cannot now. */
function sendMessage(text, parent = chat.tree.lastAnswer(chat.leaf), attachments = []) {
  if ((!text.trim() && !attachments.length) || !canGenerate()) return false;
  const question = newMessage(parent, "user", text);
  if (attachments.length) question.attachments = attachments;
  chat.tree.put(question);
  if (chat.isNew) keepNewChat(text.trim() ? text : attachments[0].name);
  generateAnswer(question);
  return true;
}

/** Whether an answer can be requested in this conversation; if not, the reason is shown. */
function canGenerate() {
  if (generations.has(chat.id)) return false;
  if (chat.tree.path(chat.leaf).some(isWrittenElsewhere)) {
    announce("Another tab is generating an answer here.");
    return false;
  }
  if ($("settings").checkValidity()) return true;
  toggle("settings", true);
  $("settings").reportValidity();
  return false;
}

function keepNewChat(text) {
  const { id, settings } = chat;
  const now = Date.now();
  chat.isNew = false;
  window.history.pushState(null, "", `#chat-${id}`);
  kept(store.add([{ record: { id, title: titleOf(text), created: now, updated: now, leaf: null, settings }, messages: [] }]));
}

/** The beginning of a text, up to a whole word. */
function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line;
  return `${line.slice(0, TITLE_LENGTH).replace(/\s\S*$/, "")} …`;
}

/** Requests an answer to a question. */
function generateAnswer(question) {
  if (!canGenerate()) return;
  const answer = newMessage(question.id, "assistant", "");
  chat.tree.put(answer);
  chat.leaf = answer.id;
  new Generation(chat, answer);
  kept(store.change(chat.id, { leaf: answer.id, updated: Date.now() }, [question, answer])).then(() => tellChange(chat.id));
  showChat();
  scrollDown(true);
}

/** Requests another version of an answer; one without a text is replaced. */
function regenerate(answer) {
  if (!canGenerate()) return;
  if (!answer.text && !answer.reasoning) {
    chat.tree.remove(answer);
    kept(store.deleteMessage(answer.id));
  }
  generateAnswer(chat.tree.get(answer.parent));
}

/** The body of a request for an answer. */
function requestBody({ tree, settings }, answer) {
  const said = tree.path(answer.parent).map((message) => ({ role: message.role, content: contentOf(message), reasoning_content: message.reasoning || undefined }));
  const system = settings.system?.trim();
  return JSON.stringify({
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    ...requestFields(settings, tree.versions(answer).length - 1),
    stream: true,
    return_progress: true,
  });
}

/** Keeps what there is of an answer. */
function saveAnswer(answer) {
  tell("grown", answer);
  return kept(store.change(answer.conversation, {}, [answer]));
}

/** Shows and keeps an answer that has ended. */
async function finishAnswer(answer) {
  if (answer.conversation === chat.id) {
    showChat();
    const notices = answer.use ? contextNotices(answer.use) : [];
    const endings = { stopped: "Stopped.", failed: "" };
    announce(endings[answer.end] ?? ["Answer complete.", ...notices].join(" "));
    if (document.activeElement === document.body) $("prompt").focus();
  }
  tell("grown", answer);
  await kept(store.change(answer.conversation, { updated: Date.now() }, [answer]));
  tellChange(answer.conversation);
}

/** Shows what an answer has become, at most once per frame. */
function showGrowth(answer) {
  if (answer.conversation === chat.id) frame ??= requestAnimationFrame(() => showChat());
}

function announce(text) {
  $("announcement").textContent = text;
}

/** Changes fields of the conversation, and keeps them once it has a message. */
function changeChat(fields) {
  Object.assign(chat, fields);
  if (!chat.isNew) kept(store.change(chat.id, fields)).then(() => tellChange(chat.id));
}

function tellChange(id) {
  tell("changed", id);
  showList();
}

/** Shows another version of a message, with the newest messages that follow it. */
function showVersion(message, pressed) {
  changeChat({ leaf: chat.tree.leaf(message.id) });
  showChat();
  const { element } = views.get(message.id);
  element.querySelector(`[aria-label="${pressed}"]`).focus();
  element.scrollIntoView({ block: "nearest" });
}

/** Opens a conversation by its id; without one, or if it is gone, a new one. */
async function openChat(id, isFromAddress = false) {
  const now = ++opening;
  const found = id && (await kept(store.read(id)));
  if (now !== opening) return;
  if (!isFromAddress) window.history.pushState(null, "", found ? `#chat-${id}` : window.location.pathname);
  chat = found ? chatOf(found) : newChat();
  showSettings(chat.settings);
  followChat();
  announce("");
  for (const view of views.values()) view.element.remove();
  views.clear();
  showChat();
  showList();
  scrollDown(true);
  tell("asked", chat.id);
  // On a touch screen the focus would open the keyboard.
  if (!isFromAddress && matchMedia("(hover: hover)").matches) $("prompt").focus();
}

/** A conversation from its records; an answer that is being generated is newer than its record. */
function chatOf({ record, messages }) {
  const tree = new MessageTree(messages);
  const own = generations.get(record.id)?.answer;
  if (own) tree.put(own);
  return { ...record, tree, leaf: tree.get(record.leaf) ? record.leaf : tree.leaf() };
}

/** Takes over what another tab changed in a conversation. While an answer is generated here, its branch stays. */
async function refreshChat(id) {
  const found = id === chat.id && (await kept(store.read(id)));
  if (!found || id !== chat.id) return;
  const { leaf } = chat;
  chat = chatOf(found);
  if (generations.has(id) || isEditing()) chat.leaf = leaf;
  if (!$("settings").contains(document.activeElement)) showSettings(chat.settings);
  followChat();
  showChat();
}

function leaveDeletedChat() {
  openChat(null).then(() => announce("The conversation was deleted in another tab."));
}

function isEditing() {
  return [...views.values()].some((view) => view.isEdited);
}

/** Shows the path to the leaf; elements of messages that stay are kept. */
function showChat() {
  cancelAnimationFrame(frame);
  frame = null;
  const atEnd = isAtEnd();
  const path = chat.tree.path(chat.leaf);
  const generation = generations.get(chat.id);
  const cut = contextCut(path);
  $("welcome").hidden = path.length > 0;
  $("send").hidden = Boolean(generation);
  $("stop").hidden = !generation;
  let place = $("welcome");
  for (const message of path) {
    const view = viewOf(message);
    const isBusy = generation?.answer.id === message.id || isWrittenElsewhere(message);
    view.show(message, {
      versions: chat.tree.versions(message),
      isBusy,
      canChange: !generation,
      isUnanswered: message === path.at(-1),
      progress: isBusy && generation ? generation.progress : "",
      dropped: message === cut.first ? cut.text : "",
    });
    if (place.nextElementSibling !== view.element) place.after(view.element);
    place = view.element;
  }
  while (place.nextElementSibling) place.nextElementSibling.remove();
  for (const id of views.keys()) if (!views.get(id).element.isConnected) views.delete(id);
  showContextOf(path, generation);
  scrollDown(atEnd);
}

function viewOf(message) {
  if (!views.has(message.id)) views.set(message.id, message.role === "user" ? new QuestionView(message) : new AnswerView(message));
  return views.get(message.id);
}

function isAtEnd(slack = 40) {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < slack;
}

function scrollDown(wanted) {
  if (wanted) $("log").scrollTop = $("log").scrollHeight;
}

function toggle(name, open) {
  $(name).hidden = !open;
  $(`${name}-button`).setAttribute("aria-expanded", String(open));
  if (name === "engine") document.body.classList.toggle("alone", !open);
}

for (const name of ["settings", "engine"]) $(`${name}-button`).onclick = () => toggle(name, $(name).hidden);
if (matchMedia("(max-width: 56rem)").matches) toggle("engine", false);

const openFromAddress = () => openChat(/^#chat-(\w+)$/.exec(window.location.hash)?.[1], true);
window.onpopstate = openFromAddress;
window.onpagehide = () => {
  isLeaving = true;
  generations.forEach(({ answer }) => saveAnswer(answer));
};
