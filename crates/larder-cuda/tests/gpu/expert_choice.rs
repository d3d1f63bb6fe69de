//! Experts that the device chooses are those that the gate chooses on the CPU, with the same weights and sums.

use std::sync::Arc;

use larder_cache::two_tiers::{Device, Direction};
use larder_core::{
    ExpertGroups, ExpertId, ExpertLayout, Gate, GroupRank, LayerIdx, NumberFormat, Renorm, Score, Weighting,
};
use larder_cuda::{Gpu, GpuExperts, GpuOps};
use larder_model::{
    Activation, CallOnDevice, ChosenOnDevice, ComputeContext, DeviceExperts, DeviceMoeCall, ExpertWorkspace,
    HashRouting, MoeCall, Ops, Rows, route,
};

use crate::common::{Random, emulator, gpu, numbered, receive_bits, slots, transfer, upload_experts, wait_for_all};

pub const EXPERTS: usize = 40;
pub const K: usize = 6;
pub const HIDDEN: usize = 64;

/// Gates of all kinds that the kernel has.
pub fn gates(random: &mut Random) -> Vec<Gate> {
    let softmax = Gate::softmax(EXPERTS, K, false);
    let weighting = |renorm, scale| Weighting::Score { renorm, scale };
    let groups = |rank, masked| Some(ExpertGroups { count: 8, keep: 3, rank, masked });
    let sigmoid = Gate { score: Score::Sigmoid, ..softmax.clone() };
    let sparse = Weighting::SparseMixer { eps: 0.2 };
    vec![
        softmax.clone(),
        Gate::softmax(EXPERTS, K, true),
        Gate::softmax(EXPERTS, EXPERTS, true),
        Gate { score: Score::Raw, weighting: Weighting::SoftmaxOfChosen, ..softmax.clone() },
        Gate {
            bias: Some(random.floats(EXPERTS)),
            groups: groups(GroupRank::BestTwo, 0.0),
            weighting: weighting(Renorm::Sum { plus: 1e-20 }, 2.5),
            ..sigmoid.clone()
        },
        Gate {
            groups: groups(GroupRank::Best, f32::NEG_INFINITY),
            weighting: weighting(Renorm::Floor { min: 0.7 }, 1.5),
            ..softmax.clone()
        },
        Gate { weighting: Weighting::SigmoidShareOfChosen, score: Score::Raw, ..softmax.clone() },
        Gate { weighting: Weighting::SigmoidOfChosen, expert_scales: Some(random.floats(EXPERTS)), ..sigmoid.clone() },
        Gate { weighting: sparse, score: Score::Raw, top_k: 2, ..softmax.clone() },
        Gate { weighting: Weighting::SigmoidOfChosen, scales_input: true, ..sigmoid },
        Gate { scales_input: true, groups: groups(GroupRank::Best, 0.0), ..softmax.clone() },
        Gate {
            score: Score::SqrtSoftplus,
            bias: Some(random.floats(EXPERTS)),
            weighting: weighting(Renorm::Sum { plus: 1e-20 }, 2.5),
            ..softmax
        },
    ]
}

/// Router logits, some of which are equal, very different, or no numbers.
fn logits(random: &mut Random, tokens: usize, odd: bool) -> Vec<f32> {
    let mut logits: Vec<f32> = random.floats(tokens * EXPERTS).iter().map(|v| 8.0 * v).collect();
    if odd {
        for value in &mut logits {
            match random.below(12) {
                0 | 1 => *value = 2.0,
                2 => *value = -200.0,
                3 => *value = -0.0,
                4 => *value = f32::NAN,
                _ => {}
            }
        }
    }
    logits
}

/// A call that chooses on the device, and what the CPU computes for it.
pub struct Chosen<'a> {
    layer: LayerIdx,
    gate: &'a Gate,
    pub layout: &'a ExpertLayout,
    act: Activation,
    logits: Vec<f32>,
    x: Vec<f32>,
    residual: Vec<f32>,
    tokens: usize,
    known: Option<Vec<ExpertId>>,
    none: Option<NoExpert>,
}

/// A class for no expert.
struct NoExpert {
    /// `[tokens, EXPERTS + 1]`: the logits of all classes.
    classes: Vec<f32>,
    bias: f32,
    /// Whether each token has none.
    skips: Vec<bool>,
}

/// Its rows on the device.
#[derive(Clone, Copy)]
pub struct Sent {
    pub on_device: CallOnDevice,
    pub logits: Rows,
}

