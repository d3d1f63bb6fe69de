//! Habits of code and comments.

use super::Tree;
use super::lists::{BOOL_MATCHES, STANDARD_HASHES, STRING_ERRORS};

/// Columns that a line of a comment may have; `cargo fmt` sees to those of code.
const COMMENT_COLUMNS: usize = 120;
/// A line of a comment with fewer columns than this goes on with the next word, unless its paragraph ends.
const ORPHAN_COLUMNS: usize = 50;

/// A `match` on a bool is an `if`. The number of them may only fall.
pub fn matches_on_bools(tree: &Tree) -> Vec<String> {
    let arms = |line: &&str| ["true => ", "true if "].iter().any(|arm| line.trim_start().starts_with(arm));
    ratchet("matches on a bool", count(tree, arms), BOOL_MATCHES)
}

/// An error that is a string says nothing to a program. The number of them may only fall.
pub fn errors_that_are_strings(tree: &Tree) -> Vec<String> {
    let is_string = |line: &&str| line.contains("Result<") && line.contains(", String>");
    ratchet("results with a string as their error", count(tree, is_string), STRING_ERRORS)
}

fn count(tree: &Tree, counts: impl Fn(&&str) -> bool) -> usize {
    let sources = tree.rust().filter(|(path, _)| path.starts_with("crates/"));
    sources.map(|(_, text)| text.lines().filter(&counts).count()).sum()
}

fn ratchet(of: &str, number: usize, listed: usize) -> Vec<String> {
    let breach = (number != listed).then(|| format!("{number} {of}; the list has {listed}, which may only fall"));
    breach.into_iter().collect()
}

/// The standard library's hash may change with each of its versions, so that nothing that is stored may depend on it.
pub fn hashes_that_may_change(tree: &Tree) -> Vec<String> {
    let is_listed = |path: &str| STANDARD_HASHES.iter().any(|(listed, _)| *listed == path);
    let sources = tree.rust().filter(|(path, _)| path.starts_with("crates/") && !is_listed(path));
    sources.filter(|(_, text)| text.contains("DefaultHasher")).map(|(path, _)| path.clone()).collect()
}

pub fn wide_comments(tree: &Tree) -> Vec<String> {
    let is_row = |line: &str| text_of(line).is_some_and(|text| text.starts_with('|'));
    comment_lines(tree, |line, _| line.chars().count() > COMMENT_COLUMNS && !is_row(line))
}

/// Lines that were left short when their paragraph was changed.
pub fn orphaned_comment_lines(tree: &Tree) -> Vec<String> {
    comment_lines(tree, |line, next| {
        let goes_on = next.is_some_and(|next| next.starts_with(|c: char| c.is_lowercase()));
        let (text, columns) = (text_of(line).unwrap_or_default(), line.chars().count());
        goes_on && !text.is_empty() && !text.starts_with(['|', '#', '`', '-', '*', '>']) && columns < ORPHAN_COLUMNS
    })
}

/// The places of lines of comments that a rule refuses, which is given the line and the text of the next one of the
/// same comment. Code in comments is left out.
fn comment_lines(tree: &Tree, refuses: impl Fn(&str, Option<&str>) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let (lines, mut is_code) = (text.lines().collect::<Vec<_>>(), false);
        for (number, line) in lines.iter().enumerate() {
            let Some(text) = text_of(line) else {
                is_code = false;
                continue;
            };
            is_code ^= text.starts_with("```");
            let next = lines.get(number + 1).and_then(|next| text_of(next));
            if !is_code && refuses(line, next) {
                found.push(format!("{path}:{}", number + 1));
            }
        }
    }
    found
}

/// The text of a line that is a comment.
fn text_of(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//").map(|text| text.trim_start_matches(['/', '!']).trim_start())
}
