//! The header reader, on any bytes: it accepts or refuses, and what it accepts lies inside the file.

#![no_main]

use std::io::Write;

use larder_store::{SafetensorsHeader, ReadAt};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let file = ReadAt::open(file.path()).unwrap();
    if let Ok(header) = SafetensorsHeader::read(&file) {
        for (name, entry) in &header.tensors {
            file.read_vec(entry.start, entry.bytes as u64).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
});