impl<'a> Chosen<'a> {
    pub fn new(
        random: &mut Random,
        layer: u16,
        gate: &'a Gate,
        layout: &'a ExpertLayout,
        tokens: usize,
        odd: bool,
    ) -> Self {
        let [x, residual] = [(); 2].map(|()| random.floats(tokens * HIDDEN));
        Chosen {
            layer: LayerIdx(layer),
            gate,
            layout,
            act: Activation::Silu,
            logits: logits(random, tokens, odd),
            x,
            residual,
            tokens,
            known: None,
            none: None,
        }
    }

    /// The same with a class for no expert; the gate reads the shares of the experts in a softmax over all classes.
    pub fn with_none(self, random: &mut Random) -> Self {
        let (mut none, mut shares) = (NoExpert { classes: vec![], bias: 0.4, skips: vec![] }, vec![]);
        for row in self.logits.chunks_exact(EXPERTS) {
            none.classes.extend_from_slice(row);
            none.classes.push(8.0 * random.float());
            let row = &none.classes[none.classes.len() - EXPERTS - 1..];
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = row.iter().map(|logit| larder_kernels::exp(logit - most)).collect();
            let sum: f32 = powers.iter().sum();
            let bias = self.gate.bias.as_ref().unwrap().iter().chain([&none.bias]);
            let scores: Vec<f32> = powers.iter().zip(bias).map(|(power, bias)| power / sum + bias).collect();
            none.skips.push(scores[..EXPERTS].iter().all(|score| scores[EXPERTS] > *score));
            shares.extend(powers[..EXPERTS].iter().map(|power| power / sum));
        }
        Chosen { logits: shares, none: Some(none), ..self }
    }

    /// The same with experts that are known, in no order.
    pub fn with_known(self, random: &mut Random) -> Self {
        let mut known = Vec::new();
        for _ in 0..self.tokens {
            let mut all: Vec<ExpertId> = (0..EXPERTS as u16).map(ExpertId).collect();
            known.extend((0..self.gate.top_k).map(|_| all.swap_remove(random.below(all.len()))));
        }
        Chosen { known: Some(known), ..self }
    }

    pub fn call(&self, on_device: Option<CallOnDevice>) -> MoeCall<'_> {
        let Chosen { layer, gate, act, logits, x, tokens, .. } = self;
        MoeCall { logits, on_device, known: self.known.as_deref(), ..MoeCall::new(*layer, gate, *act, x, *tokens) }
    }

    pub fn send(&self, ops: &GpuOps) -> Sent {
        let send = |values: &[f32], width| ops.send(values, width).unwrap();
        let [x, residual] = [&self.x, &self.residual].map(|values| send(values, HIDDEN));
        let on_device = CallOnDevice { x, shared: None, residual: Some(residual) };
        let logits = match &self.none {
            Some(none) => send(&none.classes, EXPERTS + 1),
            None => send(&self.logits, EXPERTS),
        };
        Sent { on_device, logits }
    }

    pub fn device_call(&self, sent: Sent) -> DeviceMoeCall<'_> {
        let Sent { logits, on_device } = sent;
        let known = self.known.as_deref().map(HashRouting::Ids);
        let none = self.none.as_ref().map(|none| none.bias);
        DeviceMoeCall { layer: self.layer, gate: self.gate, act: self.act, logits, none, known, on_device }
    }

    /// The experts and the sums, as bits.
    pub fn by_cpu(&self, experts: &[(ExpertId, &[u8])]) -> (Vec<ExpertId>, Vec<u32>) {
        let Chosen { layout, x, residual, .. } = self;
        let call = self.call(None);
        let routed = route(&call);
        let mut bench = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
        bench.begin(&call, &routed, layout);
        bench.compute(&call, &routed, layout, experts);
        let mut sums = vec![0.0; x.len()];
        bench.sum(&call, &routed, &mut sums);
        let mut ids = routed.ids;
        for (token, _) in self.none.iter().flat_map(|none| none.skips.iter().enumerate().filter(|(_, skips)| **skips)) {
            ids[token * self.gate.top_k..][..self.gate.top_k].fill(ExpertId::NONE);
            sums[token * HIDDEN..][..HIDDEN].fill(0.0);
        }
        (ids, residual.iter().zip(sums).map(|(x, y)| (x + y).to_bits()).collect())
    }

    fn begin(&self, bench: &mut GpuExperts, ops: &GpuOps, slots: &Arc<[usize]>) -> Rows {
        bench.begin_chosen(&self.device_call(self.send(ops)), self.layout, slots).unwrap()
    }
}

