//! The user's folders: by the XDG base directory specification, and on Windows those that Windows names, unless the
//! variables of that specification are set.

use std::ffi::OsString;
use std::path::PathBuf;

/// A variable of the specification, the variable of the folder above the default, and the path from there.
type FolderRule = (&'static str, &'static str, &'static str);

#[cfg(not(windows))]
mod rules {
    use super::FolderRule;

    pub const CONFIG: FolderRule = ("XDG_CONFIG_HOME", "HOME", ".config");
    pub const STATE: FolderRule = ("XDG_STATE_HOME", "HOME", ".local/state");
    pub const CACHE: FolderRule = ("XDG_CACHE_HOME", "HOME", ".cache");
    pub const DATA: FolderRule = ("XDG_DATA_HOME", "HOME", ".local/share");
}

#[cfg(windows)]
mod rules {
    use super::FolderRule;

    pub const CONFIG: FolderRule = ("XDG_CONFIG_HOME", "APPDATA", "");
    pub const STATE: FolderRule = ("XDG_STATE_HOME", "LOCALAPPDATA", "");
    pub const CACHE: FolderRule = ("XDG_CACHE_HOME", "LOCALAPPDATA", "cache");
    pub const DATA: FolderRule = ("XDG_DATA_HOME", "LOCALAPPDATA", "");
}

/// The folder of larder's configuration.
pub fn config() -> Option<PathBuf> {
    folder(rules::CONFIG, |name| std::env::var_os(name))
}

/// The folder of larder's state, such as the input history.
pub fn state() -> Option<PathBuf> {
    folder(rules::STATE, |name| std::env::var_os(name))
}

/// The folder of larder's cache, whose content can be removed at any time.
pub fn cache() -> Option<PathBuf> {
    folder(rules::CACHE, |name| std::env::var_os(name))
}

/// The folder of downloaded models: `LARDER_MODELS`, or `models` in the user's data folder.
pub fn models() -> Option<PathBuf> {
    let named = std::env::var_os("LARDER_MODELS").map(PathBuf::from).filter(|path| !path.as_os_str().is_empty());
    named.or_else(|| Some(folder(rules::DATA, |name| std::env::var_os(name))?.join("models")))
}

/// The folder by a rule; relative paths are ignored, as the specification demands.
fn folder((named, above, default): FolderRule, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(named).or_else(|| Some(absolute(above)?.join(default)))?;
    Some(base.join("larder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = if cfg!(windows) { "C:\\" } else { "/" };

    #[test]
    fn the_variable_goes_before_the_default() {
        let of = |named: Option<&str>, above: Option<&str>| {
            folder(("NAMED", "ABOVE", "sub"), |name| if name == "NAMED" { named } else { above }.map(OsString::from))
        };
        let at = |path: &str| format!("{ROOT}{path}");
        let expected = |parts: &[&str]| Some(parts.iter().fold(PathBuf::from(ROOT), |path, part| path.join(part)));
        assert_eq!(of(Some(&at("x")), Some(&at("h"))), expected(&["x", "larder"]));
        assert_eq!(of(Some("x"), Some(&at("h"))), expected(&["h", "sub", "larder"]));
        assert_eq!(of(Some(""), Some("")), None);
        assert_eq!(of(None, None), None);
    }
}
