//! Convolutions, the delta rule and gates on recurrent states that stay on the device.

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder};
use larder_cuda::Gpu;
use larder_kernels::WeightMatrix;
use larder_model::{
    Activation, ChannelDecay, ChannelScan, Convolution, Decay, Delta, DeltaHeads, DeviceAttention, DeviceProducts,
    FakeAttention, FakeOps, FakeProducts, GateFunction, GateOrder, KvPageShape, NormGate, Ops, PlacedMatrix,
    RecurrentOps, Rows, Scan, ScanHeads, StateSpan,
};

use crate::common::{Random, copy, emulator, gpu, placed, receive};

/// A layer with a recurrent state.
struct Shape {
    heads: DeltaHeads,
    /// Inputs of the convolution, and inputs that it adds up.
    inputs: usize,
    taps: usize,
    bias: bool,
    form: ChannelDecay,
    /// Whether each channel of a key has a decay.
    by_channel: bool,
    function: GateFunction,
    /// Number format of the weights of a product of the result.
    output: NumberFormat,
}

impl Shape {
    fn window(&self) -> usize {
        (self.taps - 1) * self.heads.mixed()
    }

    fn decays(&self) -> usize {
        self.heads.v_heads * if self.by_channel { self.heads.k_dim } else { 1 }
    }
}

/// The weights of a layer, of taps, bias, bias of decays, their rates, and the norm; and those of the output.
struct Weights {
    kept: [Vec<f32>; 5],
    output: Vec<u8>,
}

/// A device with the weights of a layer, and the states of sequences.
struct Layer<'a> {
    ops: &'a dyn Ops,
    attention: &'a dyn DeviceAttention,
    kept: [usize; 5],
    output: PlacedMatrix,
    /// By sequence its state, and the copies that were made of it.
    states: [Vec<usize>; 2],
}

/// Tokens of a step, in rows of both sequences: what is convolved, strengths, decays, gates of values and of heads.
struct Step {
    counts: [usize; 2],
    rows: [Vec<f32>; 5],
    /// By sequence, after how many tokens a copy is made.
    copies: [Vec<usize>; 2],
}

const OUT: usize = 8;

impl<'a> Layer<'a> {
    fn new(
        (products, attention, ops): (Arc<dyn DeviceProducts>, &'a dyn DeviceAttention, &'a dyn Ops),
        shape: &Shape,
        weights: &Weights,
    ) -> Self {
        let (kind, order) = (shape.output, RowOrder::Plain);
        let matrix =
            WeightMatrix { kind, order, rows: OUT, cols: shape.heads.values(), scale: 1.0, bytes: &weights.output };
        let mut layer = Layer {
            ops,
            attention,
            kept: weights.kept.each_ref().map(|values| ops.keep(values).unwrap()),
            output: placed(&products, matrix),
            states: Default::default(),
        };
        layer.states = [0, 1].map(|sequence| {
            let page = layer.allocate(shape);
            let count = shape.window() + shape.heads.state_len();
            let state = Random::new(sequence).floats(count);
            attention.append(page, 0, bytemuck::cast_slice(&state)).unwrap();
            vec![page]
        });
        layer
    }

