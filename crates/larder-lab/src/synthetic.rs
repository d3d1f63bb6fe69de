//! Synthetic traces with a given popularity law.

use larder_core::{EXPERTS_MAX, Trace, TracePass};

use crate::{LabError, Rng};

/// Parameters of random routing. In each layer the j-th most popular expert is drawn with a probability proportional to
/// 1 / (j + h)^a (Zipf-Mandelbrot); the order of popularity differs from layer to layer.
#[derive(Clone, PartialEq, Debug)]
pub struct SyntheticRouting {
    /// Layers that have experts.
    pub rows: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Distinct experts per token and layer.
    pub top_k: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Exponent of the law; 0 makes all experts equally popular.
    pub a: f64,
    /// Offset of the law, which flattens its head; above -1.
    pub h: f64,
    /// Probability that an expert of the previous token is chosen again, from 0 to 1.
    pub repeat: f64,
    /// Seed; equal seeds give equal traces.
    pub seed: u64,
}

impl Default for SyntheticRouting {
    /// The geometry of gpt-oss-20b, with about its popularity law and repeats.
    fn default() -> Self {
        SyntheticRouting {
            rows: 24,
            experts: 32,
            top_k: 4,
            tokens: 256,
            sequences: 4,
            a: 0.7,
            h: 2.0,
            repeat: 0.3,
            seed: 0,
        }
    }
}

/// Limit of choices in a trace, so that it fits into memory.
const PLACES_MAX: usize = 1 << 32;

impl SyntheticRouting {
    /// Generates the trace.
    pub fn generate(&self) -> Result<Trace, LabError> {
        self.check().map_err(LabError::InvalidInput)?;
        let mut rng = Rng::new(self.seed);
        let popular: Vec<Vec<u16>> = (0..self.rows)
            .map(|_| {
                let mut all: Vec<u16> = (0..self.experts as u16).collect();
                rng.shuffle(&mut all);
                all
            })
            .collect();
        let weights: Vec<f64> = (1..=self.experts).map(|j| (j as f64 + self.h).powf(-self.a)).collect();
        let mut trace = Trace::new(self.rows, self.experts, self.top_k);
        for _ in 0..self.sequences {
            let mut last = vec![Vec::new(); self.rows];
            for token in 0..self.tokens {
                let ids: Vec<u16> = (0..self.rows)
                    .flat_map(|row| {
                        last[row] = self.choose(&last[row], &weights, &mut rng);
                        last[row].iter().map(|place| popular[row][*place]).collect::<Vec<_>>()
                    })
                    .collect();
                trace.push(&TracePass { ids: &ids, starts_sequence: token == 0, ..TracePass::default() })?;
            }
        }
        trace.meta = self.meta();
        Ok(trace)
    }

    /// The chosen positions in the order of popularity: repeats of the previous token, the rest drawn, shuffled.
    fn choose(&self, last: &[usize], weights: &[f64], rng: &mut Rng) -> Vec<usize> {
        let mut chosen: Vec<usize> = last.iter().copied().filter(|_| rng.unit() < self.repeat).collect();
        while chosen.len() < self.top_k {
            let free = || (0..self.experts).filter(|e| !chosen.contains(e));
            let mut at = rng.unit() * free().map(|e| weights[e]).sum::<f64>();
            let mut free = free().peekable();
            let drawn = loop {
                let expert = free.next().expect("fewer experts are chosen than exist");
                at -= weights[expert];
                // Rounding errors must not run past the last expert.
                if at < 0.0 || free.peek().is_none() {
                    break expert;
                }
            };
            chosen.push(drawn);
        }
        rng.shuffle(&mut chosen);
        chosen
    }

    fn check(&self) -> Result<(), String> {
        let SyntheticRouting { rows, experts, top_k, tokens, sequences, a, h, repeat, .. } = *self;
        let sizes =
            [("layers", rows), ("experts", experts), ("k", top_k), ("tokens", tokens), ("sequences", sequences)];
        if let Some((name, _)) = sizes.into_iter().find(|(_, n)| *n == 0) {
            return Err(format!("{name} must be at least 1"));
        }
        if top_k > experts {
            return Err(format!("cannot choose {top_k} of {experts} experts"));
        }
        if experts >= u16::MAX as usize || rows.checked_mul(experts).is_none_or(|n| n > EXPERTS_MAX) {
            return Err(format!("{rows} layers of {experts} experts exceed the limit of {EXPERTS_MAX} experts"));
        }
        let places = [rows, top_k, tokens, sequences].into_iter().try_fold(1usize, usize::checked_mul);
        if places.is_none_or(|n| n > PLACES_MAX) {
            return Err(format!("{sequences} sequences of {tokens} tokens are more than fits into a trace"));
        }
        if !(0.0..=100.0).contains(&a) {
            return Err(format!("the exponent a must be from 0 to 100, not {a}"));
        }
        if !(h > -1.0 && h <= 1e6) {
            return Err(format!("h must be above -1 and at most 1000000, not {h}"));
        }
        if (0.0..=1.0).contains(&repeat) {
            Ok(())
        } else {
            Err(format!("the probability of a repeat must be from 0 to 1, not {repeat}"))
        }
    }

