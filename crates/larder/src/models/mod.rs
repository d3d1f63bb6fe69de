//! Opens models for the commands, with notices on standard error and bars for progress; the folder of downloaded
//! models.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use larder_runtime::models::{self, HubName, no_folder};
use larder_runtime::{ContextSize, EngineSettings, ModelOptions, MtpUse, Notices, OpenModel, Options, WorkProgress};
use larder_store::{MANIFEST_FILE, SourceOptions, StoreError, StoreErrorKind, read_small};
use larder_text::ChatTemplate;
use parking_lot::Mutex;

use crate::cli::IgnoreConfig;
use crate::progress::{self, Bar};
use crate::user_folders;

mod installed;

pub use installed::{InstalledModel, installed, remove};

/// Path of the demo model in the repository and in archives.
const DEMO: &str = "models/demo";

/// Path of the demo model below the folder that a package manager installs to, such as `/usr`.
const INSTALLED_DEMO: &str = "share/larder/models/demo";

/// Maximum length of a file with a chat template.
const TEMPLATE_BYTES_MAX: u64 = 4 << 20;

/// The demo model that a program brings along.
static DEMO_FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Says where the demo model is that the program brings along. Only the first call counts.
pub fn set_demo(folder: PathBuf) {
    DEMO_FOLDER.get_or_init(|| folder);
}

/// The demo model: in the current folder or a parent of it, in a parent of the program's folder or installed there, or
/// brought along by the program.
pub fn default_model() -> PathBuf {
    let (current, program) = (std::env::current_dir().ok(), std::env::current_exe().ok());
    let found = current.and_then(|folder| demo_above(&folder, &[DEMO]));
    let found = found.or_else(|| demo_above(&program?, &[DEMO, INSTALLED_DEMO]));
    found.or(DEMO_FOLDER.get().cloned()).unwrap_or_else(|| DEMO.into())
}

/// The first store at one of `paths` below `start` or a parent of it.
fn demo_above(start: &Path, paths: &[&str]) -> Option<PathBuf> {
    let candidates = start.ancestors().flat_map(|folder| paths.iter().map(|path| folder.join(path)));
    candidates.into_iter().find(|demo| demo.join(MANIFEST_FILE).exists())
}

/// `NAME=PATH`, or a path alone.
pub fn named(argument: &Path) -> (Option<String>, PathBuf) {
    let split = argument.to_str().filter(|_| !argument.exists()).and_then(|text| text.split_once('='));
    match split.filter(|(name, path)| !name.is_empty() && !name.contains(['/', '\\']) && !path.is_empty()) {
        Some((name, path)) => (Some(name.to_owned()), path.into()),
        None => (None, argument.to_owned()),
    }
}

/// Opens a model as it is.
pub fn open(path: &Path) -> Result<OpenModel> {
    open_ignoring(path, &IgnoreConfig::default())
}

/// As [`open`], whatever these keys of its config say.
pub fn open_ignoring(path: &Path, ignored: &IgnoreConfig) -> Result<OpenModel> {
    open_with(path, (false, MtpUse::Never), None, ignored)
}

/// As [`open_ignoring`], with the layer for multi-token prediction if it is a store that has it.
pub fn open_whole(path: &Path, ignored: &IgnoreConfig) -> Result<OpenModel> {
    open_with(path, (false, MtpUse::IfStored), None, ignored)
}

/// Opens a model to run it with these settings: makes a store beside a GGUF file, unless there shall be none.
pub fn open_to_run(path: &Path, settings: &EngineSettings, ignored: &IgnoreConfig) -> Result<OpenModel> {
    open_with(path, (settings.store_for_gguf, settings.mtp()), settings.mmproj.as_deref(), ignored)
}

/// Opens a model to plan how it would run with these settings.
pub fn open_to_plan(path: &Path, settings: &EngineSettings, ignored: &IgnoreConfig) -> Result<OpenModel> {
    open_with(path, (false, MtpUse::Never), settings.mmproj.as_deref(), ignored)
}

