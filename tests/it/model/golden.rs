//! Every architecture against what transformers computed.

use std::path::Path;

use crate::support::reference::{check, check_chunks};
use crate::support::{folders, golden_models};

#[test]
fn every_model_type_has_a_golden_model() {
    let golden: Vec<String> =
        golden_models().iter().map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect();
    let known: Vec<&str> = larder_model::model_types().collect();
    assert_eq!(golden, known);
}

#[test]
fn golden_models_match_transformers() {
    for folder in golden_models() {
        check(&folder, "config.json");
        check(&folder, "config.transformers5.json");
    }
}

#[test]
fn reading_in_pieces_changes_nothing() {
    golden_models().iter().for_each(|folder| check_chunks(folder));
}

/// Opt-in: larger references in a folder of their own.
#[test]
fn references_match_transformers() {
    let Some(root) = std::env::var_os("LARDER_REFERENCE") else {
        println!("skipped: LARDER_REFERENCE names no folder");
        return;
    };
    for folder in folders(Path::new(&root)) {
        check(&folder, "config.json");
        check(&folder, "config.transformers5.json");
        check_chunks(&folder);
        println!("{}: as transformers", folder.display());
    }
}
