//! Python's methods of strings, lists and dictionaries within a budget.

use std::collections::HashSet;

use minijinja::{
    Error, State, Value,
    formatting::{FormatStyle, format},
    value::{Kwargs, Tuple, from_args},
};
use minijinja_contrib::pycompat;

use super::{
    budget::Budget,
    format::check_format,
    operators::{collect, is_container},
    python,
    writer::Writer,
};

/// Bytes of a letter in upper case, for each byte of the letter.
const WIDEST_CASE: usize = 3;

/// Calls the method `name` of `value`. Those that can make more than they get are this crate's own.
pub(super) fn call(
    budget: &Budget,
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        if is_container(value) && name == "count" {
            budget.weigh(value)?;
        }
        let result = pycompat::unknown_method_callback(state, value, name, args)?;
        // The dictionary's views are lazy.
        let is_view = matches!(name, "items" | "keys" | "values");
        return if is_view { collect(budget, &result).map(Value::from) } else { Ok(result) };
    };
    budget.has_steps(text.len())?;
    match name {
        "split" | "rsplit" => {
            let (separator, limit) = split_arguments(args)?;
            split(budget, text, separator, limit, name == "rsplit")
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            lines(budget, text, keep_ends.unwrap_or(false))
        }
        "removeprefix" | "removesuffix" | "partition" | "rpartition" => parts(budget, text, name, args),
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip(budget, text, chars, name != "rstrip", name != "lstrip")
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(budget, text, old, new, count)
        }
        "join" => {
            let (values,): (&Value,) = from_args(args)?;
            join(budget, values, text, Ok)
        }
        "format" => {
            check_format(budget, text, args, '{')?;
            made(budget, format(FormatStyle::StrFormat, text, args)?)
        }
        _ => {
            budget.has(text.len().saturating_mul(WIDEST_CASE))?;
            let result = pycompat::unknown_method_callback(state, value, name, args)?;
            budget.take(result.as_str().map_or(0, str::len))?;
            Ok(result)
        }
    }
}

fn made(budget: &Budget, text: String) -> Result<Value, Error> {
    budget.take(text.len())?;
    Ok(Value::from(text))
}

/// The separator and the maximum number of splits of `split`, both of which may be named.
fn split_arguments(args: &[Value]) -> Result<(Option<&str>, Option<i64>), Error> {
    let (separator, limit, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let limit = match limit {
        None => named.get::<Option<i64>>("maxsplit")?,
        limit => limit,
    };
    named.assert_all_used()?;
    Ok((separator, limit))
}

/// `text` split at `separator`, or at white space, at most `limit` times, from the end if `backwards`.
pub(super) fn split(
    budget: &Budget,
    text: &str,
    separator: Option<&str>,
    limit: Option<i64>,
    backwards: bool,
) -> Result<Value, Error> {
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let mut pieces = Vec::new();
    let mut rest = Some(text);
    while let Some(whole) = rest {
        budget.take_list(1)?;
        let whole = match (separator, backwards) {
            (Some(_), _) => whole,
            (None, false) => whole.trim_start_matches(is_space),
            (None, true) => whole.trim_end_matches(is_space),
        };
        let cut = if pieces.len() < limit { cut(whole, separator, backwards)? } else { None };
        let (piece, others) = cut.map_or((whole, None), |(piece, others)| (piece, Some(others)));
        let piece = match (separator, others, backwards) {
            (None, None, false) => piece.trim_end_matches(is_space),
            (None, None, true) => piece.trim_start_matches(is_space),
            _ => piece,
        };
        if separator.is_some() || !piece.is_empty() {
            budget.take(piece.len())?;
            pieces.push(Value::from(piece));
        }
        rest = others;
    }
    if backwards {
        pieces.reverse();
    }
    Ok(Value::from(pieces))
}

/// The first or last piece of `text` and what is beyond the separator.
fn cut<'a>(text: &'a str, separator: Option<&str>, backwards: bool) -> Result<Option<(&'a str, &'a str)>, Error> {
    let Some(separator) = separator else {
        let at = if backwards { text.rsplit_once(is_space) } else { text.split_once(is_space) };
        return Ok(if backwards { at.map(|(others, piece)| (piece, others)) } else { at });
    };
    if separator.is_empty() {
        return Err(Error::new(minijinja::ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(if backwards {
        text.rsplit_once(separator).map(|(others, piece)| (piece, others))
    } else {
        text.split_once(separator)
    })
}

/// The lines of `text`.
pub(super) fn lines(budget: &Budget, text: &str, keep_ends: bool) -> Result<Value, Error> {
    let mut lines = Vec::new();
    for line in text.split_inclusive('\n') {
        budget.take_list(1)?;
        let bare = line.strip_suffix('\n').map_or(line, |bare| bare.strip_suffix('\r').unwrap_or(bare));
        let line = if keep_ends { line } else { bare };
        budget.take(line.len())?;
        lines.push(Value::from(line));
    }
    Ok(Value::from(lines))
}

fn parts(budget: &Budget, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (part,): (&str,) = from_args(args)?;
    budget.take(text.len())?;
    let triple = |split: Option<(&str, &str)>, otherwise: [&str; 3]| {
        let parts = split.map_or(otherwise, |(before, after)| [before, part, after]);
        Value::from(Tuple::from(parts.map(Value::from)))
    };
    Ok(match name {
        "removeprefix" => Value::from(text.strip_prefix(part).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(part).unwrap_or(text)),
        "partition" => triple(text.split_once(part), [text, "", ""]),
        _ => triple(text.rsplit_once(part), ["", "", text]),
    })
}

/// Whether `c` is white space to Python, as the separators of files, groups, records and units are.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// `text` without white space, or without any of `chars`, at its start and end.
pub(super) fn strip(budget: &Budget, text: &str, chars: Option<&str>, start: bool, end: bool) -> Result<Value, Error> {
    // A set, since text and characters may both be long.
    let chars: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let is_stripped = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c));
    let text = if start { text.trim_start_matches(is_stripped) } else { text };
    let text = if end { text.trim_end_matches(is_stripped) } else { text };
    budget.take(text.len())?;
    Ok(Value::from(text))
}

/// `text` with the first `count` of `old` replaced by `new`, or with all.
pub(super) fn replace(budget: &Budget, text: &str, old: &str, new: &str, count: Option<i64>) -> Result<Value, Error> {
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    budget.take((text.len() - found * old.len()).saturating_add(found.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, count)))
}

