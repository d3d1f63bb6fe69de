// What pages of this server in other tabs do with conversations.
const WRITER_SILENCE_MS = 5000;
const tabs = window.BroadcastChannel && new BroadcastChannel("larder");
/** Answers that other tabs are generating, each with the timer that ends this unless the tab is heard again. */
const writers = new Map();

/** Tells other tabs: a conversation was changed or deleted, a message has grown, or one asks which answers are being generated. */
function tell(kind, subject) {
  tabs?.postMessage({ kind, subject });
}

/** Whether another tab generates this message. */
function isWrittenElsewhere(message) {
  return writers.has(message.id);
}

if (tabs) {
  tabs.onmessage = ({ data: { kind, subject } }) => {
    if (kind === "grown") hearGrowth(subject);
    if (kind === "changed") refreshChat(subject);
    if (kind === "deleted") generations.get(subject)?.stop.abort();
    if (kind === "deleted" && subject === chat.id) leaveDeletedChat();
    if (kind === "changed" || kind === "deleted") showList();
    if (kind === "asked" && generations.has(subject)) tell("grown", generations.get(subject).answer);
  };
}

function hearGrowth(message) {
  clearTimeout(writers.get(message.id));
  if (message.end) writers.delete(message.id);
  else writers.set(message.id, setTimeout(() => forgetWriter(message.id), WRITER_SILENCE_MS));
  if (message.conversation !== chat.id) return;
  chat.tree.put(message);
  showChat();
}

function forgetWriter(id) {
  writers.delete(id);
  showChat();
}
