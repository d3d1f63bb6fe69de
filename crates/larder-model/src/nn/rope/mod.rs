//! Rotary positions (RoPE) with their scalings: linear, dynamic, yarn, longrope, llama3.

use std::f64::consts::PI;
use std::ops::Range;
use std::sync::OnceLock;

use scaling::{SCALING_KEYS, Scaling, Yarn, log_scale};

use crate::config::{Config, config_error};
use crate::error::Result;
use crate::ops::{RopeTable, Rotary};
use crate::step::{PlacedImage, RotaryRun, rotary_runs};

mod scaling;
mod sections;

pub use sections::RotarySections;

/// The context of dynamic scaling, longer than any sequence: beyond it positions are no longer exact in f32.
const DYNAMIC_REACH: usize = 1 << 24;

/// The map from positions to angles.
#[derive(Clone, Debug)]
pub struct Rope {
    dim: usize,
    theta: f64,
    scaling: Scaling,
    /// Which frequencies turn by the height and the width of positions in images, if some do.
    sections: Option<RotarySections>,
    /// Computed at first use, where they do not depend on the length of the sequence.
    fixed: OnceLock<Frequencies>,
}

/// Frequencies `[dim / 2]`, and the factor on cosines and sines.
type Frequencies = (Vec<f32>, f64);

/// A type of layers with a rope of its own.
pub struct RopeType {
    /// The name of the type, under which `rope_parameters` has its object.
    pub name: &'static str,
    /// Path of that object in messages.
    pub prefix: &'static str,
    /// The key that has this object in configs without `rope_parameters`.
    pub older: Option<&'static str>,
    /// Width of a head.
    pub head_dim: usize,
    /// Default of `rope_theta`.
    pub theta: f64,
    /// Default of the share of a head that is rotated.
    pub partial: f64,
    /// Default of the factor on cosines and sines under yarn scaling; `None` for the usual one.
    pub amplitude: Option<f64>,
}

/// What a rope is parsed with; `trained` is stated outside of the object.
struct RopeDefaults {
    head_dim: usize,
    theta: f64,
    context: usize,
    partial: Option<f64>,
    amplitude: Option<f64>,
    trained: Option<usize>,
    table: usize,
    sections: Option<RotarySections>,
}

impl Rope {
    /// From a config in old keys (`rope_theta`, `rope_scaling`) or new ones (`rope_parameters`).
    ///
    /// `partial` is the architecture's default share of a head that is rotated; `None` if heads are always rotated
    /// whole.
    pub fn parse(
        config: &mut Config,
        head_dim: usize,
        theta: f64,
        context: usize,
        partial: Option<f64>,
    ) -> Result<(Rope, Rotary)> {
        Self::parse_beside(config, head_dim, theta, context, partial, &[])
    }

    /// As [`parse`](Self::parse), of a model whose positions in images have three dimensions. By default they have
    /// these sections.
    pub fn parse_with_sections(
        config: &mut Config,
        head_dim: usize,
        theta: f64,
        context: usize,
        partial: Option<f64>,
        sections: RotarySections,
    ) -> Result<(Rope, Rotary)> {
        Self::parse_all(config, head_dim, theta, context, partial, (&[], Some(sections)))
    }

    /// As [`parse`](Self::parse), where the keys `others` of the nested object have other uses.
    pub fn parse_beside(
        config: &mut Config,
        head_dim: usize,
        theta: f64,
        context: usize,
        partial: Option<f64>,
        others: &[&str],
    ) -> Result<(Rope, Rotary)> {
        Self::parse_all(config, head_dim, theta, context, partial, (others, None))
    }

    fn parse_all(
        config: &mut Config,
        head_dim: usize,
        theta: f64,
        context: usize,
        partial: Option<f64>,
        (others, sections): (&[&str], Option<RotarySections>),
    ) -> Result<(Rope, Rotary)> {
        let theta = config.number_or("rope_theta", theta)?;
        let trained = config.opt_size(&["original_max_position_embeddings"])?;
        let partial = match partial {
            Some(default) => Some(config.number_or("partial_rotary_factor", default)?),
            None => None,
        };
        let inner = rope_object(config)?;
        Self::of_object(
            inner,
            RopeDefaults { head_dim, theta, context, partial, amplitude: None, trained, table: 0, sections },
            others,
        )
    }