/// The texts of `values`, each of which `value_of` gives, with `separator` between them.
pub(super) fn join(
    budget: &Budget,
    values: &Value,
    separator: &str,
    value_of: impl Fn(Value) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let mut out = Writer::new(budget);
    for (index, item) in values.try_iter()?.checked().enumerate() {
        out.push_str(if index > 0 { separator } else { "" })?;
        python::write(&value_of(item?)?, &mut out)?;
    }
    out.finish().map(Value::from)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn list(value: Result<Value, Error>) -> Vec<String> {
        value.unwrap().try_iter().unwrap().map(|item| item.to_string()).collect()
    }

    fn budget() -> Budget {
        Budget::new(1 << 20, Duration::from_secs(60))
    }

    #[test]
    fn splits_are_those_of_python() {
        let split = |text, separator, limit, backwards| list(split(&budget(), text, separator, limit, backwards));
        assert_eq!(split("a,b,,c", Some(","), None, false), ["a", "b", "", "c"]);
        assert_eq!(split("a,b,c", Some(","), Some(1), false), ["a", "b,c"]);
        assert_eq!(split("a,b,c", Some(","), Some(1), true), ["a,b", "c"]);
        assert_eq!(split("a,b,c", Some(","), Some(0), true), ["a,b,c"]);
        assert_eq!(split("a,b,c", Some(","), Some(-1), true), ["a", "b", "c"]);
        assert_eq!(split("", Some(","), None, false), [""]);
        assert_eq!(split("  a \u{1f} b \n", None, None, false), ["a", "b"]);
        assert_eq!(split("  a  b c ", None, Some(1), false), ["a", "b c"]);
        assert_eq!(split("  a  b c ", None, Some(1), true), ["a  b", "c"]);
        assert!(split("   ", None, None, false).is_empty() && split("", None, None, true).is_empty());
        assert!(super::split(&budget(), "a", Some(""), None, false).is_err());
    }

    #[test]
    fn lines_end_at_line_feeds() {
        assert_eq!(list(lines(&budget(), "a\r\n\nb", false)), ["a", "", "b"]);
        assert_eq!(list(lines(&budget(), "a\r\nb\n", true)), ["a\r\n", "b\n"]);
        assert!(list(lines(&budget(), "", false)).is_empty());
    }

    #[test]
    fn what_is_made_is_taken_before() {
        let budget = Budget::new(10_000, Duration::from_secs(60));
        let long = "x".repeat(9000);
        assert!(replace(&budget, &long, "x", &long, None).is_err());
        assert!(replace(&budget, &long, "", &long, None).is_err());
        assert!(split(&budget, &long, Some("x"), None, false).is_err());
        assert_eq!(replace(&self::budget(), "aaa", "a", "bc", Some(2)).unwrap().to_string(), "bcbca");
        assert_eq!(replace(&self::budget(), "ab", "", "-", None).unwrap().to_string(), "-a-b-");
    }
}
