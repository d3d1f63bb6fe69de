//! `lambda-costs.json`: what the cache bias λ of the routing strategy `prior` costs a model, measured on a text.

use std::fmt;

use larder_core::{Geometry, printable};
use larder_policy::routing::RoutingSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::evictor_file::SidecarError;

/// Relative rise of perplexity above which generated text breaks; docs/evaluation.md has the measurements.
const BREAKING_RISE: f64 = 0.15;
/// Version of the format and of the rule by which text breaks.
const FORMAT: u32 = 1;
/// Most cache sizes of a file, and most values of λ at each.
const SIZES_MAX: usize = 16;
const LAMBDAS_MAX: usize = 100;
/// Largest λ: that of the server.
const LAMBDA_MAX: f64 = 100.0;
/// Longest text in a file, in bytes.
const TEXT_BYTES: usize = 200;
/// Steps of a scale of λ, at most, and their usual distance.
const STEPS_MAX: usize = 100;
const STEP: f64 = 0.01;

/// Whether generated text breaks with a strategy that raises perplexity by this share of that of the model's own routing.
pub fn text_breaks(rise: f64) -> bool {
    rise > BREAKING_RISE
}

/// The measured costs of λ for one model, by cache size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LambdaCosts {
    /// Version of the format.
    pub format: u32,
    /// The model's `model_type`.
    pub model_type: String,
    /// Layers with experts.
    pub layers: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token and layer.
    pub top_k: usize,
    /// Name of the text.
    pub text: String,
    /// Tokens of the text, computed one per step.
    pub tokens: u64,
    /// Tokens per chunk.
    pub chunk: usize,
    /// Day of the measurement, as in 2026-11-26.
    pub date: String,
    /// Version of larder.
    pub larder: String,
    /// The eviction policy.
    pub eviction: String,
    /// `layer` or `global`.
    pub scope: String,
    /// Options of `prior` beside λ that differ from their defaults, as in `j=1`.
    pub settings: String,
    /// The measurements, by ascending cache size.
    pub sizes: Vec<SizeCosts>,
}

/// The measured costs at one cache size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SizeCosts {
    /// Slots per layer.
    pub slots: usize,
    /// Perplexity with the model's own routing.
    pub perplexity: f64,
    /// The measurements, by ascending λ above 0.
    pub lambdas: Vec<MeasuredLambda>,
}

/// The measured cost of one λ.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct MeasuredLambda {
    /// λ.
    pub lambda: f64,
    /// Relative rise of perplexity over the model's own routing.
    pub rise: f64,
    /// Its standard error, if the text had several chunks.
    pub rise_error: Option<f64>,
    /// Share of the model's own experts that were chosen.
    pub agreement: f64,
    /// Share of the model's own experts that were not chosen.
    pub substituted: f64,
    /// Mean KL divergence of the router's choice to the model's own, in nats.
    pub kl: f64,
    /// Misses per token.
    pub misses_per_token: f64,
    /// Whether text breaks, by the rule of this version of the format.
    pub text_breaks: bool,
}

/// How the cost of a λ is known.
#[derive(Clone, Copy, PartialEq, Debug)]
enum CostBasis {
    /// The model's own routing.
    Own,
    Measured,
    /// Between two values, of which the lower may be 0.
    Between(f64, f64),
    /// Above the largest measured λ, whose cost it is.
    Beyond(f64),
}

/// The cost of a λ, measured or between two measurements.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LambdaCost {
    /// λ.
    lambda: f64,
    rise: f64,
    rise_error: Option<f64>,
    agreement: f64,
    kl: f64,
    basis: CostBasis,
}

/// The cost of a routing strategy as sentences.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostNote {
    /// The measured cost, or why there is none.
    pub cost: String,
    /// A warning if text breaks.
    pub warning: Option<String>,
}

impl LambdaCosts {
    /// File name in the model's folder.
    pub const FILE: &str = "lambda-costs.json";
    /// Limit of the file's size in bytes.
    pub const BYTES_MAX: u64 = 1 << 20;

    /// Costs without measurements yet, of a model of this type and geometry.
    pub fn new(model_type: &str, geometry: &Geometry) -> Self {
        let text = String::new;
        LambdaCosts {
            format: FORMAT,
            model_type: model_type.to_owned(),
            layers: geometry.moe_layers.len(),
            experts: geometry.experts,
            top_k: geometry.top_k,
            text: text(),
            tokens: 0,
            chunk: 0,
            date: text(),
            larder: text(),
            eviction: text(),
            scope: text(),
            settings: text(),
            sizes: Vec::new(),
        }
    }

