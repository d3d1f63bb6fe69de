//! The image tower of a store: every changed byte is found, and only images suffer from it.

use std::error::Error;
use std::fs;
use std::path::Path;

use larder_store::{Source, Store, verify};
use serde_json::Value;

use super::{picture, references, store};
use crate::support::mmproj::write_mmproj;
use crate::support::{larder, larder_ok, larder_refuses};

/// Reads all that there is of the tower of a store.
fn read_tower(store: &Path) -> Result<usize, Box<dyn Error>> {
    let tower = Store::open(store)?.tower()?.ok_or("has no tower")?;
    let tensors = tower.tensors();
    for name in tower.names() {
        let mut bytes = vec![0; tensors.meta(name).unwrap().bytes];
        tensors.read(name, 0, &mut bytes)?;
    }
    Ok(tower.names().len())
}

#[test]
fn changed_and_truncated_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &references()[0];
    let store = store(folder, &dir.path().join("store"), true);
    assert!(read_tower(&store).unwrap() > 30);
    let command = ["verify", store.to_str().unwrap()];
    larder_ok(&command);
    for name in ["vision.json", "vision.json.seal", "vision.safetensors"] {
        let path = store.join(name);
        let good = fs::read(&path).unwrap();
        let cuts = [0, 1, good.len() / 2, good.len() - 1].map(|len| good[..len].to_vec());
        let step = (good.len() / 150).max(1);
        let changed = (0..good.len()).step_by(step).map(|at| {
            let mut bad = good.clone();
            bad[at] ^= 1;
            bad
        });
        for bad in cuts.into_iter().chain(changed) {
            fs::write(&path, &bad).unwrap();
            // Padding between tensors is compared by `verify` alone.
            let outcome = read_tower(&store);
            let is_found = outcome.is_err() || !verify(&store, &()).unwrap().is_good();
            assert!(is_found && (outcome.is_err() || name == "vision.safetensors"), "{name}: {} bytes", bad.len());
        }
        assert_eq!(larder(&command).status.code(), Some(1), "{name}");
        fs::write(&path, &good).unwrap();
    }
    larder_ok(&command);
}

#[test]
fn text_needs_no_tower_and_an_image_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &references()[0];
    let store = store(folder, &dir.path().join("store"), true);
    let (path, picture) = (store.to_str().unwrap(), picture("odd"));
    let image = ["run", "-m", path, "-n", "2", "--image", picture.to_str().unwrap(), "-p", "What is this?"];
    let text = ["run", "-m", path, "-n", "2", "-p", "What is this?"];
    let before = larder_ok(&text);
    larder_ok(&image);
    let mut bytes = fs::read(store.join("vision.json")).unwrap();
    bytes[10] ^= 1;
    fs::write(store.join("vision.json"), bytes).unwrap();
    assert_eq!(larder_ok(&text), before);
    let said = larder_refuses(&image);
    assert!(
        said.contains("vision.json: does not match its checksum; make it again with `larder store add-vision`"),
        "{said}"
    );
    for name in ["vision.json", "vision.json.seal", "vision.safetensors"] {
        fs::remove_file(store.join(name)).unwrap();
    }
    let said = larder_refuses(&image);
    assert!(
        said.contains("the image tower of this model is not here") && said.contains("larder store add-vision"),
        "{said}"
    );
    let mmproj = dir.path().join("mmproj-f32.gguf");
    write_mmproj(folder, &mmproj);
    let named = [&image[..], &["--mmproj", mmproj.to_str().unwrap()]].concat();
    larder_ok(&named);
    larder_ok(&["store", "add-vision", mmproj.to_str().unwrap(), path]);
    larder_ok(&image);
}

#[test]
fn inspect_and_plan_show_the_tower() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &references()[0];
    let store = store(folder, &dir.path().join("store"), true);
    let json = |args: &[&str]| -> Value { serde_json::from_str(&larder_ok(args)).unwrap() };
    for path in [store.to_str().unwrap(), folder.to_str().unwrap()] {
        let tower = &json(&["inspect", path, "--json"])["tower"];
        assert_eq!((&tower["layers"], &tower["width"]), (&3.into(), &24.into()), "{path}");
        assert!(tower["bytes"].as_u64().unwrap() > 50_000);
        assert!(larder_ok(&["inspect", path]).contains("tower of 3 layers, width 24"));
        let plan = |vision: &str| json(&["plan", "-m", path, "--json", "--vision", vision]);
        let (on, off) = (plan("auto"), plan("off"));
        let images = &on["images"];
        assert!(
            off["images"].is_null() && images["preloaded"] == false && plan("preload")["images"]["preloaded"] == true
        );
        let parts = ["tower_bytes", "working_bytes", "kept_bytes"].map(|part| images[part].as_u64().unwrap());
        assert!(parts.iter().all(|bytes| *bytes > 0));
        assert_eq!(images["bytes"].as_u64().unwrap(), parts.iter().sum::<u64>());
    }
}

#[test]
fn hostile_mmproj_files_are_refused_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &references()[0];
    let mmproj = dir.path().join("mmproj.gguf");
    write_mmproj(folder, &mmproj);
    let good = fs::read(&mmproj).unwrap();
    let picture = picture("dot");
    let [model, picture, file] = [folder, &picture, &mmproj].map(|path| path.to_str().unwrap());
    let line = ["run", "-m", model, "-n", "1", "--image", picture, "--mmproj", file, "-p", "x"];
    larder_ok(&line);
    let with = |key: &str, value: u32| {
        let at = good.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4;
        let mut bad = good.clone();
        bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bad
    };
    let mut named_llama = good.clone();
    let at = good.windows(4).position(|window| window == b"clip").unwrap();
    named_llama[at..at + 4].copy_from_slice(b"lama");
    let all = [
        vec![],
        good[..good.len() / 2].to_vec(),
        good[..100].to_vec(),
        named_llama,
        with("clip.vision.block_count", u32::MAX),
        with("clip.vision.block_count", 250),
        with("clip.vision.embedding_length", 0),
        with("clip.vision.embedding_length", 16384),
        with("clip.vision.projection_dim", 64),
        with("clip.vision.patch_size", 1),
        with("clip.vision.attention.head_count", 5),
        with("clip.vision.spatial_merge_size", 8),
        with("clip.vision.image_max_pixels", 1),
    ];
    for (at, bad) in all.iter().enumerate() {
        fs::write(&mmproj, bad).unwrap();
        let said = larder_refuses(&line);
        assert!(said.contains("mmproj"), "{at}: {said}");
    }
}
