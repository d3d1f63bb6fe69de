//! Attention on the device has the bits of attention on the CPU.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use larder_core::NumberFormat;
use larder_cuda::{Emulator, EmulatorFault, Gpu};
use larder_kernels::{AttentionArgs, KvTensor, ThreadPool, attend, narrow};
use larder_model::{DeviceAttention, DeviceKvShape, DeviceKvView};

use crate::common::{Random, emulator, gpu};

/// The same KV rows in main memory and on a device.
struct Rows {
    form: DeviceKvShape,
    data: Vec<u8>,
    number: usize,
}

impl Rows {
    fn new(device: &dyn DeviceAttention, kind: NumberFormat, heads: usize, room: usize, width: usize) -> Self {
        let form = DeviceKvShape { kind, heads, capacity: room, row_bytes: width * kind.block_bytes() };
        Rows { form, data: vec![0; form.bytes()], number: device.allocate(form).unwrap() }
    }

    /// Appends random rows from position `at` on, in both places.
    fn append(&mut self, device: &dyn DeviceAttention, random: &mut Random, at: usize, count: usize) {
        let DeviceKvShape { kind, heads, capacity: room, row_bytes: row } = self.form;
        let mut bytes = vec![0; count * heads * row];
        narrow(kind, &random.floats(bytes.len() / kind.block_bytes()), &mut bytes);
        device.append(self.number, at, &bytes).unwrap();
        for (i, row_bytes) in bytes.chunks_exact(row).enumerate() {
            let (token, head) = (i / heads, i % heads);
            self.data[(head * room + at + token) * row..][..row].copy_from_slice(row_bytes);
        }
    }

    fn on_host(&self, width: usize) -> KvTensor<'_> {
        let DeviceKvShape { kind, capacity: room, row_bytes: row, .. } = self.form;
        KvTensor { kind, data: &self.data, head_stride: room * row, row_stride: row, width }
    }

    fn on_device(&self, width: usize) -> DeviceKvView {
        DeviceKvView { block: self.number, width }
    }
}

/// The shape of an attention.
struct Shape {
    heads: usize,
    kv_heads: usize,
    key: usize,
    value: usize,
    /// Values are a part of the keys, as in latent attention.
    latent: bool,
    sinks: bool,
    kind: NumberFormat,
}

/// The output bits of the CPU and of the device.
fn both(
    device: &dyn DeviceAttention,
    random: &mut Random,
    shape: &Shape,
    rows: [&Rows; 2],
    seen: &[Range<usize>],
) -> [Vec<u32>; 2] {
    let Shape { heads, kv_heads, key, value, .. } = *shape;
    let (queries, sinks) = (random.floats(seen.len() * heads * key), random.floats(heads));
    let args = AttentionArgs {
        queries: &queries,
        heads,
        keys: rows[0].on_host(key),
        values: rows[1].on_host(value),
        kv_heads,
        seen,
        scale: 0.37,
        sinks: shape.sinks.then_some(&sinks[..]),
    };
    let (mut wanted, mut found) = (vec![0.0; seen.len() * heads * value], vec![f32::NAN; seen.len() * heads * value]);
    attend(&ThreadPool::new(1, false).unwrap(), &args, &mut wanted);
    device.attend(&args.with_kv(rows[0].on_device(key), rows[1].on_device(value)), &mut found).unwrap();
    [wanted, found].map(|all| all.into_iter().map(f32::to_bits).collect())
}

const fn shape(heads: usize, kv_heads: usize, key: usize, value: usize) -> Shape {
    Shape { heads, kv_heads, key, value, latent: false, sinks: false, kind: NumberFormat::F32 }
}

