//! Decoding of pictures, on any bytes: a picture within the limits, or a refusal of one sentence.

#![no_main]

use larder_vision::{DecodeLimits, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let limits = DecodeLimits { bytes: 1 << 16, pixels: 1 << 18 };
    match decode(bytes, &limits) {
        Ok(image) => {
            let pixels = image.width() as u64 * image.height() as u64;
            assert!(pixels > 0 && pixels <= limits.pixels);
            assert_eq!(image.pixels().len() as u64, 3 * pixels);
        }
        Err(error) => assert!(error.to_string().len() < 160),
    }
});
