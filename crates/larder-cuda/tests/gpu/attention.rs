//! Attention on the device has the bits of attention on the CPU.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use larder_core::NumberFormat;
use larder_cuda::{Emulator, EmulatorFault, Gpu, GpuAttention};
use larder_kernels::{AttentionArgs, AttentionTask, KvTensor, ThreadPool, attend, narrow, quantise_row, widen};
use larder_model::{DeviceAttention, KvPageShape, KvView, Place};

use crate::common::{Random, emulator, gpu};

/// Positions per page.
const PAGE: usize = 16;

/// The same KV rows in main memory and on a device.
pub struct KvCase {
    form: KvPageShape,
    pages: Vec<Vec<u8>>,
    ids: Vec<usize>,
    len: usize,
}

impl KvCase {
    pub fn new(kind: NumberFormat, heads: usize, width: usize) -> Self {
        let form = KvPageShape {
            kind,
            heads,
            positions: PAGE,
            row_bytes: width.div_ceil(kind.block_len()) * kind.block_bytes(),
        };
        KvCase { form, pages: Vec::new(), ids: Vec::new(), len: 0 }
    }

    /// Appends random rows in both places.
    pub fn append(&mut self, device: &dyn DeviceAttention, random: &mut Random, mut count: usize) {
        let KvPageShape { kind, heads, row_bytes: row, .. } = self.form;
        while count > 0 {
            let at = self.len % PAGE;
            if at == 0 {
                self.pages.push(vec![0; self.form.bytes()]);
                self.ids.push(device.allocate(self.form).unwrap());
            }
            let now = count.min(PAGE - at);
            let mut bytes = vec![0; now * heads * row];
            for out in bytes.chunks_exact_mut(row) {
                let values = random.floats(self.form.row_values());
                match kind {
                    NumberFormat::Q8_0 => quantise_row(&values, out),
                    kind => narrow(kind, &values, out),
                }
            }
            device.append(*self.ids.last().unwrap(), at, &bytes).unwrap();
            for (i, row_bytes) in bytes.chunks_exact(row).enumerate() {
                let (token, head) = (i / heads, i % heads);
                self.pages.last_mut().unwrap()[(head * PAGE + at + token) * row..][..row].copy_from_slice(row_bytes);
            }
            self.len += now;
            count -= now;
        }
    }

    /// The values of a row.
    pub fn values(&self, head: usize, at: usize) -> Vec<f32> {
        let row = self.form.row_bytes;
        let mut values = vec![0.0; self.form.row_values()];
        let bytes = &self.pages[at / PAGE][(head * PAGE + at % PAGE) * row..][..row];
        widen(self.form.kind, bytes, &mut values);
        values
    }

    fn on_host(&self, width: usize) -> KvTensor<'_> {
        let KvPageShape { kind, positions, row_bytes, .. } = self.form;
        KvTensor { kind, pages: &self.pages, page_len: positions, row_bytes, width }
    }

    /// Without the pages that have no position from `from` on.
    fn on_device(&self, width: usize, from: usize) -> KvView {
        let first_page = from / PAGE;
        KvView { place: Place::Device, first_page, pages: self.ids[first_page..].to_vec().into(), width }
    }

    pub fn free(&self, device: &dyn DeviceAttention) {
        self.ids.iter().for_each(|id| device.free(*id));
    }
}

/// The shape of an attention.
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub key: usize,
    pub value: usize,
    /// Values are a part of the keys, as in latent attention.
    pub latent: bool,
    pub sinks: bool,
    pub kind: NumberFormat,
}

/// Queries of one sequence.
pub struct Queries {
    pub queries: Vec<f32>,
    pub sinks: Vec<f32>,
    pub seen: Vec<Range<usize>>,
}

impl Queries {
    pub fn new(random: &mut Random, shape: &Shape, seen: Vec<Range<usize>>) -> Self {
        let (queries, sinks) = (random.floats(seen.len() * shape.heads * shape.key), random.floats(shape.heads));
        Queries { queries, sinks, seen }
    }

    fn args<T>(&self, shape: &Shape, [keys, values]: [T; 2]) -> AttentionArgs<'_, T> {
        let Queries { queries, sinks, seen } = self;
        let Shape { heads, kv_heads, .. } = *shape;
        let sinks = shape.sinks.then_some(&sinks[..]);
        AttentionArgs { queries, heads, keys, values, kv_heads, seen, scale: 0.37, sinks, bias: None }
    }

    fn outputs(&self, shape: &Shape) -> Vec<f32> {
        vec![f32::NAN; self.seen.len() * shape.heads * shape.value]
    }
}

