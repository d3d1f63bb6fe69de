// Answers that this page generates: at most one at a time in each conversation, whichever conversation is shown.
const SAVE_MS = 300;
const WAIT_MS = 400;
/** By the id of the conversation. */
const generations = new Map();
/** Whether the page is being closed: what there is of an answer then stays without an end. */
let isLeaving = false;

/** Requests an answer, which grows as a message of its own. */
class Generation {
  stop = new AbortController();
  /** What the server says before the first token. */
  progress = "";
  #prefill = new Prefill();
  #finish = null;
  #savedAt = 0;
  #isAnswered = false;

  constructor(chat, answer) {
    this.answer = answer;
    this.model = modelOf(chat);
    const body = requestBody(chat, answer);
    generations.set(answer.conversation, this);
    this.done = this.#run(body);
  }

  async #run(body) {
    // A tab that waits for its first token is heard of too.
    const pulse = setInterval(() => this.#save(), 1000);
    const wait = setInterval(() => this.#tellWait().catch(() => {}), WAIT_MS);
    try {
      const response = await fetchWithKey("/v1/chat/completions", { method: "POST", signal: this.stop.signal, body });
      clearInterval(wait);
      this.#isAnswered = true;
      this.progress = "";
      if (!response.ok) throw new Error(await errorMessage(response));
      noteRequest(response, this.answer.conversation);
      for await (const line of linesOf(response)) this.#read(line);
      if (!this.#finish) throw new Error("The connection ended before the answer did.");
      this.answer.end = this.#finish;
    } catch (error) {
      if (isLeaving) return;
      this.answer.end = this.stop.signal.aborted ? "stopped" : "failed";
      if (!this.stop.signal.aborted) this.answer.error = error.message;
    }
    clearInterval(pulse);
    clearInterval(wait);
    // An answer that was stopped has no use of its own.
    if (this.contextTokens) this.answer.use ??= { tokens: this.contextTokens, size: contextSize };
    generations.delete(this.answer.conversation);
    finishAnswer(this.answer);
  }

  /** Says, where there are several models, that the request waits for its model. */
  async #tellWait() {
    if (this.model === null) return;
    await fetchModels();
    if (this.#isAnswered) return;
    this.progress = waitText(this.model);
    showGrowth(this.answer);
    if (this.answer.conversation === chat.id) followChat();
  }

  #read(line) {
    if (line.startsWith(":")) return this.#readComment(line.slice(1).trim());
    if (!line.startsWith("data: ") || line === "data: [DONE]") return;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.prompt_progress) this.progress = this.#prefill.read(chunk.prompt_progress);
    const choice = chunk.choices[0];
    this.answer.model ??= chunk.model;
    this.answer.reasoning += choice?.delta.reasoning_content ?? "";
    this.answer.text += choice?.delta.content ?? "";
    this.#finish ??= choice?.finish_reason;
    if (chunk.timings) {
      this.answer.timings = timingsOf(chunk.timings);
      this.answer.miss = chunk.timings.cache_miss_reason;
    }
    if (chunk.context_use) this.answer.use = chunk.context_use;
    if (performance.now() - this.#savedAt > SAVE_MS) this.#save();
    showGrowth(this.answer);
  }

  /** Comments of the stream: a position in the queue, or how full the context is. */
  #readComment(comment) {
    const tokens = /^context (\d+)$/.exec(comment)?.[1];
    if (tokens) this.contextTokens = Number(tokens);
    else if (comment) this.progress = comment;
    showGrowth(this.answer);
  }

  #save() {
    this.#savedAt = performance.now();
    saveAnswer(this.answer);
  }
}
