//! The rules of the source tree that reviews would otherwise have to repeat: dependencies between crates, `unsafe`, file
//! length, front comments, names, vocabulary, and links. Each rule is checked against a breach of itself as well.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that each crate may depend on, outside of its tests.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("larder-os", &[]),
    ("larder-core", &["os"]),
    ("larder-policy", &["os", "core"]),
    ("larder-kernels", &["os", "core"]),
    ("larder-store", &["os", "core"]),
    ("larder-cache", &["os", "core", "policy", "store"]),
    ("larder-hub", &["os", "core", "store"]),
    ("larder-model", &["os", "core", "kernels"]),
    ("larder-cuda", &["os", "core", "kernels", "store", "cache", "model"]),
    ("larder-text", &["os", "core"]),
    ("larder-engine", &["os", "core", "policy", "cache", "model", "text"]),
    ("larder-lab", &["os", "core", "policy", "cache", "model", "engine"]),
    (
        "larder-runtime",
        &["os", "core", "policy", "kernels", "store", "cache", "hub", "model", "cuda", "text", "engine", "edge"],
    ),
    ("larder-c", &["runtime"]),
    ("larder-serve", &["os", "core", "cache", "model", "text", "engine"]),
    ("larder-edge", &["os", "core", "cache", "model", "engine"]),
    (
        "larder",
        &[
            "os", "core", "policy", "kernels", "store", "cache", "model", "text", "engine", "runtime", "lab", "serve",
            "edge",
        ],
    ),
    ("larder-python", &["core", "runtime"]),
];

/// Crates that depend on the command, as they bring it along.
const WITH_COMMAND: &[&str] = &["larder-python"];

/// Files and folders that may hold `unsafe`.
const UNSAFE: &[&str] = &[
    "crates/larder-c/src/",
    "crates/larder-cuda/src/cuda/mod.rs",
    "crates/larder-cuda/src/cuda/compiler.rs",
    "crates/larder-cuda/src/counted.rs",
    "crates/larder-cuda/src/driver.rs",
    "crates/larder-cuda/src/emulator/mod.rs",
    "crates/larder-cuda/src/emulator/library.rs",
    "crates/larder-cuda/src/emulator/streams.rs",
    "crates/larder-cuda/src/launch_queue/graphs.rs",
    "crates/larder-cuda/src/launch_queue/mod.rs",
    "crates/larder-cuda/src/launches/mod.rs",
    "crates/larder-cuda/src/link/mod.rs",
    "crates/larder-cuda/src/link/staging.rs",
    "crates/larder-cuda/src/measure.rs",
    "crates/larder-cuda/src/memory.rs",
    "crates/larder-cuda/tests/kernels/",
    "crates/larder-kernels/src/attention/mod.rs",
    "crates/larder-kernels/src/attention/query_tile.rs",
    "crates/larder-kernels/src/attention/row_products.rs",
    "crates/larder-kernels/src/attention/softmax.rs",
    "crates/larder-kernels/src/avx2/",
    "crates/larder-kernels/src/avx512/",
    "crates/larder-kernels/src/disjoint.rs",
    "crates/larder-kernels/src/inputs.rs",
    "crates/larder-kernels/src/neon/",
    "crates/larder-kernels/src/products/mod.rs",
    "crates/larder-kernels/src/simd/",
    "crates/larder-kernels/src/thread_pool/mod.rs",
    "crates/larder-kernels/src/thread_pool/shared.rs",
    "crates/larder-store/src/page_cache.rs",
    "crates/larder-store/src/reader/arena/",
    "crates/larder-store/src/reader/overlapped.rs",
    "crates/larder-store/src/reader/registered_buffers.rs",
    "crates/larder-store/src/reader/uring.rs",
    "crates/larder-os/src/affinity/windows.rs",
    "crates/larder-os/src/files/system/windows.rs",
    "crates/larder-os/src/freed_memory.rs",
    "crates/larder-os/src/group/job_object.rs",
    "crates/larder-os/src/lock/",
    "crates/larder-os/src/memory/",
    "crates/larder-os/src/nodes.rs",
    "crates/larder-os/src/power/windows.rs",
    "crates/larder-os/src/sysctl.rs",
    "tests/src/instructions.rs",
    "tests/src/larder.rs",
];

