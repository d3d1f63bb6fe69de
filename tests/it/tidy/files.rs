//! Files: their beginnings, their lengths, and where they lie.

use super::Tree;
use super::lists::MOST_LINES;

pub fn files_without_front_comment(tree: &Tree) -> Vec<String> {
    tree.rust().filter(|(_, text)| !text.starts_with("//!")).map(|(path, _)| path.clone()).collect()
}

pub fn modules_beside_their_folder(tree: &Tree) -> Vec<String> {
    let beside = |path: &&String| {
        let folder = format!("{}/", path.trim_end_matches(".rs"));
        tree.files.keys().any(|other| other.starts_with(&folder) && other.ends_with(".rs"))
    };
    tree.rust().map(|(path, _)| path).filter(beside).cloned().collect()
}

pub fn long_files(tree: &Tree) -> Vec<String> {
    let long = tree.files.iter().filter(|(path, text)| is_code(path) && text.lines().count() > MOST_LINES);
    long.map(|(path, text)| format!("{path} has {} lines", text.lines().count())).collect()
}

pub fn is_code(path: &str) -> bool {
    [".rs", ".cu", ".cuh", ".cpp", ".js"].iter().any(|ending| path.ends_with(ending))
}
