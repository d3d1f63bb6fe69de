// The languages of code blocks, as far as colours need them. A grammar has
// - spans: comments and strings, each with its opening (a text or a pattern), its closing (without one: the end of the line), its kind,
//   and whether it has escapes, nests, goes on over lines, or opens only apart from a word before it;
// - marks: other patterns with a kind, and the grammar that holds behind them;
// - keywords and constants, and the pattern of words and whether calls have a kind;
// - key: the sign behind names of fields;
// - lines: prefixes that give a whole line its kind.
// Patterns are sticky, and none repeats a part that repeats itself, so each takes time in proportion to what it matches.
const setOf = (words) => new Set(words.split(" "));
const quoted = (sign, more = {}) => ({ open: sign, close: sign, kind: "string", escape: true, ...more });
const lineComment = (open, more = {}) => ({ open, kind: "comment", ...more });
const blockComment = (open, close, more = {}) => ({ open, close, kind: "comment", lines: true, ...more });
const SLASHES = [lineComment("//"), blockComment("/*", "*/")];
const QUOTES = [quoted('"'), quoted("'")];
const HASH = lineComment("#", { apart: true });
const TRIPLES = [quoted('"""', { lines: true }), quoted("'''", { lines: true })];
const CONSTANTS = setOf("true false null none nil True False None NULL nullptr undefined NaN Infinity");
const ANNOTATION = [/@[A-Za-z_][\w.]*/y, "name"];

