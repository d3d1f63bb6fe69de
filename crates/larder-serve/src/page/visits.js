// The experts that the answers of each conversation have visited, as long as the page is open.
const CHATS_MAX = 20;
const REQUESTS_MAX = 32;
/** Counts by model and conversation, the newest last. */
const visitsOfChats = new Map();
/** Counts by the number of a request whose conversation is not known: its first steps may be told before its response begins. */
const visitsOfRequests = new Map();
/** The conversations of requests, by number. */
const chatsOfRequests = new Map();

/** Puts an entry last, and drops the first if there are too many. */
function putLast(map, key, value, most) {
  map.delete(key);
  map.set(key, value);
  if (map.size > most) map.delete(map.keys().next().value);
  return value;
}

function countsIn(map, key, most) {
  return putLast(map, key, countsOf(map, key) ?? new Uint32Array(grid.kind.length), most);
}

/** Counts of an entry; none if they are of another model's cells. */
function countsOf(map, key) {
  const counts = map.get(key);
  return counts?.length === grid?.kind.length ? counts : undefined;
}

/** The counts of a conversation are those of the model that is shown. */
function keyOf(id) {
  return `${shownModel} ${id}`;
}

/** Adds the visits of a step to the conversations of its requests. */
function countVisits({ requests = [], layers }) {
  for (const number of requests) {
    const id = chatsOfRequests.get(number);
    const counts = id === undefined ? countsIn(visitsOfRequests, number, REQUESTS_MAX) : countsIn(visitsOfChats, keyOf(id), CHATS_MAX);
    for (const visit of layers) {
      for (const expert of grid.expertsOf(visit)) {
        const cell = grid.cellOf(visit.layer, expert);
        if (cell !== undefined) counts[cell]++;
      }
    }
  }
}

/** Notes which conversation a request is of, by the number that its response tells. */
function noteRequest(response, id) {
  const told = response.headers.get("x-larder-request");
  if (told === null) return;
  const number = Number(told);
  putLast(chatsOfRequests, number, id, REQUESTS_MAX);
  const before = countsOf(visitsOfRequests, number);
  if (!before) return;
  visitsOfRequests.delete(number);
  const counts = countsIn(visitsOfChats, keyOf(id), CHATS_MAX);
  before.forEach((count, cell) => (counts[cell] += count));
}

/** Shows the counts of the conversation that is shown, if the grid shall show these. */
function showVisits() {
  if (!grid?.counts) return;
  grid.setCounts(countsOf(visitsOfChats, keyOf(chat.id)) ?? new Uint32Array(grid.kind.length));
  showGridText();
}

/** What the grid of a conversation shows, as a sentence. */
function visitsText(counts) {
  const visited = counts.reduce((sum, count) => sum + (count > 0), 0);
  if (!visited) return "no expert visited by answers of this chat since the page was opened";
  const first = counts.indexOf(grid.most);
  return `${visited} of ${counts.length} experts visited by this chat, most often ${nameOf(first)} (${timesOf(grid.most)})`;
}

for (const button of $("grid-view").children) {
  button.onclick = () => {
    for (const other of $("grid-view").children) other.setAttribute("aria-pressed", String(other === button));
    const isChat = button.id === "view-chat";
    $("legend").hidden = isChat;
    $("legend-chat").hidden = !isChat;
    grid?.setCounts(isChat ? new Uint32Array(grid.kind.length) : null);
    if (isChat) showVisits();
    else if (grid) showGridText();
  };
}
