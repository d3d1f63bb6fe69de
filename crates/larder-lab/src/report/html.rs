//! Parts of HTML pages.

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// The beginning of a self-contained page without scripts, which [`END`] ends.
pub fn begin(title: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{}</title><style>{STYLE}</style></head><body>\n",
        escape(title)
    )
}

/// The end of a page.
pub const END: &str = "</body></html>\n";

/// A table whose first row is the header. Cells are HTML.
pub fn table(rows: &[Vec<String>]) -> String {
    let line = |row: &Vec<String>, tag: &str| -> String {
        let cells: String = row.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let Some((head, body)) = rows.split_first() else { return String::new() };
    let body: String = body.iter().map(|row| line(row, "td")).collect();
    format!("<div class=\"wide\"><table><thead>{}</thead><tbody>\n{body}</tbody></table></div>\n", line(head, "th"))
}

/// The style of all pages, with a light and a dark scheme.
const STYLE: &str = "
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --faint: #667085; --line: #d8dde5; --soft: #f4f6f9;
  --c0: #6b7280; --c1: #1f77b4; --c2: #e8710a; --c3: #2a9d55; --c4: #c92a2a; --c5: #7048e8; --c6: #0ba5b5; --c7: #8a5a2b;
  --c8: #e64fa6; --c9: #a3a30a; --c10: #22357a; --c11: #94ba4c;
  --hit: #2f9e56; --miss: #e0455a; --stays: #cfe3f7; --out: #1c2430; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e6eaf0; --faint: #98a2b3; --line: #333b47;
  --soft: #1c222b; --c0: #a3aab5; --c1: #5aa9e6; --c2: #ff9f4a; --c3: #4fc27f; --c4: #ff6b6b; --c5: #a78bfa; --c6: #35d0e0;
  --c7: #c08a5a; --c8: #ff8fd0; --c9: #dede4a; --c10: #8094ff; --c11: #c3e88d;
  --hit: #46c075; --miss: #ff6174; --stays: #25405c; --out: #e6eaf0; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1.5rem; max-width: 78rem; background: var(--paper);
  color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .faint { color: var(--faint); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(31rem, 1fr)); gap: 1rem 1.5rem; }
.charts > :only-child { max-width: 38rem; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .title { font-size: 14px; font-weight: 600; }
svg .faint { fill: var(--faint); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; } svg .strong { stroke-width: 2.6; }
svg .dashed { stroke-dasharray: 6 4; } svg .whisker { stroke-width: 1.2; }
svg .box { fill-opacity: .25; stroke-width: 1.5; }
svg .hit { fill: var(--hit); } svg .miss { fill: var(--miss); } svg .stays { fill: var(--stays); }
svg .out { stroke: var(--out); stroke-width: 1.6; stroke-linecap: round; fill: none; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .2rem .65rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { background: var(--soft); font-weight: 600; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--faint); }
";
