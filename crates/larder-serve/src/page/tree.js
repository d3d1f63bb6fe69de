// The messages of a conversation as a tree: versions of a message have the same parent, and one path from the root is shown.
class MessageTree {
  messages = new Map();
  #children = new Map();

  constructor(messages = []) {
    for (const message of messages) this.put(message);
  }

  /** Adds a message, or replaces the one with its id. */
  put(message) {
    const versions = this.versions(message);
    const at = versions.findIndex(({ id }) => id === message.id);
    if (at >= 0) versions[at] = message;
    else versions.push(message);
    versions.sort((a, b) => a.created - b.created);
    this.#children.set(message.parent, versions);
    this.messages.set(message.id, message);
  }

  /** Removes a message that none follows. */
  remove(message) {
    this.messages.delete(message.id);
    this.#children.set(message.parent, this.versions(message).filter(({ id }) => id !== message.id));
  }

  get(id) {
    return this.messages.get(id);
  }

  /** A message and its alternatives, the oldest first. */
  versions(message) {
    return this.#children.get(message.parent) ?? [];
  }

  /** The messages from the root to one. */
  path(id) {
    const path = [];
    for (let at = this.get(id); at; at = this.get(at.parent)) path.push(at);
    return path.reverse();
  }

  /** The end of the newest messages that follow one, or of all. */
  leaf(id = null) {
    let at = id;
    for (;;) {
      const next = this.#children.get(at)?.at(-1);
      if (!next) return at;
      at = next.id;
    }
  }

  /** The last answer on the path to a message, which a new question can follow, so that roles alternate. */
  lastAnswer(id) {
    let at = this.get(id);
    while (at && !(at.role === "assistant" && at.text)) at = this.get(at.parent);
    return at?.id ?? null;
  }
}
