//! The placement file: which machine holds which experts, as TOML.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use larder_os::{read_regular_text, write_atomically};
use serde::{Deserialize, Serialize};

use crate::placement::PlacementError;

const VERSION: u32 = 1;
/// Maximum length of a file.
const BYTES_MAX: u64 = 64 << 20;

/// The experts that each server and the device hold.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    version: u32,
    /// Experts by server name, then by model name.
    #[serde(default)]
    pub server: BTreeMap<String, BTreeMap<String, ExpertLists>>,
    /// Experts that the device keeps itself, by model name.
    #[serde(default)]
    pub device: BTreeMap<String, ExpertLists>,
}

/// Experts of one model.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertLists {
    /// One ascending list per decoder layer; empty for layers without experts.
    pub experts: Vec<Vec<u16>>,
}

impl ExpertLists {
    /// Number of experts in all lists.
    pub fn count(&self) -> usize {
        self.experts.iter().map(Vec::len).sum()
    }

    /// Checks the lists against a model's number of decoder layers and of experts per layer.
    pub fn check(&self, layers: usize, experts: usize) -> Result<(), String> {
        if self.experts.len() != layers {
            return Err(format!("lists {} layers, but the model has {layers}", self.experts.len()));
        }
        let beyond = |ids: &&Vec<u16>| ids.last().is_some_and(|last| *last as usize >= experts);
        match self.experts.iter().find(beyond).and_then(|ids| ids.last()) {
            Some(expert) => Err(format!("lists expert {expert}, but the model's layers have {experts} experts")),
            None => Ok(()),
        }
    }
}

impl PlacementFile {
    /// A file of the current version with these experts.
    pub fn new(server: BTreeMap<String, BTreeMap<String, ExpertLists>>, device: BTreeMap<String, ExpertLists>) -> Self {
        PlacementFile { version: VERSION, server, device }
    }

    /// Reads and checks a placement file.
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let error = |reason: String| PlacementError::File { path: path.to_owned(), reason };
        let text = read_regular_text(path, BYTES_MAX).map_err(|e| error(format!("cannot be read: {e}")))?;
        PlacementFile::parse(&text).map_err(error)
    }

    /// Parses the text of such a file. The error continues a sentence that begins with the file's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: PlacementFile = toml::from_str(text)
            .map_err(|e| format!("is not a valid placement: {}", e.message().replace('\n', ", ")))?;
        if file.version != VERSION {
            return Err(format!("has placement version {}; this larder reads version {VERSION}", file.version));
        }
        let all = file
            .server
            .iter()
            .flat_map(|(name, models)| models.iter().map(move |(model, held)| (name.as_str(), model, held)));
        let own = file.device.iter().map(|(model, held)| ("the device", model, held));
        for (owner, model, held) in all.chain(own) {
            let ascending = |ids: &Vec<u16>| ids.windows(2).all(|pair| pair[0] < pair[1]);
            if let Some(layer) = held.experts.iter().position(|ids| !ascending(ids)) {
                return Err(format!(
                    "lists experts of {model}, layer {layer}, for {owner} twice or not in ascending order"
                ));
            }
        }
        Ok(file)
    }

    /// Writes the file atomically: it appears whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), PlacementError> {
        let error = |e: std::io::Error| PlacementError::File {
            path: path.to_owned(),
            reason: format!("cannot be written: {e}"),
        };
        write_atomically(path, |out| out.write_all(self.to_toml().as_bytes())).map_err(error)
    }

    /// The text of the file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("names and numbers can be written as TOML")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> PlacementFile {
        let held = |experts: &[&[u16]]| ExpertLists { experts: experts.iter().map(|ids| ids.to_vec()).collect() };
        let models = BTreeMap::from([("demo".to_owned(), held(&[&[], &[0, 3, 7], &[1]]))]);
        let server = BTreeMap::from([("desk".to_owned(), models)]);
        PlacementFile::new(server, BTreeMap::from([("a b.c".to_owned(), held(&[&[2]]))]))
    }

    #[test]
    fn written_files_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("placement.toml");
        sample().write(&path).unwrap();
        assert_eq!(PlacementFile::read(&path).unwrap(), sample());
        let text = sample().to_toml();
        assert!(
            text.contains("version = 1") && text.contains("[server.desk.demo]\nexperts = [[], [0, 3, 7], [1]]"),
            "{text}"
        );
    }

    #[test]
    fn invalid_files_are_refused() {
        let good = sample().to_toml();
        for (from, to, message) in [
            ("version = 1", "version = 2", "version 2"),
            ("[0, 3, 7]", "[3, 0, 7]", "demo, layer 1, for desk twice or not in ascending order"),
            ("[2]", "[2, 2]", "for the device twice"),
            ("experts", "expert", "is not a valid placement"),
            ("[2]", "[-2]", "is not a valid placement"),
        ] {
            let error = PlacementFile::parse(&good.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(message) && !error.contains('\n'), "{error}");
        }
        let held = &sample().server["desk"]["demo"];
        assert_eq!((held.count(), held.check(3, 8)), (4, Ok(())));
        assert!(held.check(4, 8).unwrap_err().contains("3 layers, but the model has 4"));
        assert!(held.check(3, 7).unwrap_err().contains("expert 7"));
    }
}
