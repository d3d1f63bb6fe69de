//! Crates: their dependencies, their public names, and what only some of them may do.

use std::collections::{BTreeMap, BTreeSet};

use super::lists::{DEPENDENCIES, OPENERS, SEAMS, SHARED_NAMES, UNSAFE, WITH_COMMAND};
use super::{Tree, words};

pub fn forbidden_dependencies(tree: &Tree) -> Vec<String> {
    let allowed = |name: &str, on: &str| {
        let row = DEPENDENCIES.iter().find(|(crate_name, _)| *crate_name == name);
        let is_listed = row.is_some_and(|(_, list)| list.iter().any(|short| on == format!("larder-{short}")));
        is_listed || on == "larder" && WITH_COMMAND.contains(&name)
    };
    let outside = |name: &str| name == "larder-tests" || name == "larder-benches";
    let wrong = tree.dependencies.iter().filter(|(name, on)| !outside(name) && !allowed(name, on));
    wrong.map(|(name, on)| format!("{name} depends on {on}")).collect()
}

pub fn unlisted_unsafe(tree: &Tree) -> Vec<String> {
    let is_listed =
        |path: &str| UNSAFE.iter().any(|listed| path.starts_with(listed)) || path.starts_with("tests/it/tidy/");
    let holds = |text: &str| {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.into_iter().any(|line| words(line).any(|word| word == "unsafe") || line.contains("allow(unsafe_code)"))
    };
    tree.rust().filter(|(path, text)| !is_listed(path) && holds(text)).map(|(path, _)| path.clone()).collect()
}

pub fn unexplained_traits(tree: &Tree) -> Vec<String> {
    let mut missing = Vec::new();
    for (page, traits) in SEAMS {
        let text = tree.page(&format!("docs/{page}"));
        let absent = |name: &&&str| !words(text).any(|word| word == **name);
        missing.extend(traits.iter().filter(absent).map(|name| format!("{page} does not name {name}")));
    }
    missing
}

/// Number formats and instruction sets are rows of a table, not implementations of a trait.
pub fn unlisted_pages(tree: &Tree) -> Vec<String> {
    const TABLES: &[&str] = &["adding-a-number-format.md", "adding-an-instruction-set.md"];
    let pages =
        tree.files.keys().filter_map(|path| path.strip_prefix("docs/")).filter(|page| page.starts_with("adding-"));
    let listed = |page: &&str| TABLES.contains(page) || SEAMS.iter().any(|(seam, _)| seam == page);
    pages.filter(|page| !listed(page)).map(String::from).collect()
}

pub fn prints_of_the_runtime(tree: &Tree) -> Vec<String> {
    let prints = |text: &str| {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let mut code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.any(|line| ["print!", "println!"].iter().any(|name| line.contains(name)))
    };
    let sources = tree.rust().filter(|(path, _)| path.starts_with("crates/larder-runtime/src/"));
    sources.filter(|(_, text)| prints(text)).map(|(path, _)| path.clone()).collect()
}

pub fn openers(tree: &Tree) -> Vec<String> {
    const CALLS: [&str; 4] = ["File::open(", "fs::read(", "fs::read_to_string(", "OpenOptions::new()"];
    let is_test =
        |path: &str| ["/tests", "tests.rs", "testing.rs", "reference.rs"].iter().any(|part| path.contains(part));
    let is_listed = |path: &str| OPENERS.iter().any(|listed| path.starts_with(listed));
    let sources = tree.rust().filter(|(path, _)| path.starts_with("crates/") && !is_test(path) && !is_listed(path));
    let mut found = Vec::new();
    for (path, text) in sources {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let calls = |line: &str, call: &str| {
            let before = line.split(call).next().and_then(|before| before.chars().next_back());
            line.contains(call) && !before.is_some_and(char::is_alphanumeric)
        };
        let opens = |line: &str| CALLS.iter().any(|call| calls(line, call)) && !line.contains("open_regular_with(");
        found.extend(code.lines().filter(|line| opens(line)).map(|line| format!("{path}: {}", line.trim())));
    }
    found
}

pub fn crates_not_on_the_map(tree: &Tree) -> Vec<String> {
    let map = tree.page("docs/ARCHITECTURE.md");
    let crates: BTreeSet<&str> =
        tree.files.keys().filter_map(|path| path.strip_prefix("crates/")?.split('/').next()).collect();
    crates.into_iter().filter(|name| !map.contains(&format!("`{name}`"))).map(String::from).collect()
}

pub fn repeated_names(tree: &Tree) -> Vec<String> {
    let mut crates_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (path, text) in tree.rust() {
        let Some(inside) = path.strip_prefix("crates/") else { continue };
        let crate_name = inside.split('/').next().unwrap();
        for name in text.lines().filter_map(public_type) {
            crates_of.entry(name).or_default().insert(crate_name);
        }
    }
    let is_listed = |name: &str| SHARED_NAMES.iter().any(|(listed, _)| *listed == name);
    let repeated = crates_of.into_iter().filter(|(name, crates)| crates.len() > 1 && !is_listed(name));
    repeated.map(|(name, crates)| format!("{name} in {}", crates.into_iter().collect::<Vec<_>>().join(", "))).collect()
}

/// The name of the type that a line of code makes public.
pub fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let (kind, rest) = rest.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&kind);
    is_type.then(|| words(rest).next()).flatten()
}
