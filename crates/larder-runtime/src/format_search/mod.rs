//! Choosing a number format for each matrix, so that a model of a given size loses as little as possible.
//!
//! Each group of matrices is rounded to one format, the probe, and the KL divergence of the model's output is measured
//! with everything else as it was. In another format the divergence is in proportion to the error of the group's
//! products, which needs the weights alone. The bytes then go where they lower the sum of divergences most.

mod allocation;
mod cost_file;
mod divergence;
mod groups;
mod rounding_errors;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use larder_core::{Blueprint, NumberFormat};
use larder_model::{ComputeContext, Decoder, LogitsFor};
use larder_store::{Assembler, ConvertedTensors, FormatMix, Importance, Source, WantedFormats};

use crate::text_pass::{TextPass, chunks_per_step};
use allocation::{Candidate, allocate};
use cost_file::{CostFile, MeasuredCost};
use divergence::Distributions;
use groups::{MatrixGroup, groups};
use rounding_errors::WideWeights;

/// A model, and what its formats are measured on.
pub struct FormatSearch<'a> {
    /// The model, whose weights are floats or can be widened to floats.
    pub source: &'a dyn Source,
    /// Its architecture.
    pub blueprint: &'a Blueprint,
    /// How large the inputs of its matrices are.
    pub importance: Option<&'a Importance>,
    /// Chunks of a text, each a sequence of its own.
    pub chunks: &'a [&'a [u32]],
    /// Whether resident matrices get formats too, or keep theirs.
    pub resident: bool,
    /// Compute threads.
    pub threads: usize,
}

/// The formats that were chosen.
#[derive(Clone, Debug)]
pub struct ChosenFormats {
    /// A rule for each matrix.
    pub mix: FormatMix,
    /// Mean bits of a weight.
    pub bits: f64,
    /// The sum of the divergences of all groups, each alone.
    pub expected_kl: f64,
    /// The mean KL divergence of the model in these formats, in nats.
    pub kl: f64,
    /// Weights in each format, by ascending bits.
    pub shares: Vec<(NumberFormat, u64)>,
}

/// Receives the progress of a search.
pub trait SearchProgress {
    /// A search of `tokens` tokens through the model begins.
    fn begin(&mut self, tokens: usize);
    /// `tokens` more are done.
    fn advance(&mut self, tokens: usize);
}

impl FormatSearch<'_> {
    /// Chooses formats of `bits` bits per weight for the store at `store`. What was measured is kept in a file beside
    /// it, under `key`, which names everything that decides about it.
    pub fn choose(
        &self,
        store: &Path,
        key: &str,
        bits: f64,
        progress: &mut dyn SearchProgress,
    ) -> Result<ChosenFormats> {
        let all = groups(self.source, self.blueprint, self.resident)?;
        let kinds: Vec<Vec<NumberFormat>> = all.iter().map(candidates).collect();
        let probes: Vec<NumberFormat> = kinds.iter().map(|kinds| nearest(kinds, bits)).collect();
        let weights: u64 = all.iter().map(MatrixGroup::weights).sum();
        let budget = (weights as f64 * bits / 8.0) as u64;
        check_budget(&all, &kinds, budget, weights)?;
        self.check(&rules(all.iter().zip(probes.iter().copied()))?)?;
        let mut costs = CostFile::open(store, &format!("{key}, probes {}", names(&probes)))?;

        let compute =
            ComputeContext::new(self.threads, false).context("compute threads cannot be started; try fewer")?;
        let compute = Arc::new(compute);
        let tokens: usize = self.chunks.iter().map(|chunk| chunk.len()).sum();
        progress.begin(tokens * (2 + all.len() - costs.measured.len().min(all.len())));
        let decoder = Decoder::load(self.source.config(), self.source, compute.clone())?;
        let mut probe = Probe { search: self, own: Distributions::new(store, decoder.vocab())?, decoder, compute };
        probe.record(progress)?;
        let wide = WideWeights::new(self.source, self.blueprint, self.importance)?;
        for ((group, kinds), kind) in all.iter().zip(&kinds).zip(&probes).skip(costs.measured.len()) {
            let errors = wide.errors(group, kinds)?;
            let kl = probe.divergence(&rules([(group, *kind)])?, !group.of_experts, progress)?;
            costs.push(MeasuredCost { group: group.names[0].clone(), kl: kl as f32, errors })?;
        }

        let options: Vec<Vec<Candidate>> = all
            .iter()
            .zip(&kinds)
            .zip(costs.measured.iter().zip(&probes))
            .map(|((group, kinds), (cost, probe))| {
                kinds.iter().map(|kind| candidate(group, *kind, *probe, cost)).collect()
            })
            .collect();
        let chosen = allocate(&options, budget).context("the smallest formats are larger than that")?;
        let picks: Vec<(&MatrixGroup, NumberFormat)> =
            all.iter().zip(chosen.iter().zip(&kinds).map(|(at, kinds)| kinds[*at])).collect();
        let mix = rules(picks.iter().copied())?;
        let of_chosen = || chosen.iter().zip(&options).map(|(at, options)| options[*at]);
        let kl = probe.divergence(&mix, self.resident, progress)?;
        let bytes: u64 = of_chosen().map(|candidate| candidate.bytes).sum();
        Ok(ChosenFormats {
            mix,
            bits: 8.0 * bytes as f64 / weights as f64,
            expected_kl: of_chosen().map(|candidate| candidate.cost).sum(),
            kl,
            shares: shares(&picks),
        })
    }
}

