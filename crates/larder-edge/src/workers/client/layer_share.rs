//! One worker's share of a layer: its request, and the use of each row of its reply.

use larder_core::ExpertId;
use larder_model::{MoeCall, Routed};

use crate::workers::codec;
use crate::workers::compute_job::to_wire;
use crate::workers::handshake::{Handshake, PROTOCOL_VERSION, printable};
use crate::workers::wire::{ComputeReply, ComputeRequest, Format};

/// The source of the output of one entry of the routing, `token · k + rank`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputSource {
    /// Computed locally, or no expert in this entry.
    Local,
    /// A row of a reply.
    Row {
        /// Index of the reply.
        reply: usize,
        /// Index of the row in it.
        row: usize,
    },
    /// Contained in the row of an earlier entry of the same token.
    Summed,
}

/// The experts of a layer that one worker computes.
#[derive(Debug)]
pub struct LayerShare {
    /// Distinct experts, in order of rank.
    pub experts: Vec<ExpertId>,
    format: Format,
    layer: u32,
    hidden: usize,
    /// For each term, the entry `token · k + rank` of its first expert.
    term_starts: Vec<usize>,
    /// The other entries of the terms.
    summed: Vec<usize>,
}

impl LayerShare {
    /// Forms the terms of `experts` for a call's tokens, and the request for them, without its id and model.
    ///
    /// With f32 the sum over all experts of a token must have the bits that it has on one machine. That sum is in rank
    /// order from 0, so only consecutive experts from the first rank on can be summed on the worker, and every other
    /// expert is a term of its own. With bf16 the result is rounded anyway, and a token's experts are one term.
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
            // Whether the next expert of this share extends the current term.
            let mut joins = false;
            let mut is_first = true;
            for (rank, id) in ids.iter().enumerate().filter(|(_, id)| **id != ExpertId::NONE) {
                let (entry, was_first) = (token * k + rank, std::mem::replace(&mut is_first, false));
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
                        share.summed.push(entry);
                    }
                    None => {
                        joins = was_first || format == Format::Bf16;
                        request.term_state.push(state);
                        request.term_experts.push(1);
                        share.term_starts.push(entry);
                    }
                }
                request.experts.push(u32::from(id.0));
                request.weights.push(routed.weights[entry]);
            }
        }
        (share, request)
    }

    /// Checks that a reply is valid for request `id` and decodes its rows. The error continues a sentence that begins
    /// with the worker's name.
    pub fn check_reply(&self, reply: &ComputeReply, id: u64, handshake: &Handshake) -> Result<Vec<f32>, String> {
        let wrong = |what: String| Err(format!("sent an invalid reply: {what}"));
        if reply.version != PROTOCOL_VERSION {
            return wrong(format!("it has version {}", reply.version));
        }
        if reply.model != handshake.model {
            return wrong(format!("it is for experts {}", printable(&reply.model)));
        }
        if (reply.id, reply.layer) != (id, self.layer) {
            return wrong(format!(
                "it is for request {} and layer {}, expected were request {id} and layer {}",
                reply.id, reply.layer, self.layer
            ));
        }
        if reply.format() != self.format {
            return wrong("its number format is not the requested one".into());
        }
        match codec::decode(self.format, &reply.rows, self.term_starts.len() * self.hidden) {
            Some(rows) => Ok(rows),
            None => wrong(format!(
                "it has {} bytes for {} rows of {} values",
                reply.rows.len(),
                self.term_starts.len(),
                self.hidden
            )),
        }
    }

    /// Records the reply with index `reply` as the source of the outputs of this share.
    pub fn assign_rows(&self, reply: usize, sources: &mut [OutputSource]) {
        for (row, entry) in self.term_starts.iter().enumerate() {
            sources[*entry] = OutputSource::Row { reply, row };
        }
        self.summed.iter().for_each(|entry| sources[*entry] = OutputSource::Summed);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{Gate, LayerIdx};
    use larder_model::Activation;

    use super::*;
    use crate::workers::compute_job::ComputeJob;
    use crate::workers::handshake::tests::handshake;

    fn ids(ids: &[u16]) -> Vec<ExpertId> {
        ids.iter().map(|id| ExpertId(*id)).collect()
    }

    fn share(format: Format) -> (LayerShare, ComputeRequest) {
        let gate = Gate::softmax(8, 3, false);
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let call = MoeCall::new(LayerIdx(1), &gate, Activation::Silu, &x, 3);
        // The first token begins with two experts of the share, the second has none, the third has two separate ones.
        let routed = Routed::new(ids(&[4, 5, 0, 1, 2, u16::MAX, 5, 1, 4]), (1..=9).map(|i| i as f32).collect());
        let (share, mut request) = LayerShare::new(&call, &routed, ids(&[4, 5]), format);
        (request.id, request.model) = (9, "abc".into());
        (share, request)
    }

    #[test]
    fn f32_terms_keep_the_order_of_the_sum() {
        let (share, request) = share(Format::F32);
        assert_eq!(request.term_state, [0, 1, 1]);
        assert_eq!(request.term_experts, [2, 1, 1]);
        assert_eq!((&request.experts[..], &request.weights[..]), (&[4, 5, 5, 4][..], &[1.0, 2.0, 7.0, 9.0][..]));
        let mut sources = [OutputSource::Local; 9];
        share.assign_rows(2, &mut sources);
        let row = |row| OutputSource::Row { reply: 2, row };
        let local = OutputSource::Local;
        assert_eq!(sources, [row(0), OutputSource::Summed, local, local, local, local, row(1), local, row(2)]);
        let job = ComputeJob::read(&request, &handshake()).unwrap();
        assert_eq!(job.x, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn bf16_terms_are_one_per_token() {
        let (_, request) = share(Format::Bf16);
        assert_eq!((&request.term_state[..], &request.term_experts[..]), (&[0, 1][..], &[2, 2][..]));
        assert!(ComputeJob::read(&request, &handshake()).is_ok());
    }

    #[test]
    fn invalid_replies_are_refused() {
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
            ("version 3", |r| r.version = 3),
            ("for experts abd", |r| r.model = "abd".into()),
            ("request 8", |r| r.id = 8),
            ("layer 0", |r| r.layer = 0),
            ("format", |r| r.format = Format::Bf16.into()),
            ("47 bytes", |r| r.rows.truncate(47)),
            ("64 bytes", |r| r.rows.resize(64, 0)),
        ];
        for (part, damage) in damages {
            let mut reply = reply.clone();
            damage(&mut reply);
            let error = share.check_reply(&reply, 9, &handshake()).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
