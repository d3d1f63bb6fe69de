//! Tests of row tables: every row, damage, files that contradict the manifest.

use std::{fs, path::PathBuf};

use larder_core::{Blueprint, NumberFormat, TensorSpec, Tensors};

use super::*;
use crate::{
    check_reads::CheckReads,
    error::{Result, StoreErrorKind},
    files::{checksum::checksum_of, safetensors::DATA_START},
    manifest::{BLOCK_BYTES, TABLES, TableFile},
    quantize::encode,
    source::Checkpoint,
    testing::{ExpertForm, Tiny, write_checkpoint},
};

/// Columns of the table; a row of 96 values in f32 has 384 bytes, so 170 rows share a block.
const COLS: usize = 96;

fn values(rows: usize) -> Vec<f32> {
    (0..rows * COLS).map(|i| ((i * 37 + i / COLS) % 1021) as f32 * 0.125 - 60.0).collect()
}

struct Fixture {
    dir: tempfile::TempDir,
    table: TableFile,
    /// The bytes of all rows.
    bytes: Vec<u8>,
}

impl Fixture {
    fn new(rows: usize, wanted: Option<NumberFormat>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let tensors = [("words.weight".to_owned(), vec![rows, COLS], values(rows))];
        write_checkpoint(&source, |_| NumberFormat::F32, &tensors);
        let source = Checkpoint::open(&source).unwrap();
        let spec = TensorSpec { by_row: true, ..TensorSpec::new("words.weight", &[rows, COLS], true) };
        let blueprint = Blueprint { resident: vec![spec], ..Tiny::new(ExpertForm::Separate).blueprint() };
        let (plans, notes) = plans(&source, &blueprint, wanted).unwrap();
        assert!(notes.is_empty());
        fs::create_dir(dir.path().join(TABLES)).unwrap();
        let table = write(&source, &plans[0], &dir.path().join(plans[0].table.path()), &()).unwrap();
        assert_eq!(check_written(&plans[0], &dir.path().join(table.path())).unwrap(), table);
        let kind = wanted.unwrap_or(NumberFormat::F32);
        let mut bytes = vec![0; kind.matrix_bytes(rows, COLS).unwrap()];
        encode(kind, &values(rows), &mut bytes).unwrap();
        Fixture { dir, table, bytes }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(self.table.path())
    }

    fn open(&self) -> Result<RowTable> {
        RowTable::open(self.dir.path(), &self.table)
    }
}

#[test]
fn every_row_and_range_is_that_of_the_matrix() {
    for (rows, wanted) in [
        (1, None),
        (170, None),
        (171, None),
        (1000, None),
        (1500, Some(NumberFormat::F16)),
        (2000, Some(NumberFormat::Q8_0)),
        (1213, Some(NumberFormat::Q4_0)),
    ] {
        let fixture = Fixture::new(rows, wanted);
        let table = fixture.open().unwrap();
        assert_eq!((table.meta().shape.as_slice(), table.meta().bytes), (&[rows, COLS][..], fixture.bytes.len()));
        let row_bytes = table.row_bytes();
        assert!(fixture.table.block_rows * row_bytes <= BLOCK_BYTES);
        // In an order that verifies blocks late and early, and reads rows of verified blocks again.
        for row in (0..rows).map(|i| i * 7919 % rows).chain([0, rows - 1]) {
            let mut got = vec![0; row_bytes];
            table.read_row(row, &mut got).unwrap();
            assert!(got == fixture.bytes[row * row_bytes..][..row_bytes], "{rows} {wanted:?} row {row}");
        }
        let fresh = fixture.open().unwrap();
        for (from, to) in [(0, 1), (row_bytes - 1, row_bytes), (0, fixture.bytes.len()), (5, fixture.bytes.len() - 3)] {
            let mut got = vec![0; to - from];
            fresh.read(from, &mut got).unwrap();
            assert!(got == fixture.bytes[from..to], "{from}..{to}");
        }
        let mut two = vec![0; 2 * row_bytes];
        table.read_rows(&[rows - 1, 0], &mut two).unwrap();
        assert!(two[..row_bytes] == fixture.bytes[(rows - 1) * row_bytes..]);
        assert_eq!(table.read_row(rows, &mut vec![0; row_bytes]).unwrap_err().kind, StoreErrorKind::Missing);
        table.check(&()).unwrap();
    }
}