    fn allocate(&self, shape: &Shape) -> usize {
        let row_bytes = 4 * (shape.window() + shape.heads.state_len());
        let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes };
        self.attention.allocate(form).unwrap()
    }

    /// Takes in the tokens of a step; what is received, and all states.
    fn step(&mut self, shape: &Shape, step: &Step) -> Vec<Vec<u32>> {
        let [taps, bias, of_decays, rates, norm] = self.kept;
        let mut first_row = 0;
        let spans = [0, 1].map(|sequence| {
            let copies: Vec<(usize, usize)> =
                step.copies[sequence].iter().map(|taken_in| (*taken_in, self.allocate(shape))).collect();
            self.states[sequence].extend(copies.iter().map(|(_, page)| page));
            let (page, tokens) = (self.states[sequence][0], step.counts[sequence]);
            first_row += tokens;
            StateSpan { page, recurrence_at: shape.window(), first_row: first_row - tokens, tokens, copies }
        });
        let spans: Vec<StateSpan> = spans.into_iter().filter(|span| span.tokens > 0).collect();
        let (ops, heads) = (self.ops, shape.heads);
        let tokens: usize = step.counts.iter().sum();
        let send = |values: &[f32]| ops.send(values, values.len() / tokens).unwrap();
        let [strengths, products, of_values, of_heads] = [1, 2, 3, 4].map(|at| send(&step.rows[at]));
        // Columns of the channels, one input after the other.
        let widths = [heads.mixed() / shape.inputs; Convolution::MAX_INPUTS];
        let inputs: Vec<Rows> = (0..shape.inputs)
            .map(|input| {
                let first = widths[..input].iter().sum::<usize>();
                let end = if input + 1 == shape.inputs { heads.mixed() } else { first + widths[input] };
                let columns: Vec<f32> =
                    step.rows[0].chunks_exact(heads.mixed()).flat_map(|row| row[first..end].to_vec()).collect();
                send(&columns)
            })
            .collect();
        let bias = Some(bias).filter(|_| shape.bias);
        let convolution = Convolution { inputs: &inputs, taps, bias, width: shape.taps, dilation: 1, silu: shape.bias };
        let qkv = ops.convolve(&convolution, &spans).unwrap();
        let decay = Decay { products, bias: of_decays, rates, form: shape.form };
        let y = ops.delta(&Delta { heads, qkv, strengths, decay }, &spans).unwrap();
        let (width, function, order) = (heads.v_dim, shape.function, GateOrder::NormFirst);
        let norm = NormGate { weight: norm, width, eps: 1e-6, function, order };
        let normalised = ops.norm_gate(copy(ops, y), of_values, &norm).unwrap();
        let out = ops.matmul(normalised, &[&self.output]).unwrap()[0];
        let by_head = ops.gate(copy(ops, y), of_heads, function, heads.v_heads).unwrap();
        let by_value = ops.gate(copy(ops, y), of_values, function, heads.v_heads).unwrap();
        let again = ops.matmul(by_value, &[&self.output]).unwrap()[0];
        let activated = ops.activate(Activation::Gelu, ops.add(y, copy(ops, y), 0.5).unwrap()).unwrap();
        let capped = ops.softcap(ops.add(y, copy(ops, y), 7.0).unwrap(), 1.5).unwrap();
        let mut found = Vec::from(receive(ops, [qkv, y, normalised, out, by_head, again, activated, capped]));
        for page in self.states.iter().flatten() {
            let mut state = vec![0.0_f32; shape.window() + heads.state_len()];
            self.attention.read(*page, bytemuck::cast_slice_mut(&mut state)).unwrap();
            found.push(state);
        }
        found.into_iter().map(|values| values.into_iter().map(f32::to_bits).collect()).collect()
    }
}

/// Takes in tokens on both devices.
pub fn compare(gpu: &Gpu) {
    use NumberFormat::{F32, Q8_0};
    let heads =
        |[k_heads, v_heads, k_dim, v_dim]: [usize; 4], tiled| DeltaHeads { k_heads, v_heads, k_dim, v_dim, tiled };
    let plain = Shape {
        heads: heads([2, 4, 16, 32], false),
        inputs: 1,
        taps: 4,
        bias: false,
        form: ChannelDecay::Softplus,
        by_channel: false,
        function: GateFunction::Silu,
        output: Q8_0,
    };
    let shapes = [
        Shape { heads: heads([2, 4, 40, 36], true), taps: 3, bias: true, output: F32, ..plain },
        Shape { heads: heads([3, 3, 33, 64], false), inputs: 3, by_channel: true, ..plain },
        Shape {
            heads: heads([2, 2, 64, 8], false),
            inputs: 2,
            by_channel: true,
            form: ChannelDecay::Bounded(-5.0),
            function: GateFunction::Sigmoid,
            output: F32,
            ..plain
        },
        Shape { taps: 1, function: GateFunction::Softplus, ..plain },
        // With more rows of a state than registers have room for.
        Shape { heads: heads([1, 2, 132, 34], false), output: F32, ..plain },
        // That of Qwen3-Next.
        Shape { heads: heads([16, 32, 128, 128], false), ..plain },
        plain,
    ];
    for (which, shape) in shapes.iter().enumerate() {
        let mut random = Random::new(which as u64 + 40);
        let (mixed, heads) = (shape.heads.mixed(), shape.heads);
        let mut output = vec![0; shape.output.matrix_bytes(OUT, heads.values()).unwrap()];
        random.weights(shape.output, &mut output);
        let kept = [shape.taps * mixed, mixed, shape.decays(), heads.v_heads, heads.v_dim];
        let weights = Weights { kept: kept.map(|count| random.floats(count)), output };
        let (products, attention) = (Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap()));
        let ops = gpu.ops(products.clone(), attention.clone()).unwrap();
        let (host_products, host_attention) =
            (Arc::new(FakeProducts::new(1 << 30)), Arc::new(FakeAttention::new(1 << 30)));
        let host_ops = FakeOps::fake(host_products.clone(), host_attention.clone());
        let mut device = Layer::new((products, attention.as_ref(), &ops), shape, &weights);
        let mut host = Layer::new((host_products, host_attention.as_ref(), &host_ops), shape, &weights);
        for (counts, copies) in [
            ([5, 1], [vec![1, 3], vec![]]),
            ([1, 1], [vec![], vec![]]),
            ([0, 2], [vec![], vec![1]]),
            ([3, 9], [vec![2], vec![4, 5, 8]]),
        ] {
            let tokens = counts.iter().sum::<usize>();
            let widths = [mixed, heads.v_heads, shape.decays(), heads.values(), heads.v_heads];
            let rows = widths.map(|width| random.floats(tokens * width).iter().map(|v| 3.0 * v).collect());
            let step = Step { counts, rows, copies };
            let [got, wanted] = [&mut device, &mut host].map(|layer| layer.step(shape, &step));
            assert_eq!(got.len(), wanted.len());
            for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                assert!(wanted.iter().any(|bits| *bits != 0) || shape.taps == 1, "result {at} is zero");
                assert!(got == wanted, "shape {which}, tokens {counts:?}, result {at}");
            }
        }
    }
}

