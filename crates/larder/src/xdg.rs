//! The user's folders, by the XDG base directory specification.

use std::ffi::OsString;
use std::path::PathBuf;

/// The folder of larder's configuration.
pub fn config() -> Option<PathBuf> {
    xdg_dir(std::env::var_os("XDG_CONFIG_HOME"), std::env::var_os("HOME"), ".config")
}

/// The folder of larder's state, such as the input history.
pub fn state() -> Option<PathBuf> {
    xdg_dir(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), ".local/state")
}

/// The folder of larder's cache, whose content can be removed at any time.
pub fn cache() -> Option<PathBuf> {
    xdg_dir(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"), ".cache")
}

/// The folder of downloaded models: `LARDER_MODELS`, or `models` in the user's data folder.
pub fn models() -> Option<PathBuf> {
    let named = std::env::var_os("LARDER_MODELS").map(PathBuf::from).filter(|path| !path.as_os_str().is_empty());
    let data = || xdg_dir(std::env::var_os("XDG_DATA_HOME"), std::env::var_os("HOME"), ".local/share");
    named.or_else(|| Some(data()?.join("models")))
}

/// `named` or, in `home`, the default; relative paths are ignored, as the specification demands.
fn xdg_dir(named: Option<OsString>, home: Option<OsString>, default: &str) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let base = named.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(default)))?;
    Some(base.join("larder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_goes_before_the_default() {
        let of = |named: &str, home: &str| xdg_dir(Some(named.into()), Some(home.into()), ".config");
        assert_eq!(of("/x", "/h"), Some("/x/larder".into()));
        assert_eq!(of("x", "/h"), Some("/h/.config/larder".into()));
        assert_eq!(of("", ""), None);
        assert_eq!(xdg_dir(None, None, ".config"), None);
    }
}
