//! Names the commit that larder is built from, for reports: `LARDER_COMMIT` of the environment or, in a clone, git's. A
//! build from an archive, or without git, names none. With target and features it is what `larder --version` prints.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=LARDER_COMMIT");
    let given = std::env::var("LARDER_COMMIT").ok().filter(|commit| is_commit(commit));
    let commit = given.or_else(of_clone);
    if let Some(commit) = &commit {
        println!("cargo:rustc-env=LARDER_BUILD_COMMIT={commit}");
    }
    println!("cargo:rustc-env=LARDER_BUILD_VERSION={}", version(commit));
}

/// Version, commit if it is known, target and features.
fn version(commit: Option<String>) -> String {
    let variable = |name: &str| std::env::var(name).expect("cargo sets it");
    let features = std::env::vars().filter_map(|(name, _)| {
        let feature = name.strip_prefix("CARGO_FEATURE_")?.to_lowercase().replace('_', "-");
        (feature != "default").then_some(feature)
    });
    let mut features: Vec<String> = features.collect();
    features.sort();
    let features = if features.is_empty() { "no features".into() } else { format!("features {}", features.join(", ")) };
    let parts: Vec<String> = commit.into_iter().chain([variable("TARGET"), features]).collect();
    format!("{} ({})", variable("CARGO_PKG_VERSION"), parts.join("; "))
}

/// The commit of the clone whose top folder is the workspace; a clone around an archive of larder has other commits.
fn of_clone() -> Option<String> {
    if !git(&["rev-parse", "--show-prefix"])?.is_empty() {
        return None;
    }
    // The log of HEAD grows with each commit and checkout.
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"]).filter(|commit| is_commit(commit))
}

fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The output of git in the workspace's folder.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).current_dir("../..").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