/// Compares attention of all shapes over growing sequences.
pub fn compare(gpu: &Gpu) {
    let device = gpu.attention().unwrap();
    let mut random = Random::new(5);
    let shapes = [
        shape(8, 2, 32, 32),
        Shape { sinks: true, ..shape(6, 3, 40, 40) },
        Shape { latent: true, ..shape(5, 1, 72, 64) },
        Shape { latent: true, sinks: true, ..shape(9, 1, 24, 17) },
        shape(3, 3, 7, 7),
        Shape { sinks: true, ..shape(1, 1, 1, 70) },
    ];
    for shape in shapes.into_iter().flat_map(|s| [NumberFormat::F32, NumberFormat::F16].map(|kind| Shape { kind, ..s }))
    {
        let Shape { kv_heads, key, value, latent, kind, .. } = shape;
        let mut keys = Rows::new(&device, kind, kv_heads, 150, key);
        let mut values = Rows::new(&device, kind, kv_heads, 140, value);
        let mut len = 0;
        for (step, count) in [1, 5, 1, 33, 1, 1, 60, 7, 1].into_iter().enumerate() {
            keys.append(&device, &mut random, len, count);
            values.append(&device, &mut random, len, count);
            let first = |at: usize| match step % 3 {
                0 => 0,
                1 => at.saturating_sub(4),
                _ => at / 16 * 16,
            };
            let seen: Vec<Range<usize>> = (len..len + count).map(|at| first(at)..at + 1).collect();
            len += count;
            let rows = [&keys, if latent { &keys } else { &values }];
            let [wanted, found] = both(&device, &mut random, &shape, rows, &seen);
            assert!(
                wanted == found,
                "{kind}, {kv_heads} heads of {key} and {value}, {count} more than {}",
                len - count
            );
        }
        [keys, values].iter().for_each(|rows| device.free(rows.number));
    }
}

