// Messages on the page: questions that can be edited, answers that can be regenerated, each with its versions.

/** What all messages have. `show` is told the state that is not part of the record: its versions, and whether it is being generated. */
class MessageView {
  constructor(message, element, label) {
    this.body = make("div", "text");
    this.tools = make("div", "tools");
    this.element = element;
    this.element.setAttribute("aria-label", label);
    this.element.append(this.body, this.tools);
    this.message = message;
  }

  /** Replaces the tools where something about them is new. */
  showTools(state, make) {
    const key = JSON.stringify(state);
    if (key === this.shownTools) return;
    this.shownTools = key;
    this.tools.replaceChildren(...make());
  }

  /** "2 / 3" between two buttons; none for a single version. */
  versionSwitch(versions) {
    if (versions.length < 2) return [];
    const at = versions.findIndex(({ id }) => id === this.message.id);
    const step = (sign, label, by) => {
      const button = toolButton(sign, () => versions[at + by] && showVersion(versions[at + by], label));
      button.setAttribute("aria-label", label);
      button.setAttribute("aria-disabled", String(!versions[at + by]));
      return button;
    };
    const count = make("span", "", `${at + 1} / ${versions.length}`);
    const group = make("span", "versions", step("‹", "Previous version", -1), count, step("›", "Next version", 1));
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "Versions");
    return [group];
  }
}

function toolButton(text, onclick, label) {
  const button = make("button", "", text);
  button.type = "button";
  button.onclick = onclick;
  if (label) button.setAttribute("aria-label", label);
  return button;
}

class QuestionView extends MessageView {
  constructor(message) {
    super(message, make("article", "message user"), "Message");
    this.body.textContent = message.text;
    this.body.before(...attachmentViews(message));
    this.mark = make("p", "dropped quiet");
    this.element.prepend(this.mark);
  }

  show(message, { versions, canChange, isUnanswered, dropped }) {
    this.message = message;
    this.mark.textContent = dropped;
    this.showTools([versions.map(({ id }) => id), canChange, isUnanswered], () => [
      copyButton(() => message.text, "Copy this message"),
      ...(canChange ? [toolButton("Edit", () => this.edit(), "Edit this message")] : []),
      ...(canChange && isUnanswered ? [toolButton("Try again", () => generateAnswer(message))] : []),
      ...this.versionSwitch(versions),
    ]);
  }

  /** Shows the text in a field; sending it makes a version of the message. */
  edit() {
    const field = make("textarea", "");
    const editor = make("form", "editor", field, make("div", "", toolButton("Cancel", () => this.endEdit()), make("button", "", "Send")));
    field.rows = 1;
    field.value = this.message.text;
    field.setAttribute("aria-label", "Edited message");
    field.oninput = () => fitHeight(field);
    field.onkeydown = (event) => {
      if (event.key === "Escape") event.preventDefault(), this.endEdit();
      if (isSendKey(event)) event.preventDefault(), editor.requestSubmit();
    };
    editor.onsubmit = (event) => {
      event.preventDefault();
      const { text, parent, attachments } = this.message;
      if (field.value === text || sendMessage(field.value, parent, attachments)) this.endEdit();
    };
    this.element.classList.add("edited");
    this.body.before(editor);
    fitHeight(field);
    field.focus();
  }

  endEdit() {
    this.element.classList.remove("edited");
    this.element.querySelector(".editor").remove();
    const button = this.element.isConnected && this.tools.querySelector("[aria-label^=Edit]");
    (button || $("prompt")).focus();
  }

  get isEdited() {
    return this.element.classList.contains("edited");
  }
}

class AnswerView extends MessageView {
  constructor(message) {
    super(message, make("article", "message answer"), "Answer");
  }

  show(message, { versions, isBusy, canChange, progress }) {
    this.message = message;
    this.element.classList.toggle("busy", isBusy);
    if (isBusy) this.element.setAttribute("aria-busy", "true");
    else this.element.removeAttribute("aria-busy");
    this.showText(isBusy, progress);
    const key = [versions.map(({ id }) => id), isBusy, canChange, message.end, models.length];
    this.showTools(key, () => (isBusy ? [] : this.finishedTools(versions, canChange)));
  }

  showText(isBusy, progress) {
    const { text, reasoning } = this.message;
    const shown = [text, reasoning, isBusy, progress];
    if (shown.every((part, i) => part === this.shown?.[i])) return;
    this.shown = shown;
    if (!text && !reasoning) return this.showPlaceholder(isBusy ? progress || "…" : "");
    if (!this.body.blocks) this.body.replaceChildren();
    const isThinking = isBusy && !text;
    showMarkdown(this.body, (reasoning && `<think>${reasoning}${isThinking ? "" : "</think>\n\n"}`) + text);
  }

  showPlaceholder(text) {
    this.body.replaceChildren(...(text ? [make("p", "waiting", text)] : []));
  }

  finishedTools(versions, canChange) {
    const { text, end, error, use } = this.message;
    for (const old of this.element.querySelectorAll(":scope > :is(.error, .notice)")) old.remove();
    if (end === "failed") {
      const alert = make("p", "error", error ?? "The answer failed.");
      alert.setAttribute("role", "alert");
      this.tools.before(alert);
    }
    const notices = use ? contextNotices(use) : [];
    if (notices.length) this.tools.before(make("p", "notice quiet", notices.join(" ")));
    const again = canChange ? [toolButton(end === "failed" ? "Try again" : "Regenerate", () => regenerate(this.message))] : [];
    const copy = text ? [copyButton(() => text, "Copy this answer")] : [];
    const notes = make("span", "quiet", answerNotes(this.message).join(" · "));
    if (this.message.miss) notes.title = `Prefix cache: ${this.message.miss}`;
    return [...copy, ...again, ...this.versionSwitch(versions), notes];
  }
}

/** Which of several models an answer is of, how it ended, and how fast it was. */
function answerNotes({ end, timings, model }) {
  const notes = model && models.length > 1 ? [model] : [];
  if (end === "length") notes.push("token limit");
  // An answer without an end belongs to a page that was closed.
  if (end === "stopped" || !end) notes.push("stopped");
  if (timings) {
    notes.push(`${timings.tokens} tokens`, `${formatNumber(timings.tokens_per_second)} tokens/s`, `TTFT ${formatTime(timings.ttft_seconds)}`);
  }
  return notes;
}

/** The part of the server's timings that is kept. */
function timingsOf({ predicted_n: tokens, predicted_per_second, queued_ms, prompt_ms }) {
  return { tokens, tokens_per_second: predicted_per_second, ttft_seconds: (queued_ms + prompt_ms) / 1e3 };
}

/** Milliseconds below a second. */
function formatTime(seconds) {
  return seconds < 1 ? `${Math.ceil(1e3 * seconds)} ms` : `${formatNumber(seconds)} s`;
}

/** Up to three significant digits. */
function formatNumber(number) {
  return number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

/** Enter sends; with Shift, or while an input method composes, it does not. */
function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** Makes a field as high as its text. */
function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}