/// The output bits of the CPU and of the device for a batch of sequences.
pub fn both(device: &GpuAttention, shape: &Shape, batch: &[(Queries, [&KvCase; 2])]) -> [Vec<u32>; 2] {
    let Shape { key, value, .. } = *shape;
    let outs = || batch.iter().map(|(queries, _)| queries.outputs(shape)).collect::<Vec<_>>();
    let (mut wanted, mut found) = (outs(), outs());
    for ((queries, [keys, values]), out) in batch.iter().zip(&mut wanted) {
        let args = queries.args(shape, [keys.on_host(key), values.on_host(value)]);
        attend(&ThreadPool::new(1, false).unwrap(), &mut [AttentionTask { args, out }]);
    }
    let tasks = batch.iter().zip(&mut found).map(|((queries, [keys, values]), out)| {
        let from = queries.seen.iter().map(|seen| seen.start).min().unwrap_or(0);
        let args = queries.args(shape, [keys.on_device(key, from), values.on_device(value, from)]);
        AttentionTask { args, out }
    });
    device.attend(&mut tasks.collect::<Vec<_>>()).unwrap();
    [wanted, found].map(|all| all.into_iter().flatten().map(f32::to_bits).collect())
}

pub const fn shape(heads: usize, kv_heads: usize, key: usize, value: usize) -> Shape {
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
    let kinds = [NumberFormat::F32, NumberFormat::F16, NumberFormat::Q8_0];
    for shape in shapes.into_iter().flat_map(|shape| kinds.map(|kind| Shape { kind, ..shape })) {
        let Shape { kv_heads, key, value, latent, kind, .. } = shape;
        let mut sequences = [0; 2].map(|_| [key, value].map(|width| KvCase::new(kind, kv_heads, width)));
        // The last steps cross from one position tile into the next, with all, with few and with 16 positions in sight.
        for (step, count) in [1, 5, 1, 33, 1, 1, 60, 7, 401, 1, 6, 1, 2].into_iter().enumerate() {
            let first = |at: usize| match step % 3 {
                0 => 0,
                1 => at.saturating_sub(4),
                _ => at / 16 * 16,
            };
            let mut batch = Vec::new();
            for (rows, count) in sequences.iter_mut().zip([count, 60 / count]) {
                let len = rows[0].len;
                rows.iter_mut().for_each(|rows| rows.append(&device, &mut random, count));
                let seen = (len..len + count).map(|at| first(at)..at + 1).collect();
                batch.push((Queries::new(&mut random, &shape, seen), [&rows[0], &rows[usize::from(!latent)]]));
            }
            let [wanted, found] = both(&device, &shape, &batch);
            assert!(wanted == found, "{kind}, {kv_heads} heads of {key} and {value}, step {step}");
        }
        sequences.iter().flatten().for_each(|rows| rows.free(&device));
    }
}