#[test]
fn all_shapes_give_the_same_bits_as_they_grow() {
    for seed in 1..3 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

#[test]
fn many_queries_over_many_positions_are_split_into_launches() {
    let Some(emulator) = emulator(4) else { return };
    let emulator = Arc::new(emulator);
    let gpu = Gpu::with_driver(emulator.clone()).unwrap();
    let device = gpu.attention().unwrap();
    let (mut random, shape) = (Random::new(4), Shape { kind: NumberFormat::F16, ..shape(4, 2, 4, 4) });
    const ROOM: usize = 40_000;
    let [mut keys, mut values] = [0; 2].map(|_| Rows::new(&device, NumberFormat::F16, 2, ROOM, 4));
    keys.append(&device, &mut random, 0, ROOM);
    values.append(&device, &mut random, 0, ROOM);
    // Two queries see nearly all positions, and every query takes as much memory for scores: 41 MB.
    let seen: Vec<Range<usize>> = (0..64).map(|i| if i % 63 == 0 { i..ROOM } else { 9 * i..10 * i }).collect();
    let before = emulator.launches();
    let [wanted, found] = both(&device, &mut random, &shape, [&keys, &values], &seen);
    assert!(wanted == found);
    assert_eq!(emulator.launches() - before, 2 + 3 * 3, "a copy in, a copy out, and three groups of three kernels");
    let (allocated, _) = emulator.allocated_bytes();
    assert!(allocated < 25 << 20, "{allocated} bytes");
}

#[test]
fn kv_rows_can_be_copied_to_a_larger_block() {
    let Some(emulator) = emulator(6) else { return };
    let gpu = gpu(emulator);
    let device = gpu.attention().unwrap();
    let (mut random, shape) = (Random::new(6), shape(6, 3, 8, 8));
    let mut old = Rows::new(&device, NumberFormat::F32, 3, 10, 8);
    old.append(&device, &mut random, 0, 10);
    let mut new = Rows::new(&device, NumberFormat::F32, 3, 25, 8);
    device.copy(old.number, new.number, 7).unwrap();
    for head in 0..3 {
        let (from, to) = (head * 10 * 32, head * 25 * 32);
        new.data[to..][..7 * 32].copy_from_slice(&old.data[from..][..7 * 32]);
    }
    // The old block grows independently of the new one.
    old.append(&device, &mut random, 3, 4);
    new.append(&device, &mut random, 7, 18);
    for (rows, len) in [(&old, 10), (&new, 25)] {
        let [wanted, found] = both(&device, &mut random, &shape, [rows, rows], &[0..len, len - 1..len]);
        assert!(wanted == found, "{len}");
    }
    let message = device.copy(new.number, old.number, 11).unwrap_err().to_string();
    assert_eq!(message, "cannot copy 11 of 25 rows in f32 to a KV block of 10 rows in f32");
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let Some(emulator) = emulator(7) else { return };
    let gpu = gpu(emulator);
    let device = gpu.attention().unwrap();
    let mut random = Random::new(7);
    let mut rows = Rows::new(&device, NumberFormat::F32, 2, 10, 4);
    rows.append(&device, &mut random, 0, 10);
    let attend = |number, heads, width, queries: usize, seen: Range<usize>, out: usize, sinks: Option<&[f32]>| {
        let (queries, table) = (vec![0.0; queries], DeviceKvView { block: number, width });
        let (keys, values, seen) = (table, table, &[seen][..]);
        let args = AttentionArgs { queries: &queries, heads, keys, values, kv_heads: 2, seen, scale: 1.0, sinks };
        device.attend(&args, &mut vec![0.0; out])
    };
    let number = rows.number;
    attend(number, 4, 4, 16, 0..10, 16, Some(&[0.0; 4])).unwrap();
    for wrong in [
        attend(number, 3, 4, 12, 0..10, 12, None),
        attend(number, 4, 5, 20, 0..10, 20, None),
        attend(number, 4, 0, 0, 0..10, 0, None),
        attend(number, 4, 4, 15, 0..10, 16, None),
        attend(number, 4, 4, 16, 0..11, 16, None),
        attend(number, 4, 4, 16, 4..4, 16, None),
        attend(number, 4, 4, 16, 0..10, 15, None),
        attend(number, 4, 4, 16, 0..10, 16, Some(&[0.0; 3])),
    ] {
        let message = wrong.unwrap_err().to_string();
        assert!(message.starts_with("attention of 1 queries with ") && message.contains("does not fit"), "{message}");
    }
    let said = attend(99, 4, 4, 16, 0..10, 16, None).unwrap_err().to_string();
    assert_eq!(said, "the GPU has no KV block 99");
    let said = device.append(number, 9, &[0; 64]).unwrap_err().to_string();
    assert_eq!(said, "cannot append 64 bytes at position 9: rows are 2 x 16 bytes, with room for 10");
    assert!(device.append(number, 0, &[0; 33]).is_err());
    let form = DeviceKvShape { kind: NumberFormat::Q8_0, heads: 1, capacity: 1, row_bytes: 34 };
    assert_eq!(
        device.allocate(form).unwrap_err().to_string(),
        "the GPU cannot keep a KV cache in q8_0 with 1 heads of 34 bytes per row"
    );
    let said = device
        .allocate(DeviceKvShape { kind: NumberFormat::F32, heads: 1, capacity: 65 << 20, row_bytes: 4 })
        .unwrap_err();
    assert!(said.to_string().starts_with("cannot allocate 272629760 bytes of device memory: 6"), "{said}");
}

/// Appends and attends until an operation fails; checks all results before that.
fn until_it_fails(emulator: &Arc<Emulator>, seed: u64) -> Result<(), String> {
    let gpu = Gpu::with_driver(emulator.clone()).map_err(|e| e.to_string())?;
    let (mut random, device) = (Random::new(seed), gpu.attention().map_err(|e| e.to_string())?);
    let form = DeviceKvShape { kind: NumberFormat::F16, heads: 1, capacity: 64, row_bytes: 16 };
    let number = device.allocate(form).map_err(|e| e.to_string())?;
    let (queries, mut data, mut out) = (random.floats(16), vec![0; form.bytes()], vec![0.0; 16]);
    for at in 0..8 {
        narrow(NumberFormat::F16, &random.floats(8), &mut data[at * 16..][..16]);
        device.append(number, at, &data[at * 16..][..16]).map_err(|e| e.to_string())?;
        let table =
            KvTensor { kind: NumberFormat::F16, data: &data, head_stride: data.len(), row_stride: 16, width: 8 };
        let (seen, sinks) = (0..at + 1, None);
        let seen = slice::from_ref(&seen);
        let args = AttentionArgs {
            queries: &queries,
            heads: 2,
            keys: table,
            values: table,
            kv_heads: 1,
            seen,
            scale: 1.0,
            sinks,
        };
        let there = DeviceKvView { block: number, width: 8 };
        device.attend(&args.with_kv(there, there), &mut out).map_err(|e| e.to_string())?;
        let mut wanted = vec![0.0; 16];
        attend(&ThreadPool::new(1, false).unwrap(), &args, &mut wanted);
        assert_eq!(out, wanted, "seed {seed}");
    }
    Ok(())
}

#[test]
fn a_failure_is_an_error_and_leaks_no_memory() {
    // Copies as short as these are made by kernels.
    for fault in [EmulatorFault::Launch, EmulatorFault::Allocate] {
        let mut failed = 0;
        for seed in 0..20 {
            let Some(emulator) = emulator(seed) else { return };
            let emulator = Arc::new(emulator.with_fault(fault, 12));
            let result = until_it_fails(&emulator, seed);
            failed += usize::from(result.is_err());
            assert_eq!(emulator.allocated_bytes(), (0, 0), "{fault:?}, seed {seed}");
        }
        assert!(failed > 3, "{fault:?}: {failed} of 20 failed");
    }
}
