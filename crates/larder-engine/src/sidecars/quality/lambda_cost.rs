//! What the cache bias λ of the strategy `prior` costs, as measured and in between, as numbers and as sentences.

use std::fmt;

use larder_policy::routing::RoutingSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::QualityCalibration;

/// Relative rise of perplexity above which generated text breaks; docs/evaluation.md has the measurements.
const BREAKING_RISE: f64 = 0.15;
/// Largest λ: that of the server.
pub(super) const LAMBDA_MAX: f64 = 100.0;
/// Steps of a scale of λ, at most, and their usual distance.
pub(super) const STEPS_MAX: usize = 100;
const STEP: f64 = 0.01;

/// Whether generated text breaks with a strategy that raises perplexity by this share of that of the model's own
/// routing.
pub fn text_breaks(rise: f64) -> bool {
    rise > BREAKING_RISE
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
    /// Mean KL divergence of the router's choice to the model's own, in nats.
    pub kl: f64,
    /// Misses per token.
    pub misses_per_token: f64,
}

/// How the cost of a λ is known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum CostBasis {
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
    pub(super) rise: f64,
    rise_error: Option<f64>,
    pub(super) agreement: f64,
    kl: f64,
    pub(super) basis: CostBasis,
}

/// The cost of a routing strategy as sentences.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostNote {
    /// The measured cost, or why there is none.
    pub cost: String,
    /// A warning if text breaks.
    pub warning: Option<String>,
}

impl QualityCalibration {
    /// The cost of a λ, by linear interpolation between the two measurements around it.
    pub fn lambda_cost(&self, lambda: f64) -> LambdaCost {
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

    /// How the costs of λ came about, for a cache with this many slots per layer.
    pub fn lambda_source(&self, slots: usize) -> String {
        let QualityCalibration { slots: measured, experts, eviction, tokens, text, date, .. } = self;
        let here = if *measured == slots { String::new() } else { format!(" (here {slots})") };
        format!(
            "Measured with {measured} of {experts} experts per layer in memory{here}, eviction {eviction}, on {tokens} tokens of {text}, {date}."
        )
    }

    /// The measurements of λ, and the cost at each step of a scale of it, for a cache with this many slots per layer.
    pub fn lambda_json(&self, slots: usize) -> Value {
        let steps = self.lambda_scale().into_iter().map(|cost| {
            let note = cost.note();
            json!({"lambda": cost.lambda, "cost": note.cost, "warning": note.warning})
        });
        json!({
            "source": self.lambda_source(slots),
            "text": self.text,
            "tokens": self.tokens,
            "date": self.date,
            "eviction": self.eviction,
            "slots": self.slots,
            "measured": self.lambdas,
            "scale": steps.collect::<Vec<_>>(),
        })
    }

    /// The costs of λ from 0 to the largest that was measured, in steps of 0.01 or a hundred of them.
    fn lambda_scale(&self) -> Vec<LambdaCost> {
        let most = self.lambdas.last().map_or(0.0, |measured| measured.lambda);
        let steps = ((most / STEP).round().max(1.0) as usize).min(STEPS_MAX);
        // Hundredths stay what they are written as.
        let at = |i: usize| if i == steps { most } else { (i as f64 * most / steps as f64 * 1e6).round() / 1e6 };
        (0..=steps).map(|i| self.lambda_cost(at(i))).collect()
    }
}

/// The cost of a strategy, if it has a λ above 0; `calibration` is that of the model, if there is one.
pub fn lambda_cost_note(calibration: Option<&QualityCalibration>, routing: &RoutingSpec) -> Option<CostNote> {
    let lambda = routing.lambda().filter(|lambda| *lambda > 0.0)?;
    let unknown = |cost: String| Some(CostNote { cost, warning: None });
    let Some(calibration) = calibration else {
        return unknown("not measured for this model; `larder tune` does it".to_owned());
    };
    let options = |routing: &RoutingSpec| routing.prior_settings().unwrap_or_default();
    let (here, measured) = (options(routing), options(&RoutingSpec::standard_prior()));
    if here != measured {
        let here = if here.is_empty() { "no further options" } else { &here };
        return unknown(format!("measured with {measured}, not with {here}"));
    }
    Some(calibration.lambda_cost(lambda).note())
}

impl MeasuredLambda {
    pub(super) fn is_possible(&self) -> bool {
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        let is_amount = |amount: f64| amount.is_finite() && amount >= 0.0;
        self.lambda > 0.0
            && self.lambda <= LAMBDA_MAX
            && self.rise.is_finite()
            && self.rise > -1.0
            && self.rise_error.is_none_or(is_amount)
            && is_share(self.agreement)
            && is_amount(self.kl)
            && is_amount(self.misses_per_token)
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