/// Type names that are public in more than one crate, each with its reason.
const SHARED_NAMES: &[(&str, &str)] = &[("Result", "the customary alias of a crate's own error")];

/// Files in which a word of the glossary's "not" column may stand, each with its reason.
const KEPT_WORDS: &[(&str, &[&str], &str)] = &[
    ("crates/larder-core/src/CODE_BOOKS_LICENSE", &["whom"], "the text of a licence"),
    ("crates/larder-serve/src/live.rs", &["awaited"], "a JSON key of the API"),
    ("crates/larder-serve/src/metrics.rs", &["awaited"], "the name of a metric"),
    ("crates/larder-serve/src/page/grid.js", &["awaited"], "a JSON key of the API"),
    (
        "crates/larder/src/telemetry.rs",
        &["awaited", "demanded", "guessed", "guesses"],
        "deprecated JSON keys and columns",
    ),
    ("crates/larder/src/commands/report.rs", &["neighbour", "who"], "prompts"),
];

/// The traits of each seam, and the page that explains how to implement them.
const SEAMS: &[(&str, &[&str])] = &[
    ("adding-a-device.md", &["Device", "DeviceExperts", "DeviceProducts", "DeviceAttention", "Ops", "Driver"]),
    ("adding-a-model.md", &["Mixer", "ExpertPath"]),
    ("adding-a-reader.md", &["Reader"]),
    ("adding-a-routing-strategy.md", &["Router", "Residency"]),
    ("adding-a-source.md", &["Source", "Tensors"]),
    ("adding-a-tool-format.md", &["CallReader", "ResponseFormat"]),
    ("adding-an-eviction-policy.md", &["Eviction"]),
];

/// Files that open files for reading by themselves: the function that all others use, and what reads `/proc` and `/sys`.
const OPENERS: &[&str] = &["crates/larder-os/src/", "crates/larder/src/doctor/"];

const MOST_LINES: usize = 500;

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
        name: "files are opened for reading by larder_core's functions, which pipes do not stop",
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

fn forbidden_dependencies(tree: &Tree) -> Vec<String> {
    let allowed = |name: &str, on: &str| {
        let row = DEPENDENCIES.iter().find(|(crate_name, _)| *crate_name == name);
        let is_listed = row.is_some_and(|(_, list)| list.iter().any(|short| on == format!("larder-{short}")));
        is_listed || on == "larder" && WITH_COMMAND.contains(&name)
    };
    let outside = |name: &str| name == "larder-tests" || name == "larder-benches";
    let wrong = tree.dependencies.iter().filter(|(name, on)| !outside(name) && !allowed(name, on));
    wrong.map(|(name, on)| format!("{name} depends on {on}")).collect()
}

fn unlisted_unsafe(tree: &Tree) -> Vec<String> {
    let is_listed = |path: &str| UNSAFE.iter().any(|listed| path.starts_with(listed)) || path == "tests/it/tidy.rs";
    let holds = |text: &str| {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.into_iter().any(|line| words(line).any(|word| word == "unsafe") || line.contains("allow(unsafe_code)"))
    };
    tree.rust().filter(|(path, text)| !is_listed(path) && holds(text)).map(|(path, _)| path.clone()).collect()
}

fn files_without_front_comment(tree: &Tree) -> Vec<String> {
    tree.rust().filter(|(_, text)| !text.starts_with("//!")).map(|(path, _)| path.clone()).collect()
}

