//! Tests of the workspace against the definition.

use larder_core::{Gate, LayerIdx, NumberFormat};

use super::*;
use crate::ops::Activation;

/// The bytes of an expert with varied weights.
fn expert(layout: &ExpertLayout, seed: usize) -> Vec<u8> {
    let mut data = vec![0; layout.bytes];
    for (_, part) in layout.parts() {
        let values = (0..part.rows * part.cols).map(|i| ((i * 31 + seed * 17 + part.offset) % 97) as f32 / 97.0 - 0.5);
        let (values, bytes) = (values.collect::<Vec<f32>>(), &mut data[part.offset..][..part.bytes]);
        match part.kind {
            NumberFormat::Q8_0 => {
                let rows = values.chunks(part.cols).zip(bytes.chunks_mut(part.bytes / part.rows));
                rows.for_each(|(values, row)| larder_kernels::quantise_row(values, row));
            }
            kind => larder_kernels::narrow(kind, &values, bytes),
        }
    }
    data
}

/// The definition, for a single token.
fn naive(layout: &ExpertLayout, data: &[u8], act: Activation, x: &[f32]) -> Vec<f32> {
    let floats = |part: &ExpertPart| -> Vec<f32> {
        part.of(data).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let product = |part: &ExpertPart, x: &[f32]| -> Vec<f32> {
        let w = floats(part);
        w.chunks_exact(part.cols).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let bias = layout.bias.as_ref().map(|b| b.as_ref().map(floats)).unwrap();
    let add = |v: Vec<f32>, b: &[f32]| -> Vec<f32> { v.iter().zip(b).map(|(a, b)| a + b).collect() };
    let mut inner = add(product(&layout.up, x), &bias.up);
    match &layout.gate {
        Some(gate) => {
            let up = std::mem::replace(&mut inner, add(product(gate, x), &bias.gate.unwrap()));
            act.combine(&mut inner, &up);
        }
        None => act.apply(&mut inner),
    }
    add(product(&layout.down, &inner), &bias.down)
}

#[test]
fn groups_and_batches_follow_the_definition() {
    check(ExpertLayout::new(24, 16, [NumberFormat::F32; 3], true).unwrap());
}

#[test]
fn experts_of_two_matrices_follow_the_definition() {
    check(ExpertLayout::new(24, 16, [NumberFormat::F32; 2], true).unwrap());
}

/// Outputs of a call of `tokens` tokens, of which all chose expert 0 and some other. The experts
/// are computed `at_once` at a time.
fn computed(layout: &ExpertLayout, tokens: usize, at_once: usize) -> Vec<f32> {
    let (hidden, experts, k) = (layout.up.cols, 9, 3);
    let data: Vec<Vec<u8>> = (0..experts).map(|e| expert(layout, e)).collect();
    let x: Vec<f32> = (0..tokens * hidden).map(|i| (i as f32 * 0.3).cos()).collect();
    let second = |token: usize| ExpertId((1 + token * 5 % 7) as u16);
    let ids = (0..tokens).flat_map(|t| [ExpertId(0), second(t), if t % 4 == 0 { ExpertId(8) } else { ExpertId::NONE }]);
    let routed = Routed::new(ids.collect(), (0..tokens * k).map(|i| 0.1 + i as f32 * 0.01).collect());
    let gate = Gate::softmax(experts, k, false);
    let act = Activation::Silu;
    let call = MoeCall::new(LayerIdx(0), &gate, act, &x, tokens);
    let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::new(2, false).unwrap()));
    workspace.begin(&call, &routed, layout);
    let group: Vec<_> = data.iter().enumerate().map(|(e, data)| (ExpertId(e as u16), data.as_slice())).collect();
    match at_once {
        STAGES => in_stages(&mut workspace, &call, &routed, layout, &group),
        _ => group.chunks(at_once).for_each(|group| workspace.compute(&call, &routed, layout, group)),
    }
    assert!(workspace.up.len() <= PART_ROWS * layout.up.rows);
    let mut out = vec![f32::NAN; tokens * hidden];
    workspace.sum(&call, &routed, &mut out);
    out
}

/// In [`computed`]: in two stages, mixed with experts that are computed whole.
const STAGES: usize = usize::MAX;

fn in_stages(
    workspace: &mut ExpertWorkspace,
    call: &MoeCall,
    routed: &Routed,
    layout: &ExpertLayout,
    group: &[(ExpertId, &[u8])],
) {
    let front = layout.segments()[0].len();
    let fronts: Vec<_> = group.iter().map(|(expert, data)| (*expert, &data[..front])).collect();
    let mut stage = |stage, group: &[_]| workspace.compute_stage(call, routed, layout, stage, group);
    stage(ComputeStage::Inputs, &fronts[2..5]);
    stage(ComputeStage::Inputs, &fronts[7..8]);
    stage(ComputeStage::Whole, &group[..2]);
    stage(ComputeStage::Rest, &[group[4], group[7]]);
    stage(ComputeStage::Inputs, &fronts[8..]);
    stage(ComputeStage::Whole, &group[5..7]);
    stage(ComputeStage::Rest, &[group[8], group[2], group[3]]);
}

