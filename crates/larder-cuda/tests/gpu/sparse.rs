//! The choice of rows by an indexer on the device, and attention to them.

use std::ops::Range;
use std::sync::Arc;

use larder_core::NumberFormat;
use larder_cuda::Gpu;
use larder_kernels::AttentionArgs;
use larder_model::{
    ChoiceOps, DeviceAttention, FakeAttention, FakeOps, FakeProducts, IndexBlocks, IndexChoice, KvPageShape, KvView,
    Ops, Place, SeenRows,
};

use crate::common::{Random, emulator, gpu, receive_bits};

const PAGE: usize = 16;

/// An indexer, and the attention to what it chooses.
struct Shape {
    kind: NumberFormat,
    blocks: IndexBlocks,
    count: usize,
    parts: usize,
    heads: usize,
    width: usize,
    weighted: bool,
    /// Heads of queries and of keys, and widths of keys and values; values are the first numbers of keys if there are
    /// none.
    attention: [usize; 4],
    /// Tokens of each sequence, and how many of them are new.
    sequences: &'static [(usize, usize)],
}

/// A device or its fake, with the rows of all sequences.
struct KvCase {
    index: Vec<KvView>,
    keys: Vec<KvView>,
    values: Vec<KvView>,
}

impl Shape {
    /// KvCase of an indexer of a sequence.
    fn index_rows(&self, tokens: usize) -> usize {
        match self.blocks {
            IndexBlocks::OfPositions(block) => tokens / block,
            IndexBlocks::OfRows { .. } => tokens,
        }
    }

    /// Pages of random rows, few of which differ in their first numbers, so that scores are equal.
    fn pages(
        &self,
        attention: &dyn DeviceAttention,
        (heads, width): (usize, usize),
        count: usize,
        random: &mut Random,
    ) -> KvView {
        let (kind, positions) = (self.kind, PAGE);
        let row_bytes = width.div_ceil(kind.block_len()) * kind.block_bytes();
        let mut pages = Vec::new();
        for start in (0..count).step_by(PAGE) {
            let page = attention.allocate(KvPageShape { kind, heads, positions, row_bytes }).unwrap();
            for at in 0..PAGE.min(count - start) {
                let mut bytes = vec![0; heads * row_bytes];
                bytes.chunks_exact_mut(row_bytes).for_each(|row| {
                    let mut values: Vec<f32> = random.floats(width);
                    if random.below(3) > 0 {
                        values = Random::new(random.below(4) as u64).floats(width);
                    }
                    match kind {
                        NumberFormat::Q8_0 => larder_kernels::quantise_row(&values, row),
                        kind => larder_kernels::narrow(kind, &values, row),
                    }
                });
                attention.append(page, at, &bytes).unwrap();
            }
            pages.push(page);
        }
        KvView { place: Place::Device, first_page: 0, pages: pages.into(), width }
    }

    fn rows(&self, attention: &dyn DeviceAttention) -> KvCase {
        let (mut random, [_, kv_heads, key, value]) = (Random::new(4), self.attention);
        let mut of = |shape, rows: fn(&Self, usize) -> usize| -> Vec<KvView> {
            let each = self.sequences.iter().map(|(tokens, _)| rows(self, *tokens));
            each.map(|count| self.pages(attention, shape, count, &mut random)).collect()
        };
        let index = of((1, self.width), Shape::index_rows);
        let keys = of((kv_heads, key), |_, tokens| tokens);
        let values = of((kv_heads, value), |_, tokens| tokens);
        KvCase { index, keys, values }
    }

