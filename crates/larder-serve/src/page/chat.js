// The conversation.
const conversation = [];
let generation = null;

$("composer").onsubmit = (event) => {
  event.preventDefault();
  sendMessage($("prompt").value);
};

$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  sendMessage($("prompt").value);
};

$("prompt").oninput = fitPrompt;
$("stop").onclick = () => generation?.abort();
$("new-chat").onclick = startNewChat;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) generation?.abort();
});

function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function startNewChat() {
  generation?.abort();
  conversation.length = 0;
  for (const message of $("log").querySelectorAll(".message")) message.remove();
  $("welcome").hidden = false;
  showContext(0);
  $("prompt").focus();
}

function sendMessage(text) {
  if (generation || !text.trim()) return;
  if (!$("settings").checkValidity()) {
    toggle("settings", true);
    $("settings").reportValidity();
    return;
  }
  // A message without an answer is dropped, so that roles alternate.
  if (conversation.at(-1)?.role === "user") conversation.pop();
  conversation.push({ role: "user", content: text });
  $("welcome").hidden = true;
  $("log").append(make("div", "message user", make("div", "text", text)));
  $("prompt").value = "";
  fitPrompt();
  generateAnswer();
}

/** Requests the next answer of the conversation and shows it as it streams in. */
async function generateAnswer() {
  const stop = (generation = new AbortController());
  const view = new AnswerView();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await fetchWithKey("/v1/chat/completions", { method: "POST", signal: stop.signal, body: request() });
    if (!response.ok) throw new Error(await errorMessage(response));
    for await (const line of linesOf(response)) handleLine(line, view);
  } catch (error) {
    view.failed = stop.signal.aborted ? "" : error.message;
    view.wasStopped = stop.signal.aborted;
  }
  generation = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  view.finish();
  if (!view.element.isConnected) return;
  if (view.text) {
    conversation.push({ role: "assistant", content: view.text, reasoning_content: view.reasoning || undefined });
  }
  $("announcement").textContent = view.failed ? "" : view.wasStopped ? "Stopped." : `Answer complete. ${view.notice}`.trim();
  if (document.activeElement === document.body) $("prompt").focus();
}

/** The request body. Empty settings are left out, so that the model's defaults apply. */
function request() {
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  const system = $("system").value.trim();
  return JSON.stringify({
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    stream: true,
  });
}

function handleLine(line, view) {
  if (line.startsWith(":")) return handleComment(line.slice(1).trim(), view);
  if (!line.startsWith("data: ") || line === "data: [DONE]") return;
  const chunk = JSON.parse(line.slice(6));
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (choice?.delta.reasoning_content) view.add("reasoning", choice.delta.reasoning_content);
  if (choice?.delta.content) view.add("text", choice.delta.content);
  if (choice?.finish_reason) view.addTimings(choice.finish_reason, chunk.timings);
  if (chunk.context_use) view.addContext(chunk.context_use);
}

/** Comments of the stream: a position in the queue, or how full the context is. */
function handleComment(comment, view) {
  const tokens = /^context (\d+)$/.exec(comment)?.[1];
  if (tokens) showContext(Number(tokens));
  else view.showProgress(comment);
}

/** An answer on the page. */
class AnswerView {
  reasoning = "";
  text = "";
  failed = "";
  wasStopped = false;
  notes = [];
  notice = "";

  constructor() {
    this.body = make("div", "text", make("p", "waiting", "…"));
    this.element = make("article", "message busy", this.body);
    this.element.setAttribute("aria-busy", "true");
    this.element.setAttribute("aria-label", "Answer");
    $("log").append(this.element);
    scrollDown(true);
  }

  showProgress(comment) {
    if (!this.text && !this.reasoning && comment) this.body.textContent = comment;
  }

  /** Adds to a part: "reasoning" or "text". */
  add(part, text) {
    this[part] += text;
    // Tokens may arrive faster than frames are drawn.
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = null;
    const atEnd = isAtEnd();
    if (!this.body.blocks) this.body.replaceChildren();
    const reasoning = this.reasoning && `<think>${this.reasoning}${this.text ? "</think>\n\n" : ""}`;
    showMarkdown(this.body, reasoning + this.text);
    scrollDown(atEnd);
  }

  addTimings(reason, timings) {
    if (reason === "length") this.notes.push("stopped at the token limit");
    if (!timings) return;
    const ttft = (timings.queued_ms + timings.prompt_ms) / 1e3;
    this.notes.push(`${timings.predicted_n} tokens`, `${formatNumber(timings.predicted_per_second)} tokens/s`, `TTFT ${formatNumber(ttft)} s`);
  }

  addContext(use) {
    showContext(use.tokens, use.size);
    this.notice = contextNotices(use).join(" ");
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.show();
    this.element.classList.remove("busy");
    this.element.removeAttribute("aria-busy");
    if (this.wasStopped) this.notes.push("stopped");
    if (this.failed) {
      const alert = make("p", "error", this.failed);
      alert.setAttribute("role", "alert");
      this.body.append(alert);
    }
    if (this.notice) this.element.append(make("p", "notice quiet", this.notice));
    const button = make("button", "", this.failed ? "Try again" : "Regenerate");
    button.type = "button";
    button.onclick = () => this.regenerate();
    for (const other of $("log").querySelectorAll(".regenerate")) other.remove();
    button.classList.add("regenerate");
    const copy = this.text ? [copyButton(() => this.text, "Copy this answer")] : [];
    this.element.append(make("div", "tools", ...copy, button, make("span", "quiet", this.notes.join(" · "))));
    scrollDown(isAtEnd(120));
  }

  regenerate() {
    if (generation) return;
    if (conversation.at(-1)?.role === "assistant") conversation.pop();
    this.element.remove();
    generateAnswer();
  }
}

function isAtEnd(slack = 40) {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < slack;
}

function scrollDown(wanted) {
  if (wanted) $("log").scrollTop = $("log").scrollHeight;
}

/** Up to three significant digits. */
function formatNumber(number) {
  return number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

function toggle(name, open) {
  $(name).hidden = !open;
  $(`${name}-button`).setAttribute("aria-expanded", String(open));
  if (name === "engine") document.body.classList.toggle("alone", !open);
}

for (const name of ["settings", "engine"]) $(`${name}-button`).onclick = () => toggle(name, $(name).hidden);
if (matchMedia("(max-width: 56rem)").matches) toggle("engine", false);
$("settings").onsubmit = (event) => event.preventDefault();
