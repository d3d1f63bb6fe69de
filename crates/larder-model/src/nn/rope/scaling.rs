//! The scalings of rotary positions: linear, dynamic, yarn, longrope, llama3, proportional.

use std::f64::consts::PI;

use crate::config::{Config, config_error};
use crate::error::Result;

/// How angles change so that a model reaches beyond the positions that it was trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    Dynamic {
        factor: f64,
        trained: f64,
    },
    Yarn(Yarn),
    Long(Long),
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        trained: f64,
    },
    /// Only the first `pairs` of a head turn, with frequencies over the width of the whole head.
    Proportional {
        factor: f64,
        pairs: usize,
    },
}

/// Frequencies on a ramp between plain and divided ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub trained: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub truncate: bool,
    pub amplitude: f64,
    pub mscale_all_dim: Option<f64>,
}

/// A divisor for each frequency: one list for short sequences, one for long ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Long {
    pub trained: usize,
    pub short: Vec<f64>,
    pub long: Vec<f64>,
    pub short_amplitude: f64,
    pub long_amplitude: f64,
}

/// All keys of all scalings. A key that the scaling in use does not need has no effect.
pub const SCALING_KEYS: &[&str] = &[
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "long_mscale",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    // Sections of a head that turn by the position in an image, of models that are used without images here.
    "mrope_interleaved",
    "mrope_section",
    "original_max_position_embeddings",
    "short_factor",
    "short_mscale",
    "truncate",
];

/// The factor on cosines and sines, or on scores, that goes with positions stretched by `factor`.
pub fn log_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Scaling {
    pub fn parse(
        config: &mut Config,
        context: usize,
        outer_trained: Option<usize>,
        amplitude: Option<f64>,
    ) -> Result<Self> {
        let new = config.opt_text("rope_type")?;
        let kind = config.opt_text("type")?;
        let kind = new.or(kind).unwrap_or("default");
        let inner_trained = config.opt_size(&["original_max_position_embeddings"])?;
        let trained = outer_trained.or(inner_trained).unwrap_or(context);
        Ok(match kind {
            "default" | "mrope" => Scaling::None,
            "proportional" => Scaling::Proportional { factor: config.positive_or("factor", 1.0)?, pairs: 0 },
            "linear" => Scaling::Linear { factor: factor(config)? },
            "dynamic" => Scaling::Dynamic { factor: factor(config)?, trained: context as f64 },
            "yarn" => Scaling::Yarn(Yarn::parse(config, context, trained as f64, amplitude)?),
            "longrope" | "su" => Scaling::Long(Long::parse(config, context, trained)?),
            "llama3" => {
                let (low, high) = (config.number("low_freq_factor")?, config.number("high_freq_factor")?);
                if high < low {
                    return Err(config_error(format!("rope high_freq_factor is {high}, below low_freq_factor {low}")));
                }
                Scaling::Llama3 { factor: factor(config)?, low, high, trained: trained as f64 }
            }
            other => {
                let known = "default, linear, dynamic, yarn, longrope, llama3 and proportional";
                return Err(config_error(format!("rope type '{other}' is not supported; supported are {known}")));
            }
        })
    }
}

fn factor(config: &mut Config) -> Result<f64> {
    match config.number("factor")? {
        n if n > 0.0 => Ok(n),
        n => Err(config_error(format!("rope factor is {n}; it must be positive"))),
    }
}

impl Yarn {
    fn parse(config: &mut Config, context: usize, trained: f64, amplitude: Option<f64>) -> Result<Self> {
        let factor = match config.opt_number("factor")? {
            Some(factor) if factor > 0.0 => factor,
            Some(factor) => return Err(config_error(format!("rope factor is {factor}; it must be positive"))),
            None => context as f64 / trained,
        };
        let (mscale, mscale_all_dim) = (config.opt_number("mscale")?, config.opt_number("mscale_all_dim")?);
        let amplitude = match (config.opt_number("attention_factor")?.or(amplitude), mscale, mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => log_scale(factor, m) / log_scale(factor, all),
            _ => log_scale(factor, 1.0),
        };
        let or = |value: f64, default: f64| if value == 0.0 { default } else { value };
        Ok(Yarn {
            factor,
            trained,
            beta_fast: or(config.number_or("beta_fast", 32.0)?, 32.0),
            beta_slow: or(config.number_or("beta_slow", 1.0)?, 1.0),
            truncate: config.flag_or("truncate", true)?,
            amplitude,
            mscale_all_dim,
        })
    }

    /// High frequencies stay, low ones are divided by the factor, with a ramp between.
    pub fn frequencies(&self, plain: impl Iterator<Item = f64>, dim: usize, theta: f64) -> Vec<f64> {
        let at = |turns: f64| dim as f64 * (self.trained / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (at(self.beta_fast), at(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        plain.enumerate().map(|(i, f)| f / self.factor * stretched(i) + f * (1.0 - stretched(i))).collect()
    }
}

impl Long {
    fn parse(config: &mut Config, context: usize, trained: usize) -> Result<Self> {
        let mut factors = |name| match config.opt_numbers(name)? {
            Some(list) if list.iter().all(|f| *f > 0.0) => Ok(list),
            _ => Err(config_error(format!("longrope needs {name}, a list of positive numbers"))),
        };
        let (short, long) = (factors("short_factor")?, factors("long_factor")?);
        let factor = config.number_or("factor", context as f64 / trained as f64)?;
        let derived = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (trained as f64).ln()).sqrt() };
        let amplitude = config.number_or("attention_factor", derived)?;
        Ok(Long {
            trained,
            short,
            long,
            short_amplitude: config.number_or("short_mscale", amplitude)?,
            long_amplitude: config.number_or("long_mscale", amplitude)?,
        })
    }
}
