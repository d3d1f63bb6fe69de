//! Files of all kinds, against the pixels of Pillow.

use larder_vision::{DecodeError, DecodeLimits, PictureFormat, decode};
use serde_json::Value;

use crate::support::folder;

/// Levels by which a lossy file may differ: decoders may round differently.
fn tolerance(name: &str) -> u8 {
    match name.rsplit('.').next() {
        Some("jpg") => 4,
        _ if name.starts_with("lossy") => 4,
        _ => 0,
    }
}

#[test]
fn every_file_has_the_pixels_of_pillow() {
    let listed: Value = serde_json::from_slice(&std::fs::read(folder().join("files.json")).unwrap()).unwrap();
    let listed = listed.as_object().unwrap();
    assert!(listed.len() > 40);
    for (name, expected) in listed {
        let bytes = std::fs::read(folder().join("files").join(name)).unwrap();
        let image = decode(&bytes, &DecodeLimits::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let size = [image.width(), image.height()].map(|side| Value::from(side as u64));
        assert_eq!(size, [&expected["width"], &expected["height"]].map(Value::clone), "{name}");
        let hex = expected["rgb"].as_str().unwrap();
        let wanted = (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap());
        let most = image.pixels().iter().zip(wanted).map(|(a, b)| a.abs_diff(b)).max().unwrap();
        assert!(most <= tolerance(name), "{name} is off by {most}");
    }
}

#[test]
fn cut_files_are_refused_in_a_sentence() {
    let mut refused = 0;
    for name in ["rgb.png", "whole.jpg", "lossless.webp", "still.gif"] {
        let bytes = std::fs::read(folder().join("files").join(name)).unwrap();
        for length in 0..bytes.len() - 8 {
            match decode(&bytes[..length], &DecodeLimits::default()) {
                Ok(image) => assert_eq!((image.width(), image.height()), (23, 17), "{name} at {length}"),
                Err(error) => {
                    assert!(error.to_string().len() < 120 && !error.to_string().contains('\n'));
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 1000, "{refused} cut files are refused");
}

#[test]
fn limits_are_checked_before_anything_is_decoded() {
    let bytes = std::fs::read(folder().join("files/rgb.png")).unwrap();
    let few = |bytes: usize, pixels: u64| DecodeLimits { bytes, pixels };
    assert!(decode(&bytes, &few(bytes.len(), 23 * 17)).is_ok());
    let many = DecodeError::TooManyBytes { bytes: bytes.len(), most: bytes.len() - 1 };
    assert_eq!(decode(&bytes, &few(bytes.len() - 1, 1 << 20)).err(), Some(many));
    let large = DecodeError::TooManyPixels { width: 23, height: 17, most: 390 };
    assert_eq!(decode(&bytes, &few(1 << 20, 390)).err(), Some(large));
}

#[test]
fn files_are_known_by_their_first_bytes() {
    let formats = [("png", PictureFormat::Png), ("jpg", PictureFormat::Jpeg), ("webp", PictureFormat::WebP)];
    for file in std::fs::read_dir(folder().join("files")).unwrap() {
        let path = file.unwrap().path();
        let found = PictureFormat::sniff(&std::fs::read(&path).unwrap());
        let by_name = formats.iter().find(|(ending, _)| path.extension().unwrap() == *ending);
        assert_eq!(found, Some(by_name.map_or(PictureFormat::Gif, |(_, format)| *format)), "{}", path.display());
    }
    for other in ["", "GIF", "RIFF\0\0\0\0WAVE", "<svg/>", "%PDF-1.7", "BM\0\0\0\0\0\0"] {
        assert_eq!(decode(other.as_bytes(), &DecodeLimits::default()).err(), Some(DecodeError::UnknownFormat));
    }
}
