// What a message says and shows: its text, and the files that it has in its record.
const ATTACHED_MOST = 20;

/** What a message says and shows, as requests have it: a text, or with pictures a list of parts. */
function contentOf({ text, attachments = [] }) {
  const files = attachments.filter(({ kind }) => kind === "text").map(({ name, text }) => `${name}:\n${fenced(text)}`);
  const whole = [...files, text].filter(Boolean).join("\n\n");
  const pictures = attachments.filter(({ kind }) => kind === "image");
  if (!pictures.length) return whole;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return whole ? [...parts, { type: "text", text: whole }] : parts;
}

/** A text between marks that it does not have itself. */
function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Whether a value from outside is a list of attachments. */
function areAttachments(list) {
  const isName = (name) => typeof name === "string" && name.length <= 200;
  const isFile = (file) => isName(file?.name) && (file.kind === "text" ? typeof file.text === "string" : file.kind === "image" && isPictureUrl(file.url));
  return Array.isArray(list) && list.length <= ATTACHED_MOST && list.every(isFile);
}

function isPictureUrl(url) {
  return typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/.test(url);
}
