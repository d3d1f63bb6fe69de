// Blocks of code: their colours, a label and a button that copies. The code of an answer grows while it is generated; only its last line
// and what follows are coloured anew. What is coloured only ever becomes text nodes.
/** Characters of a line, and of a block, that are coloured; the rest is plain. */
const LINE_COLOURED = 2000;
const BLOCK_COLOURED = 100_000;
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const NUMBER = /\d(?:[eE][+-](?=\d)|\w|\.(?=\d))*/y;

/** The end of a sticky pattern's match at a place; -1 if there is none. */
function endOfMatch(pattern, line, at) {
  pattern.lastIndex = at;
  return pattern.test(line) ? pattern.lastIndex : -1;
}

/** Whether no word ends before this place. */
function isApart(line, at) {
  return at === 0 || " \t([{,:=;|&<>".includes(line[at - 1]);
}

/** Goes over the lines of a text. `add` gets each part of them with its kind, which is empty for plain text. */
class CodeScanner {
  constructor(grammar, add) {
    Object.assign(this, { grammar, add, span: null, depth: 0 });
  }

  /** The state between two lines. */
  get state() {
    return { grammar: this.grammar, span: this.span, depth: this.depth };
  }

  set state(state) {
    Object.assign(this, state);
  }

  scan(line) {
    if (!this.grammar) return this.add("", line);
    const prefix = this.grammar.lines?.find(([start]) => line.startsWith(start));
    if (prefix) return this.add(prefix[1], line);
    let end = Math.min(line.length, LINE_COLOURED);
    // Both halves of a character stay together.
    if (/[\ud800-\udbff]/.test(line[end - 1] ?? "") && end < line.length) end--;
    this.scanPart(line.slice(0, end));
    this.add("", line.slice(end));
    if (this.span && !this.span.lines) this.span = null;
  }

  scanPart(line) {
    Object.assign(this, { line, at: 0, plainFrom: 0 });
    while (this.at < line.length) {
      const isTaken = this.span ? this.takeSpan(this.at) : this.takeMark() || this.openSpan() || this.takeWord() || this.takeNumber();
      if (!isTaken) this.at++;
    }
    this.add("", line.slice(this.plainFrom));
  }

  /** Takes the part up to `end`; plain text is added with all that follows without a kind. */
  take(kind, end) {
    if (kind) {
      this.add("", this.line.slice(this.plainFrom, this.at));
      this.add(kind, this.line.slice(this.at, end));
      this.plainFrom = end;
    }
    this.at = end;
    return true;
  }

  takeMark() {
    for (const [pattern, kind, next, where] of this.grammar.marks ?? []) {
      const end = endOfMatch(pattern, this.line, this.at);
      if (end < 0 || (where === "apart" && !isApart(this.line, this.at))) continue;
      if (where === "first" && this.line.slice(0, this.at).trim()) continue;
      if (next) this.grammar = GRAMMARS[next];
      return this.take(kind, end);
    }
    return false;
  }

  openSpan() {
    const { line, at } = this;
    for (const span of this.grammar.spans) {
      if (span.apart && !isApart(line, at)) continue;
      if (typeof span.open === "string") {
        if (!line.startsWith(span.open, at)) continue;
        this.span = span;
        this.depth = 1;
        return this.takeSpan(at + span.open.length);
      }
      // A pattern's group decides about the end.
      span.open.lastIndex = at;
      const found = span.open.exec(line);
      if (!found) continue;
      this.span = { ...span, close: span.close(found[1]) };
      this.depth = 1;
      return this.takeSpan(at + found[0].length);
    }
    return false;
  }

  /** Takes the span under way, whose inside goes on at `inside`, up to its end or that of the line. */
  takeSpan(inside) {
    const { span, line } = this;
    const end = Math.min(this.endOfSpan(inside), line.length);
    if (this.depth === 0) this.span = null;
    const isKey = this.grammar.key && span.kind === "string" && !this.span && this.isBeforeKeySign(end);
    return this.take(isKey ? "name" : span.kind, end);
  }