    /// The lists of the new tokens, and their attention: to the rows of the lists, and to all that they see.
    fn step(&self, ops: &dyn Ops, rows: &KvCase) -> (Vec<Vec<u32>>, Vec<u32>) {
        let [heads, kv_heads, key_width, _] = self.attention;
        let new = self.sequences.iter().flat_map(|(tokens, new)| tokens - new..*tokens);
        let positions: Vec<usize> = new.map(|at| at + 1).collect();
        let (tokens, mut random) = (positions.len(), Random::new(9));
        let seen = positions.iter().map(|at| SeenRows { rows: self.index_rows(*at), positions: *at });
        let seen: Vec<SeenRows> = seen.flat_map(|seen| std::iter::repeat_n(seen, self.parts)).collect();
        let mut send = |width: usize| ops.send(&random.floats(tokens * width), width).unwrap();
        let index = IndexChoice {
            queries: send(self.parts * self.heads * self.width),
            weights: self.weighted.then(|| send(self.parts * self.heads)),
            parts: self.parts,
            heads: self.heads,
            scale: 0.3,
            rectified: self.weighted,
            count: self.count,
            blocks: self.blocks,
            seen: &seen,
        };
        let of_sequences = rows.index.iter().zip(self.sequences);
        let index_rows: Vec<_> = of_sequences.map(|(view, (_, new))| (view.clone(), new * self.parts)).collect();
        ops.choose_rows(&index, &index_rows).unwrap();
        let lengths: Vec<usize> = seen.iter().map(|seen| index.chosen(*seen)).collect();
        let lists = ops.receive_choice(&lengths).unwrap();
        let (queries, sinks) = (send(heads * key_width), Random::new(3).floats(heads));
        let visible: Vec<_> = positions.iter().map(|at| 0..*at).collect();
        let mut rest = &visible[..];
        let tasks: Vec<AttentionArgs<KvView>> = (self.sequences.iter().enumerate())
            .map(|(i, (_, new))| AttentionArgs {
                queries: &[],
                heads,
                keys: rows.keys[i].clone(),
                values: rows.values[i].clone(),
                kv_heads,
                seen: rest.split_off(..*new).unwrap(),
                scale: 0.2,
                sinks: Some(&sinks),
                bias: None,
            })
            .collect();
        let tasks: Vec<_> = tasks.iter().collect();
        let [chosen] = receive_bits(ops, [ops.attend_chosen(queries, &tasks, &lengths).unwrap()]);
        let [all] = receive_bits(ops, [ops.attend_all(queries, &tasks, None).unwrap()]);
        assert!(chosen != all);
        (lists, [chosen, all].concat())
    }

    /// The attention of the new tokens to the first rows of the pages of their sequence, to some or to many of them,
    /// and to a window behind these pages.
    fn step_joined(&self, ops: &dyn Ops, rows: &KvCase) -> Vec<u32> {
        let [heads, kv_heads, key_width, _] = self.attention;
        let (mut tasks, mut lists, sinks) = (Vec::new(), Vec::new(), Random::new(3).floats(heads));
        let windows: Vec<Vec<Range<usize>>> = (self.sequences.iter().enumerate())
            .map(|(i, (tokens, new))| {
                let first = rows.keys[i].pages.len() / 2 * PAGE;
                let window = |at: usize| at.saturating_sub(6).max(first)..at;
                let some =
                    |at: usize| (0..first as u32).filter(|row| !(row * 7 + at as u32).is_multiple_of(3)).collect();
                let new = tokens + 1 - new..=*tokens;
                lists.extend(new.clone().map(some));
                new.map(window).collect()
            })
            .collect();
        for (i, seen) in windows.iter().enumerate() {
            let (keys, values) = (rows.keys[i].clone(), rows.values[i].clone());
            let (scale, sinks) = (0.2, Some(&sinks[..]));
            tasks.push(AttentionArgs { queries: &[], heads, keys, values, kv_heads, seen, scale, sinks, bias: None });
        }
        let (tasks, tokens): (Vec<_>, usize) = (tasks.iter().collect(), lists.len());
        let all = Random::new(8).floats(tokens * heads * key_width);
        let lists: Vec<&[u32]> = lists.iter().map(Vec::as_slice).collect();
        let counts: Vec<usize> = lists.iter().map(|list| list.len()).collect();
        assert!(counts.contains(&0) && counts.iter().any(|count| *count > 9));
        ops.send_choice(&lists, 2 * PAGE).unwrap();
        let values = [true, false].map(|listed| {
            let queries = ops.send(&all, heads * key_width).unwrap();
            let [values] = receive_bits(ops, [ops.attend_joined(queries, &tasks, &counts, listed).unwrap()]);
            values
        });
        assert!(values[0] != values[1]);
        values.concat()
    }
}

/// Chooses and attends on the device and on its fake, for models' kinds of sparse attention.
pub fn compare(gpu: &Gpu) {
    compare_shapes(gpu, &shapes());
}

fn compare_shapes(gpu: &Gpu, shapes: &[Shape]) {
    for (which, shape) in shapes.iter().enumerate() {
        let (products, attention) = (Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap()));
        let ops = gpu.ops(products, attention.clone()).unwrap();
        let host = Arc::new(FakeAttention::new(1 << 30));
        let host_ops = FakeOps::fake(Arc::new(FakeProducts::new(1 << 30)), host.clone());
        let (found_lists, found) = shape.step(&ops, &shape.rows(attention.as_ref()));
        let (lists, wanted) = shape.step(&host_ops, &shape.rows(host.as_ref()));
        let shorter = lists.iter().filter(|list| list.last().is_some_and(|last| *last as usize >= list.len()));
        assert!(shorter.count() > 0, "shape {which}: some tokens choose");
        assert!(lists.iter().all(|list| list.is_sorted()));
        assert_eq!(found_lists, lists, "shape {which}");
        assert!(found.iter().any(|bits| *bits != 0) && found == wanted, "shape {which}");
        if shape.parts == 1 && shape.sequences.len() > 1 {
            let found = shape.step_joined(&ops, &shape.rows(attention.as_ref()));
            let wanted = shape.step_joined(&host_ops, &shape.rows(host.as_ref()));
            assert!(found == wanted, "shape {which}, rows of two sources");
        }
    }
}

