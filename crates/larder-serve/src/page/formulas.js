// Formulas in answers. The server makes MathML of their LaTeX; until it is there, and where it cannot be had, the source is shown.
// The MathML of the response is not trusted: it is parsed apart, and only known elements and attributes are copied.
const FORMULA_LENGTH = 4000;
/** Formulas and characters of a request, and of what is remembered. */
const FORMULA_BATCH = 64;
const FORMULA_BATCH_LENGTH = 16_000;
const FORMULAS_REMEMBERED = 2000;
const FORMULA_RETRY_MS = 10_000;
const MATH_ELEMENTS = new Set("math mfrac mi mn mo mover mroot mrow mspace msqrt msub msubsup msup mtable mtd mtext mtr munder munderover".split(" "));
const MATH_ATTRIBUTES = new Set(
  ("depth display displaystyle fence form height largeop linethickness lspace mathvariant maxsize minsize movablelimits rspace scriptlevel " +
    "separator stretchy symmetric voffset width").split(" "),
);
/** By display and LaTeX: the element to copy, null if there is none, undefined while it is not known. */
const formulas = new Map();
/** Formulas to request, and the elements that wait for each. */
const formulasWanted = new Map();
let formulaTimer = null;
let formulasPausedUntil = 0;

/** The element of a formula, with its source until the MathML is there. */
function formulaElement(source, latex, display, tag = "span") {
  const element = make(tag, display ? "formula display" : "formula", source);
  if (display) element.tabIndex = 0;
  const id = (display ? "d" : "i") + wellFormed(latex);
  const math = formulas.get(id);
  if (math) element.replaceChildren(math.cloneNode(true));
  else if (math !== null && latex.length <= FORMULA_LENGTH) wantFormula(id, element);
  return element;
}

function wantFormula(id, element) {
  if (performance.now() < formulasPausedUntil) return;
  if (!formulasWanted.has(id)) formulasWanted.set(id, []);
  formulasWanted.get(id).push(element);
  formulaTimer ??= setTimeout(requestFormulas, 30);
}

/** Requests formulas until none is wanted. */
async function requestFormulas() {
  while (formulasWanted.size) {
    const ids = nextFormulas();
    try {
      const request = { formulas: ids.map((id) => ({ latex: id.slice(1), display: id[0] === "d" })) };
      const { formulas: results } = await fetchJson("/mathml", request);
      ids.forEach((id, i) => rememberFormula(id, mathOf(results[i]?.mathml)));
    } catch {
      // The sources stay, and formulas that are shown later are tried again.
      formulasPausedUntil = performance.now() + FORMULA_RETRY_MS;
      formulasWanted.clear();
    }
  }
  formulaTimer = null;
}

function nextFormulas() {
  const ids = [];
  let length = 0;
  for (const id of formulasWanted.keys()) {
    length += id.length;
    if (ids.length === FORMULA_BATCH || (ids.length && length > FORMULA_BATCH_LENGTH)) break;
    ids.push(id);
  }
  return ids;
}

function rememberFormula(id, math) {
  if (formulas.size >= FORMULAS_REMEMBERED) formulas.delete(formulas.keys().next().value);
  math?.setAttribute("alttext", id.slice(1));
  formulas.set(id, math);
  const waiting = formulasWanted.get(id) ?? [];
  formulasWanted.delete(id);
  if (!math) return;
  const atEnd = isAtEnd();
  for (const element of waiting) element.replaceChildren(math.cloneNode(true));
  scrollDown(atEnd);
}

/** The element of some MathML; null if it is none. */
function mathOf(mathml) {
  if (typeof mathml !== "string") return null;
  const math = new DOMParser().parseFromString(mathml, "text/html").body.firstChild;
  const isMath = math?.localName === "math" && math.namespaceURI !== document.body.namespaceURI;
  return isMath ? copyOfMath(math, math.namespaceURI) : null;
}

/** A copy of an element with known elements and attributes only; null if there are others. */
function copyOfMath(source, namespace) {
  if (source.namespaceURI !== namespace || !MATH_ELEMENTS.has(source.localName)) return null;
  const copy = document.createElementNS(namespace, source.localName);
  for (const { name, value } of source.attributes) {
    if (name === "class") copy.setAttribute(name, value.split(" ").filter((part) => /^(?:menv|mop)-[a-z-]{1,30}$/.test(part)).join(" "));
    else if (MATH_ATTRIBUTES.has(name) && isMathValue(value)) copy.setAttribute(name, value);
  }
  for (const child of source.childNodes) {
    const part = child.nodeType === Node.TEXT_NODE ? child.data : copyOfMath(child, namespace);
    if (part === null) return null;
    copy.append(part);
  }
  return copy;
}