const SCRIPT_WORDS = setOf(
  "abstract any as async await boolean break case catch class const constructor continue debugger declare default delete do else enum export extends " +
    "finally for from function get if implements import in infer instanceof interface is keyof let namespace never new number object of override " +
    "private protected public readonly return satisfies set static string super switch symbol this throw try type typeof unknown var void while with yield",
);
const C_WORDS = setOf(
  "alignas alignof asm auto bool break case catch char class co_await co_return co_yield concept const consteval constexpr constinit continue decltype " +
    "default delete do double else enum explicit export extern final float for friend goto if inline int int8_t int16_t int32_t int64_t long mutable " +
    "namespace new noexcept operator override private protected public register requires restrict return short signed size_t sizeof static static_assert " +
    "static_cast struct switch template this thread_local throw try typedef typename uint8_t uint16_t uint32_t uint64_t union unsigned using virtual " +
    "void volatile wchar_t while",
);
const SQL_WORDS = setOf(
  "add all alter and any as asc begin between bigint boolean by cascade case cast char check column commit constraint create cross database date " +
    "decimal default delete desc distinct drop else end except exists explain false fetch float foreign from full function grant group having if in " +
    "index inner insert int integer intersect interval into is join key lateral left like limit natural not null numeric offset on or order outer " +
    "over partition primary real references returning revoke right rollback row rows select set smallint table text then timestamp to transaction " +
    "trigger true truncate union unique update using values varchar view when where window with",
);
const SCRIPT = {
  spans: [...SLASHES, ...QUOTES, quoted("`", { lines: true })],
  marks: [ANNOTATION],
  keywords: SCRIPT_WORDS,
  calls: true,
};
const STYLE_SHEET = {
  spans: [blockComment("/*", "*/"), ...QUOTES],
  marks: [[/@[a-z-]+/y, "keyword"], [/#[0-9a-fA-F]{3,8}\b/y, "number"], [/![a-z]+/y, "keyword"]],
  word: /-{0,2}[\p{L}_][\p{L}\p{N}_-]*/uy,
  key: ":",
  calls: true,
};

const GRAMMARS = {
  rust: {
    spans: [
      lineComment("//"), blockComment("/*", "*/", { nests: true }), quoted('"', { lines: true }),
      { open: /b?r(#{0,20})"/y, close: (hashes) => `"${hashes}`, kind: "string", lines: true },
    ],
    marks: [[/b?'(?:\\[^']{1,12}|[^'\\])'/uy, "string"], [/'[a-z_]\w*/y, "name"], [/#!?\[[^\]]{0,200}\]/y, "name"]],
    keywords: setOf(
      "Self as async await bool box break char const continue crate dyn else enum extern f32 f64 fn for i8 i16 i32 i64 i128 if impl in isize let loop " +
        "match mod move mut pub ref return self static str struct super trait type u8 u16 u32 u64 u128 union unsafe use usize where while yield",
    ),
    macros: true,
    calls: true,
  },
  python: {
    spans: [lineComment("#"), ...TRIPLES, ...QUOTES],
    marks: [ANNOTATION],
    keywords: setOf(
      "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not " +
        "or pass raise return self try while with yield",
    ),
    calls: true,
  },
  javascript: SCRIPT,
  c: {
    spans: [...SLASHES, ...QUOTES, { open: /R"([\w.-]{0,16})\(/y, close: (name) => `)${name}"`, kind: "string", lines: true }],
    marks: [[/#[ \t]{0,20}[a-z]+/y, "keyword", undefined, "first"]],
    keywords: C_WORDS,
    calls: true,
  },
  go: {
    spans: [...SLASHES, ...QUOTES, quoted("`", { lines: true, escape: false })],
    keywords: setOf(
      "any bool break byte case chan comparable complex64 complex128 const continue default defer else error fallthrough float32 float64 for func go goto " +
        "if import int int8 int16 int32 int64 interface map package range return rune select string struct switch type uint uint8 uint16 uint32 uint64 " +
        "uintptr var",
    ),
    constants: setOf("true false nil iota"),
    calls: true,
  },
  java: {
    spans: [...SLASHES, quoted('"""', { lines: true }), ...QUOTES],
    marks: [ANNOTATION],
    keywords: setOf(
      "abstract assert boolean break byte case catch char class const continue default do double else enum extends final finally float for goto if " +
        "implements import instanceof int interface long native new package permits private protected public record return sealed short " +
        "static strictfp super switch synchronized this throw throws transient try var void volatile while yield",
    ),
    calls: true,
  },
  bash: {
    spans: [HASH, quoted('"', { lines: true }), quoted("'", { lines: true, escape: false })],
    marks: [[/\\./y, ""], [/\$(?:\w+|\{[^}]{0,200}\}|[@#?*!$-])/y, "name"], [/--?[A-Za-z][\w-]*/y, "name", undefined, "apart"]],
    keywords: setOf(
      "alias break case cd continue declare do done echo elif else esac eval exec exit export fi for function if in local printf read readonly return " +
        "set shift source sudo test then trap unset until while",
    ),
    word: /[\p{L}_][\p{L}\p{N}_-]*/uy,
  },
  json: { spans: [...SLASHES, quoted('"')], key: ":" },
  yaml: {
    spans: [HASH, quoted('"', { apart: true, lines: true }), quoted("'", { apart: true, lines: true, escape: false })],
    marks: [[/[&*!][\w!-]+/y, "name", undefined, "apart"]],
    constants: setOf("true false null yes no on off True False Null"),
    word: /[\p{L}_][\p{L}\p{N}_./-]*/uy,
    key: ": ",
  },
  toml: {
    spans: [lineComment("#"), ...TRIPLES, quoted('"'), quoted("'", { escape: false })],
    marks: [[/\[\[?[\w ."'-]{1,200}\]\]?$/y, "keyword", undefined, "first"]],
    word: /[\p{L}_][\p{L}\p{N}_.-]*/uy,
    key: "=",
  },
  html: {
    spans: [blockComment("\x3c!--", "-->")],
    marks: [
      [/\x3cscript(?![\w:-])/iy, "keyword", "scriptTag"], [/\x3cstyle(?![\w:-])/iy, "keyword", "styleTag"], [/<[/!?]?[A-Za-z][\w:-]*/y, "keyword", "tag"],
      [/&#?\w{1,30};/y, "number"],
    ],
    isText: true,
  },
  tag: tagBefore("html"),
  scriptTag: tagBefore("script"),
  styleTag: tagBefore("style"),
  script: { ...SCRIPT, marks: [[/<\/script/iy, "keyword", "tag"], ...SCRIPT.marks] },
  style: { ...STYLE_SHEET, marks: [[/<\/style/iy, "keyword", "tag"], ...STYLE_SHEET.marks] },
  css: STYLE_SHEET,
  sql: { spans: [lineComment("--"), blockComment("/*", "*/"), quoted("'", { escape: false, lines: true }), quoted('"', { escape: false })], keywords: SQL_WORDS, ignoresCase: true, calls: true },
  diff: {
    spans: [],
    lines: [["+++", "keyword"], ["---", "keyword"], ["diff ", "keyword"], ["@@", "name"], ["index ", "comment"], ["+", "added"], ["-", "removed"]],
    isText: true,
  },
  /** Languages that are known only for their comments. */
  slashes: { spans: [...SLASHES, quoted('"')] },
  hashes: { spans: [HASH, quoted('"')] },
};

/** Attributes, up to the end of a tag; then the grammar `next`. */
function tagBefore(next) {
  const quote = (sign) => quoted(sign, { escape: false, lines: true });
  return { spans: [quote('"'), quote("'")], marks: [[/[/?]?>/y, "keyword", next]], word: /[\p{L}_:@][\p{L}\p{N}_:.-]*/uy, wordKind: "name" };
}

const LANGUAGE_NAMES = {
  rust: "rs", python: "py python3 pycon", javascript: "js jsx mjs cjs node typescript ts tsx", c: "cpp c++ cc cxx h hpp hxx cuda cu objc objective-c glsl",
  go: "golang", java: "", bash: "sh shell zsh console shell-session ksh fish", json: "json5 jsonc jsonl ndjson", yaml: "yml", toml: "",
  html: "htm xml svg xhtml vue", css: "scss less", sql: "sqlite postgres postgresql mysql", diff: "patch",
  hashes: "ruby rb perl pl r julia jl elixir ex make makefile dockerfile docker nix ini conf cfg properties powershell ps1 cmake nginx",
  slashes: "",
};
const LANGUAGES = new Map(Object.entries(LANGUAGE_NAMES).flatMap(([name, others]) => [name, ...others.split(" ").filter(Boolean)].map((each) => [each, GRAMMARS[name]])));
const PLAIN_NAMES = new Set(["", "text", "txt", "plain", "plaintext", "output", "log", "none", "markdown", "md"]);

/** The grammar of a fence's language; null for plain text. */
function grammarOf(language) {
  const name = language.toLowerCase();
  return LANGUAGES.get(name) ?? (PLAIN_NAMES.has(name) ? null : GRAMMARS.slashes);
}