/// A step of the recurrence of Mamba 2 and of the norm behind it, and the states of two sequences.
fn scanned(heads: ScanHeads, (attention, ops): (&dyn DeviceAttention, &dyn Ops), random: &mut Random) -> Vec<Vec<u32>> {
    let (window, mut found) = (5, Vec::new());
    let values = window + heads.state_len();
    let row_bytes = 4 * values;
    let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes };
    let pages: Vec<usize> = (0..4).map(|_| attention.allocate(form).unwrap()).collect();
    for page in &pages {
        attention.append(*page, 0, bytemuck::cast_slice(&random.floats(values))).unwrap();
    }
    let [step_bias, rates, skips] = [(); 3].map(|()| ops.keep(&random.floats(heads.heads)).unwrap());
    let kept = [heads.state_len(), heads.inner()].map(|count| ops.keep(&random.floats(count)).unwrap());
    let width = heads.inner() / heads.groups;
    let weights = [heads.inner(), width].map(|count| ops.keep(&random.floats(count)).unwrap());
    for (counts, limits) in [([4, 1], [0.001, f32::INFINITY]), ([1, 1], [0.3, 0.5]), ([2, 3], [0.0, 0.7])] {
        let tokens = counts.iter().sum::<usize>();
        let mut send = |width: usize| ops.send(&random.floats(tokens * width), width).unwrap();
        let (convolved, steps, gates) = (send(heads.channels()), send(heads.heads), send(heads.inner()));
        let copies = if counts[0] > 1 { vec![(1, pages[2])] } else { vec![] };
        let spans = [(0, 0, copies), (1, counts[0], vec![])].map(|(sequence, first_row, copies)| StateSpan {
            page: pages[sequence],
            recurrence_at: window,
            first_row,
            tokens: counts[sequence],
            copies,
        });
        let y = ops.scan(&Scan { heads, convolved, steps, step_bias, rates, skips, limits }, &spans).unwrap();
        // The same rows of the state as channels.
        let (x, steps, b, c) = (send(heads.inner()), send(heads.inner()), send(heads.state), send(heads.state));
        let channels = ChannelScan { x, steps, b, c, rates: kept[0], skips: kept[1] };
        let of_channels = ops.scan_channels(&channels, &spans).unwrap();
        let orders = [(GateOrder::GateFirst, weights[0]), (GateOrder::NormFirst, weights[1])];
        let norms = orders.map(|(order, weight)| {
            let function = GateFunction::Silu;
            ops.norm_gate(copy(ops, y), gates, &NormGate { weight, width, eps: 1e-5, function, order }).unwrap()
        });
        let product = ops.gate(copy(ops, y), gates, GateFunction::Identity, heads.heads).unwrap();
        // A channel whose window has five values, then new recurrences.
        let (column, taps) = (send(1), ops.keep(&[0.75, -1.5]).unwrap());
        let dilated = Convolution { inputs: &[column], taps, bias: None, width: 2, dilation: window, silu: false };
        let dilated = ops.convolve(&dilated, &spans).unwrap();
        let states = spans.iter().map(|span| span.copies.len() + 1).sum::<usize>();
        if counts != [1, 1] {
            ops.write_recurrences(&spans, &random.floats(states * heads.state_len())).unwrap();
        }
        found.extend(receive(ops, [y, of_channels, norms[0], norms[1], product, dilated]));
    }
    for page in pages {
        let mut state = vec![0.0_f32; values];
        attention.read(page, bytemuck::cast_slice_mut(&mut state)).unwrap();
        found.push(state);
    }
    found.into_iter().map(|values| values.into_iter().map(f32::to_bits).collect()).collect()
}

