//! The rules of the source tree that reviews would otherwise have to repeat: dependencies between crates, `unsafe`,
//! file length, front comments, names, vocabulary, and links. Each rule is checked against a breach of itself as well.

mod circles;
mod code;
mod crates;
mod files;
mod lists;
mod vocabulary;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use circles::circles_of_files;
use code::{errors_that_are_strings, hashes_that_may_change, matches_on_bools, orphaned_comment_lines, wide_comments};
use crates::{
    crates_not_on_the_map, forbidden_dependencies, openers, prints_of_the_runtime, repeated_names, unexplained_traits,
    unlisted_pages, unlisted_unsafe,
};
use files::{files_without_front_comment, long_files, modules_beside_their_folder};
use lists::MOST_LINES;
use vocabulary::{banned_words, dead_anchors, dead_links};

/// The sources as text, and the dependencies between crates.
#[derive(Clone)]
struct Tree {
    /// By path from the root, with `/` between the parts.
    files: BTreeMap<String, String>,
    dependencies: Vec<(String, String)>,
}

impl Tree {
    fn read() -> Tree {
        let root = root();
        let mut files = BTreeMap::new();
        for folder in ["crates", "examples", "tests/it", "tests/src", "benches", "docs", "README.md", "CONTRIBUTING.md"]
        {
            collect(&root, &root.join(folder), &mut files);
        }
        Tree { files, dependencies: dependencies(&root) }
    }

    fn rust(&self) -> impl Iterator<Item = (&String, &String)> {
        self.files.iter().filter(|(path, _)| path.ends_with(".rs"))
    }

    fn page(&self, path: &str) -> &str {
        self.files.get(path).unwrap_or_else(|| panic!("{path} is missing"))
    }

    fn append(&mut self, path: &str, text: &str) {
        self.files.entry(path.into()).or_default().push_str(text);
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Adds every text file at or below `path`.
fn collect(root: &Path, path: &Path, files: &mut BTreeMap<String, String>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().is_some_and(|name| name != "target") && !path.is_symlink() {
                collect(root, &path, files);
            }
        }
    } else if let Ok(text) = std::fs::read_to_string(path) {
        let name = path.strip_prefix(root).unwrap().components().map(|c| c.as_os_str().to_string_lossy());
        files.insert(name.collect::<Vec<_>>().join("/"), text);
    }
}

/// Every dependency of a crate of the workspace on another, outside of tests and build scripts.
fn dependencies(root: &Path) -> Vec<(String, String)> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let metadata = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(metadata).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut all = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            if dependency["kind"].is_null() && on.starts_with("larder") && !name.ends_with("s-tests") {
                all.push((name.to_string(), on.to_string()));
            }
        }
    }
    all
}

/// One rule: the places that break it, and a way to break it.
struct Rule {
    name: &'static str,
    breaches: fn(&Tree) -> Vec<String>,
    breach: fn(&mut Tree),
}

