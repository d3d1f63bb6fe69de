// The side bar: the list of conversations, search, renaming and deleting. On narrow screens it is a drawer.
const GROUPS = [[0, "Today"], [1, "Yesterday"], [7, "Last 7 days"], [30, "Last 30 days"], [Infinity, "Older"]];
const LIST_LENGTH = 200;
const SNIPPET = { before: 12, after: 90 };
const narrow = matchMedia("(max-width: 72rem)");
let listLength = LIST_LENGTH;
let listTimer = 0;
let listing = 0;
/** What the last deletion took. */
let deleted = null;

/** Shows the list soon; changes that come together are shown together. */
function showList() {
  clearTimeout(listTimer);
  listTimer = setTimeout(renderList, 60);
}

async function renderList() {
  const now = ++listing;
  const wanted = $("search").value.trim();
  const pattern = wanted && new RegExp(wanted.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "iu");
  const all = (await kept(store.list())) ?? [];
  const texts = (pattern && (await kept(store.search(pattern, () => now === listing)))) || new Map();
  // A newer list is on its way, or the list waits for what is done with one of its conversations.
  if (now !== listing || $("list").querySelector("input") || $("chat-menu").matches(":popover-open")) return;
  const found = pattern ? all.filter(({ id, title }) => texts.has(id) || pattern.test(title)) : all;
  const focus = focusInList();
  $("list").replaceChildren(...groupsOf(found.slice(0, listLength), pattern, texts));
  if (found.length > listLength) $("list").append(toolButton(`Show all ${found.length}`, showWholeList));
  $("list-empty").textContent = found.length ? "" : pattern ? "No conversation has this text." : "Conversations will be listed here.";
  $("export-all").disabled = !all.length;
  if (focus) $("list").querySelector(`[data-id="${focus.id}"] ${focus.button}`)?.focus();
}

function showWholeList() {
  listLength = Infinity;
  showList();
}

/** The conversation and the button that have the focus, so that a new list can keep it. */
function focusInList() {
  const item = document.activeElement.closest("#list li");
  return item && { id: item.dataset.id, button: document.activeElement.matches(".more") ? ".more" : ".open" };
}

function groupsOf(records, pattern, texts) {
  const elements = [];
  let shown = null;
  for (const record of records) {
    const days = Math.round((new Date().setHours(0, 0, 0, 0) - new Date(record.updated).setHours(0, 0, 0, 0)) / 864e5);
    const name = GROUPS.find(([most]) => days <= most)[1];
    if (name !== shown) elements.push(make("h3", "", (shown = name)), make("ul"));
    elements.at(-1).append(listItem(record, pattern, texts.get(record.id)));
  }
  return elements;
}

function listItem(record, pattern, text) {
  const { id, title } = record;
  const open = toolButton("", () => chooseChat(id));
  open.className = "open";
  open.title = title;
  open.append(make("span", "title", ...marked(title, pattern)));
  if (text && !pattern.test(title)) open.append(make("span", "snippet", ...marked(text, pattern)));
  if (id === chat.id) open.setAttribute("aria-current", "true");
  const more = toolButton("⋯", () => openMenu(more, record), `Actions for ${title}`);
  more.className = "more";
  more.setAttribute("aria-haspopup", "true");
  const item = make("li", "", open, more);
  if (generations.has(id)) open.append(make("span", "dot", make("span", "hidden", "generating")));
  item.dataset.id = id;
  return item;
}

/** A text around its first match, which is marked; it begins with a word, so near to the match that a narrow list shows both. */
function marked(text, pattern) {
  const match = pattern && pattern.exec(text);
  if (!match) return [text];
  const cut = Math.max(0, match.index - SNIPPET.before);
  const start = cut && cut + Math.max(0, text.slice(cut, match.index).search(/(?<=\s)\S/));
  const end = match.index + match[0].length;
  const before = (start ? "…" : "") + text.slice(start, match.index);
  return [before, make("mark", "", match[0]), text.slice(end, end + SNIPPET.after)];
}

function chooseChat(id) {
  closeDrawer();
  showNote("");
  if (id !== chat.id || chat.isNew) openChat(id);
}

