//! Pixel values of computed pictures of many sizes, against the checksums of transformers'.

use larder_kernels::ThreadPool;
use larder_vision::{Patches, Processor, ProcessorConfig, RgbImage, smart_resize};
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use crate::support::folder;

/// The picture whose bytes follow from their place, as `scripts/make/vision/pictures.py` computes it.
fn computed(width: usize, height: usize) -> RgbImage {
    let value = |place: usize| {
        let (row, column) = (place / 3 / width, place / 3 % width);
        let mixed = (place as u64 * 2_654_435_761 + 12_345) & 0xffff_ffff;
        match place % 3 {
            0 => ((row * 5 + column * 3) % 256) as u8,
            1 => ((row / 7 + column / 5) % 2 * 255) as u8,
            _ => (mixed ^ (mixed >> 15)) as u8,
        }
    };
    RgbImage::new(width, height, (0..width * height * 3).map(value).collect()).unwrap()
}

/// The checksum of the values as transformers has them: each channel stands there once per time slice.
fn checksum(patches: &Patches, square: usize) -> u64 {
    let channels = patches.values.chunks_exact(square).flat_map(|channel| [channel, channel]);
    let bytes: Vec<u8> = channels.flatten().flat_map(|value| value.to_le_bytes()).collect();
    XxHash3_64::oneshot(&bytes)
}

#[test]
fn pictures_of_all_sizes_have_the_bits_of_transformers() {
    let cases: Value = serde_json::from_slice(&std::fs::read(folder().join("pixels.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 40);
    for case in cases {
        let of = |key: &str| case[key].as_u64().unwrap() as usize;
        let size = json!({"shortest_edge": of("least"), "longest_edge": of("most")});
        let mut file = json!({"size": size, "patch_size": of("patch"), "resample": of("resample")});
        if of("patch") == 16 {
            file["image_mean"] = json!([0.5, 0.5, 0.5]);
            file["image_std"] = json!([0.5, 0.5, 0.5]);
        }
        let processor = Processor::new(ProcessorConfig::read(&file).unwrap());
        for threads in [1, 3] {
            let pool = ThreadPool::new(threads, false).unwrap();
            let patches = processor.patches(&pool, &computed(of("width"), of("height"))).unwrap();
            assert_eq!(case["grid"], json!([1, patches.rows, patches.columns]), "{case}");
            assert_eq!(
                format!("{:016x}", checksum(&patches, of("patch").pow(2))),
                case["xxh3"].as_str().unwrap(),
                "{case}"
            );
        }
    }
}

#[test]
fn a_limit_of_pixels_is_kept() {
    let processor = Processor::new(ProcessorConfig::qwen());
    let less = processor.limited_to(20_000);
    for (width, height) in [(1, 1), (4000, 3000), (300, 299), (1000, 10)] {
        let (w, h) = less.size(width, height).unwrap();
        assert!(w * h <= 20_000 && w % 28 == 0 && h % 28 == 0, "{w} x {h}");
        let grid = less.grid(width, height).unwrap();
        assert_eq!((grid.columns * 28, grid.rows * 28), (w, h));
    }
    assert_eq!(processor.limited_to(1).size(500, 400).unwrap(), (28, 28));
    assert_eq!(smart_resize((4000, 3000), 28, (3136, 1_003_520)), Some((1148, 840)));
}

#[test]
fn settings_that_cannot_be_kept_are_refused() {
    for (key, value) in [
        ("patch_size", json!(0)),
        ("patch_size", json!(1_000_000)),
        ("patch_size", json!(-3)),
        ("merge_size", json!(2.5)),
        ("do_rescale", json!(false)),
        ("do_normalize", json!("no")),
        ("resample", json!(1)),
        ("image_std", json!([0.5, 0.0, 0.5])),
        ("image_mean", json!([0.5, 0.5])),
        ("image_mean", json!([0.5, 1e300, 0.5])),
        ("size", json!({"shortest_edge": 100, "longest_edge": 10})),
        ("size", json!({"longest_edge": 4_611_686_018_427_387_904u64})),
        ("max_pixels", json!("many")),
        ("rescale_factor", json!(0)),
    ] {
        let error = ProcessorConfig::read(&json!({key: value})).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("should be") && error.len() < 160, "{key}: {error}");
    }
    assert!(ProcessorConfig::read(&json!([1])).is_err());
    let nested = ProcessorConfig::read(&json!({"image_processor": {"patch_size": 16}})).unwrap();
    assert_eq!(nested, ProcessorConfig { patch: 16, ..ProcessorConfig::qwen() });
}
