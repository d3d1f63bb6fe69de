// What messages with files become in a request, and which files an import may have.
const picture = { kind: "image", name: "a.png", url: "data:image/png;base64,aGk=" };
const file = { kind: "text", name: "b.md", text: "see:\n```\nx\n```" };
const contents = [
  { text: "hi" },
  { text: "hi", attachments: [picture] },
  { text: "", attachments: [picture, picture] },
  { text: "hi", attachments: [file] },
  { text: "hi", attachments: [file, picture] },
].map(contentOf);
const lists = [
  [picture, file],
  [],
  Array(21).fill(file),
  [{ ...picture, url: "https://a.b/c.png" }],
  [{ ...picture, url: "data:image/svg+xml;base64,aGk=" }],
  [{ ...picture, url: 'data:image/png;base64,aGk="' }],
  [{ ...picture, name: 7 }],
  [{ kind: "text", name: "c" }],
  [{ kind: "other", name: "c", text: "" }],
  [null],
  "files",
].map(areAttachments);
console.log(JSON.stringify({ contents, lists }));