/// Passes the text through the model with some of its matrices rounded.
struct Probe<'s, 'a> {
    search: &'s FormatSearch<'a>,
    /// The distributions of the model as it is.
    own: Distributions,
    decoder: Decoder,
    compute: Arc<ComputeContext>,
}

impl Probe<'_, '_> {
    /// Records the distributions of the model as it is.
    fn record(&mut self, progress: &mut dyn SearchProgress) -> Result<()> {
        let FormatSearch { source, blueprint, chunks, .. } = *self.search;
        let experts = Assembler::new(source, blueprint, None)?;
        let mut pass = TextPass::new(&self.decoder, &experts, &self.compute);
        let own = &mut self.own;
        pass.run(chunks, self.search.per_step()?, LogitsFor::All, &mut |step, logits| {
            progress.advance(chunks[step].iter().map(|chunk| chunk.len()).sum());
            if logits.iter().any(|logit| logit.is_nan()) {
                bail!("the model's logits are NaN on this text");
            }
            own.push(logits)
        })
    }

    /// The mean divergence with the matrices of `mix` in its formats. `resident` says whether resident ones are among
    /// them.
    fn divergence(&mut self, mix: &FormatMix, resident: bool, progress: &mut dyn SearchProgress) -> Result<f64> {
        let FormatSearch { source, blueprint, chunks, importance, threads, .. } = *self.search;
        let wanted = WantedFormats::new(mix, None);
        let experts = Assembler::weighed(source, blueprint, wanted, importance)?;
        let changed = if resident {
            let tensors = ConvertedTensors::weighed(source, blueprint, wanted, importance)?;
            Some(Decoder::load(source.config(), &tensors, self.compute.clone())?)
        } else {
            None
        };
        let mut pass = TextPass::new(changed.as_ref().unwrap_or(&self.decoder), &experts, &self.compute);
        let (own, mut sum) = (&mut self.own, 0.0);
        own.rewind()?;
        pass.run(chunks, self.search.per_step()?, LogitsFor::All, &mut |step, logits| {
            progress.advance(chunks[step].iter().map(|chunk| chunk.len()).sum());
            sum += own.divergence(logits, threads)?;
            Ok(())
        })?;
        // Formats in which a model computes no numbers are possible, and never chosen.
        Ok(if sum.is_finite() { sum / own.rows().max(1) as f64 } else { f64::from(f32::MAX) })
    }
}