/// Sparse attention of the kinds that models have, with equal scores.
fn shapes() -> Vec<Shape> {
    use IndexBlocks::{OfPositions, OfRows};
    use NumberFormat::{F16, F32, Q8_0};
    let sequences = &[(70, 3), (3, 2), (41, 1), (9, 9)];
    let of = |kind, blocks, count, parts, heads, attention| Shape {
        kind,
        blocks,
        count,
        parts,
        heads,
        width: 20,
        weighted: parts == 1,
        attention,
        sequences,
    };
    vec![
        of(F32, OfPositions(1), 7, 1, 5, [4, 1, 24, 16]),
        of(F16, OfPositions(1), 16, 1, 1, [6, 2, 32, 32]),
        of(Q8_0, OfPositions(3), 4, 1, 6, [5, 1, 32, 32]),
        of(F16, OfPositions(5), 1, 1, 4, [8, 8, 9, 17]),
        of(F32, OfRows { rows: 4, local: 1 }, 3, 2, 1, [6, 2, 24, 20]),
        of(Q8_0, OfRows { rows: 8, local: 2 }, 2, 4, 1, [8, 4, 40, 12]),
        of(F16, OfRows { rows: 2, local: 2 }, 2, 1, 3, [3, 1, 16, 16]),
    ]
}

#[test]
fn chosen_rows_and_attention_to_them_have_the_same_bits() {
    for seed in 1..3 {
        let Some(emulator) = emulator(seed) else { return };
        compare(&gpu(emulator));
    }
}

#[test]
fn a_choice_among_many_rows_has_several_steps() {
    let Some(emulator) = emulator(5) else { return };
    let (kind, sequences) = (NumberFormat::F16, &[(9000, 1)][..]);
    let of = |blocks, count, parts| Shape {
        kind,
        blocks,
        count,
        parts,
        heads: 2 - parts % 2,
        width: 4,
        weighted: false,
        attention: [2, 2, 4, 4],
        sequences,
    };
    let shapes = [of(IndexBlocks::OfPositions(1), 1500, 1), of(IndexBlocks::OfRows { rows: 1, local: 3 }, 3000, 2)];
    compare_shapes(&gpu(emulator), &shapes);
}

#[test]
fn lists_that_the_cpu_has_made_are_attended_to() {
    let Some(emulator) = emulator(6) else { return };
    let gpu = gpu(emulator);
    let attention = Arc::new(gpu.attention().unwrap());
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), attention.clone()).unwrap();
    let lists = [&[0, 2, 5][..], &[4], &[1, 3]];
    ops.send_choice(&lists, 4).unwrap();
    assert_eq!(ops.receive_choice(&[3, 1, 2]).unwrap(), lists);
    for error in [ops.receive_choice(&[3, 1]), ops.receive_choice(&[3, 1, 5])] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("the last choice has 3 with up to 4 rows"), "{error}");
    }
    assert!(ops.send_choice(&lists, 2).unwrap_err().to_string().contains("more than 2 rows"));
    // More rows than a token sees, and another number of lists.
    let shape = &shapes()[0];
    let rows = shape.rows(attention.as_ref());
    let queries = ops.send(&[1.0; 96], 96).unwrap();
    let (keys, values) = (rows.keys[0].clone(), rows.values[0].clone());
    let seen = 0..2;
    let (heads, kv_heads, sinks) = (4, 1, None);
    let seen = std::slice::from_ref(&seen);
    let task = AttentionArgs { queries: &[], heads, keys, values, kv_heads, seen, scale: 1.0, sinks, bias: None };
    ops.send_choice(&[&[0, 1, 2]], 4).unwrap();
    for lengths in [&[3][..], &[0], &[1, 1], &[]] {
        assert!(ops.attend_chosen(queries, &[&task], lengths).is_err(), "{lengths:?}");
    }
    assert!(ops.attend_chosen(queries, &[&task], &[2]).is_ok());
    // KvCase of another source reach into those of the task, a list that is not there, and two lists for a token.
    let seen = 2..4;
    let task = AttentionArgs { seen: std::slice::from_ref(&seen), ..task };
    for (lengths, listed) in [(&[3][..], false), (&[3], true), (&[1, 1], false), (&[], false)] {
        assert!(ops.attend_joined(queries, &[&task], lengths, listed).is_err(), "{lengths:?}");
    }
    for (lengths, listed) in [(&[0][..], false), (&[2], false), (&[2], true), (&[0], true)] {
        assert!(ops.attend_joined(queries, &[&task], lengths, listed).is_ok(), "{lengths:?}");
    }
}