    fn meta(&self) -> std::collections::BTreeMap<String, String> {
        let SyntheticRouting { a, h, repeat, seed, .. } = self;
        let law = format!("p_j ~ 1/(j+{h})^{a}, repeats {repeat}, seed {seed}");
        [("source".to_owned(), "larder lab synth".to_owned()), ("law".to_owned(), law)].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_repeat_with_their_seed_and_pass_the_check() {
        let synth = SyntheticRouting { tokens: 20, ..SyntheticRouting::default() };
        let one = synth.generate().unwrap();
        one.check().unwrap();
        assert_eq!(one, synth.generate().unwrap());
        assert_ne!(one.ids, SyntheticRouting { seed: 1, ..synth }.generate().unwrap().ids);
        assert_eq!(one.sequences, [20; 4]);
    }

    /// With one expert per token the law can be read off directly.
    #[test]
    fn popularity_follows_the_law_in_an_order_of_each_layers_own() {
        let synth = SyntheticRouting {
            rows: 2,
            experts: 6,
            top_k: 1,
            tokens: 20_000,
            sequences: 1,
            repeat: 0.0,
            a: 1.5,
            h: 0.5,
            seed: 3,
        };
        let trace = synth.generate().unwrap();
        let mut orders = Vec::new();
        for row in 0..2 {
            let mut counts = [(0u32, 0usize); 6];
            (0..trace.tokens()).for_each(|t| counts[trace.chosen(t, row)[0] as usize].0 += 1);
            counts.iter_mut().enumerate().for_each(|(e, c)| c.1 = e);
            counts.sort_by(|a, b| b.cmp(a));
            let sum: f64 = (1..=6).map(|j| (j as f64 + 0.5).powf(-1.5)).sum();
            for (j, (count, _)) in counts.iter().enumerate() {
                let want = (j as f64 + 1.5).powf(-1.5) / sum;
                let got = f64::from(*count) / 20_000.0;
                assert!((got - want).abs() < 0.012, "row {row}, rank {j}: {got} instead of {want}");
            }
            orders.push(counts.iter().map(|c| c.1).collect::<Vec<_>>());
        }
        assert_ne!(orders[0], orders[1]);
    }

    #[test]
    fn repeats_follow_their_chance() {
        let kept = |repeat| {
            let synth = SyntheticRouting {
                rows: 1,
                experts: 64,
                a: 0.0,
                tokens: 4000,
                sequences: 1,
                repeat,
                ..SyntheticRouting::default()
            };
            let trace = synth.generate().unwrap();
            let both = |t: usize| trace.chosen(t, 0).iter().filter(|e| trace.chosen(t - 1, 0).contains(e)).count();
            (1..4000).map(both).sum::<usize>() as f64 / (3999.0 * 4.0)
        };
        assert!((kept(0.0) - 4.0 / 64.0).abs() < 0.01, "{}", kept(0.0));
        assert!((kept(0.5) - 0.5 - 0.5 * 0.03).abs() < 0.02, "{}", kept(0.5));
        assert_eq!(kept(1.0), 1.0);
    }

    #[test]
    fn extreme_laws_still_give_distinct_experts() {
        for (a, experts, top_k) in [(100.0, 300, 8), (0.0, 4, 4), (3.0, 1, 1)] {
            let synth =
                SyntheticRouting { a, experts, top_k, tokens: 5, rows: 2, h: -0.99, ..SyntheticRouting::default() };
            synth.generate().unwrap().check().unwrap();
        }
    }

    #[test]
    fn parameters_out_of_range_are_refused_in_one_sentence() {
        let error = |synth: SyntheticRouting| synth.generate().unwrap_err().to_string();
        assert!(error(SyntheticRouting { top_k: 33, ..SyntheticRouting::default() }).contains("33 of 32"));
        assert!(error(SyntheticRouting { tokens: 0, ..SyntheticRouting::default() }).contains("tokens"));
        assert!(
            error(SyntheticRouting { tokens: usize::MAX, ..SyntheticRouting::default() }).contains("more than fits")
        );
        assert!(error(SyntheticRouting { a: f64::NAN, ..SyntheticRouting::default() }).contains("exponent"));
        assert!(error(SyntheticRouting { h: -1.0, ..SyntheticRouting::default() }).contains("h must"));
        assert!(error(SyntheticRouting { repeat: 1.1, ..SyntheticRouting::default() }).contains("repeat"));
        assert!(error(SyntheticRouting { rows: 1 << 20, ..SyntheticRouting::default() }).contains("limit"));
    }
}
