//! Quantised checkpoints, with any bytes as the file of weights: they are accepted or refused, and what is accepted can
//! be read in both views, or is refused with a reason.

#![no_main]

use larder_store::{Source, open_source};
use libfuzzer_sys::fuzz_target;

/// The first byte chooses among these.
const CONFIGS: [&str; 6] = [
    r#"{"quant_method":"mxfp4"}"#,
    r#"{"quant_method":"fp8","weight_block_size":[2,3]}"#,
    r#"{"quant_method":"compressed-tensors","format":"pack-quantized"}"#,
    r#"{"quant_method":"compressed-tensors","format":"float-quantized"}"#,
    r#"{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized"}"#,
    r#"{"quant_method":"modelopt","quant_algo":"NVFP4"}"#,
];

fuzz_target!(|bytes: &[u8]| {
    let Some((first, weights)) = bytes.split_first() else { return };
    let folder = tempfile::tempdir().unwrap();
    let config = CONFIGS[usize::from(*first) % CONFIGS.len()];
    let config = format!(r#"{{"model_type":"x","quantization_config":{config}}}"#);
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    let Ok(source) = open_source(folder.path()) else { return };
    read_all(source.as_ref(), weights.len());
    if let Some(floats) = source.as_floats() {
        read_all(floats, weights.len());
    }
});

fn read_all(source: &dyn Source, file_bytes: usize) {
    for name in source.names() {
        let Some(meta) = source.meta(name) else { continue };
        assert!(meta.bytes <= 8 * file_bytes, "{name} is far larger than the file");
        let _ = source.read(name, 0, &mut vec![0; meta.bytes]);
        source.samples(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}