    /// Parses the file, and checks that it is for a model of this type and geometry.
    pub fn from_bytes(bytes: &[u8], model_type: &str, geometry: &Geometry) -> Result<Self, SidecarError> {
        let wrong = |why: String| SidecarError(format!("was not written by `larder eval sweep --save`: {why}"));
        let version: Value = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
        match version["format"].as_u64() {
            Some(found) if found != u64::from(FORMAT) => {
                let why = format!(
                    "has format {found}, and this larder reads {FORMAT}; make it again with `larder eval sweep --save`"
                );
                return Err(SidecarError(why));
            }
            _ => {}
        }
        let found: LambdaCosts = serde_json::from_value(version).map_err(|e| wrong(printable(&e.to_string())))?;
        let of = |it: &LambdaCosts| {
            format!("{} with {} layers of {} experts, {} per token", it.model_type, it.layers, it.experts, it.top_k)
        };
        let own = LambdaCosts::new(model_type, geometry);
        if of(&found) != of(&own) {
            return Err(SidecarError(format!("is for {}, but this model is {}", printable(&of(&found)), of(&own))));
        }
        found.check().map_err(wrong)?;
        Ok(found)
    }

    /// Refuses values that no measurement has.
    pub fn check(&self) -> Result<(), String> {
        let texts = [&self.text, &self.date, &self.larder, &self.eviction, &self.scope, &self.settings];
        if texts.iter().any(|text| text.len() > TEXT_BYTES || **text != printable(text)) {
            return Err(format!("its texts must be plain and of at most {TEXT_BYTES} bytes"));
        }
        self.base().map_err(|e| e.to_string())?;
        let (count, sizes) = (self.sizes.len(), &self.sizes);
        if !(1..=SIZES_MAX).contains(&count) || !sizes.is_sorted_by(|a, b| a.slots < b.slots) {
            return Err(format!("it must have 1 to {SIZES_MAX} cache sizes, in ascending order"));
        }
        sizes.iter().try_for_each(|size| size.check(self.experts))
    }

    /// The strategy that was measured, with λ = 0.
    pub fn base(&self) -> Result<RoutingSpec, larder_policy::PolicyError> {
        let separator = if self.settings.is_empty() { "" } else { "," };
        format!("prior:lambda=0{separator}{}", self.settings).parse()
    }

    /// The measurement that holds for a cache with this many slots per layer: that with the most slots which are no more, or
    /// else with the fewest.
    pub fn at_size(&self, slots: usize) -> &SizeCosts {
        let below = self.sizes.iter().rev().find(|size| size.slots <= slots);
        below.unwrap_or(&self.sizes[0])
    }

    /// How the numbers came about, for a cache with this many slots per layer.
    pub fn source(&self, slots: usize) -> String {
        let measured = self.at_size(slots).slots;
        let here = if measured == slots { String::new() } else { format!(" (here {slots})") };
        let settings = if self.settings.is_empty() { String::new() } else { format!(", prior with {}", self.settings) };
        format!(
            "Measured with {measured} of {} experts per layer in memory{here}, eviction {}{settings}, on {} tokens of {}, {}.",
            self.experts, self.eviction, self.tokens, self.text, self.date
        )
    }

    /// The measurements, and the cost at each step of a scale of λ, for a cache with this many slots per layer.
    pub fn json(&self, slots: usize) -> Value {
        let size = self.at_size(slots);
        let steps = size.scale().into_iter().map(|cost| {
            let note = cost.note();
            json!({"lambda": cost.lambda, "cost": note.cost, "warning": note.warning})
        });
        json!({
            "source": self.source(slots),
            "text": self.text,
            "tokens": self.tokens,
            "date": self.date,
            "eviction": self.eviction,
            "scope": self.scope,
            "settings": self.settings,
            "slots": size.slots,
            "perplexity": size.perplexity,
            "measured": size.lambdas,
            "scale": steps.collect::<Vec<_>>(),
        })
    }
}

/// The cost of a strategy with a cache of this many slots per layer, if it has a λ above 0; `costs` are those of the model, if
/// they were measured.
pub fn lambda_cost_note(costs: Option<&LambdaCosts>, routing: &RoutingSpec, slots: usize) -> Option<CostNote> {
    let lambda = routing.lambda().filter(|lambda| *lambda > 0.0)?;
    let unknown = |cost: String| Some(CostNote { cost, warning: None });
    let Some(costs) = costs else {
        return unknown("not measured for this model; larder eval sweep TEXT --save does it".to_owned());
    };
    let settings = routing.prior_settings().unwrap_or_default();
    if settings != costs.settings {
        let plain = |text: &str| if text.is_empty() { "no further options".to_owned() } else { text.to_owned() };
        return unknown(format!("measured with {}, not with {}", plain(&costs.settings), plain(&settings)));
    }
    Some(costs.at_size(slots).cost(lambda).note())
}

