//! The GGUF reader, on any bytes: it accepts or refuses, and what it accepts can be read.

#![no_main]

use std::io::Write;

use larder_store::{Gguf, SIDECARS, Source};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(bytes).unwrap();
    let Ok(gguf) = Gguf::open(file.path()) else { return };
    for sidecar in SIDECARS {
        let _ = gguf.sidecar(sidecar);
    }
    for name in gguf.names() {
        let tensors: &dyn Source = &gguf;
        let meta = tensors.meta(name).unwrap_or_else(|| panic!("{name} is listed and unknown"));
        assert!(meta.bytes <= bytes.len(), "{name} is larger than the file");
        let mut data = vec![0; meta.bytes];
        tensors.read(name, 0, &mut data).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
});