#[test]
fn a_table_is_a_safetensors_file() {
    let fixture = Fixture::new(171, Some(NumberFormat::Q8_0));
    let bytes = fs::read(fixture.path()).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rows = file.tensor("words.weight").unwrap();
    assert_eq!((rows.shape(), rows.data()), (&[171, 102][..], &fixture.bytes[..]));
    let checksums = file.tensor("_checksums").unwrap();
    assert_eq!((checksums.shape(), checksum_of(checksums.data())), (&[1, 16][..], fixture.table.checksum.clone()));
}

#[test]
fn a_changed_byte_is_found_by_the_rows_of_its_block_and_no_others() {
    let fixture = Fixture::new(1000, None);
    let good = fs::read(fixture.path()).unwrap();
    let (row_bytes, block_rows) = (4 * COLS, fixture.table.block_rows);
    for at in [0, row_bytes * block_rows - 1, row_bytes * block_rows, row_bytes * 999, row_bytes * 1000 - 1] {
        let mut bad = good.clone();
        bad[DATA_START + at] ^= 1;
        fs::write(fixture.path(), bad).unwrap();
        let table = fixture.open().unwrap();
        for row in 0..1000 {
            let same_block = row / block_rows == at / row_bytes / block_rows;
            let read = table.read_row(row, &mut vec![0; row_bytes]);
            assert_eq!(read.is_err(), same_block, "byte {at}, row {row}");
        }
        assert_eq!(table.check(&()).unwrap_err().kind, StoreErrorKind::Mismatch);
    }
    // Header, padding, checksums and length.
    let end = good.len();
    for at in [0, 9, 300, DATA_START - 1, end - 1, end - 16 * fixture.table.blocks()] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(fixture.path(), bad).unwrap();
        assert!(fixture.open().is_err(), "byte {at}");
    }
    for bad in [&good[..end - 1], &good[..100], &[]] {
        fs::write(fixture.path(), bad).unwrap();
        assert_eq!(fixture.open().err().unwrap().kind, StoreErrorKind::Malformed);
    }
    fs::remove_file(fixture.path()).unwrap();
    assert_eq!(fixture.open().err().unwrap().kind, StoreErrorKind::Io);
}

#[test]
fn every_read_of_a_row_is_checked_unless_only_the_first_is() {
    let fixture = Fixture::new(1000, None);
    let table = fixture.open().unwrap();
    let row_bytes = 4 * COLS;
    let read = |row| table.read_row(row, &mut vec![0; row_bytes]);
    read(0).unwrap();
    read(999).unwrap();
    let mut bad = fs::read(fixture.path()).unwrap();
    bad[DATA_START + 3 * row_bytes] ^= 1;
    // In place, as the file is open.
    fs::write(fixture.path(), &bad).unwrap();
    assert!(read(0).unwrap_err().message.contains("rows 0 and following"));
    read(999).unwrap();
    table.set_checks(CheckReads::First);
    read(3).unwrap();
    table.set_checks(CheckReads::All);
    assert_eq!(read(3).unwrap_err().kind, StoreErrorKind::Mismatch);
    bad[DATA_START + 3 * row_bytes] ^= 1;
    fs::write(fixture.path(), bad).unwrap();
    read(3).unwrap();
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_an_error() {
    let fixture = Fixture::new(1000, None);
    let table = fixture.open().unwrap();
    table.read_row(0, &mut vec![0; 4 * COLS]).unwrap();
    fs::OpenOptions::new().write(true).open(fixture.path()).unwrap().set_len(4200).unwrap();
    for row in [0, 1, 999] {
        assert_eq!(table.read_row(row, &mut vec![0; 4 * COLS]).unwrap_err().kind, StoreErrorKind::Malformed);
    }
}

#[test]
fn a_store_gives_its_tables_by_the_name_of_their_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let store = crate::store::Store::open(&crate::testing::small_store(dir.path(), ExpertForm::Halves)).unwrap();
    let meta = store.meta("embed").unwrap().clone();
    let mut whole = vec![0; meta.bytes];
    store.read("embed", 0, &mut whole).unwrap();
    let rows = store.rows("embed").unwrap();
    assert_eq!(*rows.meta(), meta);
    for (row, want) in whole.chunks_exact(meta.bytes / 7).enumerate() {
        let mut got = vec![0; want.len()];
        rows.read_rows(&[row], &mut got).unwrap();
        assert_eq!(got, want);
    }
    assert!(store.rows("head").is_none() && store.row_table("norm").is_none());
}
