//! The file that says who holds what.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::PlacementError;

const VERSION: u32 = 1;

/// Who holds which experts of which models.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    version: u32,
    /// By server, then by model.
    #[serde(default)]
    pub server: BTreeMap<String, BTreeMap<String, ExpertLists>>,
    /// What the device keeps for itself, by model.
    #[serde(default)]
    pub device: BTreeMap<String, ExpertLists>,
}

/// Experts of one model.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertLists {
    /// Those of each decoder layer, ascending; none of a layer that has no experts.
    pub experts: Vec<Vec<u16>>,
}

impl ExpertLists {
    /// How many they are.
    pub fn count(&self) -> usize {
        self.experts.iter().map(Vec::len).sum()
    }

    /// Whether it can be of a model with so many decoder layers and experts in each; the error says why not.
    pub fn check(&self, layers: usize, experts: usize) -> Result<(), String> {
        if self.experts.len() != layers {
            return Err(format!("lists {} layers, and the model has {layers}", self.experts.len()));
        }
        let beyond = |ids: &&Vec<u16>| ids.last().is_some_and(|last| *last as usize >= experts);
        match self.experts.iter().find(beyond).and_then(|ids| ids.last()) {
            Some(expert) => Err(format!("lists expert {expert}, and the model's layers have {experts}")),
            None => Ok(()),
        }
    }
}

impl PlacementFile {
    /// What lies where.
    pub fn new(server: BTreeMap<String, BTreeMap<String, ExpertLists>>, device: BTreeMap<String, ExpertLists>) -> Self {
        PlacementFile { version: VERSION, server, device }
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let wrong = |why: String| PlacementError::File { path: path.to_owned(), reason: why };
        let text = fs::read_to_string(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
        PlacementFile::parse(&text).map_err(wrong)
    }

    /// Reads the text of such a file; the error says what it does wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: PlacementFile =
            toml::from_str(text).map_err(|e| format!("is no placement: {}", e.message().replace('\n', ", ")))?;
        if file.version != VERSION {
            return Err(format!("is a placement of version {}; this larder reads version {VERSION}", file.version));
        }
        let all = file
            .server
            .iter()
            .flat_map(|(name, models)| models.iter().map(move |(model, held)| (name.as_str(), model, held)));
        let own = file.device.iter().map(|(model, held)| ("the device", model, held));
        for (owner, model, held) in all.chain(own) {
            let ascending = |ids: &Vec<u16>| ids.windows(2).all(|pair| pair[0] < pair[1]);
            if let Some(layer) = held.experts.iter().position(|ids| !ascending(ids)) {
                return Err(format!("lists experts of {model}, layer {layer}, for {owner} twice or out of order"));
            }
        }
        Ok(file)
    }

    /// Writes a file, which appears whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), PlacementError> {
        let wrong = |e: std::io::Error| PlacementError::File {
            path: path.to_owned(),
            reason: format!("cannot be written: {e}"),
        };
        let mut temp = path.as_os_str().to_owned();
        temp.push(".tmp");
        fs::write(&temp, self.to_toml()).and_then(|()| fs::rename(&temp, path)).map_err(wrong)
    }

    /// The text of the file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("names and numbers, which TOML can hold")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> PlacementFile {
        let held = |experts: &[&[u16]]| ExpertLists { experts: experts.iter().map(|ids| ids.to_vec()).collect() };
        let models = BTreeMap::from([("demo".to_owned(), held(&[&[], &[0, 3, 7], &[1]]))]);
        let server = BTreeMap::from([("desk".to_owned(), models)]);
        PlacementFile::new(server, BTreeMap::from([("a b.c".to_owned(), held(&[&[2]]))]))
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("placement.toml");
        some().write(&path).unwrap();
        assert_eq!(PlacementFile::read(&path).unwrap(), some());
        let text = some().to_toml();
        assert!(
            text.contains("version = 1") && text.contains("[server.desk.demo]\nexperts = [[], [0, 3, 7], [1]]"),
            "{text}"
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = some().to_toml();
        for (from, to, why) in [
            ("version = 1", "version = 2", "version 2"),
            ("[0, 3, 7]", "[3, 0, 7]", "demo, layer 1, for desk twice or out of order"),
            ("[2]", "[2, 2]", "for the device twice"),
            ("experts", "expert", "is no placement"),
            ("[2]", "[-2]", "is no placement"),
        ] {
            let said = PlacementFile::parse(&good.replacen(from, to, 1)).unwrap_err();
            assert!(said.contains(why) && !said.contains('\n'), "{said}");
        }
        let held = &some().server["desk"]["demo"];
        assert_eq!((held.count(), held.check(3, 8)), (4, Ok(())));
        assert!(held.check(4, 8).unwrap_err().contains("3 layers, and the model has 4"));
        assert!(held.check(3, 7).unwrap_err().contains("expert 7"));
    }
}
