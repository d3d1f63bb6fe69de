//! The seam between a model and wherever its experts are.

use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, Part};
use larder_kernels::{Weights, matmul};

use crate::error::Result;
use crate::nn::Activation;

/// What a layer hands over once its router has spoken.
pub struct Call<'a> {
    /// Which layer.
    pub layer: LayerIdx,
    /// How this layer turns logits into a choice.
    pub gate: &'a Gate,
    /// The experts' activation.
    pub act: Activation,
    /// `[tokens, experts]`
    pub logits: &'a [f32],
    /// `[tokens, hidden]`
    pub x: &'a [f32],
    /// Rows of `logits` and `x`.
    pub tokens: usize,
}

/// Which experts each token got.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routed {
    /// `[tokens, k]`, best first.
    pub ids: Vec<ExpertId>,
    /// `[tokens, k]`, in the order of `ids`.
    pub weights: Vec<f32>,
}

/// Chooses and computes a layer's experts.
pub trait ExpertPath {
    /// Writes the weighted sum of each token's experts to `out [tokens, hidden]` and says which they were.
    ///
    /// The caller guarantees slices of the sizes in [`Call`]. The implementation guarantees that `out` depends on
    /// nothing but the call and the weights, and is summed in the order of [`Routed::ids`]; on an error `out` is
    /// unspecified and the path stays usable.
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed>;
}

/// Every expert in memory and the model's own choice: the reference that all else is compared with.
pub struct AllResident {
    layers: Vec<Option<ResidentLayer>>,
}

struct ResidentLayer {
    layout: ExpertLayout,
    experts: Vec<Vec<u8>>,
}

impl AllResident {
    /// Room for the experts of `layers` decoder layers.
    pub fn new(layers: usize) -> Self {
        AllResident { layers: (0..layers).map(|_| None).collect() }
    }

    /// Sets a layer's experts, all of `layout`.
    pub fn set(&mut self, layer: LayerIdx, layout: ExpertLayout, experts: Vec<Vec<u8>>) {
        debug_assert!(experts.iter().all(|e| e.len() == layout.bytes));
        self.layers[layer.index()] = Some(ResidentLayer { layout, experts });
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.layers.iter().flatten().flat_map(|l| &l.experts).map(Vec::len).sum()
    }
}

impl ExpertPath for AllResident {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed> {
        let layer = self.layers[call.layer.index()].as_ref().expect("every MoE layer was given its experts");
        let routed = route(call);
        let mut outputs = RankedOutputs::new(call);
        for (expert, data) in layer.experts.iter().enumerate() {
            outputs.compute(call, &routed, ExpertId(expert as u16), &layer.layout, data);
        }
        outputs.sum(call, &routed, out);
        Ok(routed)
    }
}

/// The model's own choice for every token of a call.
pub fn route(call: &Call) -> Routed {
    let mut routed = Routed::default();
    let (mut values, mut ids, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for logits in call.logits.chunks_exact(call.gate.experts) {
        call.gate.values(logits, &mut values);
        call.gate.choose(&values, &mut ids);
        call.gate.weights(logits, &ids, &mut weights);
        routed.ids.extend_from_slice(&ids);
        routed.weights.extend_from_slice(&weights);
    }
    routed
}

/// Every chosen expert's output, kept apart until all are there, so that the sum does not depend on who came first.
pub struct RankedOutputs {
    hidden: usize,
    outputs: Vec<f32>, // [tokens, k, hidden]
}

impl RankedOutputs {
    /// Room for the outputs of a call.
    pub fn new(call: &Call) -> Self {
        let hidden = call.x.len() / call.tokens;
        RankedOutputs { hidden, outputs: vec![0.0; call.tokens * call.gate.top_k * hidden] }
    }

    /// Computes one expert for all tokens that chose it, in one batch.
    pub fn compute(&mut self, call: &Call, routed: &Routed, expert: ExpertId, layout: &ExpertLayout, data: &[u8]) {
        let (k, hidden) = (call.gate.top_k, self.hidden);
        let places: Vec<usize> = (0..routed.ids.len()).filter(|i| routed.ids[*i] == expert).collect();
        if places.is_empty() {
            return;
        }
        let mut x = Vec::with_capacity(places.len() * hidden); // [places, hidden]
        for place in &places {
            let scale = if call.gate.scales_input { routed.weights[*place] } else { 1.0 };
            x.extend(call.x[place / k * hidden..][..hidden].iter().map(|v| v * scale));
        }
        let y = expert_mlp(layout, data, call.act, &x); // [places, hidden]
        for (place, y) in places.iter().zip(y.chunks_exact(hidden)) {
            self.outputs[place * hidden..][..hidden].copy_from_slice(y);
        }
    }

    /// The weighted sum of each token's experts, in the order of their rank: `out [tokens, hidden]`.
    pub fn sum(&self, call: &Call, routed: &Routed, out: &mut [f32]) {
        let (k, hidden) = (call.gate.top_k, self.hidden);
        out.fill(0.0);
        for (place, output) in self.outputs.chunks_exact(hidden).enumerate() {
            let weight = if call.gate.scales_input { 1.0 } else { routed.weights[place] };
            let out = &mut out[place / k * hidden..][..hidden];
            out.iter_mut().zip(output).for_each(|(o, y)| *o += weight * y);
        }
    }
}

/// One expert: `down(act(gate(x), up(x)))` for `x [tokens, hidden]`.
pub fn expert_mlp(layout: &ExpertLayout, data: &[u8], act: Activation, x: &[f32]) -> Vec<f32> {
    let [gate_bias, up_bias, down_bias] = match &layout.bias {
        Some(parts) => parts.map(Some),
        None => [None; 3],
    };
    let mut gate = product(&layout.gate, gate_bias, data, x); // [tokens, inter]
    let up = product(&layout.up, up_bias, data, x); // [tokens, inter]
    act.combine(&mut gate, &up);
    product(&layout.down, down_bias, data, &gate) // [tokens, hidden]
}

fn product(part: &Part, bias: Option<Part>, data: &[u8], x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / part.cols * part.rows];
    matmul(Weights { kind: part.kind, rows: part.rows, cols: part.cols, bytes: part.of(data) }, x, &mut out);
    if let Some(bias) = bias {
        let mut values = vec![0.0; part.rows];
        larder_kernels::widen(bias.kind, bias.of(data), &mut values);
        out.chunks_exact_mut(part.rows).for_each(|row| row.iter_mut().zip(&values).for_each(|(o, b)| *o += b));
    }
    out
}
