//! The reader of importance matrices, on any bytes: it accepts or refuses, and what it accepts can be written and read
//! again.

#![no_main]

use std::io::Write;

use larder_core::LayerIdx;
use larder_store::Importance;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(bytes).unwrap();
    let Ok(importance) = Importance::read(file.path()) else { return };
    let _ = importance.of("model.layers.0.self_attn.q_proj.weight");
    for part in ["gate", "up", "down"] {
        let _ = importance.of_expert(LayerIdx(0), part, 1);
    }
    importance.write(file.path()).unwrap();
    let again = Importance::read(file.path()).unwrap_or_else(|e| panic!("what was written is refused: {e}"));
    assert_eq!(again.digest(), importance.digest());
});
