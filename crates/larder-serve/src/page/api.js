// Requests to the server, and helpers for elements. The API key is kept in this variable only.
const $ = (id) => document.getElementById(id);
let key = "";
let keyPrompt = null;

/** Fetches with the API key; asks the user for the key as long as the server refuses it. */
async function fetchWithKey(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (used === key) await promptForKey(used !== "");
  }
}

/** Fetches JSON; throws the server's error message. */
async function fetchJson(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetchWithKey(path, options);
  if (!response.ok) throw new Error(await errorMessage(response));
  return response.json();
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server returned status ${response.status}.`;
  }
}

/** Asks the user for the key. Concurrent requests share one dialog. */
function promptForKey(wasWrong) {
  keyPrompt ??= new Promise((resolve) => {
    $("key-wrong").textContent = wasWrong ? "Incorrect API key." : "";
    $("key-dialog").showModal();
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value;
      $("key").value = "";
      $("key-dialog").close();
      keyPrompt = null;
      resolve();
    };
  });
  return keyPrompt;
}

// Without the key nothing works, so the dialog cannot be cancelled.
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

/** The lines of a stream of server-sent events: data and comments. */
async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) yield line;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A new element with a class and text or children. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** A button that copies the result of `text()`. */
function copyButton(text, label) {
  const button = make("button", "", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.onclick = async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Copy failed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

/** Browsers offer no `navigator.clipboard` to pages from another machine without TLS; those use `execCommand`. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = make("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  return isDone;
}