    /// A rope for each type of layer, by the objects of `rope_parameters` under their names; with the table of each.
    pub fn parse_types(config: &mut Config, types: &[RopeType], context: usize) -> Result<Vec<(Rope, Rotary)>> {
        let mut all = config.opt_object("rope_parameters", "rope_parameters.")?;
        let mut found = Vec::with_capacity(types.len());
        for (table, RopeType { name, prefix, older, head_dim, theta, partial, amplitude }) in types.iter().enumerate() {
            let inner = match (&mut all, older) {
                (Some(all), _) => all.opt_object(name, prefix)?,
                (None, Some(older)) => config.opt_object(older, "rope_scaling.")?,
                (None, None) => None,
            };
            let (head_dim, theta, partial, amplitude) = (*head_dim, *theta, Some(*partial), *amplitude);
            let (trained, sections) = (None, None);
            let defaults = RopeDefaults { head_dim, theta, context, partial, amplitude, trained, table, sections };
            found.push(Self::of_object(inner, defaults, &[])?);
        }
        if let Some(mut all) = all {
            all.ignore(&["rope_type"]); // each type states its own
            all.finish();
        }
        Ok(found)
    }

    fn of_object(inner: Option<Config>, defaults: RopeDefaults, others: &[&str]) -> Result<(Rope, Rotary)> {
        let RopeDefaults { head_dim, mut theta, context, partial, amplitude, trained, table, mut sections } = defaults;
        let (mut share, mut scaling) = (partial.unwrap_or(1.0), Scaling::None);
        if let Some(mut inner) = inner {
            theta = inner.number_or("rope_theta", theta)?;
            if partial.is_some() {
                share = inner.number_or("partial_rotary_factor", share)?;
            }
            scaling = Scaling::parse(&mut inner, context, trained, amplitude)?;
            sections = sections.map(|default| default.parse(&mut inner)).transpose()?;
            inner.ignore(SCALING_KEYS);
            inner.ignore(others);
            inner.finish();
        }
        let mut dim = (head_dim as f64 * share) as usize;
        if let Scaling::Proportional { pairs, .. } = &mut scaling {
            (*pairs, dim) = ((head_dim as f64 * share / 2.0) as usize, if share <= 1.0 { head_dim } else { dim });
        }
        if theta <= 1.0 || !(dim as f64 <= head_dim as f64 && dim >= 2 && dim.is_multiple_of(2)) {
            let what = format!("rope_theta {theta} with {dim} of {head_dim} values of a head rotated is out of range");
            return Err(config_error(what));
        }
        let rope = Rope { dim, theta, scaling, sections, fixed: OnceLock::new() };
        rope.check()?;
        Ok((rope, Rotary { dim, interleaved: false, table }))
    }

    /// The same angles with yarn scaling: `factor` times the `trained` positions, the usual ramp, no rounding of the
    /// ramp.
    pub fn with_yarn(self, factor: f64, trained: f64) -> Self {
        let (beta_fast, beta_slow, truncate, amplitude) = (32.0, 1.0, false, log_scale(factor, 1.0));
        let mscale_all_dim = None;
        let yarn = Yarn { factor, trained, beta_fast, beta_slow, truncate, amplitude, mscale_all_dim };
        Rope { scaling: Scaling::Yarn(yarn), fixed: OnceLock::new(), ..self }
    }

    fn check(&self) -> Result<()> {
        if let Scaling::Long(long) = &self.scaling
            && (long.short.len() != self.dim / 2 || long.long.len() != self.dim / 2)
        {
            let (short, long) = (long.short.len(), long.long.len());
            let want = self.dim / 2;
            return Err(config_error(format!(
                "longrope has {short} short and {long} long factors; the head size needs {want} of each"
            )));
        }
        Ok(())
    }

    /// Bytes of the cosines and sines of one position.
    pub fn bytes_per_position(&self) -> usize {
        self.dim / 2 * size_of::<(f32, f32)>()
    }

    /// The longest sequence, in tokens: `context` of the config, or more where scaling extends it. Dynamic scaling
    /// grows with the sequence and has no limit of its own.
    pub fn max_context(&self, context: usize) -> usize {
        match &self.scaling {
            Scaling::Dynamic { .. } => context.max(DYNAMIC_REACH),
            Scaling::Yarn(Yarn { factor, trained, .. }) => context.max((factor * trained) as usize),
            _ => context,
        }
    }

    /// The sequence length beyond which the angles of all positions change, earlier ones included, if there is one.
    pub fn switches_at(&self) -> Option<usize> {
        match &self.scaling {
            Scaling::Long(long) => Some(long.trained),
            _ => None,
        }
    }