  endOfSpan(at) {
    const { open, close, escape, nests } = this.span;
    if (close === undefined) return this.line.length;
    while (at < this.line.length) {
      if (escape && this.line[at] === "\\") at += 2;
      else if (this.line.startsWith(close, at)) {
        at += close.length;
        if (--this.depth === 0) break;
      } else if (nests && this.line.startsWith(open, at)) {
        at += open.length;
        this.depth++;
      } else at++;
    }
    return at;
  }

  isBeforeKeySign(end) {
    const { line } = this;
    const [sign, space] = this.grammar.key;
    while (line[end] === " ") end++;
    return line[end] === sign && (!space || end + 1 === line.length || line[end + 1] === space);
  }

  takeWord() {
    const { grammar, line, at } = this;
    if (grammar.isText) return false;
    const end = endOfMatch(grammar.word ?? WORD, line, at);
    if (end <= at) return false;
    return this.take(this.kindOfWord(line.slice(at, end), end), end);
  }

  kindOfWord(text, end) {
    const { wordKind, keywords, constants = CONSTANTS, ignoresCase, key, calls, macros } = this.grammar;
    const word = ignoresCase ? text.toLowerCase() : text;
    if (wordKind) return wordKind;
    if (key && this.isBeforeKeySign(end)) return "name";
    if (keywords?.has(word)) return "keyword";
    if (constants.has(word)) return "number";
    if (calls && this.line[end] === "(") return "name";
    return macros && this.line[end] === "!" && this.line[end + 1] !== "=" ? "name" : "";
  }

  takeNumber() {
    if (this.grammar.isText || this.grammar.wordKind) return false;
    const end = endOfMatch(NUMBER, this.line, this.at);
    return end > this.at && this.take("number", end);
  }
}

/** A block of code on the page. */
class CodeBlock {
  #nodes = document.createDocumentFragment();
  #plain = "";
  /** The text up to here has its final nodes; the nodes behind it belong to the last line. */
  #settled = 0;
  #open = [];
  #place = make("code");

  constructor(language) {
    this.language = language;
    this.code = "";
    this.scanner = new CodeScanner(grammarOf(language), (kind, text) => this.#add(kind, text));
    const bar = make("div", "quiet", make("span", "", language || "text"), copyButton(() => this.code, "Copy this code"));
    const pre = make("pre", "", this.#place);
    pre.tabIndex = 0;
    this.element = make("div", "code", bar, pre);
    this.element.block = this;
  }

  /** Whether this block can show a text by changing its end. */
  canShow(language, code) {
    return language === this.language && code.startsWith(this.code.slice(0, this.#settled));
  }

  show(code) {
    if (code === this.code) return;
    for (const node of this.#open) node.remove();
    const lines = code.slice(this.#settled).split("\n");
    const last = lines.pop();
    lines.forEach((line, i) => this.#scan(i ? "\n" : "", line));
    this.#flush();
    this.#place.append(this.#nodes);
    this.#settled = code.length - last.length - (lines.length ? 1 : 0);
    if (this.#settled > BLOCK_COLOURED) this.scanner.state = { grammar: null, span: null, depth: 0 };
    const { state } = this.scanner;
    this.#scan(lines.length ? "\n" : "", last);
    this.#flush();
    this.#open = [...this.#nodes.childNodes];
    this.#place.append(this.#nodes);
    this.scanner.state = state;
    this.code = code;
  }

  #scan(before, line) {
    this.#plain += before;
    this.scanner.scan(line);
  }

  #add(kind, text) {
    if (!text) return;
    if (!kind) {
      this.#plain += text;
      return;
    }
    this.#flush();
    this.#nodes.append(make("span", kind, text));
  }

  #flush() {
    if (this.#plain) this.#nodes.append(this.#plain);
    this.#plain = "";
  }
}

/** Blocks of code that were shown, in their order, for the texts that follow; filled while an answer is shown anew. */
let spareCode = [];

/** The element of a block of code: that of the block shown before it if this one goes on, or a new one. */
function codeElement(language, code) {
  const before = spareCode.shift();
  const block = before?.canShow(language, code) ? before : new CodeBlock(language);
  block.show(code);
  return block.element;
}
