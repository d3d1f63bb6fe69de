//! Steps that run ahead on a device that sometimes draws another token, or fails: the text and all that follows are the
//! same.

use std::sync::Arc;

use larder_core::{ExpertId, Gate, LayerIdx};
use larder_engine::{
    AheadCounts, Sampler, Sampling, Sequence, Session, SessionDecoding, Speculation, StepPart, TokenChoice, TokenInput,
    step,
};
use larder_model::{
    AllResident, ComputeContext, Decoder, DeviceMoeCall, DevicePath, ExpertPath, FakeOps, HashRouting, LogitsFor,
    ModelError, MoeCall, Ops, Routed, Rows, TokenPhase,
};

use super::speculation::{CONTEXT, PROMPT, tokenizer, ways, write_in};
use crate::cache::attention::{DeviceFaults, on_faulty_device};
use crate::support::fixture;
use crate::support::rig::model;

/// Experts that a device chooses and computes, as far as the decoder can see.
pub(super) struct OnFake {
    pub(super) experts: AllResident,
    pub(super) ops: Arc<FakeOps>,
}

impl ExpertPath for OnFake {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        self.experts.forward(call, out)
    }

    fn on_device(&mut self) -> Option<&mut dyn DevicePath> {
        Some(self)
    }
}

impl DevicePath for OnFake {
    fn begin(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<(Routed, Option<Rows>), ModelError> {
        Ok((self.forward(call, out)?, None))
    }

    fn chooses(&mut self, _: LayerIdx, _: &Gate, tokens: usize) -> bool {
        tokens == 1
    }

    fn begin_chosen(&mut self, call: &DeviceMoeCall) -> Result<Rows, ModelError> {
        let DeviceMoeCall { layer, gate, act, known, on_device, .. } = *call;
        let known = known.map(|known| match known {
            HashRouting::Ids(ids) => ids.to_vec(),
            HashRouting::OfDrawn(table) => {
                self.ops.row_of_drawn(table, gate.top_k).into_iter().map(|id| ExpertId(id as u16)).collect()
            }
        });
        let known = known.as_deref();
        let [logits, x] = [call.logits, on_device.x].map(|rows| self.ops.peek(rows));
        let mut out = vec![0.0; x.len()];
        let (tokens, meanwhile) = (call.logits.rows, &|| ());
        let call = MoeCall {
            layer,
            gate,
            act,
            logits: &logits,
            x: &x,
            on_device: None,
            tokens,
            known,
            origins: &[],
            meanwhile,
        };
        self.experts.forward(&call, &mut out)?;
        let mut sums = self.ops.send(&out, out.len() / tokens)?;
        for added in [on_device.shared, on_device.residual].into_iter().flatten() {
            sums = self.ops.add(added, sums, 1.0)?;
        }
        Ok(sums)
    }
}

/// Attention over few and over many heads, sinks, a latent, factors, states that cannot go back freely, experts that
/// tokens decide on.
const MODELS: [&str; 9] = [
    "olmoe",
    "gpt_oss",
    "gemma4_text",
    "granitemoe",
    "deepseek_v3",
    "qwen3_next",
    "jamba",
    "granitemoehybrid",
    "deepseek_v4",
];

#[test]
fn texts_are_those_without_whatever_the_device_draws() {
    let mut all = AheadCounts::default();
    for name in MODELS {
        let folder = fixture("golden").join(name);
        let (model, tokenizer) = (model(&folder), tokenizer(&folder));
        for wrong in [0, 3, 10] {
            let (compute, ops) = on_faulty_device(DeviceFaults { wrong_draws: wrong, ..DeviceFaults::default() });
            let decoder = model.decoder_by(ComputeContext { kv_device_layers: usize::MAX, ..compute }).unwrap();
            decoder.place_embedding().unwrap();
            let mut there = OnFake { experts: model.resident(), ops };
            for (at, way) in ways().into_iter().enumerate() {
                let mut here = model.resident();
                let [of_host, of_device]: [(_, AheadCounts); 2] = [
                    {
                        let mut session = Session::new(&model.decoder, &mut here, CONTEXT);
                        let (written, _) = write_in(&mut session, &tokenizer, way, Speculation::Off);
                        (written, session.sequence().ahead_counts())
                    },
                    {
                        let mut session = Session::new(&decoder, &mut there, CONTEXT);
                        let (written, _) = write_in(&mut session, &tokenizer, way, Speculation::Auto);
                        (written, session.sequence().ahead_counts())
                    },
                ];
                assert_eq!(of_host.0, of_device.0, "{name}: way {at}, every {wrong}th draw is wrong");
                let counts = of_device.1;
                assert_eq!(of_host.1, AheadCounts::default());
                assert!(counts.steps > 0, "{name}: way {at}: {counts:?}");
                // Where many are wrong, it stops; behind a shift of the context it tries again.
                let most = if wrong == 0 { 0 } else { 16 + counts.steps / 8 };
                assert!(counts.dropped <= most, "{name}: way {at}: {counts:?}");
                let drops = counts.dropped * 40 > counts.steps || counts.steps < 60;
                assert!(wrong == 0 || drops, "{name}: way {at}: {counts:?}");
                all += counts;
            }
        }
    }
    println!("{all:?}");
    assert!(all.dropped > 500 && all.steps > 10 * all.dropped, "{all:?}");
}

/// The tokens of three sequences that take turns, alone or together, as they are drawn; each is of another length in
/// the end.
fn taking_turns(decoder: &Decoder, experts: &mut dyn ExpertPath, wants_ahead: bool) -> (Vec<Vec<u32>>, AheadCounts) {
    let mut rng = larder_core::Rng::new(11);
    let new = |n: u64| {
        let mut sequence = Sequence::new(decoder, CONTEXT);
        sequence.append(decoder, &PROMPT[..15 + n as usize], TokenPhase::Prefill).unwrap();
        // Two of them with penalties, one of these with biases.
        let frequency_penalty = if n > 0 { 0.02 } else { 0.0 };
        let sampling = Sampling { temperature: 0.3, top_k: 5, frequency_penalty, ..Sampling::default() };
        let sampler = Sampler::new(sampling, n).unwrap().with_prompt_len(PROMPT.len().min(15 + n as usize));
        (sequence, if n == 1 { sampler.with_logit_bias(vec![(40, 1.0), (7, -1.0)]) } else { sampler })
    };
    let mut all: Vec<(Sequence, Sampler)> = (0..3).map(new).collect();
    for _ in 0..200 {
        let chosen = if rng.below(8) > 0 { 1 << rng.below(3) } else { 1 + rng.below(7) };
        let mut parts = Vec::new();
        let mut samplers = Vec::new();
        for (n, (sequence, sampler)) in all.iter_mut().enumerate() {
            if chosen & 1 << n > 0 {
                let best = sampler.best(&[sequence.tokens()]);
                let draws = sampler.draws(&[sequence.tokens()]).filter(|_| wants_ahead);
                parts.push(StepPart { sequence, most: 50, logits_for: LogitsFor::Last, best, draws });
                samplers.push(sampler);
            }
        }
        let logits = step(decoder, experts, &mut parts, &mut ()).unwrap();
        for ((part, sampler), mut logits) in parts.into_iter().zip(samplers).zip(logits) {
            let id = sampler.sample_row(logits.row(0, 1), part.sequence.tokens()).unwrap();
            part.sequence.append(decoder, &[id], TokenPhase::Decode).unwrap();
        }
    }
    let counts = all.iter().map(|(sequence, _)| sequence.ahead_counts());
    let counts = counts.fold(AheadCounts::default(), |all, own| all + own);
    (all.into_iter().map(|(sequence, _)| sequence.tokens().to_vec()).collect(), counts)
}

#[test]
fn sequences_that_take_turns_write_what_they_write_elsewhere() {
    for name in ["olmoe", "qwen3_next", "deepseek_v4"] {
        let model = model(&fixture("golden").join(name));
        let (want, none) = taking_turns(&model.decoder, &mut model.resident(), true);
        assert_eq!(none, AheadCounts::default());
        let (compute, ops) = on_faulty_device(DeviceFaults::default());
        let decoder = model.decoder_by(ComputeContext { kv_device_layers: usize::MAX, ..compute }).unwrap();
        decoder.place_embedding().unwrap();
        let mut there = OnFake { experts: model.resident(), ops };
        let (got, counts) = taking_turns(&decoder, &mut there, true);
        assert_eq!(got, want, "{name}");
        println!("{name}: {counts:?}");
        assert!(counts.steps > 80 && counts.dropped > 10, "{name}: {counts:?}");
        assert_eq!(taking_turns(&decoder, &mut there, false), (want, AheadCounts::default()), "{name}");
    }
}

/// The tokens behind a prompt, and how often a step failed and was asked for again.
fn persistently<P: ExpertPath>(session: &mut Session<P>, tokens: usize) -> (Vec<u32>, usize) {
    let (mut sampler, mut failures) = (Sampler::new(Sampling::default(), 0).unwrap(), 0);
    let logits = loop {
        match session.forward(&TokenInput::prompt(&PROMPT), &mut ()) {
            Ok(logits) => break logits,
            Err(_) => failures += 1,
        }
    };
    let mut decoding = SessionDecoding::new(session, logits.into(), &Speculation::Off.into());
    let mut ids = Vec::new();
    for room in (0..tokens).rev() {
        let id = sampler.sample_row(decoding.logits(), &[]).unwrap();
        ids.push(id);
        decoding.settle();
        while let Err(error) = decoding.next(id, room, &mut sampler, &mut ()) {
            assert!(matches!(error, ModelError::Device(_)), "{error:?}");
            failures += 1;
            assert!(failures < 1000);
        }
    }
    (ids, failures)
}

#[test]
fn a_step_that_fails_is_an_error_and_nothing_is_lost() {
    for name in ["olmoe", "qwen3_next", "deepseek_v4"] {
        let model = model(&fixture("golden").join(name));
        let want = persistently(&mut Session::new(&model.decoder, &mut model.resident(), CONTEXT), 60);
        let (mut all, mut ahead) = (0, 0);
        let fails = [9, 14, 25, 40].map(|failing| DeviceFaults { failing, ..DeviceFaults::default() });
        // Of memory for a page of keys or of states.
        let refuses = [2, 3, 5].map(|refusing| DeviceFaults { refusing, ..DeviceFaults::default() });
        for faults in fails.into_iter().chain(refuses) {
            let (compute, ops) = on_faulty_device(faults);
            let decoder = model.decoder_by(ComputeContext { kv_device_layers: usize::MAX, ..compute }).unwrap();
            decoder.place_embedding().unwrap();
            let mut there = OnFake { experts: model.resident(), ops };
            let mut session = Session::new(&decoder, &mut there, CONTEXT);
            let (ids, failures) = persistently(&mut session, 60);
            assert_eq!(ids, want.0, "{name}: {faults:?}");
            all += failures;
            ahead += session.sequence().ahead_counts().steps;
        }
        println!("{name}: {all} failures, {ahead} steps ran ahead");
        assert!(want.1 == 0 && all > 10 && ahead > 50, "{all} failures, {ahead} steps ran ahead");
    }
}