    /// Whether positions have the same angles in a sequence of `before` tokens and in one of `after` tokens.
    pub fn same_angles(&self, before: usize, after: usize) -> bool {
        match &self.scaling {
            Scaling::Long(long) => (before > long.trained) == (after > long.trained),
            Scaling::Dynamic { trained, .. } => before.max(after) as f64 <= *trained,
            _ => true,
        }
    }

    /// Appends the angles of the tokens with these indices, in a sequence of `horizon` tokens with these images, to a
    /// table.
    pub fn extend(&self, table: &mut RopeTable, images: &[PlacedImage], indices: Range<usize>, horizon: usize) {
        let of_horizon;
        let (frequencies, amplitude) = match self.scaling {
            Scaling::Dynamic { .. } | Scaling::Long(_) => {
                of_horizon = self.frequencies(horizon);
                &of_horizon
            }
            _ => self.fixed.get_or_init(|| self.frequencies(horizon)),
        };
        let angle = |position: usize, frequency: f32| (position as f32 * frequency) as f64;
        let turn = |a: f64| ((a.cos() * amplitude) as f32, (a.sin() * amplitude) as f32);
        let Some(sections) = self.sections else {
            return table.0.extend(indices.flat_map(|at| frequencies.iter().map(move |f| turn(angle(at, *f)))));
        };
        for run in rotary_runs(images, indices) {
            match run {
                RotaryRun::Text(positions) => {
                    table.0.extend(positions.flat_map(|at| frequencies.iter().map(move |f| turn(angle(at, *f)))));
                }
                RotaryRun::Image { at, grid, tokens } => {
                    let of_token = |token: usize| {
                        let position = [at, at + token / grid.columns, at + token % grid.columns];
                        let frequencies = frequencies.iter().enumerate();
                        frequencies.map(move |(i, f)| turn(angle(position[sections.dimension(i)], *f)))
                    };
                    table.0.extend(tokens.flat_map(of_token));
                }
            }
        }
    }

    fn frequencies(&self, horizon: usize) -> Frequencies {
        let plain = |theta: f64| (0..self.dim / 2).map(move |i| theta.powf(-2.0 * i as f64 / self.dim as f64));
        let (frequencies, amplitude): (Vec<f64>, f64) = match &self.scaling {
            Scaling::None => (plain(self.theta).collect(), 1.0),
            Scaling::Linear { factor } => (plain(self.theta).map(|f| f / factor).collect(), 1.0),
            Scaling::Dynamic { factor, trained } => {
                let length = (horizon as f64).max(*trained);
                let stretch = factor * length / trained - (factor - 1.0);
                let theta = self.theta * stretch.powf(self.dim as f64 / (self.dim as f64 - 2.0));
                (plain(theta).collect(), 1.0)
            }
            Scaling::Yarn(yarn) => (yarn.frequencies(plain(self.theta), self.dim, self.theta), yarn.amplitude),
            Scaling::Long(long) => {
                let (factors, amplitude) = if horizon > long.trained {
                    (&long.long, long.long_amplitude)
                } else {
                    (&long.short, long.short_amplitude)
                };
                (plain(self.theta).zip(factors).map(|(f, by)| f / by).collect(), amplitude)
            }
            Scaling::Proportional { factor, pairs } => {
                let turning = |(i, f)| if i < *pairs { f / factor } else { 0.0 };
                (plain(self.theta).enumerate().map(turning).collect(), 1.0)
            }
            Scaling::Llama3 { factor, low, high, trained } => {
                let scale = |f: f64| {
                    let turns = trained * f / (2.0 * PI);
                    // Llama 4 Scout has no ramp: low equals high.
                    let smooth = if turns >= *high { 1.0 } else { ((turns - low) / (high - low)).clamp(0.0, 1.0) };
                    (1.0 - smooth) * f / factor + smooth * f
                };
                (plain(self.theta).map(scale).collect(), 1.0)
            }
        };
        (frequencies.into_iter().map(|f| f as f32).collect(), amplitude)
    }
}

/// The factor on attention scores for heads of `width` values: `width^-0.5`, and DeepSeek's correction for scaled
/// positions.
pub fn attention_scale(width: usize, rope: &Rope) -> f64 {
    let plain = (width as f64).powf(-0.5);
    match &rope.scaling {
        Scaling::Yarn(Yarn { factor, mscale_all_dim: Some(mscale), .. }) if *mscale != 0.0 => {
            plain * log_scale(*factor, *mscale).powi(2)
        }
        _ => plain,
    }
}