/// The recurrence of Mamba 2 on both devices.
pub fn compare_scans(gpu: &Gpu) {
    for (which, [heads, head_dim, groups, state]) in [[4, 8, 2, 40], [6, 5, 3, 11], [2, 64, 1, 128]].iter().enumerate()
    {
        let heads = ScanHeads { heads: *heads, head_dim: *head_dim, groups: *groups, state: *state };
        let (products, attention) = (Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap()));
        let ops = gpu.ops(products, attention.clone()).unwrap();
        let got = scanned(heads, (attention.as_ref(), &ops), &mut Random::new(which as u64));
        let attention = Arc::new(FakeAttention::new(1 << 30));
        let ops = FakeOps::fake(Arc::new(FakeProducts::new(1 << 30)), attention.clone());
        let wanted = scanned(heads, (attention.as_ref(), &ops), &mut Random::new(which as u64));
        for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert!(wanted.iter().any(|bits| *bits != 0), "result {at} is zero");
            assert!(got == wanted, "{heads:?}, result {at}");
        }
    }
}

#[test]
fn recurrent_states_are_advanced_as_on_the_cpu() {
    for seed in 1..4 {
        let Some(emulator) = emulator(seed) else { return };
        let gpu = gpu(emulator);
        compare(&gpu);
        compare_scans(&gpu);
    }
}

#[test]
fn states_and_rows_that_do_not_fit_are_refused() {
    let Some(emulator) = emulator(4) else { return };
    let gpu = gpu(emulator);
    let attention = Arc::new(gpu.attention().unwrap());
    let ops = gpu.ops(Arc::new(gpu.products(0).unwrap()), attention.clone()).unwrap();
    let page = |values: usize| {
        let form = KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes: 4 * values };
        attention.allocate(form).unwrap()
    };
    let (x, taps) = (ops.send(&[1.0; 8], 4).unwrap(), ops.keep(&[0.5; 12]).unwrap());
    let convolution = Convolution { inputs: &[x], taps, bias: None, width: 3, dilation: 1, silu: false };
    let span = StateSpan { page: page(8), recurrence_at: 8, first_row: 0, tokens: 2, copies: vec![] };
    assert!(ops.convolve(&convolution, std::slice::from_ref(&span)).is_ok());
    let refused = |span: StateSpan| {
        let error = ops.convolve(&convolution, &[span]).unwrap_err();
        error.to_string()
    };
    let text = refused(StateSpan { recurrence_at: 4, ..span.clone() });
    assert!(text.contains("cannot be convolved with 3 taps"), "{text}");
    let text = refused(StateSpan { tokens: 1, ..span.clone() });
    assert!(text.contains("cannot be convolved"), "{text}");
    let text = refused(StateSpan { copies: vec![(1, page(7))], ..span.clone() });
    assert!(text.contains("a page of 28 bytes is no state of 8 values"), "{text}");
    let text = refused(StateSpan { copies: vec![(2, page(8))], ..span.clone() });
    assert!(text.contains("are not 2 rows"), "{text}");
    assert!(ops.write_recurrences(std::slice::from_ref(&span), &[1.0]).is_err(), "the state has no recurrence");
    assert!(refused(StateSpan { page: 99, ..span }).contains("the GPU has no KV page 99"));
    assert!(ops.gate(x, x, GateFunction::Silu, 3).is_err());
}
