// What asks the server. The key stays in this variable and nowhere else.
const $ = (id) => document.getElementById(id);
let key = "";
let asking = null;

/** The server's response; asks for the key as long as the server wants another one. */
async function ask(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (used === key) await askForKey(used !== "");
  }
}

/** The same, in JSON; throws what the server says where it refuses. */
async function askJson(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await ask(path, options);
  if (!response.ok) throw new Error(await refusal(response));
  return response.json();
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** One question at a time, whoever needs the key. */
function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    $("key-wrong").textContent = wasWrong ? "That was not the right key." : "";
    $("key-dialog").showModal();
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value;
      $("key").value = "";
      $("key-dialog").close();
      asking = null;
      resolve();
    };
  });
  return asking;
}

// Without the key nothing works, so there is nothing to go back to.
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

/** The lines of a stream of events: data and comments. */
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

/** A button that copies what `text()` gives. */
function copyButton(text, label) {
  const button = make("button", "", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.onclick = async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

/** Browsers keep their clipboard from pages that came without TLS from another machine; those copy in the old way. */
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
