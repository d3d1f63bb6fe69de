//! Names of models on the hub.

use std::fmt;
use std::path::PathBuf;

use super::DOWNLOAD;

const PART_MAX: usize = 96;
const FILE_MAX: usize = 200;
/// What stands before a name in the addresses of the hub's pages.
const PAGES: [&str; 3] = ["https://huggingface.co/", "huggingface.co/", "hf.co/"];

/// A model name on the hub: `org/name`, optionally with `@revision` and `:FILE.gguf`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubName {
    /// `org/name`.
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: Option<String>,
    /// One of several GGUF files.
    pub file: Option<String>,
}

impl HubName {
    /// Parses a name. Anything that could lead out of the models folder is refused.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = PAGES.iter().find_map(|page| text.strip_prefix(page)).unwrap_or(text);
        let (rest, file) = split(text, ':');
        let (repo, revision) = split(rest, '@');
        let name =
            HubName { repo: repo.to_owned(), revision: revision.map(str::to_owned), file: file.map(str::to_owned) };
        let repo_is_good = repo.split('/').count() == 2 && is_path(repo, PART_MAX) && !repo.ends_with(DOWNLOAD);
        let revision_is_good = revision.is_none_or(|r| is_path(r, PART_MAX));
        let file_is_good = file.is_none_or(|f| is_path(f, FILE_MAX) && f.ends_with(".gguf"));
        match (repo_is_good, revision_is_good, file_is_good) {
            (false, ..) => Err(format!("'{text}' is not a model name such as org/name")),
            (_, false, _) => Err(format!("'{text}' has no valid revision after the @")),
            (.., false) => Err(format!("'{text}' has no valid .gguf file after the colon")),
            _ => Ok(name),
        }
    }

    /// Path of the model's store, relative to the models folder.
    pub fn folder(&self) -> PathBuf {
        self.to_string().replace('%', "%25").replacen('/', "\0", 1).replace('/', "%2F").replace('\0', "/").into()
    }

    /// The name of the model in a folder.
    pub fn of_folder(org: &str, folder: &str) -> Option<Self> {
        Self::parse(&format!("{org}/{}", folder.replace("%2F", "/").replace("%25", "%"))).ok()
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(before, behind)| (before, Some(behind)))
}

/// Whether `text` is a relative path of plain words, none of which is a parent folder or a flag.
fn is_path(text: &str, longest: usize) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    let word = |word: &str| !word.is_empty() && !word.starts_with(['.', '-']) && word.chars().all(plain);
    text.len() <= longest && !text.contains("..") && text.split('/').all(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_parts_and_a_folder() {
        for (text, folder) in [
            ("a/b", "a/b"),
            ("a/b-1.5_x@v1", "a/b-1.5_x@v1"),
            ("a/b@refs/pr/1", "a/b@refs%2Fpr%2F1"),
            ("a/b@main:Q4/c-00001-of-00002.gguf", "a/b@main:Q4%2Fc-00001-of-00002.gguf"),
        ] {
            let name = HubName::parse(text).unwrap();
            assert_eq!((name.to_string().as_str(), name.folder().to_str().unwrap()), (text, folder));
            let (org, rest) = folder.split_once('/').unwrap();
            assert_eq!(HubName::of_folder(org, rest), Some(name));
        }
        for page in PAGES {
            assert_eq!(HubName::parse(&format!("{page}a/b")), HubName::parse("a/b"));
        }
        let name = HubName::parse("a/b@c:d.gguf").unwrap();
        assert_eq!(
            (name.repo.as_str(), name.revision.as_deref(), name.file.as_deref()),
            ("a/b", Some("c"), Some("d.gguf"))
        );
    }

    #[test]
    fn paths_out_of_the_folder_are_refused() {
        for bad in [
            "a",
            "a/b/c",
            "/a/b",
            "../b",
            "a/..",
            "a/.b",
            "./b",
            "a/b/",
            "a//b",
            "",
            "a/b@",
            "a/b@../x",
            "a/b@/x",
            "a/b:x",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a/b:",
            "a b/c",
            "a\\b/c",
            "a/b%2F",
            "a/b\0",
            "-a/b",
            "a/x..y",
            "a/b.download",
        ] {
            assert!(HubName::parse(bad).is_err(), "{bad}");
        }
        assert!(HubName::parse(&format!("a/{}", "b".repeat(200))).is_err());
    }
}