#[test]
fn all_shapes_give_the_same_bits_as_they_grow() {
    for seed in 1..3 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

/// A few queries see many positions, whose tiles are launched apart.
pub fn compare_few_queries(gpu: &Gpu) {
    let device = gpu.attention().unwrap();
    let mut random = Random::new(8);
    let kinds = [NumberFormat::F32, NumberFormat::F16, NumberFormat::Q8_0];
    let shapes = [shape(8, 2, 32, 64), Shape { latent: true, sinks: true, ..shape(5, 1, 72, 40) }];
    for shape in shapes.into_iter().flat_map(|shape| kinds.map(|kind| Shape { kind, ..shape })) {
        let Shape { kv_heads, key, value, latent, kind, .. } = shape;
        let mut rows = [key, value].map(|width| KvCase::new(kind, kv_heads, width));
        rows.iter_mut().for_each(|rows| rows.append(&device, &mut random, 2100));
        // All see all, then none from the start, then of different position tiles.
        let whole = Vec::from([0..1537, 0..2100]);
        let from_within = Vec::from([700..2100, 1000..1024]);
        let mixed = Vec::from([0..513, 300..2048, 2048..2100, 511..512]);
        for seen in [whole, from_within, mixed] {
            let queries = Queries::new(&mut random, &shape, seen);
            let views = [&rows[0], &rows[usize::from(!latent)]];
            let [wanted, found] = both(&device, &shape, &[(queries, views)]);
            assert!(wanted == found, "{kind}, {key} and {value}");
        }
        rows.iter().for_each(|rows| rows.free(&device));
    }
}

#[test]
fn few_queries_over_many_positions_give_the_same_bits() {
    let Some(emulator) = emulator(2) else { return };
    let emulator = Arc::new(emulator);
    let gpu = Gpu::with_driver(emulator.clone()).unwrap();
    let before = emulator.launches();
    compare_few_queries(&gpu);
    assert!(emulator.launches() - before >= 6 * 3 * 3, "three launches for each attention");
}

#[test]
fn sequences_are_attended_to_together() {
    let Some(emulator) = emulator(3) else { return };
    let emulator = Arc::new(emulator);
    let gpu = Gpu::with_driver(emulator.clone()).unwrap();
    let device = gpu.attention().unwrap();
    let (mut random, shape) = (Random::new(9), Shape { kind: NumberFormat::F16, ..shape(8, 2, 32, 64) });
    let lens = [1, 17, 600, 33, 64, 9];
    let rows = lens.map(|len| {
        let mut rows = [32, 64].map(|width| KvCase::new(NumberFormat::F16, 2, width));
        rows.iter_mut().for_each(|rows| rows.append(&device, &mut random, len));
        rows
    });
    let mut batch = |count: usize| {
        let queries = |len: usize| {
            let seen = (len.saturating_sub(count)..len).map(|at| 0..at + 1).collect();
            Queries::new(&mut random, &shape, seen)
        };
        let all = lens.map(queries).into_iter().zip(&rows).map(|(queries, rows)| (queries, rows.each_ref()));
        all.collect::<Vec<_>>()
    };
    for count in [1, 3] {
        let batch = batch(count);
        // Launches what was collected so far.
        both(&device, &shape, &batch[..1]);
        let before = emulator.launches();
        let [wanted, found] = both(&device, &shape, &batch);
        assert!(wanted == found);
        assert_eq!(emulator.launches() - before, 2 + 3, "a copy in, a copy out, and three kernels");
    }
}

#[test]
fn many_queries_over_many_positions_are_split_into_launches() {
    let Some(emulator) = emulator(4) else { return };
    let emulator = Arc::new(emulator);
    let gpu = Gpu::with_driver(emulator.clone()).unwrap();
    let device = gpu.attention().unwrap();
    let (mut random, shape) = (Random::new(4), Shape { kind: NumberFormat::F16, ..shape(4, 2, 4, 4) });
    const LEN: usize = 40_000;
    let [mut keys, mut values] = [0; 2].map(|_| KvCase::new(NumberFormat::F16, 2, 4));
    keys.append(&device, &mut random, LEN);
    values.append(&device, &mut random, LEN);
    // Two queries see nearly all positions, and every query takes as much memory for scores: 41 MB.
    let seen = (0..64).map(|i| if i % 63 == 0 { i..LEN } else { 9 * i..10 * i }).collect();
    // Launches what was collected so far.
    both(&device, &shape, &[(Queries::new(&mut random, &shape, std::iter::once(0..1).collect()), [&keys, &values])]);
    let before = emulator.launches();
    let queries = Queries::new(&mut random, &shape, seen);
    let [wanted, found] = both(&device, &shape, &[(queries, [&keys, &values])]);
    assert!(wanted == found);
    assert_eq!(emulator.launches() - before, 2 + 3 * 3, "a copy in, a copy out, and three groups of three kernels");
    let (allocated, _) = emulator.allocated_bytes();
    assert!(allocated < 25 << 20, "{allocated} bytes");
}

#[test]
fn kv_rows_can_be_copied_to_another_page() {
    let Some(emulator) = emulator(6) else { return };
    let gpu = gpu(emulator);
    let device = gpu.attention().unwrap();
    let (mut random, shape) = (Random::new(6), shape(6, 3, 8, 8));
    let mut old = KvCase::new(NumberFormat::F32, 3, 8);
    old.append(&device, &mut random, PAGE + 10);
    let copy = device.allocate(old.form).unwrap();
    device.copy(old.ids[1], copy, 7).unwrap();
    let mut new = KvCase { form: old.form, pages: old.pages.clone(), ids: vec![old.ids[0], copy], len: PAGE + 7 };
    // The copied page is filled independently of the new one.
    old.append(&device, &mut random, 4);
    new.append(&device, &mut random, 18);
    for rows in [&old, &new] {
        let queries = Queries::new(&mut random, &shape, vec![0..rows.len, rows.len - 1..rows.len]);
        let [wanted, found] = both(&device, &shape, &[(queries, [rows, rows])]);
        assert!(wanted == found, "{}", rows.len);
    }
    let other = device.allocate(KvPageShape { heads: 2, ..old.form }).unwrap();
    for wrong in [device.copy(copy, old.ids[0], PAGE + 1), device.copy(copy, other, 1)] {
        let message = wrong.unwrap_err().to_string();
        assert!(message.starts_with("cannot copy ") && message.contains("rows from a KV page"), "{message}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let Some(emulator) = emulator(7) else { return };
    let gpu = gpu(emulator);
    let device = gpu.attention().unwrap();
    let mut random = Random::new(7);
    let mut rows = KvCase::new(NumberFormat::F32, 2, 4);
    rows.append(&device, &mut random, 10);
    let attend = |number, heads, width, queries: usize, seen: Range<usize>, out: usize, sinks: Option<&[f32]>| {
        let table = KvView { place: Place::Device, first_page: 0, pages: vec![number].into(), width };
        let (queries, keys, values, seen) = (vec![0.0; queries], table.clone(), table, &[seen][..]);
        let args =
            AttentionArgs { queries: &queries, heads, keys, values, kv_heads: 2, seen, scale: 1.0, sinks, bias: None };
        device.attend(&mut [AttentionTask { args, out: &mut vec![0.0; out] }])
    };
    let number = rows.ids[0];
    attend(number, 4, 4, 16, 0..10, 16, Some(&[0.0; 4])).unwrap();
    for wrong in [
        attend(number, 3, 4, 12, 0..10, 12, None),
        attend(number, 4, 5, 20, 0..10, 20, None),
        attend(number, 4, 0, 0, 0..10, 0, None),
        attend(number, 4, 4, 15, 0..10, 16, None),
        attend(number, 4, 4, 16, 0..17, 16, None),
        attend(number, 4, 4, 16, 4..4, 16, None),
        attend(number, 4, 4, 16, 0..10, 15, None),
        attend(number, 4, 4, 16, 0..10, 16, Some(&[0.0; 3])),
    ] {
        let message = wrong.unwrap_err().to_string();
        assert!(message.starts_with("attention of 1 queries with ") && message.contains("does not fit"), "{message}");
    }
    let said = attend(99, 4, 4, 16, 0..10, 16, None).unwrap_err().to_string();
    assert_eq!(said, "the GPU has no KV page 99");
    let said = device.append(number, 15, &[0; 64]).unwrap_err().to_string();
    assert_eq!(said, "cannot append 64 bytes at row 15: rows are 2 x 16 bytes, with room for 16");
    assert!(device.append(number, 0, &[0; 33]).is_err());
    let form = KvPageShape { kind: NumberFormat::Q4_0, heads: 1, positions: 16, row_bytes: 18 };
    let refused = |form| device.allocate(form).unwrap_err().to_string();
    let text = "the GPU cannot keep a KV cache in q4_0 with 1 heads of 18 bytes per row and 16 positions per page";
    assert_eq!(refused(form), text);
    let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 64 << 20, row_bytes: 4 };
    assert!(refused(KvPageShape { positions: 24, ..form }).ends_with("24 positions per page"));
    assert!(refused(form).starts_with("cannot allocate 268435456 bytes of device memory: 6"), "{}", refused(form));
}

/// Appends and attends until an operation fails; checks all results before that.
fn until_it_fails(emulator: &Arc<Emulator>, seed: u64) -> Result<(), String> {
    let gpu = Gpu::with_driver(emulator.clone()).map_err(|e| e.to_string())?;
    let (mut random, device) = (Random::new(seed), gpu.attention().map_err(|e| e.to_string())?);
    let form = KvPageShape { kind: NumberFormat::F16, heads: 1, positions: 64, row_bytes: 16 };
    let number = device.allocate(form).map_err(|e| e.to_string())?;
    let (queries, mut pages, mut out) = (random.floats(16), vec![vec![0; form.bytes()]], vec![0.0; 16]);
    for at in 0..8 {
        let row = &mut pages[0][at * 16..][..16];
        narrow(NumberFormat::F16, &random.floats(8), row);
        device.append(number, at, row).map_err(|e| e.to_string())?;
        let table = KvTensor { kind: NumberFormat::F16, pages: &pages, page_len: 64, row_bytes: 16, width: 8 };
        let (seen, sinks) = (0..at + 1, None);
        let seen = slice::from_ref(&seen);
        let (keys, values) = (table, table);
        let args = AttentionArgs {
            queries: &queries,
            heads: 2,
            keys,
            values,
            kv_heads: 1,
            seen,
            scale: 1.0,
            sinks,
            bias: None,
        };
        let there = KvView { place: Place::Device, first_page: 0, pages: vec![number].into(), width: 8 };
        let task = AttentionTask { args: args.with_kv(there.clone(), there), out: &mut out };
        device.attend(&mut [task]).map_err(|e| e.to_string())?;
        let mut wanted = vec![0.0; 16];
        attend(&ThreadPool::new(1, false).unwrap(), &mut [AttentionTask { args, out: &mut wanted }]);
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