/// The options of an engine with this context and with the draft model that the settings name.
pub fn options(settings: &EngineSettings, context: ContextSize) -> Result<Options> {
    let draft = settings.draft.as_deref().map(|path| open(path).map(Arc::new)).transpose()?;
    Ok(Options { draft, ..settings.options(context) })
}

fn open_with(
    path: &Path,
    (store_for_gguf, mtp): (bool, MtpUse),
    mmproj: Option<&Path>,
    ignored: &IgnoreConfig,
) -> Result<OpenModel> {
    if path == Path::new(DEMO) && !path.exists() {
        let what = "is the demo model, which was not found; name a model with -m";
        return Err(StoreError::new(StoreErrorKind::Missing, path, what).into());
    }
    let (models_folder, cache_folder) = (user_folders::models(), user_folders::cache());
    let (ignored_keys, notices, mmproj) = (ignored.keys.clone(), notices(), mmproj.map(Path::to_owned));
    let options = ModelOptions { models_folder, cache_folder, store_for_gguf, mtp, mmproj, ignored_keys, notices };
    OpenModel::open(path, &options)
}

/// The chat template in the file of `--chat-template-file`, in place of the model's.
pub fn template_of(model: &OpenModel, path: &Path) -> Result<ChatTemplate> {
    let Some(jinja) = read_small(path, TEMPLATE_BYTES_MAX)? else { bail!("{}: not found", path.display()) };
    model.other_template(&jinja).with_context(|| path.display().to_string())
}

/// Prints notices on standard error, and progress as bars.
pub fn notices() -> Notices {
    Notices::to(|notice| eprintln!("{notice}")).with_progress(Bars::default())
}

/// The models folder.
pub fn folder() -> Result<PathBuf> {
    user_folders::models().with_context(no_folder)
}

/// Path of a model's store, which may not exist.
pub fn store_path(name: &HubName) -> Result<PathBuf> {
    Ok(folder()?.join(name.folder()))
}

/// The store of a model, downloaded if it is not complete.
pub fn pull(name: &HubName, ignored: &IgnoreConfig) -> Result<PathBuf> {
    let opening = SourceOptions { ignored_keys: ignored.keys.clone(), ..SourceOptions::default() };
    models::fetch_if_missing(name, Some(&folder()?), &opening, &notices())
}

/// The existing store of `model`, which is a path, a name or a GGUF file.
pub fn store_of(model: &Path) -> Option<PathBuf> {
    models::store_of(model, user_folders::models().as_deref())
}

/// A bar for the work that is being done.
#[derive(Default)]
struct Bars(Mutex<Option<Bar>>);

impl Bars {
    fn with(&self, act: impl FnOnce(&mut Option<Bar>)) {
        act(&mut self.0.lock());
    }
}

impl WorkProgress for Bars {
    fn begin(&self, work: &str, bytes: u64, done: u64) {
        let bar = progress::bar(work, bytes);
        bar.resume(done);
        self.with(|current| *current = Some(bar));
    }

    fn advance(&self, bytes: u64) {
        self.with(|bar| bar.iter().for_each(|bar| bar.advance(bytes)));
    }

    fn end(&self) {
        self.with(|bar| bar.take().iter().for_each(Bar::finish));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_found_in_a_parent_and_below_share_of_one() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("usr/bin/larder");
        let find = |paths: &[&str]| demo_above(&program, paths);
        assert_eq!(find(&[DEMO, INSTALLED_DEMO]), None);
        let installed = folder.path().join("usr/share/larder/models/demo");
        std::fs::create_dir_all(&installed).unwrap();
        assert_eq!(find(&[DEMO, INSTALLED_DEMO]), None, "without a manifest it is no store");
        std::fs::write(installed.join(MANIFEST_FILE), "").unwrap();
        assert_eq!(find(&[DEMO, INSTALLED_DEMO]), Some(installed));
        assert_eq!(find(&[DEMO]), None);
    }

    #[test]
    fn only_texts_that_are_no_paths_are_split() {
        for (text, name) in [("a=b", Some("a")), ("a/b=c", None), ("=b", None), ("a=", None), ("a", None)] {
            assert_eq!(named(Path::new(text)).0.as_deref(), name, "{text}");
        }
    }
}
