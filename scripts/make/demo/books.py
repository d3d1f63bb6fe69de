"""Reads the books and keeps only prose: one line per paragraph, an empty line between paragraphs."""

import re
from pathlib import Path

# Held out of training; the only book of its author in the collection.
HELD_OUT = "treasure-island"

# Verse, and plays in the spelling of the first folio: their line breaks carry meaning, and there is too little of them.
NOT_PROSE = {
    "blake-poems",
    "milton-paradise",
    "shakespeare-caesar",
    "shakespeare-hamlet",
    "shakespeare-macbeth",
    "whitman-leaves",
}

PLAIN_PUNCTUATION = {
    "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'",
    "\u2014": "--", "\u2013": "-", "\u2026": "...", "\u00a0": " ",
}
PLAIN = str.maketrans(PLAIN_PUNCTUATION | {"\ufeff": "", "_": ""})
ABOUT_THE_FILE = re.compile(r"gutenberg|transcriber|proofread|produced by|e-?text|\{pg|=>|https?:|www\.", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.?!:;,\-]['\")\]]*$")


def decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def is_prose(paragraph: str) -> bool:
    """False for headings, tables of contents, page notes and text about the file itself."""
    if ABOUT_THE_FILE.search(paragraph) or paragraph.startswith(("[", "*")):
        return False
    letters = sum(c.isalpha() for c in paragraph)
    if letters < 0.6 * len(paragraph) or not any(c.islower() for c in paragraph):
        return False
    return len(paragraph) > 100 or SENTENCE_END.search(paragraph) is not None


def clean(text: str) -> str:
    text = text.replace("\r\n", "\n").translate(PLAIN)
    text = re.sub(r"\[Illustration[^\]]*\]|\[Footnote[^\]]*\]|\[\d+\]", "", text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if is_prose(p))


def read_books(folder: Path) -> tuple[list[str], str]:
    """The cleaned training books in the order of their names, and the held-out book."""
    books = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    if HELD_OUT not in books:
        raise SystemExit(f"{folder}: the held-out book {HELD_OUT}.txt is missing")
    held_out = clean(decode(books.pop(HELD_OUT).read_bytes()))
    return [clean(decode(path.read_bytes())) for name, path in books.items() if name not in NOT_PROSE], held_out