fn rope_object<'a>(config: &mut Config<'a>) -> Result<Option<Config<'a>>> {
    let new = config.opt_object("rope_parameters", "rope_parameters.")?;
    let old = config.opt_object("rope_scaling", "rope_scaling.")?;
    match (new, old) {
        (Some(_), Some(_)) => Err(config_error("rope_parameters and rope_scaling are both set; remove one of them")),
        (new, old) => Ok(new.or(old)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::refused;

    fn parse(value: serde_json::Value) -> Result<Rope> {
        let mut config = Config::new(&value)?;
        let (rope, _) = Rope::parse(&mut config, 8, 10_000.0, 4096, None)?;
        match &config.judge(&[])[..] {
            [] => Ok(rope),
            refusals => Err(refused(refusals)),
        }
    }

    #[test]
    fn old_and_new_keys_give_equal_rotations() {
        let old = parse(json!({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}})).unwrap();
        let new =
            parse(json!({"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}})).unwrap();
        assert_eq!((old.theta, &old.scaling), (new.theta, &new.scaling));
        assert_eq!(old.frequencies(1).0[0], 0.25);
    }

    #[test]
    fn long_rope_switches_with_the_length_of_the_sequence() {
        let rope = parse(json!({"rope_scaling": {
            "type": "su", "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 2.0, 2.0, 2.0],
            "short_mscale": 1.5, "long_mscale": 3.0, "original_max_position_embeddings": 16
        }}))
        .unwrap();
        assert_eq!(rope.switches_at(), Some(16));
        assert_eq!((rope.frequencies(16).0[0], rope.frequencies(16).1), (1.0, 1.5));
        assert_eq!((rope.frequencies(17).0[0], rope.frequencies(17).1), (0.5, 3.0));
    }

    #[test]
    fn dynamic_scaling_begins_beyond_the_trained_length() {
        let rope = parse(json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}})).unwrap();
        let plain = parse(json!({})).unwrap();
        assert_eq!(rope.frequencies(4096), plain.frequencies(1));
        assert!(rope.frequencies(8192).0[1] < plain.frequencies(1).0[1]);
    }

    #[test]
    fn llama3_scaling_divides_long_wavelengths_also_without_a_ramp() {
        let rope = |low: f64, high: f64| {
            let scaling = json!({
                "rope_type": "llama3", "factor": 16.0, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": 1024
            });
            parse(json!({ "rope_scaling": scaling })).map(|rope| rope.frequencies(1).0)
        };
        let plain = parse(json!({})).unwrap().frequencies(1).0; // 1, 0.1, 0.01, 0.001: 163, 16.3, 1.63 and 0.163 turns
        let step = rope(1.0, 1.0).unwrap();
        assert_eq!(step, [plain[0], plain[1], plain[2], plain[3] / 16.0]);
        let ramp = rope(1.0, 4.0).unwrap();
        assert_eq!([ramp[0], ramp[1], ramp[3]], [step[0], step[1], step[3]]);
        assert!(ramp[2] > plain[2] / 16.0 && ramp[2] < plain[2]);
        assert!(rope(4.0, 1.0).is_err());
    }

    #[test]
    fn proportional_scaling_turns_the_first_pairs_with_the_frequencies_of_the_whole_head() {
        let rope = |factor: f64| {
            let config = json!({"rope_parameters": {
                "rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": factor, "rope_theta": 1e4
            }});
            let mut config = Config::new(&config).unwrap();
            Rope::parse(&mut config, 8, 1e4, 4096, Some(1.0)).unwrap()
        };
        let plain = parse(json!({})).unwrap().frequencies(1).0;
        let (turning, rotary) = rope(1.0);
        assert_eq!(rotary.dim, 8);
        assert_eq!(turning.frequencies(1).0, [plain[0], plain[1], 0.0, 0.0]);
        assert_eq!(rope(4.0).0.frequencies(1).0, [plain[0] / 4.0, plain[1] / 4.0, 0.0, 0.0]);
    }

    #[test]
    fn unsupported_scalings_are_errors() {
        for bad in [
            json!({"rope_scaling": {"type": "spiral"}}),
            json!({"rope_scaling": {"type": "linear"}}),
            json!({"rope_scaling": {"type": "linear", "factor": -1.0}}),
            json!({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}),
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
            json!({"rope_scaling": 7}),
            json!({"rope_theta": 0}),
        ] {
            assert!(parse(bad.clone()).is_err(), "{bad}");
        }
    }
}
