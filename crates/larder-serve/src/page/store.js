// Conversations and their messages as records, in IndexedDB, or in memory where a browser offers none. A message is written only by
// the page that generates it, and a conversation's fields are merged, so that pages in several tabs overwrite nothing of each other.
const READ = "readonly", WRITE = "readwrite";
/** Messages that a search reads at a time; some have pictures. */
const BATCH = 50;

/** A random id of a record. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The result of a request of IndexedDB. */
function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** IndexedDB: each transaction is kept whole or not at all. */
class DiskTables {
  static async open() {
    const opening = indexedDB.open("larder", 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("conversations", { keyPath: "id" });
      opening.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    const tables = new DiskTables();
    tables.database = await resultOf(opening);
    tables.database.onversionchange = () => tables.database.close();
    return tables;
  }

  async transaction(mode, work) {
    const transaction = this.database.transaction(["conversations", "messages"], mode);
    const isOver = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new Error("The change was taken back."));
    });
    try {
      const result = await work(tablesOf(transaction));
      await isOver;
      return result;
    } catch (error) {
      isOver.catch(() => {});
      // It is over already if it failed by itself.
      if (!transaction.error) transaction.abort();
      throw error;
    }
  }
}

/** What a transaction offers. */
function tablesOf(transaction) {
  const table = (name) => transaction.objectStore(name);
  return {
    get: (name, id) => resultOf(table(name).get(id)),
    all: (name) => resultOf(table(name).getAll()),
    put: (name, record) => resultOf(table(name).put(record)),
    delete: (name, id) => resultOf(table(name).delete(id)),
    messagesOf: (id) => resultOf(table("messages").index("conversation").getAll(id)),
    eachBatch: async (visit) => {
      for (let batch = null; batch?.length !== 0; ) {
        const rest = batch && IDBKeyRange.lowerBound(batch.at(-1).id, true);
        batch = await resultOf(table("messages").getAll(rest, BATCH));
        if (!visit(batch)) return;
      }
    },
  };
}

/** The same in memory, until the page is closed. */
class MemoryTables {
  tables = { conversations: new Map(), messages: new Map() };

  async transaction(_mode, work) {
    const all = (name) => structuredClone([...this.tables[name].values()]);
    return work({
      get: (name, id) => structuredClone(this.tables[name].get(id)),
      all,
      put: (name, record) => this.tables[name].set(record.id, structuredClone(record)),
      delete: (name, id) => this.tables[name].delete(id),
      messagesOf: (id) => all("messages").filter((message) => message.conversation === id),
      eachBatch: (visit) => visit([...this.tables.messages.values()]),
    });
  }
}

/** All conversations of this browser. */
class ConversationStore {
  /** Whether records are kept beyond this page. */
  isKept = true;
  #tables = DiskTables.open().catch(() => {
    this.isKept = false;
    return new MemoryTables();
  });

  async #run(mode, work) {
    return (await this.#tables).transaction(mode, work);
  }

  /** Resolves once `isKept` is known. */
  async ready() {
    await this.#tables;
  }

  /** All conversations without their messages, the latest first. */
  async list() {
    const all = await this.#run(READ, (tables) => tables.all("conversations"));
    return all.sort((a, b) => b.updated - a.updated);
  }

  /** A conversation with its messages; undefined if there is none of this id. */
  read(id) {
    return this.#run(READ, async (tables) => {
      const record = await tables.get("conversations", id);
      return record && { record, messages: await tables.messagesOf(id) };
    });
  }

  /** Adds whole conversations. */
  add(conversations) {
    const messages = conversations.flatMap((conversation) => conversation.messages);
    return this.#run(WRITE, async (tables) => {
      await Promise.all(conversations.map(({ record }) => tables.put("conversations", record)));
      await Promise.all(messages.map((message) => tables.put("messages", message)));
    });
  }

  /** Writes some fields and messages of a conversation; returns false if it was deleted meanwhile. */
  change(id, fields, messages = []) {
    return this.#run(WRITE, async (tables) => {
      const record = await tables.get("conversations", id);
      if (!record) return false;
      await tables.put("conversations", { ...record, ...fields });
      await Promise.all(messages.map((message) => tables.put("messages", message)));
      return true;
    });
  }

  /** Deletes a message. */
  deleteMessage(id) {
    return this.#run(WRITE, (tables) => tables.delete("messages", id));
  }

  /** Deletes a conversation and returns it whole. */
  delete(id) {
    return this.#run(WRITE, async (tables) => {
      const record = await tables.get("conversations", id);
      const messages = await tables.messagesOf(id);
      await tables.delete("conversations", id);
      await Promise.all(messages.map((message) => tables.delete("messages", message.id)));
      return record && { record, messages };
    });
  }

  /** A text of each conversation that has one with this pattern, by the conversation's id; ends early once it is not wanted. */
  async search(pattern, isWanted) {
    const found = new Map();
    await this.#run(READ, (tables) => tables.eachBatch((messages) => {
      for (const { conversation, text } of messages) if (!found.has(conversation) && pattern.test(text)) found.set(conversation, text);
      return isWanted();
    }));
    return found;
  }
}

const NOT_KEPT = "This browser keeps no conversations here, so they end with this page. Export them to keep them.";
const store = openStore();

function openStore() {
  const opened = new ConversationStore();
  opened.ready().then(() => showKeeping(opened.isKept ? "" : NOT_KEPT));
  return opened;
}

/** Waits for a write; a failure is shown, and the page goes on with what it has. */
async function kept(write) {
  try {
    return await write;
  } catch (error) {
    showKeeping(`The last change was not kept (${error?.message || error?.name || "unknown reason"}). Export the conversation to keep it.`);
    return undefined;
  }
}

function showKeeping(problem) {
  $("keeping").textContent = problem;
}
