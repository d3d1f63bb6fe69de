//! Tests of importance matrices: what is known of each matrix, and files, whole and broken.

use std::{fs, path::PathBuf};

use super::*;
use crate::{error::StoreErrorKind, source::GgufBuilder};

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";

fn small() -> Importance {
    let mut importance = Importance::new("novel.txt".into(), 512);
    importance.insert(QUERY, vec![2.0, 4.0, 8.0], vec![2.0]);
    importance.insert("layers.3.experts.gate", vec![16.0, 32.0, 0.0, 0.0], vec![8.0, 0.0]);
    importance.insert("layers.3.experts.down", vec![16.0, 0.0, 0.0, 0.0], vec![8.0, 0.0]);
    importance.insert("encoder.layers.0.q.weight", vec![1.0], vec![1.0]);
    importance.set_chunks(7);
    importance
}

#[test]
fn means_are_per_column_and_experts_lean_on_their_layer() {
    let importance = small();
    assert_eq!(importance.of(QUERY).unwrap(), [1.0, 2.0, 4.0]);
    assert_eq!(importance.of("model.layers.1.self_attn.q_proj.weight"), None);
    let of_expert = |part, expert| importance.of_expert(LayerIdx(3), part, expert);
    assert_eq!(of_expert("gate", 0).unwrap(), [2.0, 4.0]);
    assert_eq!(of_expert("gate", 1).unwrap(), [2.0, 4.0]);
    assert_eq!((of_expert("gate", 2), of_expert("up", 0)), (None, None));
    // Eight tokens with 2 and 0, and eight with the mean of both.
    assert_eq!(of_expert("down", 0).unwrap(), [1.5, 0.5]);
    assert_eq!(of_expert("down", 1), None);
    assert_eq!(importance.shape("layers.3.experts.down"), Some((2, 2)));
    assert_eq!(importance.shape(QUERY), Some((1, 3)));
}

#[test]
fn a_file_holds_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.gguf");
    small().write(&path).unwrap();
    let read = Importance::read(&path).unwrap();
    assert_eq!(read, small());
    assert_eq!(read.digest(), small().digest());
    let mut other = small();
    other.insert(QUERY, vec![2.0, 4.0, 9.0], vec![2.0]);
    assert_ne!(other.digest(), small().digest());
}

fn written(file: &GgufBuilder) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.gguf");
    fs::write(&path, file.bytes()).unwrap();
    (dir, path)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A file with the tensors of one matrix.
fn file(sums: (&[u64], &[f32]), counts: (&[u64], &[f32])) -> GgufBuilder {
    let file = GgufBuilder::new().text("general.type", "imatrix").texts("imatrix.datasets", &["novel.txt"]);
    let file = file.uint("imatrix.chunk_count", 7).uint("imatrix.chunk_size", 512);
    let file = file.tensor("blk.3.ffn_gate_up_exps.weight.in_sum2", sums.0, 0, &floats(sums.1));
    file.tensor("blk.3.ffn_gate_up_exps.weight.counts", counts.0, 0, &floats(counts.1))
}

#[test]
fn gate_and_up_may_be_one_matrix() {
    let (_dir, path) = written(&file((&[2, 2], &[1.0, 2.0, 3.0, 4.0]), (&[1, 2], &[1.0, 1.0])));
    let importance = Importance::read(&path).unwrap();
    assert_eq!(importance.chunks(), 7);
    for part in ["gate", "up"] {
        assert_eq!(importance.shape(&expert_matrix(LayerIdx(3), part)), Some((2, 2)));
        assert!(importance.of_expert(LayerIdx(3), part, 1).is_some());
    }
    assert_eq!(importance.of_expert(LayerIdx(3), "down", 1), None);
}

#[test]
fn broken_files_are_refused_in_one_sentence() {
    let message = |file: &GgufBuilder| {
        let (_dir, path) = written(file);
        let error = Importance::read(&path).unwrap_err();
        (error.kind, error.message)
    };
    let sums: &[f32] = &[1.0, 2.0, 3.0, 4.0];
    let (kind, what) = message(&file((&[2, 2], sums), (&[1, 3], &[1.0, 1.0, 1.0])));
    assert!(kind == StoreErrorKind::Mismatch && what.contains("shape [2, 2], but"), "{what}");
    assert!(what.ends_with("counts the tokens of 3 experts"), "{what}");
    for bad in [f32::NAN, f32::INFINITY, -1.0] {
        let (kind, what) = message(&file((&[2, 2], &[1.0, bad, 3.0, 4.0]), (&[1, 2], &[1.0, 1.0])));
        assert!(kind == StoreErrorKind::Malformed && what.contains("with the value"), "{what}");
        let (_, what) = message(&file((&[2, 2], sums), (&[1, 2], &[1.0, bad])));
        assert!(what.contains("weight.counts' with the value"), "{what}");
    }
    let lone = GgufBuilder::new().text("general.type", "imatrix");
    let (_, what) = message(&lone.clone().tensor("a.in_sum2", &[1], 0, &floats(&[1.0])));
    assert_eq!(what, "has the tensor 'a.in_sum2', but no 'a.counts'");
    let (_, what) = message(&lone.clone().tensor("a.counts", &[1], 0, &floats(&[1.0])));
    assert_eq!(what, "has the tensor 'a.counts', but no 'a.in_sum2'");
    let halves = lone.clone().tensor("a.in_sum2", &[2], 1, &[0; 4]).tensor("a.counts", &[1], 0, &floats(&[1.0]));
    assert_eq!(message(&halves).1, "has the tensor 'a.in_sum2' in a format other than f32");
    assert_eq!(message(&lone).1, "holds no importance of any matrix");
    let (_, what) = message(&GgufBuilder::new().text("general.type", "model"));
    assert_eq!(what, "is no importance matrix: it is of the type 'model', not 'imatrix'");
    let (_, what) = message(&GgufBuilder::new());
    assert_eq!(what, "is no importance matrix: it states no type, not 'imatrix'");
}

/// A file with any changed byte is refused, or can still be used.
#[test]
fn changed_bytes_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.gguf");
    small().write(&path).unwrap();
    let good = fs::read(&path).unwrap();
    let mut used = 0;
    for at in (0..good.len()).step_by(2) {
        let (mut bad, flip) = (good.clone(), [1, 0x80, 0xff][at % 3]);
        bad[at] ^= flip;
        fs::write(&path, bad).unwrap();
        let Ok(importance) = Importance::read(&path) else { continue };
        let expert = (0..3).map(|expert| importance.of_expert(LayerIdx(3), "gate", expert));
        for found in expert.chain([importance.of(QUERY)]).flatten() {
            assert!(found.iter().all(|square| *square >= 0.0), "{at} {flip}: {found:?}");
        }
        used += 1;
    }
    assert!(used > 100, "{used} files were used");
}

#[test]
fn the_older_format_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("imatrix.dat");
    for bytes in [&b"\x01\0\0\0\x06\0\0\0weight"[..], b"", b"GG"] {
        fs::write(&path, bytes).unwrap();
        let error = Importance::read(&path).unwrap_err();
        assert!(error.kind == StoreErrorKind::Unsupported && error.message.contains("--in-file OLD.dat"), "{error}");
    }
}
