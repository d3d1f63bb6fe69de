//! Whether a store that does not say of what content it was made was made of a given source.

use std::collections::BTreeSet;

use larder_core::{Blueprint, ExpertId, NumberFormat, RowOrder};

use crate::{
    assemble::Assembler,
    error::Result,
    manifest::Manifest,
    resident::{ResidentPlan, TensorEncoder},
    source::Source,
    store::Store,
    tensor_slice::AssemblyBuffers,
};

/// Experts of each layer that are compared, spread evenly, the first and the last among them.
const EXPERTS_COMPARED: usize = 4;

/// Whether `store` holds what a conversion of `source` writes: its resident weights and some experts of each layer are
/// converted again, and their checksums compared with those of the store. For stores without an identity of their source.
pub fn is_made_of(store: &Store, source: &dyn Source, blueprint: &Blueprint) -> Result<bool> {
    let manifest = store.manifest();
    if manifest.geometry != blueprint.geometry {
        return Ok(false);
    }
    Ok(has_experts_of(manifest, source, blueprint)? && has_resident_weights_of(store, source, blueprint)?)
}

fn has_experts_of(manifest: &Manifest, source: &dyn Source, blueprint: &Blueprint) -> Result<bool> {
    let Ok(assembler) = Assembler::new(source, blueprint, requested(&manifest.source.experts)) else {
        return Ok(false);
    };
    let mut buffers = AssemblyBuffers::default();
    let mut data = vec![];
    for (row, layer) in blueprint.geometry.moe_layers.iter().enumerate() {
        let layout = &assembler.layouts()[layer];
        let class = manifest.experts.classes[manifest.experts.layers[row]];
        if (class.kinds, class.data_bytes) != (layout.kinds(), layout.bytes) {
            return Ok(false);
        }
        for expert in spread(blueprint.geometry.experts) {
            data.resize(layout.bytes, 0);
            assembler.assemble(*layer, expert, &mut data, &mut buffers)?;
            if manifest.experts.layout != RowOrder::Plain {
                layout.rearrange(&mut data);
            }
            let stored = &manifest.experts.checksums[row][expert.index()];
            if !stored.are_of(&layout.clone().in_order(manifest.experts.layout), &data) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Up to [`EXPERTS_COMPARED`] of `experts` experts.
fn spread(experts: usize) -> BTreeSet<ExpertId> {
    let last = experts.saturating_sub(1);
    (0..EXPERTS_COMPARED).map(|i| ExpertId((i * last / (EXPERTS_COMPARED - 1)) as u16)).collect()
}

fn has_resident_weights_of(store: &Store, source: &dyn Source, blueprint: &Blueprint) -> Result<bool> {
    let wanted = requested(&store.manifest().source.resident);
    let Ok(plan) = ResidentPlan::new(source, blueprint, wanted) else { return Ok(false) };
    let mut encoder = TensorEncoder::new(source);
    for item in &plan.items {
        let made = encoder.encode(item, &mut |_| Ok(()))?;
        if store.resident_checksum(&item.name) != Some(&made) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The number format that a conversion was asked for; `None` kept that of the source.
fn requested(name: &str) -> Option<NumberFormat> {
    name.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        convert::ConvertOptions,
        edit::record_source,
        error::StoreErrorKind,
        file::ReadAt,
        manifest::MANIFEST_FILE,
        safetensors::SafetensorsHeader,
        source::Checkpoint,
        testing::{EXPERTS, FORMS, Tiny, edit_manifest, files, store_of},
    };

    /// A store without the identity of its source, which is in `dir/source`.
    fn unidentified(dir: &std::path::Path, tiny: &Tiny, options: &ConvertOptions) -> std::path::PathBuf {
        let path = store_of(dir, tiny, options);
        let identity = Store::open(&path).unwrap().manifest().source.identity.clone().unwrap();
        edit_manifest(&path, &format!("\"identity\": \"{identity}\",\n"), "");
        assert_eq!(Store::open(&path).unwrap().manifest().source.identity, None);
        path
    }

    #[test]
    fn experts_are_spread_over_all() {
        let ids = |experts| spread(experts).into_iter().map(ExpertId::index).collect::<Vec<_>>();
        assert_eq!((ids(1), ids(2), ids(64)), (vec![0], vec![0, 1], vec![0, 21, 42, 63]));
    }

    #[test]
    fn a_store_knows_its_source_by_content_and_records_it() {
        for form in FORMS {
            let (dir, tiny) = (tempfile::tempdir().unwrap(), Tiny::new(form));
            let options = ConvertOptions {
                experts: Some(NumberFormat::Q8_0),
                resident: Some(NumberFormat::F16),
                ..ConvertOptions::default()
            };
            let path = unidentified(dir.path(), &tiny, &options);
            let (weights, blueprint) = (dir.path().join("source/model.safetensors"), tiny.blueprint());
            let source = || Checkpoint::open(&dir.path().join("source")).unwrap();
            let store = Store::open(&path).unwrap();
            let good = fs::read(&weights).unwrap();
            // All experts of so small a model are compared; of the resident tensors, the row table is not.
            const { assert!(EXPERTS <= EXPERTS_COMPARED) };
            let header = SafetensorsHeader::read(&ReadAt::open(&weights).unwrap()).unwrap();
            for (name, entry) in header.tensors.iter().filter(|(name, _)| *name != "embed") {
                let mut bad = good.clone();
                // The exponents of all values.
                (entry.start as usize..).take(entry.bytes).skip(1).step_by(2).for_each(|at| bad[at] ^= 1);
                fs::write(&weights, bad).unwrap();
                assert!(!is_made_of(&store, &source(), &blueprint).unwrap(), "{form:?} {name}");
                let error = record_source(&path, &source(), &blueprint).unwrap_err();
                assert_eq!(error.kind, StoreErrorKind::Mismatch, "{form:?} {name}");
            }
            fs::write(&weights, good).unwrap();
            assert!(is_made_of(&store, &source(), &blueprint).unwrap(), "{form:?}");
            assert!(record_source(&path, &source(), &blueprint).unwrap());
            assert!(!record_source(&path, &source(), &blueprint).unwrap());
            // It is now the store that names its source.
            let named = tempfile::tempdir().unwrap();
            let whole = store_of(named.path(), &tiny, &options);
            assert!(files(&path)[std::path::Path::new(MANIFEST_FILE)] == fs::read(whole.join(MANIFEST_FILE)).unwrap());
        }
    }
}
