//! Tests of invalid headers. Each must give an error that names the problem, without a panic or a large allocation.

use super::builder::{F32, GgufBuilder, Q8_0, header, mixtral};
use crate::error::StoreErrorKind;

/// The error message for a header.
fn error_of(file: &GgufBuilder) -> String {
    file.header().err().expect("an invalid header must be refused").message
}

fn refused(file: &GgufBuilder, why: &str) {
    let error = error_of(file);
    assert!(error.contains(why), "got {error:?}, expected {why:?}");
}

#[test]
fn other_files_and_versions_are_refused() {
    refused(&GgufBuilder { magic: *b"GGML", ..GgufBuilder::new() }, "does not start with the magic bytes of GGUF");
    refused(&GgufBuilder { version: 1, ..GgufBuilder::new() }, "is GGUF version 1");
    refused(&GgufBuilder { version: 4, ..GgufBuilder::new() }, "is GGUF version 4");
    refused(&GgufBuilder { version: 3u32.swap_bytes(), ..GgufBuilder::new() }, "big-endian");
    assert!(GgufBuilder { version: 2, ..GgufBuilder::new() }.header().is_ok());
}

#[test]
fn a_file_truncated_anywhere_is_an_error() {
    let whole = mixtral(true).bytes();
    assert!(header(&whole).is_ok());
    for len in 0..whole.len() {
        assert!(header(&whole[..len]).is_err(), "cut at {len} of {}", whole.len());
    }
}

#[test]
fn counts_larger_than_the_file_are_refused() {
    for count in [1 << 20, u64::MAX / 24, u64::MAX] {
        refused(&GgufBuilder { entry_count: Some(count), ..GgufBuilder::new() }, "metadata entries at byte 24");
        refused(&GgufBuilder { tensor_count: Some(count), ..GgufBuilder::new() }, "tensors at byte 24");
        for tag in [0, 4, 8, 12] {
            refused(&GgufBuilder::new().list("a", tag, count, &[]), "values of 'a' at byte");
        }
        refused(&GgufBuilder::new().entry("a", 8, &count.to_le_bytes()), "bytes at byte");
    }
}

#[test]
fn invalid_values_are_refused() {
    refused(&GgufBuilder::new().entry("a", 13, &[0; 8]), "metadata 'a' of the unknown type 13");
    refused(&GgufBuilder::new().entry("a", 7, &[2]), "the byte 2 as a boolean in metadata 'a'");
    refused(&GgufBuilder::new().list("a", 9, 1, &[0; 12]), "a list of lists as metadata 'a'");
    refused(&GgufBuilder::new().list("a", 99, 1, &[0; 12]), "unknown type 99");
    refused(
        &GgufBuilder::new().list("a", 10, 1, &[0xff; 8]),
        "the number 18446744073709551615 in metadata 'a', which is out of range",
    );
    refused(&GgufBuilder::new().entry("a", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "not UTF-8");
    refused(&GgufBuilder::new().uint("a", 1).uint("a", 1), "metadata key 'a' twice");
    for alignment in [0, 24] {
        refused(&GgufBuilder::new().uint("general.alignment", alignment), "not a power of two");
    }
}

#[test]
fn invalid_shapes_are_refused() {
    let claim = |dims: &[u64], kind| GgufBuilder::new().claim(b"t", dims, kind, 0);
    refused(&claim(&[1; 5], F32), "'t' with 5 dimensions, more than 4");
    refused(&claim(&[4, 0], F32), "'t' with a dimension that is 0 or too large");
    refused(&claim(&[1 << 32, 1 << 32], F32), "which is invalid for f32");
    refused(&claim(&[u64::MAX, 2], F32), "which is invalid for f32");
    refused(&claim(&[33, 2], Q8_0), "'t' with the shape [2, 33], which is invalid for q8_0");
    refused(&GgufBuilder::new().claim(&[0xc3, 0x28], &[4], F32, 0), "tensor name at byte 24 that is not UTF-8");
}

#[test]
fn unsupported_types_are_named() {
    let claim = |kind| GgufBuilder::new().claim(b"blk.0.x", &[32], kind, 0);
    refused(&claim(9), "has the tensor 'blk.0.x' of type Q8_1; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1,");
    refused(&claim(15), "type Q8_K");
    refused(&claim(25), "type I16");
    refused(&claim(4), "the unknown type 4");
    refused(&claim(4000), "the unknown type 4000");
    assert_eq!(claim(9).header().err().unwrap().kind, StoreErrorKind::Unsupported);
}

#[test]
fn rows_and_data_that_are_not_whole_blocks_are_refused() {
    for (kind, name, values) in [
        (3, "q4_1", 32),
        (6, "q5_0", 32),
        (7, "q5_1", 32),
        (10, "q2_k", 256),
        (11, "q3_k", 256),
        (20, "iq4_nl", 32),
        (23, "iq4_xs", 256),
        (39, "mxfp4", 32),
        (40, "nvfp4", 64),
        (16, "iq2_xxs", 256),
        (17, "iq2_xs", 256),
        (18, "iq3_xxs", 256),
        (19, "iq1_s", 256),
        (21, "iq3_s", 256),
        (22, "iq2_s", 256),
        (29, "iq1_m", 256),
        (34, "tq1_0", 256),
        (35, "tq2_0", 256),
        (41, "q1_0", 128),
        (42, "q2_0", 64),
    ] {
        let claim = |dims: &[u64]| GgufBuilder::new().claim(b"t", dims, kind, 0);
        refused(&claim(&[values / 2, 4]), &format!("which is invalid for {name}"));
        refused(&claim(&[values + 1, 2]), &format!("which is invalid for {name}"));
        // No data follow.
        refused(&claim(&[values, 2]), "ends before the end of its tensor 't' of");
    }
}

#[test]
fn invalid_offsets_are_refused() {
    let two = |second| GgufBuilder::new().counting("a", &[16], 0).claim(b"b", &[4], F32, second);
    refused(&two(32), "the overlapping tensors 'a' and 'b'");
    refused(&two(0), "overlapping");
    refused(&two(4), "'b' at offset 4, which is not a multiple of 32");
    refused(&two(64), "ends before the end of its tensor 'b' of 16 bytes");
    refused(&two(u64::MAX - 31), "ends before the end of its tensor 'b'");
    refused(&GgufBuilder::new().counting("a", &[4], 0).counting("a", &[4], 0), "the tensor 'a' twice");
}

#[test]
fn a_damaged_byte_never_panics() {
    let valid = mixtral(true).bytes();
    let (mut refused, mut state) = (0, 1u64);
    for _ in 0..2000 {
        let mut bytes = valid.clone();
        for _ in 0..3 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // The first half is mostly header.
            let at = (state >> 33) as usize % (bytes.len() / 2);
            bytes[at] = (state >> 24) as u8;
        }
        refused += usize::from(header(&bytes).is_err());
    }
    assert!(refused > 500, "{refused} of 2000 damaged headers were refused");
}
