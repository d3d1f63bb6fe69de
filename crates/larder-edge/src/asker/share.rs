//! What one worker is asked for in one layer, and what of its answer goes where.

use larder_core::ExpertId;
use larder_model::{MoeCall, Routed};

use crate::agreed::{Agreed, VERSION, short};
use crate::job::spoken;
use crate::numbers;
use crate::wire::{ComputeReply, ComputeRequest, Format};

/// Where the output of a place comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The own workbench, or nowhere if nobody is wanted there.
    Here,
    /// A row of somebody's answer.
    Row {
        /// Whose.
        answer: usize,
        /// Which.
        row: usize,
    },
    /// A row of an earlier place of the same token has it in its sum.
    Inside,
}

/// A worker's part of a layer.
#[derive(Debug)]
pub struct Share {
    /// Distinct, in order of rank.
    pub experts: Vec<ExpertId>,
    format: Format,
    layer: u32,
    hidden: usize,
    /// Of each term, the place `token · k + rank` of its first expert.
    firsts: Vec<usize>,
    /// The other places that the terms cover.
    inside: Vec<usize>,
}

impl Share {
    /// The terms that `experts` make of a call's tokens, and the request for them but for its number and model.
    ///
    /// With f32 the sum over all experts of a token must have the bits that it has on one machine: it runs in rank
    /// order from 0, so only a run of experts from the first rank on can be summed elsewhere, and every other expert is a term of
    /// its own. With bf16 the bits are lost anyway, and a token's experts are one term.
    pub fn new(call: &MoeCall, routed: &Routed, experts: Vec<ExpertId>, format: Format) -> (Self, ComputeRequest) {
        let (k, hidden) = (call.gate.top_k, call.x.len() / call.tokens);
        let mut is_mine = vec![false; call.gate.experts];
        experts.iter().for_each(|expert| is_mine[expert.index()] = true);
        let (activation, alpha, limit) = spoken(call.act);
        let (layer, version) = (u32::from(call.layer.0), VERSION);
        let mut share = Share { experts, format, layer, hidden, firsts: vec![], inside: vec![] };
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
                    request.states.extend(numbers::encode(format, &call.x[token * hidden..][..hidden]));
                    (request.states.len() / (hidden * numbers::width(format)) - 1) as u32
                });
                match request.term_experts.last_mut().filter(|_| joins) {
                    Some(experts) => {
                        *experts += 1;
                        share.inside.push(place);
                    }
                    None => {
                        joins = was_first || format == Format::Bf16;
                        request.term_state.push(state);
                        request.term_experts.push(1);
                        share.firsts.push(place);
                    }
                }
                request.experts.push(u32::from(id.0));
                request.weights.push(routed.weights[place]);
            }
        }
        (share, request)
    }

    /// The rows of an answer, if it is the one to request `id`; else what is wrong with it.
    pub fn rows(&self, reply: &ComputeReply, id: u64, agreed: &Agreed) -> Result<Vec<f32>, String> {
        let wrong = |what: String| Err(format!("gave an answer {what}"));
        if reply.version != VERSION {
            return wrong(format!("of version {}", reply.version));
        }
        if reply.model != agreed.model {
            return wrong(format!("about the experts {}", short(&reply.model)));
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
        match numbers::decode(self.format, &reply.rows, self.firsts.len() * self.hidden) {
            Some(rows) => Ok(rows),
            None => {
                wrong(format!("of {} bytes for {} rows of {} values", reply.rows.len(), self.firsts.len(), self.hidden))
            }
        }
    }

    /// Notes where the places of this share get their outputs, which come with the `answer`th answer.
    pub fn settle(&self, answer: usize, sources: &mut [Source]) {
        for (row, place) in self.firsts.iter().enumerate() {
            sources[*place] = Source::Row { answer, row };
        }
        self.inside.iter().for_each(|place| sources[*place] = Source::Inside);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{Gate, LayerIdx};
    use larder_model::Activation;

    use super::*;
    use crate::agreed::tests::agreed;
    use crate::job::Job;

    fn ids(ids: &[u16]) -> Vec<ExpertId> {
        ids.iter().map(|id| ExpertId(*id)).collect()
    }

    fn share(format: Format) -> (Share, ComputeRequest) {
        let gate = Gate::softmax(8, 3, false);
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let call = MoeCall { layer: LayerIdx(1), gate: &gate, act: Activation::Silu, logits: &[], x: &x, tokens: 3 };
        // The first token begins with two that are asked for, the second has none, the third has two apart.
        let routed =
            Routed { ids: ids(&[4, 5, 0, 1, 2, u16::MAX, 5, 1, 4]), weights: (1..=9).map(|i| i as f32).collect() };
        let (share, mut request) = Share::new(&call, &routed, ids(&[4, 5]), format);
        (request.id, request.model) = (9, "abc".into());
        (share, request)
    }

    #[test]
    fn exact_terms_keep_the_order_of_the_sum() {
        let (share, request) = share(Format::F32);
        assert_eq!(request.term_state, [0, 1, 1]);
        assert_eq!(request.term_experts, [2, 1, 1]);
        assert_eq!((&request.experts[..], &request.weights[..]), (&[4, 5, 5, 4][..], &[1.0, 2.0, 7.0, 9.0][..]));
        let mut sources = [Source::Here; 9];
        share.settle(2, &mut sources);
        let row = |row| Source::Row { answer: 2, row };
        let here = Source::Here;
        assert_eq!(sources, [row(0), Source::Inside, here, here, here, here, row(1), here, row(2)]);
        let job = Job::read(&request, &agreed()).unwrap();
        assert_eq!(job.x, [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn rounded_terms_are_one_for_each_token() {
        let (_, request) = share(Format::Bf16);
        assert_eq!((&request.term_state[..], &request.term_experts[..]), (&[0, 1][..], &[2, 2][..]));
        assert!(Job::read(&request, &agreed()).is_ok());
    }

    #[test]
    fn an_answer_must_be_the_one_that_was_asked_for() {
        let (share, request) = share(Format::F32);
        let reply = ComputeReply {
            version: VERSION,
            id: request.id,
            model: request.model,
            layer: 1,
            format: Format::F32.into(),
            rows: vec![0; 3 * 16],
            ..Default::default()
        };
        assert_eq!(share.rows(&reply, 9, &agreed()).unwrap().len(), 12);
        type Spoil = fn(&mut ComputeReply);
        let spoils: [(&str, Spoil); 7] = [
            ("version", |r| r.version = 3),
            ("experts abd", |r| r.model = "abd".into()),
            ("request 8", |r| r.id = 8),
            ("layer 0", |r| r.layer = 0),
            ("format", |r| r.format = Format::Bf16.into()),
            ("47 bytes", |r| r.rows.truncate(47)),
            ("64 bytes", |r| r.rows.resize(64, 0)),
        ];
        for (part, spoil) in spoils {
            let mut reply = reply.clone();
            spoil(&mut reply);
            let said = share.rows(&reply, 9, &agreed()).expect_err(part);
            assert!(said.contains(part), "{said}");
        }
    }
}