impl FormatSearch<'_> {
    /// Checks that the matrices can be rounded to the formats of `mix`.
    fn check(&self, mix: &FormatMix) -> Result<()> {
        let wanted = WantedFormats::new(mix, None);
        Assembler::weighed(self.source, self.blueprint, wanted, self.importance)?;
        ConvertedTensors::weighed(self.source, self.blueprint, wanted, self.importance)?;
        Ok(())
    }

    fn per_step(&self) -> Result<usize> {
        let longest = self.chunks.iter().map(|chunk| chunk.len()).max().unwrap_or(1);
        chunks_per_step(self.blueprint, longest, LogitsFor::All)
    }
}

/// The quantised formats whose blocks divide the rows of a group, by ascending bits.
fn candidates(group: &MatrixGroup) -> Vec<NumberFormat> {
    let fits = |kind: &NumberFormat| kind.is_encodable() && !kind.is_float() && group.bytes(*kind).is_some();
    let mut kinds: Vec<NumberFormat> = NumberFormat::ALL.into_iter().filter(fits).collect();
    kinds.sort_by(|a, b| bits_of(*a).total_cmp(&bits_of(*b)));
    if kinds.is_empty() { vec![NumberFormat::F16] } else { kinds }
}

/// The format whose bits are nearest.
fn nearest(kinds: &[NumberFormat], bits: f64) -> NumberFormat {
    let distance = |kind: &NumberFormat| (bits_of(*kind) - bits).abs();
    kinds.iter().copied().min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("each group has a candidate")
}

/// Bits of a weight.
fn bits_of(kind: NumberFormat) -> f64 {
    8.0 * kind.block_bytes() as f64 / kind.block_len() as f64
}

fn candidate(group: &MatrixGroup, kind: NumberFormat, probe: NumberFormat, measured: &MeasuredCost) -> Candidate {
    let error = |kind: NumberFormat| measured.errors.get(kind.name()).copied().map_or(0.0, f64::from);
    let share = if error(probe) > 0.0 { error(kind) / error(probe) } else { 0.0 };
    Candidate { bytes: group.bytes(kind).expect("candidates fit"), cost: f64::from(measured.kl.max(0.0)) * share }
}

fn check_budget(groups: &[MatrixGroup], kinds: &[Vec<NumberFormat>], budget: u64, weights: u64) -> Result<()> {
    let smallest = groups.iter().zip(kinds).map(|(group, kinds)| {
        kinds.iter().filter_map(|kind| group.bytes(*kind)).min().expect("each group has a candidate")
    });
    let least = 8.0 * smallest.sum::<u64>() as f64 / weights as f64;
    if 8.0 * budget as f64 / (weights as f64) < least - 1e-3 {
        bail!("the smallest formats of these matrices have {least:.2} bits per weight; choose at least as many");
    }
    Ok(())
}

fn names(kinds: &[NumberFormat]) -> String {
    let mut distinct: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    distinct.dedup();
    distinct.join(" ")
}

/// A rule for each matrix of the groups.
fn rules<'g>(formats: impl IntoIterator<Item = (&'g MatrixGroup, NumberFormat)>) -> Result<FormatMix> {
    let mut lines = Vec::new();
    for (group, kind) in formats {
        lines.extend(group.names.iter().map(|name| format!("{name} {kind}")));
    }
    FormatMix::try_from(lines).map_err(|why| anyhow::anyhow!(why))
}

/// Weights in each format, by ascending bits.
fn shares(picks: &[(&MatrixGroup, NumberFormat)]) -> Vec<(NumberFormat, u64)> {
    let mut shares: Vec<(NumberFormat, u64)> = Vec::new();
    for (group, kind) in picks {
        match shares.iter_mut().find(|(known, _)| known == kind) {
            Some((_, weights)) => *weights += group.weights(),
            None => shares.push((*kind, group.weights())),
        }
    }
    shares.sort_by(|(a, _), (b, _)| bits_of(*a).total_cmp(&bits_of(*b)));
    shares
}