impl SizeCosts {
    fn check(&self, experts: usize) -> Result<(), String> {
        let has_perplexity = self.perplexity.is_finite() && self.perplexity >= 1.0;
        if !(1..=experts).contains(&self.slots) || !has_perplexity {
            return Err(format!("slots must be from 1 to {experts}, and perplexity at least 1"));
        }
        if !(1..=LAMBDAS_MAX).contains(&self.lambdas.len()) || !self.lambdas.is_sorted_by(|a, b| a.lambda < b.lambda) {
            return Err(format!("a cache size must have 1 to {LAMBDAS_MAX} values of λ, in ascending order"));
        }
        match self.lambdas.iter().find(|measured| !measured.is_possible()) {
            Some(measured) => Err(format!("no measurement has the values at λ = {}", measured.lambda)),
            None => Ok(()),
        }
    }

    /// The cost of a λ, by linear interpolation between the two measurements around it.
    pub fn cost(&self, lambda: f64) -> LambdaCost {
        let own = LambdaCost { lambda, rise: 0.0, rise_error: None, agreement: 1.0, kl: 0.0, basis: CostBasis::Own };
        if lambda <= 0.0 {
            return own;
        }
        let above = self.lambdas.partition_point(|measured| measured.lambda < lambda);
        let at = |i: usize, basis| LambdaCost { lambda, basis, ..self.lambdas[i].cost() };
        match self.lambdas.get(above) {
            None => at(above - 1, CostBasis::Beyond(self.lambdas[above - 1].lambda)),
            Some(measured) if measured.lambda == lambda => at(above, CostBasis::Measured),
            Some(high) => {
                let low = above.checked_sub(1).map_or(LambdaCost { lambda: 0.0, ..own }, |i| self.lambdas[i].cost());
                low.between(&high.cost(), lambda)
            }
        }
    }

    /// The costs of λ from 0 to the largest that was measured, in steps of 0.01 or a hundred of them.
    fn scale(&self) -> Vec<LambdaCost> {
        let most = self.lambdas.last().map_or(0.0, |measured| measured.lambda);
        let steps = ((most / STEP).round().max(1.0) as usize).min(STEPS_MAX);
        // Hundredths stay what they are written as.
        let at = |i: usize| if i == steps { most } else { (i as f64 * most / steps as f64 * 1e6).round() / 1e6 };
        (0..=steps).map(|i| self.cost(at(i))).collect()
    }
}

impl MeasuredLambda {
    fn is_possible(&self) -> bool {
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        let is_amount = |amount: f64| amount.is_finite() && amount >= 0.0;
        self.lambda > 0.0
            && self.lambda <= LAMBDA_MAX
            && self.rise.is_finite()
            && self.rise > -1.0
            && self.rise_error.is_none_or(is_amount)
            && is_share(self.agreement)
            && (self.agreement + self.substituted - 1.0).abs() < 1e-9
            && is_amount(self.kl)
            && is_amount(self.misses_per_token)
            && self.text_breaks == text_breaks(self.rise)
    }

    fn cost(&self) -> LambdaCost {
        let MeasuredLambda { lambda, rise, rise_error, agreement, kl, .. } = *self;
        LambdaCost { lambda, rise, rise_error, agreement, kl, basis: CostBasis::Measured }
    }
}

impl LambdaCost {
    fn between(&self, high: &LambdaCost, lambda: f64) -> LambdaCost {
        let share = (lambda - self.lambda) / (high.lambda - self.lambda);
        let mix = |low: f64, high: f64| low + share * (high - low);
        LambdaCost {
            lambda,
            rise: mix(self.rise, high.rise),
            rise_error: None,
            agreement: mix(self.agreement, high.agreement),
            kl: mix(self.kl, high.kl),
            basis: CostBasis::Between(self.lambda, high.lambda),
        }
    }

    /// The cost as sentences.
    pub fn note(&self) -> CostNote {
        CostNote { cost: self.to_string(), warning: self.warning() }
    }

    fn warning(&self) -> Option<String> {
        text_breaks(self.rise).then(|| {
            format!(
                "Text breaks at this λ: perplexity is {:.0} % above that of the model's own routing.",
                100.0 * self.rise
            )
        })
    }
}

impl fmt::Display for LambdaCost {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.basis == CostBasis::Own {
            return f.write_str("the model's own choice of experts, without cost");
        }
        write!(f, "perplexity {:+.1}", 100.0 * self.rise)?;
        if let Some(error) = self.rise_error {
            write!(f, " ± {:.1}", 100.0 * error)?;
        }
        write!(f, " %, {:.0} % of the model's own experts chosen, KL {:.3}", 100.0 * self.agreement, self.kl)?;
        match self.basis {
            CostBasis::Between(low, high) => write!(f, " (between λ = {low} and {high}, which were measured)"),
            CostBasis::Beyond(most) => write!(f, " at λ = {most}, the largest that was measured"),
            CostBasis::Own | CostBasis::Measured => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