#[test]
fn stages_change_no_bit() {
    for kind in [NumberFormat::F32, NumberFormat::Q8_0] {
        for (matrices, bias) in [(&[kind; 3][..], true), (&[kind; 2], true), (&[kind; 3], false)] {
            let layout = match *matrices {
                [gate, up, down] => ExpertLayout::new(64, 32, [gate, up, down], bias).unwrap(),
                _ => ExpertLayout::new(64, 32, [kind; 2], bias).unwrap(),
            };
            let tokens = STAGED_ROWS / 3;
            assert_eq!(computed(&layout, tokens, STAGES), computed(&layout, tokens, 9), "{kind}, bias {bias}");
        }
    }
}

#[test]
fn parts_are_bounded_and_change_no_bit() {
    for kind in [NumberFormat::F32, NumberFormat::Q8_0] {
        let layout = ExpertLayout::new(64, 32, [kind; 3], kind.is_float()).unwrap();
        // One expert has all 700 tokens, the others 100 or 175 of them.
        let together = computed(&layout, 700, 9);
        assert_eq!(together, computed(&layout, 700, 1), "{kind}");
        // The rows of a token depend on no other token.
        let few = computed(&layout, 20, 9);
        assert_eq!(few, together[..few.len()], "{kind}");
    }
}

#[test]
fn places_are_sorted_by_expert() {
    let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::single_threaded()));
    for (ids, want) in [
        (&[2, 0, 2, u16::MAX, 5, 2][..], &[(0, &[1][..]), (1, &[]), (2, &[0, 2, 5]), (5, &[4]), (6, &[])][..]),
        (&[u16::MAX], &[(0, &[]), (3, &[])]),
        (&[], &[(0, &[])]),
    ] {
        let ids: Vec<ExpertId> = ids.iter().map(|id| ExpertId(*id)).collect();
        workspace.output_rows = vec![0; ids.len()];
        workspace.sort_places(&Routed { weights: vec![0.0; ids.len()], ids, ..Routed::default() });
        for (expert, places) in want {
            assert_eq!(&workspace.places[workspace.places_of(ExpertId(*expert))], *places, "expert {expert}");
        }
    }
}

fn check(layout: ExpertLayout) {
    let (hidden, experts, k, tokens) = (layout.up.cols, 5, 2, 7);
    let data: Vec<Vec<u8>> = (0..experts).map(|e| expert(&layout, e)).collect();
    let x: Vec<f32> = (0..tokens * hidden).map(|i| (i as f32 * 0.3).cos()).collect();
    let ids: Vec<ExpertId> = (0..tokens * k).map(|i| ExpertId(((i / k * 3 + i % k) % experts) as u16)).collect();
    let weights: Vec<f32> = (0..tokens * k).map(|i| 0.1 + i as f32 * 0.01).collect();
    let routed = Routed::new(ids, weights);
    for scales_input in [false, true] {
        let gate = Gate { scales_input, ..Gate::softmax(experts, k, false) };
        let act = Activation::Silu;
        let call = MoeCall::new(LayerIdx(0), &gate, act, &x, tokens);
        let mut workspace = ExpertWorkspace::new(Arc::new(ComputeContext::new(2, false).unwrap()));
        workspace.begin(&call, &routed, &layout);
        for group in [&[3, 1][..], &[0, 2, 4]] {
            let group: Vec<_> = group.iter().map(|e| (ExpertId(*e), data[*e as usize].as_slice())).collect();
            workspace.compute(&call, &routed, &layout, &group);
        }
        let mut out = vec![f32::NAN; tokens * hidden];
        workspace.sum(&call, &routed, &mut out);
        for t in 0..tokens {
            let mut want = vec![0.0; hidden];
            for (id, weight) in routed.ids[t * k..][..k].iter().zip(&routed.weights[t * k..]) {
                let (inside, outside) = if scales_input { (*weight, 1.0) } else { (1.0, *weight) };
                let x: Vec<f32> = x[t * hidden..][..hidden].iter().map(|v| v * inside).collect();
                let y = naive(&layout, &data[id.index()], act, &x);
                want.iter_mut().zip(y).for_each(|(w, y)| *w += outside * y);
            }
            for (got, want) in out[t * hidden..][..hidden].iter().zip(want) {
                assert!((got - want).abs() < 1e-4, "{got} instead of {want}");
            }
        }
    }
}
