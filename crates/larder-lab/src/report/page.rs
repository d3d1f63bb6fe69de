//! The frame of a report page: one file with style and script, which loads nothing, in a light and a dark scheme.

use crate::{Fact, ReportOrigin};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// SHA-256 of [`STYLE`] and [`SCRIPT`] in base64. The page's policy allows nothing else, so that names of models, files
/// and texts cannot run or load anything, even if one were not escaped.
const STYLE_HASH: &str = "1PD8YmurJfzFoSF0ropvoyrsOekt+mPi69UH5M7gevA=";
const SCRIPT_HASH: &str = "GF6Ow3RfBCsDsSMqtNpKsmKdpTaKX4sEMXWfl4oEoQI=";

/// Escapes text for HTML and SVG, between tags and in quoted attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A report page.
pub struct Page<'a> {
    /// Title of the page.
    pub title: &'a str,
    /// What the page shows, in a sentence or two of text.
    pub lead: &'a str,
    /// How its numbers came about.
    pub made: &'a ReportOrigin,
    /// Number of runs, meaning of intervals, and further settings.
    pub method: &'a [Fact],
}

impl Page<'_> {
    /// The page around a body of HTML.
    pub fn html(&self, body: &str) -> String {
        let title = escape(self.title);
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{STYLE_HASH}'; script-src 'sha256-{SCRIPT_HASH}'; \
             base-uri 'none'; form-action 'none'"
        );
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
             <header>\n<p class=\"brand\">larder</p>\n<h1>{title}</h1>\n<p class=\"lead\">{}</p>\n</header>\n\
             <main>\n{}{body}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
            escape(self.lead),
            self.setup()
        )
    }

    /// The properties of the measurement, and its command line.
    fn setup(&self) -> String {
        format!(
            "<section class=\"setup\" aria-label=\"Setup\">\n{}<pre><code>{}</code></pre>\n</section>\n",
            definitions("facts", &self.made.facts(self.method)),
            escape(&self.made.command)
        )
    }
}

/// A longer value has a line of its own.
const LONG: usize = 90;

/// A list of names and values.
pub fn definitions(class: &str, facts: &[Fact]) -> String {
    let row = |fact: &Fact| {
        let class = if fact.value.chars().count() > LONG { " class=\"long\"" } else { "" };
        format!("<div{class}><dt>{}</dt><dd>{}</dd></div>\n", escape(&fact.name), escape(&fact.value))
    };
    format!("<dl class=\"{class}\">\n{}</dl>\n", facts.iter().map(row).collect::<String>())
}

/// A part of a page that can be folded.
pub fn group(title: &str, body: &str) -> String {
    format!("<details class=\"group\" open>\n<summary><h2>{}</h2></summary>\n{body}</details>\n", escape(title))
}

/// A paragraph of text.
pub fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escape(text))
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use ring::digest::{SHA256, digest};

    use super::*;

    #[test]
    fn the_policy_names_style_and_script() {
        let hash = |text: &str| base64::engine::general_purpose::STANDARD.encode(digest(&SHA256, text.as_bytes()));
        assert_eq!(STYLE_HASH, hash(STYLE), "put the right-hand side into STYLE_HASH");
        assert_eq!(SCRIPT_HASH, hash(SCRIPT), "put the right-hand side into SCRIPT_HASH");
    }

    #[test]
    fn hostile_texts_are_escaped() {
        let hostile = "</style><script>alert('1')</script><img src=x onerror=\"a\">&";
        let made = ReportOrigin {
            date: hostile.into(),
            command: hostile.into(),
            commit: Some(hostile.into()),
            machine: vec![Fact::new(hostile, hostile)],
            ..ReportOrigin::default()
        };
        let method = [Fact::new(hostile, hostile)];
        let page = Page { title: hostile, lead: hostile, made: &made, method: &method };
        let html = page.html(&(group(hostile, "") + &paragraph(hostile)));
        assert!(!html.contains("<img") && !html.contains("alert('1')") && html.contains("&lt;img src=x"));
        assert_eq!((html.matches("<script>").count(), html.matches("</style>").count()), (1, 1));
    }

    #[test]
    fn a_page_loads_nothing() {
        let made = ReportOrigin::default();
        let html = Page { title: "t", lead: "l", made: &made, method: &[] }.html("");
        for word in ["src=", "href=", "@import", "url(", "fetch(", "http:", "https:", "innerHTML", "style="] {
            assert!(!html.contains(word), "{word}");
        }
    }
}