pub fn receive(ops: &GpuOps, rows: Rows) -> Vec<u32> {
    let [found] = receive_bits(ops, [rows]);
    found
}

/// NaN of any payload and sign is NaN.
pub fn same(a: &[u32], b: &[u32]) -> bool {
    let is_nan = |bits: &u32| f32::from_bits(*bits).is_nan();
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || is_nan(a) && is_nan(b))
}

/// Chooses by all gates, for experts of several layouts.
pub fn compare(gpu: &Gpu) {
    let mut random = Random::new(7);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    let layouts = [
        ExpertLayout::new(HIDDEN, 96, [NumberFormat::Q4_0; 3], false).unwrap(),
        ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0, NumberFormat::F16, NumberFormat::Q4_0], true).unwrap(),
        ExpertLayout::new(HIDDEN, 40, [NumberFormat::F32; 2], true).unwrap(),
    ];
    let gates = gates(&mut random);
    for (i, layout) in layouts.iter().enumerate() {
        let experts: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
        upload_experts(&mut link, layout, &experts);
        // Experts are in any slots.
        let mut slots: Vec<usize> = (0..EXPERTS).collect();
        slots.rotate_left(i);
        let numbered: Vec<_> =
            slots.iter().enumerate().map(|(e, at)| (ExpertId(e as u16), &experts[*at][..])).collect();
        let slots: Arc<[usize]> = slots.into();
        for (which, gate) in gates.iter().enumerate() {
            assert!(bench.chooses(gate, 32) && !bench.chooses(gate, 33), "gate {which}");
            bench.prepare(layout, Activation::Silu, gate, 32).unwrap();
            // The lists of the fourth call are those of the first. Up to 32 tokens choose each expert more than once.
            for (step, tokens) in [1, 4, 32, 1, 4, 13, 32, 1].into_iter().enumerate() {
                let chosen = Chosen::new(&mut random, which as u16, gate, layout, tokens, step > 2);
                // The CPU knows the experts of some layers.
                let knows = i == 1 && which >= gates.len() - 2;
                let chosen = if knows { chosen.with_known(&mut random) } else { chosen };
                let sums = chosen.begin(&mut bench, &ops, &slots);
                let found = receive(&ops, sums);
                let (ids, wanted) = chosen.by_cpu(&numbered);
                let of_device = bench.take_chosen();
                let [ChosenOnDevice { layer, experts, .. }] = &of_device[..] else { panic!("{of_device:?}") };
                assert_eq!((*layer, experts), (chosen.layer, &ids), "layout {i}, gate {which}, step {step}");
                assert!(same(&found, &wanted), "layout {i}, gate {which}, step {step}");
            }
        }
    }
}

/// Tokens that may have no expert, of one expert each as models have them, and of several.
pub fn compare_with_none(gpu: &Gpu) {
    let mut random = Random::new(17);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    let layout = ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0; 3], false).unwrap();
    let experts: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
    upload_experts(&mut link, &layout, &experts);
    let slots: Arc<[usize]> = (0..EXPERTS).collect();
    let (mut skipping, mut others) = (0, 0);
    for (layer, top_k) in [1, 3].into_iter().enumerate() {
        let bias = Some(random.floats(EXPERTS).iter().map(|bias| 0.1 * bias).collect());
        let gate = Gate { score: Score::Raw, bias, ..Gate::softmax(EXPERTS, top_k, false) };
        bench.prepare(&layout, Activation::Silu, &gate, 32).unwrap();
        for tokens in [1, 4, 1, 4, 32, 4, 2, 13] {
            let chosen = Chosen::new(&mut random, layer as u16, &gate, &layout, tokens, false).with_none(&mut random);
            let sums = chosen.begin(&mut bench, &ops, &slots);
            let found = receive(&ops, sums);
            let (ids, wanted) = chosen.by_cpu(&numbered(&experts));
            assert_eq!(bench.take_chosen()[0].experts, ids);
            assert!(found == wanted, "{tokens} tokens with {top_k} experts");
            let without = chosen.none.unwrap().skips.iter().filter(|skips| **skips).count();
            (skipping, others) = (skipping + without, others + tokens - without);
        }
    }
    assert!(skipping > 3 && others > 3, "{skipping} tokens without an expert, {others} with some");
}

#[test]
fn a_token_may_have_no_expert() {
    let Some(emulator) = emulator(4) else { return };
    compare_with_none(&gpu(emulator));
}

