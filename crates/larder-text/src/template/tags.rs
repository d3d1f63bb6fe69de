//! The `generation` tag, which the template engine lacks.

/// Replaces the tags `{% generation %}` … `{% endgeneration %}`, which mark the model's answers, by `{% with %}`
/// blocks, which render the same text. White space control stays. Each byte is looked at a constant number of times.
pub(super) fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = tag_start(rest) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let length = tag_length(tag);
        let (tag, after) = tag.split_at(length);
        push_tag(tag, &mut out);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The position of the first `{%`, `{{` or `{#`.
fn tag_start(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|pair| pair[0] == b'{' && matches!(pair[1], b'%' | b'{' | b'#'))
}

fn push_tag(tag: &str, out: &mut String) {
    match name(tag) {
        "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
        "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
        _ => out.push_str(tag),
    }
}

/// The content of a `{% … %}` tag, without white space control.
fn name(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or_default();
    inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace())
}

/// Length in bytes of the tag, comment or raw block at the start of `text`; all of `text` if its end is missing.
fn tag_length(text: &str) -> usize {
    if text.starts_with("{#") {
        return text.find("#}").map_or(text.len(), |at| at + 2);
    }
    let close = if text.starts_with("{%") { "%}" } else { "}}" };
    let length = closed_at(text, close);
    if name(&text[..length]) != "raw" {
        return length;
    }
    let mut at = length;
    while let Some(close) = text[at..].find("%}") {
        let end = at + close + 2;
        // The tag that ends here began at the last `{%`: an `endraw` has none within.
        if text[at..end].rfind("{%").is_some_and(|open| name(&text[at + open..end]) == "endraw") {
            return end;
        }
        at = end;
    }
    text.len()
}

/// The position after the first `close` that is not within a string or bracket.
fn closed_at(text: &str, close: &str) -> usize {
    let mut depth = 0usize;
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) => quote = Some(open).filter(|open| *open != c),
            None if depth == 0 && text[at..].starts_with(close) => return at + 2,
            None => match c {
                '\'' | '"' => quote = Some(c),
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            },
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::without_generation;

    #[test]
    fn the_tags_become_blocks_with_the_same_white_space() {
        assert_eq!(without_generation("{% raw %}{%{% endraw %}{% generation %}"), "{% raw %}{%{% endraw %}{% with %}");
        assert_eq!(without_generation("a {%- generation -%} b {%+endgeneration%}"), "a {%- with -%} b {%+endwith%}");
    }

    #[test]
    fn every_template_takes_time_by_its_length() {
        let started = Instant::now();
        for piece in
            ["{%%}", "{{", "{%", "{{}}", "{# #}", "{% raw %}", "{%{%%}", "{% raw %}{% endraw %}", "{%{", "{%'{%"]
        {
            without_generation(&piece.repeat((1 << 20) / piece.len()));
            without_generation(&format!("{{% raw %}}{}", piece.repeat((1 << 20) / piece.len())));
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn text_that_only_looks_like_a_tag_is_unchanged() {
        for source in [
            "{# {% generation %} #}x",
            "{{ '{% generation %}' }}",
            "{{ \"\\\"{% generation %}\" }}",
            "{{ {'a': {'b': '}}'}}['a'] }} generation",
            "{% raw %}{% generation %}{%- endraw -%}",
            "{% set generation = 1 %}",
            "{% generation",
            "{{ 'open",
            "é{%",
        ] {
            assert_eq!(without_generation(source), source);
        }
    }
}