/** Whether a value is a word, or a number or length that is not too large. */
function isMathValue(value) {
  return /^[a-z-]{1,30}$/.test(value) || (/^-?[\d.]{1,12}(?:[a-z]{2}|%)?$/.test(value) && Math.abs(parseFloat(value)) <= 100);
}

/** The formula that begins in a text: `$…$`, `$$…$$`, `\(…\)` or `\[…\]`. Prices are none. */
function formulaIn(text, at, unclosed) {
  if (text[at] === "\\" && (text[at + 1] === "(" || text[at + 1] === "[")) {
    return formulaUpTo(text, at, 2, text[at + 1] === "(" ? "\\)" : "\\]", text[at + 1] === "[", unclosed);
  }
  if (text[at] !== "$" || text[at - 1] === "$") return null;
  if (text[at + 1] === "$") return text[at + 2] === "$" ? null : formulaUpTo(text, at, 2, "$$", true, unclosed);
  const end = unclosed.has("$") ? -1 : endOfDollar(text, at + 1);
  if (end < 0) {
    unclosed.add("$");
    return null;
  }
  const latex = text.slice(at + 1, end);
  const isFormula = isDollarFormula(text[at - 1] ?? "", latex, text[end + 1] ?? "");
  return isFormula ? { node: formulaElement(text.slice(at, end + 1), latex, false), end: end + 1 } : null;
}

function formulaUpTo(text, at, length, close, display, unclosed) {
  const end = unclosed.has(close) ? -1 : text.indexOf(close, at + length);
  if (end < 0) {
    unclosed.add(close);
    return null;
  }
  const latex = text.slice(at + length, end);
  if (!latex.trim()) return null;
  const after = end + close.length;
  return { node: formulaElement(text.slice(at, after), latex, display), end: after };
}

/** The next dollar sign that is not escaped. */
function endOfDollar(text, at) {
  for (; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "$") return at;
  }
  return -1;
}

/** Whether what two single dollar signs enclose is a formula and no text between prices. */
function isDollarFormula(before, latex, after) {
  if (!/^\S/.test(latex) || !/\S$/.test(latex) || /[\w$]/.test(before) || /[\d$\p{Lu}]/u.test(after)) return false;
  return /[\\^_={}]/.test(latex) || !/\s[\p{L}]{2,}\s/u.test(latex);
}

const FORMULA_OPENING = /^ {0,3}(\$\$|\\\[)/;
const FORMULA_LINES = 100;

/** Whether a line begins a formula of lines of its own. */
function startsFormula(lines, at) {
  return FORMULA_OPENING.test(lines[at]) && formulaLines(lines, at) !== null;
}

/** The formula that begins with a line: its end, and whether it is closed. Lines in it are no lists or headings. */
function formulaLines(lines, at) {
  const [{ length }, sign] = FORMULA_OPENING.exec(lines[at]);
  const close = sign === "$$" ? "$$" : "\\]";
  const isAlone = !lines[at].slice(length).trim();
  for (let end = at; end < Math.min(lines.length, at + FORMULA_LINES); end++) {
    const found = lines[end].indexOf(close, end === at ? length : 0);
    if (found < 0) continue;
    // Text behind it makes it a part of a paragraph.
    const rest = lines[end].slice(found + close.length).trim();
    return /^[.,;:!?]?$/.test(rest) ? { end: end + 1, length, close, rest } : null;
  }
  return isAlone && lines.length - at < FORMULA_LINES ? { end: lines.length, rest: "" } : null;
}

function formulaAt(lines, at) {
  const { end, length, close, rest } = formulaLines(lines, at);
  const source = lines.slice(at, end).join("\n");
  if (!close) return { end, make: () => make("p", "formula-open", source) };
  const latex = source.slice(length, source.lastIndexOf(close));
  if (!latex.trim()) return { end, make: () => make("p", "", source) };
  return { end, make: () => formulaElement(source.trim(), latex + rest, true, "div") };
}
