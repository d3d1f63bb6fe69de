//! Circles of files: files of a crate that import from each other, round and round, so that none can be read first.

use std::collections::{BTreeMap, BTreeSet};

use super::{Tree, words};

/// Files and, of each, the files of the same crate whose names it imports.
type Imports<'t> = BTreeMap<&'t str, BTreeSet<&'t str>>;

/// Circles of files.
pub fn circles_of_files(tree: &Tree) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for (path, text) in tree.rust().filter(|(path, _)| is_shipped(path)) {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        crates.entry(path.split('/').nth(1).unwrap_or_default()).or_default().push((path, code));
    }
    crates.values().flat_map(|files| circles(&imports(files))).collect()
}

fn is_shipped(path: &str) -> bool {
    let is_test = ["/tests", "tests.rs", "testing.rs", "reference.rs"].iter().any(|part| path.contains(part));
    path.starts_with("crates/") && path.contains("/src/") && !path.ends_with("/lib.rs") && !is_test
}

fn imports<'t>(files: &[(&'t str, &'t str)]) -> Imports<'t> {
    let mut defined: BTreeMap<&str, BTreeSet<&'t str>> = BTreeMap::new();
    for (path, code) in files {
        for name in code.lines().filter_map(public_name) {
            defined.entry(name).or_default().insert(path);
        }
    }
    // A name that two files define tells nothing.
    let file_of = |name: &str| defined.get(name).filter(|files| files.len() == 1).and_then(BTreeSet::first).copied();
    let of_file = |(path, code): &(&'t str, &'t str)| {
        let others = imported_names(code).filter_map(file_of).filter(|other| other != path);
        (*path, others.collect())
    };
    files.iter().map(of_file).collect()
}

/// The name that a line at the left margin makes visible to other files.
fn public_name(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub")?;
    let rest = if rest.starts_with('(') { rest.split_once(") ")?.1 } else { rest.strip_prefix(' ')? };
    let mut words = words(rest).skip_while(|word| ["unsafe", "async"].contains(word));
    let kind = words.next()?;
    let is_name = ["fn", "struct", "enum", "trait", "type", "const", "static"].contains(&kind);
    words.find(|word| *word != "fn").filter(|_| is_name)
}

/// The last names of the paths that a file takes from its own crate.
fn imported_names(code: &str) -> impl Iterator<Item = &str> {
    ["crate::", "super::"].into_iter().flat_map(|root| code.split(root).skip(1)).flat_map(|rest| {
        let path = rest.split([';', '(', ')']).next().unwrap_or_default();
        let path = if path.contains('{') { path } else { path.split(|c: char| !is_part(c)).next().unwrap_or_default() };
        // A module is followed by `::`, a name is not.
        path.match_indices(|c: char| is_part(c) && c != ':').filter_map(|(at, _)| {
            let starts = !path[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let name = words(&path[at..]).next()?;
            (starts && !path[at + name.len()..].starts_with("::")).then_some(name)
        })
    })
}

fn is_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == ':'
}

/// The circles, each as the names of its files in order.
fn circles(imports: &Imports<'_>) -> Vec<String> {
    let reach: BTreeMap<&str, BTreeSet<&str>> = imports.keys().map(|file| (*file, reached(file, imports))).collect();
    let mut circles: Vec<String> = Vec::new();
    for (file, there) in &reach {
        let others = there.iter().filter(|other| *other != file && reach[*other].contains(file));
        let circle: BTreeSet<&str> = others.copied().chain([*file]).collect();
        if circle.len() > 1 && circle.first() == Some(file) {
            circles.push(circle.into_iter().collect::<Vec<_>>().join(", "));
        }
    }
    circles
}

/// All files that lie behind the imports of one.
fn reached<'t>(from: &'t str, imports: &Imports<'t>) -> BTreeSet<&'t str> {
    let (mut all, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        next.extend(imports.get(file).into_iter().flatten().filter(|other| all.insert(**other)));
    }
    all
}