const RULES: &[Rule] = &[
    Rule {
        name: "a crate depends only on crates that the table allows",
        breaches: forbidden_dependencies,
        breach: |tree| tree.dependencies.push(("larder-policy".into(), "larder-store".into())),
    },
    Rule {
        name: "unsafe only in the files of the list",
        breaches: unlisted_unsafe,
        breach: |tree| tree.append("crates/larder-policy/src/lib.rs", "\nfn f() { unsafe { g() } }\n"),
    },
    Rule {
        name: "each file begins with a comment on what it holds",
        breaches: files_without_front_comment,
        breach: |tree| tree.append("crates/larder-core/src/new.rs", "pub mod other;\n"),
    },
    Rule {
        name: "a module with files of its own is `name/mod.rs`, not `name.rs` beside a folder `name`",
        breaches: modules_beside_their_folder,
        breach: |tree| tree.append("crates/larder-core/src/trace.rs", "//! Traces.\n"),
    },
    Rule {
        name: "no file is longer than 500 lines",
        breaches: long_files,
        breach: |tree| tree.append("crates/larder-core/src/lib.rs", &"\n".repeat(MOST_LINES)),
    },
    Rule {
        name: "the traits of a seam are named in the page that explains it",
        breaches: unexplained_traits,
        breach: |tree| {
            tree.files.insert("docs/adding-a-reader.md".into(), "# Adding a reader\n".into());
        },
    },
    Rule {
        name: "every page on adding something belongs to a seam or a table",
        breaches: unlisted_pages,
        breach: |tree| tree.append("docs/adding-a-wheel.md", "# Adding a wheel\n"),
    },
    Rule {
        name: "the runtime reports through notices and prints nothing",
        breaches: prints_of_the_runtime,
        breach: |tree| tree.append("crates/larder-runtime/src/new.rs", "//! New.\nfn f() { eprintln!(); }\n"),
    },
    Rule {
        name: "files are opened for reading by larder_os's functions, which pipes do not stop",
        breaches: openers,
        breach: |tree| tree.append("crates/larder-lab/src/new.rs", "//! New.\nfn f() { std::fs::read(path); }\n"),
    },
    Rule {
        name: "every crate is in ARCHITECTURE",
        breaches: crates_not_on_the_map,
        breach: |tree| tree.append("crates/larder-new/src/lib.rs", "//! A new crate.\n"),
    },
    Rule {
        name: "a type name is public in one crate",
        breaches: repeated_names,
        breach: |tree| tree.append("crates/larder-hub/src/lib.rs", "\npub struct Ledger;\n"),
    },
    Rule {
        name: "no word of the glossary's \"not\" column",
        breaches: banned_words,
        breach: |tree| tree.append("crates/larder-hub/src/lib.rs", "\n// Nobody reads this.\n"),
    },
    Rule {
        name: "links between pages lead somewhere",
        breaches: dead_links,
        breach: |tree| tree.append("docs/store.md", "\n[nothing](nothing.md)\n"),
    },
    Rule {
        name: "links between pages lead to headings that exist",
        breaches: dead_anchors,
        breach: |tree| tree.append("docs/store.md", "\n[nothing](chat.md#no-such-heading)\n"),
    },
    Rule {
        name: "no files import from each other in a circle",
        breaches: circles_of_files,
        breach: |tree| {
            tree.append("crates/larder-hub/src/a.rs", "//! A.\nuse crate::b::fetch_b;\npub fn fetch_a() {}\n");
            tree.append("crates/larder-hub/src/b.rs", "//! B.\nuse crate::a::fetch_a;\npub fn fetch_b() {}\n");
        },
    },
    Rule {
        name: "a bool is asked with `if`",
        breaches: matches_on_bools,
        breach: |tree| {
            tree.append("crates/larder-hub/src/a.rs", "//! A.\nfn f() { match is {\n true => 1,\n false => 2 } }\n")
        },
    },
    Rule {
        name: "an error is a type",
        breaches: errors_that_are_strings,
        breach: |tree| tree.append("crates/larder-hub/src/a.rs", "//! A.\nfn f() -> Result<u8, String> { g() }\n"),
    },
    Rule {
        name: "nothing stored depends on the standard library's hash",
        breaches: hashes_that_may_change,
        breach: |tree| tree.append("crates/larder-hub/src/a.rs", "//! A.\nuse std::hash::DefaultHasher;\n"),
    },
    Rule {
        name: "a comment has at most 120 columns",
        breaches: wide_comments,
        breach: |tree| tree.append("crates/larder-hub/src/a.rs", &format!("//! A{}.\n", " word".repeat(30))),
    },
    Rule {
        name: "no line of a comment is left short in the middle of a sentence",
        breaches: orphaned_comment_lines,
        breach: |tree| tree.append("crates/larder-hub/src/a.rs", "//! A file\n//! of few words.\n"),
    },
];

#[test]
fn the_tree_keeps_every_rule() {
    let tree = Tree::read();
    let breaches: Vec<String> = RULES
        .iter()
        .flat_map(|rule| (rule.breaches)(&tree).into_iter().map(|at| format!("{}: {at}", rule.name)))
        .collect();
    assert!(breaches.is_empty(), "{} breaches\n{}", breaches.len(), breaches.join("\n"));
}

#[test]
fn each_rule_notices_a_breach() {
    let tree = Tree::read();
    for rule in RULES {
        let mut broken = tree.clone();
        (rule.breach)(&mut broken);
        let before = (rule.breaches)(&tree);
        let new: Vec<String> = (rule.breaches)(&broken).into_iter().filter(|at| !before.contains(at)).collect();
        assert!(!new.is_empty(), "{}: the breach goes unnoticed", rule.name);
        println!("{}: noticed {}", rule.name, new[0]);
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}
