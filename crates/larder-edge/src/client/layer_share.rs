//! What one worker is asked for in one layer, and what of its answer goes where.

use larder_core::ExpertId;
use larder_model::{MoeCall, Routed};

use crate::codec;
use crate::compute_job::to_wire;
use crate::handshake::{Handshake, PROTOCOL_VERSION, printable};
use crate::wire::{ComputeReply, ComputeRequest, Format};

/// Where the output of a place comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputSource {
    /// The own workbench, or nowhere if nobody is wanted there.
    Local,
    /// A row of somebody's answer.
    Row {
        /// Whose.
        reply: usize,
        /// Which.
        row: usize,
    },
    /// A row of an earlier place of the same token has it in its sum.
    Summed,
}

/// A worker's part of a layer.
#[derive(Debug)]
pub struct LayerShare {
    /// Distinct, in order of rank.
    pub experts: Vec<ExpertId>,
    format: Format,
    layer: u32,
    hidden: usize,
    /// Of each term, the place `token · k + rank` of its first expert.
    term_starts: Vec<usize>,
    /// The other places that the terms cover.
    summed: Vec<usize>,
}

impl LayerShare {
    /// The terms that `experts` make of a call's tokens, and the request for them but for its number and model.
    ///
    /// With f32 the sum over all experts of a token must have the bits that it has on one machine: it runs in rank
    /// order from 0, so only a run of experts from the first rank on can be summed elsewhere, and every other expert is a term of
    /// its own. With bf16 the bits are lost anyway, and a token's experts are one term.
    pub fn new(call: &MoeCall, routed: &Routed, experts: Vec<ExpertId>, format: Format) -> (Self, ComputeRequest) {
        let (k, hidden) = (call.gate.top_k, call.x.len() / call.tokens);
        let mut is_mine = vec![false; call.gate.experts];
        experts.iter().for_each(|expert| is_mine[expert.index()] = true);
        let (activation, alpha, limit) = to_wire(call.act);
        let (layer, version) = (u32::from(call.layer.0), PROTOCOL_VERSION);
        let mut share = LayerShare { experts, format, layer, hidden, term_starts: vec![], summed: vec![] };
        let mut request = ComputeRequest {
            version,
            layer,
            format: format.into(),
            activation: activation.into(),
            alpha,
            limit,
            scales_input: call.gate.scales_input,
            ..Default::default()
        };
        for (token, ids) in routed.ids.chunks_exact(k).enumerate() {
            let mut state = None;
            // Whether what is mine still goes into the term that is open.
            let mut joins = false;
            let mut is_first = true;
            for (rank, id) in ids.iter().enumerate().filter(|(_, id)| **id != ExpertId::NONE) {
                let (place, was_first) = (token * k + rank, std::mem::replace(&mut is_first, false));
                if !is_mine[id.index()] {
                    joins &= format == Format::Bf16;
                    continue;
                }
                let state = *state.get_or_insert_with(|| {
                    request.states.extend(codec::encode(format, &call.x[token * hidden..][..hidden]));
                    (request.states.len() / (hidden * codec::bytes_per_number(format)) - 1) as u32
                });
                match request.term_experts.last_mut().filter(|_| joins) {
                    Some(experts) => {
                        *experts += 1;
                        share.summed.push(place);
                    }
                    None => {
                        joins = was_first || format == Format::Bf16;
                        request.term_state.push(state);
                        request.term_experts.push(1);
                        share.term_starts.push(place);
                    }
                }
                request.experts.push(u32::from(id.0));
                request.weights.push(routed.weights[place]);
            }
        }
        (share, request)
    }

    /// The rows of an answer, if it is the one to request `id`; else what is wrong with it.
    pub fn check_reply(&self, reply: &ComputeReply, id: u64, handshake: &Handshake) -> Result<Vec<f32>, String> {
        let wrong = |what: String| Err(format!("gave an answer {what}"));
        if reply.version != PROTOCOL_VERSION {
            return wrong(format!("of version {}", reply.version));
        }
        if reply.model != handshake.model {
            return wrong(format!("about the experts {}", printable(&reply.model)));
        }
        if (reply.id, reply.layer) != (id, self.layer) {
            return wrong(format!(
                "to request {} about layer {}, asked was {id} about layer {}",
                reply.id, reply.layer, self.layer
            ));
        }
        if reply.format() != self.format {
            return wrong("in another format than it was asked in".into());
        }
        match codec::decode(self.format, &reply.rows, self.term_starts.len() * self.hidden) {
            Some(rows) => Ok(rows),
            None => wrong(format!(
                "of {} bytes for {} rows of {} values",
                reply.rows.len(),
                self.term_starts.len(),
                self.hidden
            )),
        }
    }

