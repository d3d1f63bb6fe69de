// Markdown to elements. The model's text is not trusted: it only ever becomes text nodes, link addresses are checked, and
// nesting and scanning are bounded.
const DEPTH = 8;
const FENCE = /^ {0,3}(```+|~~~+)\s*(?:([^\s`]+)(?:\s[^`]*)?)?$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,3}[.)])\s+(.*)$/s;
const DIVIDER = /^ *(?:[|:][ :]*)?-[-: |]*$/;

/** Renders `text` into `place`; unchanged blocks keep their elements, and code that grows keeps its own. */
function showMarkdown(place, text) {
  const shown = place.blocks ?? [];
  const blocks = blocksOf(text.split("\n"), 0);
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same].source === blocks[same].source) same++;
  const old = shown.slice(same).map(({ element }) => element);
  spareCode = old.flatMap(codeBlocksIn);
  const elements = blocks.slice(same).map((block) => (block.element = block.make()));
  spareCode = [];
  if (elements.length && old.some((element) => element.open)) elements[0].open = true;
  for (const element of old) if (!elements.includes(element)) element.remove();
  let before = shown[same - 1]?.element;
  for (const element of elements) {
    const next = before ? before.nextSibling : place.firstChild;
    if (next !== element) place.insertBefore(element, next);
    before = element;
  }
  place.blocks = [...shown.slice(0, same), ...blocks.slice(same)];
}

/** The blocks of code that an element is or has, in their order. */
function codeBlocksIn(element) {
  const all = [element, ...element.querySelectorAll(".code")];
  return all.flatMap(({ block }) => block ?? []);
}

/** The blocks of some lines: each block's source and a function that makes its element. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const { end, make } = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeAt(lines, at, fence);
  if (startsFormula(lines, at)) return formulaAt(lines, at);
  const heading = HEADING.exec(line);
  // The page itself has h1 and h2.
  if (heading) return { end: at + 1, make: () => inlineIn(`h${Math.min(6, heading[1].length + 2)}`, headingText(heading[2])) };
  if (RULE.test(line)) return { end: at + 1, make: () => make("hr") };
  if (depth < DEPTH && line.startsWith("<think>")) return reasoningAt(lines, at, depth);
  if (depth < DEPTH && /^ {0,3}>/.test(line)) return quoteAt(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end, depth)) end++;
  return { end, make: () => inlineIn("p", lines.slice(at, end).join("\n").trim()) };
}

/** A heading without the signs that may close it; those of a word such as C# stay. */
function headingText(text) {
  const whole = text.trimEnd();
  let end = whole.length;
  while (whole[end - 1] === "#") end--;
  return end === 0 || /\s/.test(whole[end - 1]) ? whole.slice(0, end).trimEnd() : whole;
}

function startsBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at) || startsFormula(lines, at)) return true;
  return depth < DEPTH && (/^ {0,3}>/.test(line) || ITEM.test(line));
}

function codeAt(lines, at, [, fence, language = ""]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().slice(fence.length).trim())) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return { end: Math.min(end + 1, lines.length), make: () => codeElement(language, code) };
}

function reasoningAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && !lines[end].includes("</think>")) end++;
  const isOver = end < lines.length;
  const inner = lines.slice(at, end + 1).join("\n").replace("<think>", "").replace("</think>", "").split("\n");
  const element = () => {
    const details = make("details", "", make("summary", "", isOver ? "Reasoning" : "Reasoning …"));
    details.append(...elementsOf(inner, depth + 1));
    return details;
  };
  return { end: Math.min(end + 1, lines.length), make: element };
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { end, make: () => make("blockquote", "", ...elementsOf(inner, depth + 1)) };
}

/** The items of a list; lines indented below an item belong to it. */
function listAt(lines, at, depth) {
  const [, margin, first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const item = ITEM.exec(lines[end]);
    const indent = lines[end].length - lines[end].trimStart().length;
    const isNext = item && item[1].length <= margin.length + 1 && /\d/.test(item[2]) === ordered && !RULE.test(lines[end]);
    if (isNext) items.push([item[3]]);
    else if (!lines[end].trim() && belongs(lines[end + 1], margin.length, ordered)) items.at(-1).push("");
    else if (indent > margin.length + 1 && lines[end].trim()) items.at(-1).push(lines[end].slice(Math.min(indent, margin.length + 2 + ordered)));
    else if (!lines[end].trim() || startsBlock(lines, end, depth)) break;
    else items.at(-1).push(lines[end]);
  }
  const element = () => {
    const list = make(ordered ? "ol" : "ul", "", ...items.map((item) => make("li", "", ...itemOf(item, depth + 1))));
    if (ordered) list.start = parseInt(first, 10);
    return list;
  };
  return { end, make: element };
}

/** Whether a line after an empty one continues the list. */
function belongs(line, margin, ordered) {
  const item = line && ITEM.exec(line);
  if (item && item[1].length <= margin + 1) return /\d/.test(item[2]) === ordered;
  return Boolean(line?.trim()) && line.startsWith(" ".repeat(margin + 2));
}

/** The first paragraph of an item is inlined. */
function itemOf(lines, depth) {
  const elements = elementsOf(lines, depth);
  return elements[0]?.tagName === "P" ? [...elements[0].childNodes, ...elements.slice(1)] : elements;
}

function elementsOf(lines, depth) {
  return blocksOf(lines, depth).map((block) => block.make());
}

function isTable(lines, at) {
  return lines[at].includes("|") && lines[at + 1]?.includes("|") && DIVIDER.test(lines[at + 1]);
}

function tableAt(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, tag) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split("|");
    return make("tr", "", ...cells.map((cell) => inlineIn(tag, cell.trim())));
  };
  const element = () => {
    const head = make("thead", "", row(lines[at], "th"));
    return make("table", "", head, make("tbody", "", ...lines.slice(at + 2, end).map((line) => row(line, "td"))));
  };
  return { end, make: element };
}

function inlineIn(tag, text) {
  return make(tag, "", ...inline(text, 0));
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** The nodes of a line: text, code, formulas, emphasis and links. */
function inline(text, depth) {
  const nodes = [];
  // If a mark has no end, later ones have none either; skipping them avoids quadratic time.
  const unclosed = new Set();
  const links = linkFinder(text);
  let plain = "";
  let at = 0;
  const push = (node, end) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    at = end;
  };
  while (at < text.length) {
    const found = depth < DEPTH && (codeIn(text, at, unclosed) ?? formulaIn(text, at, unclosed) ?? linkIn(text, at, links, depth) ?? markIn(text, at, unclosed, depth));
    if (found) push(found.node, found.end);
    else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else plain += text[at++];
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function codeIn(text, at, unclosed) {
  if (text[at] !== "`" || unclosed.has("`")) return null;
  let start = at;
  while (text[start] === "`") start++;
  const end = text.indexOf(text.slice(at, start), start);
  if (end < 0) {
    unclosed.add("`");
    return null;
  }
  return { node: make("code", "", text.slice(start, end).trim() || " "), end: end + (start - at) };
}

function markIn(text, at, unclosed, depth) {
  const mark = MARKS.find(([mark]) => text.startsWith(mark, at) && !unclosed.has(mark));
  if (!mark) return null;
  const [sign, tag] = mark;
  const start = at + sign.length;
  if (!/\S/.test(text[start] ?? "") || (sign[0] === "_" && /\w/.test(text[at - 1] ?? ""))) return null;
  const end = endOf(text, sign, start);
  if (end < 0) {
    unclosed.add(sign);
    return null;
  }
  return { node: make(tag, "", ...inline(text.slice(start, end), depth + 1)), end: end + sign.length };
}

function endOf(text, sign, start) {
  for (let end = text.indexOf(sign, start + 1); end >= 0; end = text.indexOf(sign, end + 1)) {
    const inWord = sign[0] === "_" && /\w/.test(text[end + sign.length] ?? "");
    // A single mark must not match half of a double one.
    const half = sign.length === 1 && text[end + 1] === sign;
    if (half) end++;
    else if (/\S/.test(text[end - 1]) && !inWord) return end;
  }
  return -1;
}

const ADDRESS = /^(?:https?|mailto):[^\s<>"]+$/i;
const BARE = /https?:[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/iy;

/** Longer addresses are text. */
const ADDRESS_LENGTH = 2000;

function linkIn(text, at, links, depth) {
  if (text[at] === "h" && !/\w/.test(text[at - 1] ?? "")) {
    BARE.lastIndex = at;
    const bare = BARE.exec(text)?.[0];
    return bare ? { node: link(bare, [bare]), end: at + bare.length } : null;
  }
  const found = text[at] === "[" && links(at);
  return found ? { node: link(found.address, inline(text.slice(at + 1, found.middle), depth + 1)), end: found.end } : null;
}

/** Finds the address behind a bracket, for brackets from left to right: no part of the text is searched twice. */
function linkFinder(text) {
  let middle = -1;
  let end = -1;
  let address = null;
  return (at) => {
    if (middle < at && middle < text.length) {
      middle = placeOf(text, "](", at);
      if (end < middle) end = placeOf(text, ")", middle);
      const inner = end < text.length && end - middle <= ADDRESS_LENGTH ? text.slice(middle + 2, end).trim() : "";
      address = ADDRESS.test(inner) ? inner : null;
    }
    return address && { address, middle, end: end + 1 };
  };
}

/** The next place of a sign; the end of the text if there is none. */
function placeOf(text, sign, from) {
  const place = text.indexOf(sign, from);
  return place < 0 ? text.length : place;
}

function link(address, children) {
  const element = make("a", "", ...children);
  element.href = address;
  element.rel = "noopener noreferrer nofollow";
  element.target = "_blank";
  return element;
}
