//! Words that the glossary refuses, and links between pages.

use std::path::{Component, Path, PathBuf};

use super::lists::KEPT_WORDS;
use super::{Tree, root, words};

pub fn banned_words(tree: &Tree) -> Vec<String> {
    let banned = banned(tree.page("docs/glossary.md"));
    assert!(banned.len() > 20, "the glossary names the words to avoid");
    let mut found = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| path.starts_with("crates/")) {
        for (number, line) in text.lines().enumerate() {
            let line = lower_parts(line);
            for phrase in &banned {
                if line.windows(phrase.len()).any(|part| part == phrase.as_slice()) && !is_kept(path, phrase) {
                    found.push(format!("{path}:{}: {}", number + 1, phrase.join(" ")));
                }
            }
        }
    }
    found
}

pub fn is_kept(path: &str, phrase: &[String]) -> bool {
    let row = KEPT_WORDS.iter().find(|(kept, ..)| *kept == path);
    row.is_some_and(|(_, words, _)| matches!(phrase, [word] if words.contains(&word.as_str())))
}

/// The words in code font of the table's last column, and of the last paragraph.
pub fn banned(glossary: &str) -> Vec<Vec<String>> {
    let rows = glossary.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.rsplit('|').nth(1));
    let last = glossary.trim_end().rsplit("\n\n").next().unwrap_or_default();
    let phrases = rows
        .chain([last.split_once("place:").map_or(last, |(_, list)| list)])
        .flat_map(|text| text.split('`').skip(1).step_by(2));
    phrases.map(lower_parts).collect()
}

pub fn dead_links(tree: &Tree) -> Vec<String> {
    let root = root();
    let mut dead = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| path.ends_with(".md")) {
        let folder = Path::new(path).parent().unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap();
            if !file.is_empty() && !file.contains("://") && !root.join(folder).join(file).exists() {
                dead.push(format!("{path}: {target}"));
            }
        }
    }
    dead
}

/// Links to a heading that its page does not have.
pub fn dead_anchors(tree: &Tree) -> Vec<String> {
    let mut dead = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| path.ends_with(".md")) {
        let folder = Path::new(path).parent().unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let Some((file, anchor)) = target.split_once('#').filter(|_| !target.contains("://")) else { continue };
            let page = if file.is_empty() { Path::new(path).to_owned() } else { plain(&folder.join(file)) };
            let text = page.to_str().and_then(|page| tree.files.get(page));
            if text.is_some_and(|text| !headings(text).any(|heading| heading == anchor)) {
                dead.push(format!("{path}: {target}"));
            }
        }
    }
    dead
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => _ = plain.pop(),
            part => plain.push(part),
        }
        plain
    })
}

/// The headings of a page, as links name them.
fn headings(page: &str) -> impl Iterator<Item = String> {
    let titles = page.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    titles.map(|title| {
        let kept = title.to_lowercase().replace(' ', "-");
        kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
    })
}

/// The words of a line, identifiers taken apart at each underscore, in lower case.
pub fn lower_parts(text: &str) -> Vec<String> {
    words(text).flat_map(|word| word.split('_')).filter(|part| !part.is_empty()).map(str::to_lowercase).collect()
}
