// Files beside a message: pictures, if the model sees, and texts. They are kept in the record of their message.
const TEXT_MOST = 512 * 2 ** 10;
/** Pictures that are sent as they are; others, and larger ones, are drawn anew. */
const SENT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const PICTURE_MOST = 2 * 2 ** 20;
const SIDE_MOST = 2048;

/** Whether the model sees. */
let seesPictures = false;
/** What goes with the next message. */
let attached = [];

$("attach").onclick = () => $("attach-file").click();
$("attach-file").onchange = async () => {
  await attachFiles($("attach-file").files);
  $("attach-file").value = "";
};
$("prompt").onpaste = (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attachFiles(event.clipboardData.files);
};
const hasFiles = ({ dataTransfer }) => [...dataTransfer.types].includes("Files");
document.ondragover = (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
};
document.ondragleave = ({ relatedTarget }) => relatedTarget || document.body.classList.remove("dropping");
document.ondrop = (event) => {
  document.body.classList.remove("dropping");
  if (!hasFiles(event)) return;
  event.preventDefault();
  attachFiles(event.dataTransfer.files);
};

/** Says what the model of the chat takes. */
function showModalities(modalities) {
  seesPictures = Boolean(modalities?.vision);
  const label = seesPictures ? "Attach pictures or text files" : "Attach text files";
  $("attach").title = label;
  $("attach").setAttribute("aria-label", label);
}

/** Attaches files one by one; what cannot be is said. */
async function attachFiles(files) {
  const problems = [];
  for (const file of [...files]) {
    try {
      if (attached.length >= ATTACHED_MOST) throw new Error(`a message has at most ${ATTACHED_MOST} files.`);
      attached.push(await attachmentOf(file));
    } catch (error) {
      problems.push(`${file.name}: ${error.message}`);
    }
    showAttached();
  }
  $("attach-note").textContent = problems.join(" ");
  $("prompt").focus();
}

async function attachmentOf(file) {
  const name = file.name.slice(0, 200);
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!seesPictures) throw new Error("this model sees no pictures.");
    return { kind: "image", name, url: await pictureUrl(file) };
  }
  if (file.size > TEXT_MOST) throw new Error(`the file is larger than ${TEXT_MOST / 2 ** 10} KiB.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error();
    return { kind: "text", name, text };
  } catch {
    throw new Error(`the file is ${seesPictures ? "neither a picture nor" : "not"} a text.`);
  }
}

/** A picture as a data: URL, drawn anew where it is large or of another type. */
async function pictureUrl(file) {
  if (SENT_TYPES.includes(file.type) && file.size <= PICTURE_MOST) return dataUrl(file);
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("the browser cannot read this picture.");
  });
  const scale = Math.min(1, SIDE_MOST / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const context = canvas.getContext("2d");
  // JPEG knows no transparency.
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the file cannot be read."));
    reader.readAsDataURL(file);
  });
}

/** Takes what is attached to the next message. */
function takeAttached() {
  const taken = attached;
  attached = [];
  $("attach-note").textContent = "";
  showAttached();
  return taken;
}

function showAttached() {
  const remove = (file) => {
    attached = attached.filter((other) => other !== file);
    showAttached();
    $("prompt").focus();
  };
  const items = attached.map((file) => make("li", "", attachmentView(file), toolButton("×", () => remove(file), `Remove ${file.name}`)));
  $("attached").replaceChildren(...items);
  $("attached").hidden = !items.length;
}

/** A picture, or the name of a text file. */
function attachmentView({ kind, name, url }) {
  if (kind !== "image") return make("span", "file", name);
  const picture = make("img");
  picture.src = url;
  picture.alt = name;
  picture.title = name;
  return picture;
}

/** The files of a message, shown before its text. */
function attachmentViews({ attachments = [] }) {
  return attachments.length ? [make("div", "attachments", ...attachments.map(attachmentView))] : [];
}
