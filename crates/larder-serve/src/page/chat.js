// The conversation.
const dialogue = [];
let writing = null;

$("composer").onsubmit = (event) => {
  event.preventDefault();
  say($("prompt").value);
};

$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say($("prompt").value);
};

$("prompt").oninput = fitPrompt;
$("stop").onclick = () => writing?.abort();
$("fresh").onclick = startAfresh;
for (const idea of $("ideas").children) idea.onclick = () => say(idea.textContent);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) writing?.abort();
});

function fitPrompt() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

function startAfresh() {
  writing?.abort();
  dialogue.length = 0;
  for (const message of $("log").querySelectorAll(".message")) message.remove();
  $("welcome").hidden = false;
  $("prompt").focus();
}

function say(text) {
  if (writing || !text.trim()) return;
  if (!$("settings").checkValidity()) {
    toggle("settings", true);
    $("settings").reportValidity();
    return;
  }
  // A message that was never answered is not sent along with the next.
  if (dialogue.at(-1)?.role === "user") dialogue.pop();
  dialogue.push({ role: "user", content: text });
  $("welcome").hidden = true;
  $("log").append(make("div", "message user", make("div", "text", text)));
  $("prompt").value = "";
  fitPrompt();
  answer();
}

/** Asks for the answer to the dialogue as it stands, and shows it as it comes. */
async function answer() {
  const stop = (writing = new AbortController());
  const view = new AnswerView();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await ask("/v1/chat/completions", { method: "POST", signal: stop.signal, body: request() });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const line of linesOf(response)) take(line, view);
  } catch (error) {
    view.failed = stop.signal.aborted ? "" : error.message;
    view.wasStopped = stop.signal.aborted;
  }
  writing = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  view.finish();
  if (!view.element.isConnected) return;
  if (view.text) dialogue.push({ role: "assistant", content: view.text });
  $("said").textContent = view.failed ? "" : view.wasStopped ? "Stopped." : "The answer is complete.";
  if (document.activeElement === document.body) $("prompt").focus();
}

/** What is left empty is not sent, and is then as the model recommends. */
function request() {
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  const system = $("system").value.trim();
  return JSON.stringify({
    messages: [...(system ? [{ role: "system", content: system }] : []), ...dialogue],
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    stream: true,
  });
}

function take(line, view) {
  if (line.startsWith(":")) return view.wait(line.slice(1).trim());
  if (!line.startsWith("data: ") || line === "data: [DONE]") return;
  const chunk = JSON.parse(line.slice(6));
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (choice?.delta.content) view.add(choice.delta.content);
  if (choice?.finish_reason) view.finished(choice.finish_reason, chunk.timings);
}

/** An answer on the page. */
class AnswerView {
  text = "";
  failed = "";
  wasStopped = false;
  notes = [];

  constructor() {
    this.body = make("div", "text", make("p", "waiting", "…"));
    this.element = make("article", "message busy", this.body);
    this.element.setAttribute("aria-busy", "true");
    this.element.setAttribute("aria-label", "Answer");
    $("log").append(this.element);
    scrollDown(true);
  }

  wait(comment) {
    if (!this.text && comment) this.body.textContent = comment;
  }

  add(text) {
    this.text += text;
    // Tokens may come faster than there are frames to show them in.
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = null;
    const atEnd = isAtEnd();
    if (!this.body.blocks) this.body.replaceChildren();
    showMarkdown(this.body, this.text);
    scrollDown(atEnd);
  }

  finished(reason, timings) {
    if (reason === "length") this.notes.push("cut off at its limit");
    if (!timings) return;
    const first = (timings.queued_ms + timings.prompt_ms) / 1e3;
    this.notes.push(`${timings.predicted_n} tokens`, `${figure(timings.predicted_per_second)} tokens/s`, `first after ${figure(first)} s`);
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.show();
    this.element.classList.remove("busy");
    this.element.removeAttribute("aria-busy");
    if (this.wasStopped) this.notes.push("stopped");
    if (this.failed) {
      const said = make("p", "error", this.failed);
      said.setAttribute("role", "alert");
      this.body.append(said);
    }
    const again = make("button", "", this.failed ? "Try again" : "Write again");
    again.type = "button";
    again.onclick = () => this.again();
    for (const other of $("log").querySelectorAll(".again")) other.remove();
    again.classList.add("again");
    const copy = this.text ? [copyButton(() => this.text, "Copy this answer")] : [];
    this.element.append(make("div", "tools", ...copy, again, make("span", "quiet", this.notes.join(" · "))));
    scrollDown(isAtEnd(120));
  }

  again() {
    if (writing) return;
    if (dialogue.at(-1)?.role === "assistant") dialogue.pop();
    this.element.remove();
    answer();
  }
}

function isAtEnd(slack = 40) {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < slack;
}

function scrollDown(wanted) {
  if (wanted) $("log").scrollTop = $("log").scrollHeight;
}

/** Three digits at most, as many as say something. */
function figure(number) {
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