#[test]
fn a_device_chooses_as_the_gate_does() {
    let Some(emulator) = emulator(3) else { return };
    compare(&gpu(emulator));
}

/// Replaces experts behind a choice that may want them. Returns whether results are as if the copies had waited.
pub fn results_are_right(gpu: &Gpu, seed: u64) -> bool {
    let mut random = Random::new(seed);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    let layout = ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0; 3], false).unwrap();
    let gate = Gate::softmax(EXPERTS, K, true);
    let mut there: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
    upload_experts(&mut link, &layout, &there);
    bench.prepare(&layout, Activation::Silu, &gate, 1).unwrap();
    let slots_of_layer: Arc<[usize]> = (0..EXPERTS).collect();
    let mut right = true;
    for _ in 0..4 {
        let chosen = Chosen::new(&mut random, 0, &gate, &layout, 1, false);
        let wanted = chosen.by_cpu(&numbered(&there)).1;
        let sums = chosen.begin(&mut bench, &ops, &slots_of_layer);
        there = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
        for (at, slot) in slots(&layout, &there).into_iter().enumerate() {
            link.submit(transfer(Direction::ToDevice, slot, at));
        }
        right &= receive(&ops, sums) == wanted;
        assert!(wait_for_all(&mut link).iter().all(|over| over.result.is_ok()));
    }
    right
}

#[test]
fn copies_wait_for_what_the_device_may_choose() {
    let mut wrong = 0;
    for seed in 0..12 {
        let Some(emulator) = emulator(seed) else { return };
        assert!(results_are_right(&gpu(emulator), seed), "seed {seed}");
        let Some(emulator) = self::emulator(seed) else { return };
        wrong += usize::from(!results_are_right(&gpu(emulator.ignoring_events()), seed));
    }
    assert!(wrong > 4, "only {wrong} of 12 were wrong without events");
}

/// Inputs at more addresses than there is memory for lists.
#[test]
fn lists_that_do_not_fit_are_written_again() {
    let Some(emulator) = emulator(9) else { return };
    let gpu = gpu(emulator);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    let (mut random, gate) = (Random::new(3), Gate::softmax(EXPERTS, K, true));
    let layout = ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0; 3], false).unwrap();
    let experts: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
    upload_experts(&mut link, &layout, &experts);
    bench.prepare(&layout, Activation::Silu, &gate, 32).unwrap();
    let (slots, mut allocated): (Arc<[usize]>, _) = ((0..EXPERTS).collect(), Vec::new());
    for round in 0..2 {
        for before in 0..24 {
            for tokens in 1..33 {
                // Rows that are sent before move the inputs.
                for _ in 0..before {
                    ops.send(&[1.0], 1).unwrap();
                }
                let chosen = Chosen::new(&mut random, 0, &gate, &layout, tokens, false);
                let sums = chosen.begin(&mut bench, &ops, &slots);
                let found = receive(&ops, sums);
                let (ids, wanted) = chosen.by_cpu(&numbered(&experts));
                let right = found == wanted && bench.take_chosen()[0].experts == ids;
                assert!(right, "round {round}, {tokens} tokens behind {before} rows");
            }
        }
        allocated.push(link.peak_bytes());
    }
    assert_eq!(allocated[0], allocated[1], "memory is used again");
}

#[test]
fn what_the_kernel_does_not_have_is_left_to_the_host() {
    let Some(emulator) = emulator(1) else { return };
    let gpu = gpu(emulator);
    let ops = Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap());
    let (mut with, without) = (gpu.experts(Some(ops.clone())).unwrap(), gpu.experts(None).unwrap());
    let gate = Gate::softmax(8, 2, true);
    assert!(with.chooses(&gate, 1) && !without.chooses(&gate, 1));
    // Logits without the class that the call has.
    let random = &mut Random::new(1);
    let layout = ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0; 3], false).unwrap();
    let of_all = Gate::softmax(EXPERTS, K, true);
    let chosen = Chosen::new(random, 0, &of_all, &layout, 1, false);
    let call = DeviceMoeCall { none: Some(0.0), ..chosen.device_call(chosen.send(&ops)) };
    let slots: Arc<[usize]> = (0..EXPERTS).collect();
    assert!(with.begin_chosen(&call, &layout, &slots).is_err());
    assert!(!with.chooses(&Gate { experts: 1025, ..gate.clone() }, 1) && !with.chooses(&gate, 33));
}
