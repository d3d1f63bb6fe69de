//! Files of strangers: bombs, and thousands of mutated ones.

use larder_vision::{DecodeError, DecodeLimits, TowerFile, decode, open_tower};
use serde_json::{Value, json};

use crate::support::{Reference, folder};

/// A PNG that says it has this size, and has no pixels.
fn png_of(width: u32, height: u32) -> Vec<u8> {
    let mut header = b"IHDR".to_vec();
    header.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    header.extend([8, 2, 0, 0, 0]);
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    let sum = crc(&header);
    file.extend(header);
    file.extend(sum.to_be_bytes());
    file.extend(b"\0\0\0\x01IDAT\0");
    file.extend(crc(b"IDAT\0").to_be_bytes());
    file
}

fn crc(bytes: &[u8]) -> u32 {
    let step = |sum: u32, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 };
    !bytes.iter().fold(!0, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), step))
}

#[test]
fn bombs_are_refused_by_their_header() {
    let limits = DecodeLimits::default();
    for (width, height) in [(50_000, 50_000), (u32::MAX >> 1, u32::MAX >> 1), (1, 60_000_000)] {
        let error = decode(&png_of(width, height), &limits).err().unwrap();
        let is_refused = matches!(
            error,
            DecodeError::TooManyPixels { .. } | DecodeError::TooMuchMemory(_) | DecodeError::Damaged(_)
        );
        assert!(is_refused, "{width} x {height}: {error}");
    }
    let large = DecodeError::TooManyPixels { width: 50_000, height: 50_000, most: limits.pixels };
    assert_eq!(decode(&png_of(50_000, 50_000), &limits).err(), Some(large));
    // Of a picture within the limits nothing follows the header.
    assert_eq!(decode(&png_of(5_000, 5_000), &limits).err(), Some(DecodeError::Damaged("PNG")));
}

#[test]
fn of_a_moving_picture_only_the_first_frame_is_decoded() {
    let bytes = std::fs::read(folder().join("files/moving.gif")).unwrap();
    let still = decode(&bytes, &DecodeLimits::default()).unwrap();
    // After the first frame, the file is damaged.
    let starts = |bytes: &[u8]| bytes.starts_with(b"\x21\xf9\x04");
    let second = (0..bytes.len()).filter(|at| starts(&bytes[*at..])).nth(1).unwrap();
    let mut damaged = bytes[..second].to_vec();
    damaged.extend([0xee; 500]);
    assert!(decode(&damaged, &DecodeLimits::default()).unwrap() == still);
    let early = [&bytes[..second - 100], &[0xee; 500]].concat();
    assert!(decode(&early, &DecodeLimits::default()).ok().as_ref() != Some(&still));
}

/// Mutated files: bytes changed, cut out, doubled; lengths set to extremes.
fn mutate(bytes: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let mut out = bytes.to_vec();
    for _ in 0..=next(6) {
        let at = next(out.len());
        match next(5) {
            0 => out[at] ^= 1 << next(8),
            1 => out[at] = next(256) as u8,
            2 => out.iter_mut().skip(at).take(4).for_each(|byte| *byte = 0xff),
            3 => {
                let end = (at + next(64)).min(out.len());
                if end - at < out.len() {
                    out.drain(at..end);
                }
            }
            _ => {
                let end = (at + next(64)).min(out.len());
                let part = out[at..end].to_vec();
                out.splice(at..at, part);
            }
        }
    }
    out
}

/// Decodes mutated files of every kind, `each` of each, and returns how many were refused.
fn mutated_files(each: u64) -> (usize, usize) {
    let limits = DecodeLimits { bytes: 1 << 20, pixels: 1 << 20 };
    let (mut refused, mut decoded) = (0, 0);
    for file in std::fs::read_dir(folder().join("files")).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        for seed in 0..each {
            match decode(&mutate(&bytes, seed), &limits) {
                Ok(image) => {
                    assert!(image.pixels().len() as u64 <= 3 * limits.pixels);
                    decoded += 1;
                }
                Err(error) => {
                    assert!(error.to_string().len() < 160, "{error}");
                    refused += 1;
                }
            }
        }
    }
    (refused, decoded)
}

#[test]
fn mutated_files_never_panic() {
    let (refused, decoded) = mutated_files(60);
    assert!(refused > 500 && decoded > 50, "{refused} refused, {decoded} decoded");
}

/// As the test above, with 3,000 of each file: minutes.
#[test]
#[ignore = "minutes"]
fn many_mutated_files_never_panic() {
    let (refused, decoded) = mutated_files(3_000);
    println!("{refused} refused, {decoded} decoded");
}

#[test]
fn hostile_configs_are_refused() {
    let reference = &Reference::all()[0];
    let open = |config: &Value| {
        let pool = larder_kernels::ThreadPool::single_threaded().into();
        let file = TowerFile::Checkpoint { config, processor: Some(&reference.processor) };
        open_tower(&file, &reference.weights, pool).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(open(&reference.config), Ok(()));
    let keys = [
        "depth",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "patch_size",
        "spatial_merge_size",
        "temporal_patch_size",
        "out_hidden_size",
        "num_position_embeddings",
        "deepstack_visual_indexes",
        "in_channels",
    ];
    for key in keys {
        for value in [json!(0), json!(-1), json!(1), json!(1u64 << 40), json!(u64::MAX), json!("x"), json!([9, 3])] {
            if value == json!(1) && ["depth", "num_heads"].contains(&key) {
                continue; // a smaller tower
            }
            let mut config = reference.config.clone();
            config["vision_config"][key] = value.clone();
            let error = open(&config).err().unwrap_or_else(|| panic!("{key} = {value} is accepted"));
            assert!(error.len() < 200, "{error}");
        }
    }
    let other = json!({"model_type": "mixtral", "vision_config": {}});
    assert!(open(&other).unwrap_err().contains("qwen3_vl_moe"), "the error names models that see");
}

#[test]
fn damaged_weights_are_refused() {
    let mut reference = Reference::all().remove(0);
    let name =
        reference.weights.0.keys().find(|name| name.ends_with("visual.blocks.0.attn.qkv.weight")).unwrap().clone();
    let open = |reference: &Reference| {
        let pool = larder_kernels::ThreadPool::single_threaded().into();
        let file = TowerFile::Checkpoint { config: &reference.config, processor: Some(&reference.processor) };
        open_tower(&file, &reference.weights, pool).map(|_| ()).map_err(|error| error.to_string())
    };
    let whole = reference.weights.0[&name].clone();
    let nan = reference.weights.0.get_mut(&name).unwrap();
    nan.1[..4].fill(0xff);
    assert!(open(&reference).unwrap_err().contains("not finite"));
    reference.weights.0.get_mut(&name).unwrap().0.shape.swap(0, 1);
    assert!(open(&reference).unwrap_err().contains("shape"));
    reference.weights.0.remove(&name);
    assert!(open(&reference).unwrap_err().contains("no tensor"));
    reference.weights.0.insert(name, whole);
    assert_eq!(open(&reference), Ok(()));
}