    /// Notes where the places of this share get their outputs, which come with the `answer`th answer.
    pub fn assign_rows(&self, reply: usize, sources: &mut [OutputSource]) {
        for (row, place) in self.term_starts.iter().enumerate() {
            sources[*place] = OutputSource::Row { reply, row };
        }
        self.summed.iter().for_each(|place| sources[*place] = OutputSource::Summed);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{Gate, LayerIdx};
    use larder_model::Activation;

    use super::*;
    use crate::compute_job::ComputeJob;
    use crate::handshake::tests::handshake;

    fn ids(ids: &[u16]) -> Vec<ExpertId> {
        ids.iter().map(|id| ExpertId(*id)).collect()
    }

    fn share(format: Format) -> (LayerShare, ComputeRequest) {
        let gate = Gate::softmax(8, 3, false);
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let call = MoeCall { layer: LayerIdx(1), gate: &gate, act: Activation::Silu, logits: &[], x: &x, tokens: 3 };
        // The first token begins with two that are asked for, the second has none, the third has two apart.
        let routed =
            Routed { ids: ids(&[4, 5, 0, 1, 2, u16::MAX, 5, 1, 4]), weights: (1..=9).map(|i| i as f32).collect() };
        let (share, mut request) = LayerShare::new(&call, &routed, ids(&[4, 5]), format);
        (request.id, request.model) = (9, "abc".into());
        (share, request)
    }

    #[test]
    fn exact_terms_keep_the_order_of_the_sum() {
        let (share, request) = share(Format::F32);
        assert_eq!(request.term_state, [0, 1, 1]);
        assert_eq!(request.term_experts, [2, 1, 1]);
        assert_eq!((&request.experts[..], &request.weights[..]), (&[4, 5, 5, 4][..], &[1.0, 2.0, 7.0, 9.0][..]));
        let mut sources = [OutputSource::Local; 9];
        share.assign_rows(2, &mut sources);
        let row = |row| OutputSource::Row { reply: 2, row };
        let here = OutputSource::Local;
        assert_eq!(sources, [row(0), OutputSource::Summed, here, here, here, here, row(1), here, row(2)]);
        let job = ComputeJob::read(&request, &handshake()).unwrap();
        assert_eq!(job.x, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn rounded_terms_are_one_for_each_token() {
        let (_, request) = share(Format::Bf16);
        assert_eq!((&request.term_state[..], &request.term_experts[..]), (&[0, 1][..], &[2, 2][..]));
        assert!(ComputeJob::read(&request, &handshake()).is_ok());
    }

    #[test]
    fn an_answer_must_be_the_one_that_was_asked_for() {
        let (share, request) = share(Format::F32);
        let reply = ComputeReply {
            version: PROTOCOL_VERSION,
            id: request.id,
            model: request.model,
            layer: 1,
            format: Format::F32.into(),
            rows: vec![0; 3 * 16],
            ..Default::default()
        };
        assert_eq!(share.check_reply(&reply, 9, &handshake()).unwrap().len(), 12);
        type Damage = fn(&mut ComputeReply);
        let damages: [(&str, Damage); 7] = [
            ("version", |r| r.version = 3),
            ("experts abd", |r| r.model = "abd".into()),
            ("request 8", |r| r.id = 8),
            ("layer 0", |r| r.layer = 0),
            ("format", |r| r.format = Format::Bf16.into()),
            ("47 bytes", |r| r.rows.truncate(47)),
            ("64 bytes", |r| r.rows.resize(64, 0)),
        ];
        for (part, damage) in damages {
            let mut reply = reply.clone();
            damage(&mut reply);
            let said = share.check_reply(&reply, 9, &handshake()).expect_err(part);
            assert!(said.contains(part), "{said}");
        }
    }
}