function openMenu(button, record) {
  const menu = $("chat-menu");
  const act = (work) => () => {
    menu.hidePopover();
    work();
  };
  $("menu-rename").onclick = act(() => rename(record));
  $("menu-copy").onclick = act(() => copyConversation(record.id));
  $("menu-export").onclick = act(() => exportConversations([record.id], record.title));
  $("menu-delete").onclick = act(() => deleteChat(record));
  menu.showPopover();
  const { right, bottom, top } = button.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, right - width)}px`;
  menu.style.top = `${bottom + height < innerHeight ? bottom : top - height}px`;
  $("menu-rename").focus();
}

// The button has the focus again; the list that comes now keeps it.
$("chat-menu").ontoggle = ({ newState }) => newState === "closed" && showList();

/** Edits a title in its place: Enter and leaving the field keep it, Escape does not. */
function rename({ id, title }) {
  const open = $("list").querySelector(`[data-id="${id}"] .open`);
  if (!open) return;
  const field = make("input");
  field.value = title;
  field.maxLength = TITLE_MOST;
  field.setAttribute("aria-label", "Title");
  const end = async (wanted) => {
    field.onblur = null;
    field.replaceWith(open);
    open.focus();
    // The list may have waited for the field.
    if (!wanted || wanted === title) return showList();
    await kept(store.change(id, { title: wanted }));
    tellChange(id);
  };
  field.onblur = () => end(field.value.trim());
  field.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter" && field.value.trim());
  };
  open.replaceWith(field);
  field.select();
}

/** Deletes a conversation; it can be taken back until the next one is opened. */
async function deleteChat({ id, title }) {
  const generation = generations.get(id);
  generation?.stop.abort();
  await generation?.done;
  deleted = await kept(store.delete(id));
  tell("deleted", id);
  if (id === chat.id) await openChat(null);
  showList();
  showNote(`“${title}” was deleted.`);
  $("undo").hidden = !deleted;
  $("undo").focus();
}

$("undo").onclick = async () => {
  const { record } = deleted;
  await kept(store.add([deleted]));
  showNote("");
  tellChange(record.id);
  openChat(record.id);
};

/** A sentence at the foot of the side bar. */
function showNote(text, isWrong = false) {
  $("undo").hidden = true;
  deleted = text ? deleted : null;
  $("side-note").hidden = !text;
  $("note-text").textContent = text;
  $("side-note").classList.toggle("wrong", isWrong);
}

$("search").oninput = showList;
$("search").onkeydown = (event) => {
  if (event.key === "Escape") event.stopPropagation(), event.preventDefault(), ($("search").value = ""), showList();
  if (event.key === "ArrowDown") event.preventDefault(), $("list").querySelector(".open")?.focus();
};
$("list").onkeydown = (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || event.target.matches("input")) return;
  event.preventDefault();
  const buttons = [...$("list").querySelectorAll(".open")];
  const at = buttons.indexOf(event.target.closest("li")?.querySelector(".open"));
  (buttons[at + step] ?? (step < 0 ? $("search") : event.target)).focus();
};

function openDrawer() {
  setDrawer(true);
  $("side-close").focus();
}

function closeDrawer() {
  if (!document.body.classList.contains("drawer")) return;
  setDrawer(false);
  $("side-button").focus();
}

/** While the drawer is open, the rest of the page is out of reach. */
function setDrawer(isOpen) {
  document.body.classList.toggle("drawer", isOpen);
  for (const element of document.querySelectorAll("body > :is(header, main, #engine, .skip)")) element.inert = isOpen;
  fitSide();
}

/** Whether the side bar is seen, as the button says. */
function fitSide() {
  const isOpen = document.body.classList.contains(narrow.matches ? "drawer" : "with-side");
  $("side").hidden = !isOpen;
  $("shade").hidden = !isOpen || !narrow.matches;
  $("side-button").setAttribute("aria-expanded", String(isOpen));
}

$("side-button").onclick = () => {
  if (narrow.matches) return openDrawer();
  document.body.classList.toggle("with-side");
  fitSide();
};
$("side-close").onclick = closeDrawer;
$("shade").onclick = closeDrawer;
$("side").onkeydown = (event) => {
  if (event.key !== "Escape" || !document.body.classList.contains("drawer") || document.querySelector(":popover-open")) return;
  event.preventDefault();
  closeDrawer();
};
narrow.onchange = () => setDrawer(false);
$("new-chat").onclick = () => chooseChat(null);
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault();
  $("prompt").focus();
};
fitSide();
openFromAddress();