fn modules_beside_their_folder(tree: &Tree) -> Vec<String> {
    let beside = |path: &&String| {
        let folder = format!("{}/", path.trim_end_matches(".rs"));
        tree.files.keys().any(|other| other.starts_with(&folder) && other.ends_with(".rs"))
    };
    tree.rust().map(|(path, _)| path).filter(beside).cloned().collect()
}

fn long_files(tree: &Tree) -> Vec<String> {
    let long = tree.files.iter().filter(|(path, text)| is_code(path) && text.lines().count() > MOST_LINES);
    long.map(|(path, text)| format!("{path} has {} lines", text.lines().count())).collect()
}

fn is_code(path: &str) -> bool {
    [".rs", ".cu", ".cuh", ".cpp", ".js"].iter().any(|ending| path.ends_with(ending))
}

fn unexplained_traits(tree: &Tree) -> Vec<String> {
    let mut missing = Vec::new();
    for (page, traits) in SEAMS {
        let text = tree.page(&format!("docs/{page}"));
        let absent = |name: &&&str| !words(text).any(|word| word == **name);
        missing.extend(traits.iter().filter(absent).map(|name| format!("{page} does not name {name}")));
    }
    missing
}

/// Number formats and instruction sets are rows of a table, not implementations of a trait.
fn unlisted_pages(tree: &Tree) -> Vec<String> {
    const TABLES: &[&str] = &["adding-a-number-format.md", "adding-an-instruction-set.md"];
    let pages =
        tree.files.keys().filter_map(|path| path.strip_prefix("docs/")).filter(|page| page.starts_with("adding-"));
    let listed = |page: &&str| TABLES.contains(page) || SEAMS.iter().any(|(seam, _)| seam == page);
    pages.filter(|page| !listed(page)).map(String::from).collect()
}

fn prints_of_the_runtime(tree: &Tree) -> Vec<String> {
    let prints = |text: &str| {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let mut code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.any(|line| ["print!", "println!"].iter().any(|name| line.contains(name)))
    };
    let sources = tree.rust().filter(|(path, _)| path.starts_with("crates/larder-runtime/src/"));
    sources.filter(|(_, text)| prints(text)).map(|(path, _)| path.clone()).collect()
}

fn openers(tree: &Tree) -> Vec<String> {
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

fn crates_not_on_the_map(tree: &Tree) -> Vec<String> {
    let map = tree.page("docs/ARCHITECTURE.md");
    let crates: BTreeSet<&str> =
        tree.files.keys().filter_map(|path| path.strip_prefix("crates/")?.split('/').next()).collect();
    crates.into_iter().filter(|name| !map.contains(&format!("`{name}`"))).map(String::from).collect()
}

fn repeated_names(tree: &Tree) -> Vec<String> {
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
fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let (kind, rest) = rest.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&kind);
    is_type.then(|| words(rest).next()).flatten()
}

fn banned_words(tree: &Tree) -> Vec<String> {
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

fn is_kept(path: &str, phrase: &[String]) -> bool {
    let row = KEPT_WORDS.iter().find(|(kept, ..)| *kept == path);
    row.is_some_and(|(_, words, _)| matches!(phrase, [word] if words.contains(&word.as_str())))
}

/// The words in code font of the table's last column, and of the last paragraph.
fn banned(glossary: &str) -> Vec<Vec<String>> {
    let rows = glossary.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.rsplit('|').nth(1));
    let last = glossary.trim_end().rsplit("\n\n").next().unwrap_or_default();
    let phrases = rows
        .chain([last.split_once("place:").map_or(last, |(_, list)| list)])
        .flat_map(|text| text.split('`').skip(1).step_by(2));
    phrases.map(lower_parts).collect()
}

fn dead_links(tree: &Tree) -> Vec<String> {
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

/// The words of a line, identifiers taken apart at each underscore, in lower case.
fn lower_parts(text: &str) -> Vec<String> {
    words(text).flat_map(|word| word.split('_')).filter(|part| !part.is_empty()).map(str::to_lowercase).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}
