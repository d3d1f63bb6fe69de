//! The cost model of copying and computing an expert, and the choice of the side that computes it.

use std::time::Duration;

/// The weight of a new measurement in the moving average.
const EWMA_WEIGHT: f64 = 0.125;
/// Numbers of tokens are grouped by powers of two, up to this many groups.
const TOKEN_BUCKETS: usize = 16;
/// The factor by which one measurement may change an estimate, up or down: it may be an outlier.
const CORRECTION_MAX: f64 = 2.0;
/// After this many decisions for the other side, a side without new measurements is tried again.
const RETRY_AFTER: u32 = 64;

/// Costs in seconds per byte, measured before anything ran.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MeasuredCosts {
    /// Copying to the device.
    pub copy: f64,
    /// Computing one token on the CPU.
    pub host: f64,
    /// Computing one token on the device.
    pub device: f64,
}

/// The side that computes an expert in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// On the CPU, from memory.
    Host,
    /// On the device, after a copy.
    Device,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Host => Side::Device,
            Side::Device => Side::Host,
        }
    }
}

/// Estimates of copying and computing, corrected by measurements. A side that was not chosen for long is tried again,
/// so that no wrong estimate stays for ever.
#[derive(Clone, PartialEq, Debug)]
pub struct CostModel {
    copy: f64,
    host: Rates,
    device: Rates,
    /// By side and group of tokens: decisions since the side was last chosen. For the device also: since the last copy,
    /// for whatever reason.
    not_chosen: [[u32; TOKEN_BUCKETS]; 2],
}

impl CostModel {
    /// Starts from measured costs.
    pub fn new(measured: MeasuredCosts) -> Self {
        let (host, device) = (Rates::new(measured.host), Rates::new(measured.device));
        CostModel { copy: measured.copy, host, device, not_chosen: [[0; TOKEN_BUCKETS]; 2] }
    }

    /// Seconds for copying this number of bytes to the device.
    pub fn copy_s(&self, bytes: usize) -> f64 {
        self.copy * bytes as f64
    }

    /// Seconds for computing an expert of this many bytes for this many tokens.
    pub fn compute_s(&self, side: Side, bytes: usize, tokens: usize) -> f64 {
        bytes as f64 * self.rates(side).per_byte(tokens)
    }

    /// Records the time of a copy to the device.
    pub fn copied(&mut self, bytes: usize, took: Duration) {
        if bytes > 0 {
            self.copy = corrected(self.copy, took.as_secs_f64() / bytes as f64, EWMA_WEIGHT);
            self.not_chosen[Side::Device as usize] = [0; TOKEN_BUCKETS];
        }
    }

    /// Records the time of computing experts together, given the bytes and tokens of each.
    pub fn computed(&mut self, side: Side, experts: &[(usize, usize)], took: Duration) {
        let expected: f64 = experts.iter().map(|(bytes, tokens)| self.compute_s(side, *bytes, *tokens)).sum();
        if expected <= 0.0 {
            return;
        }
        // Each is assumed to have deviated from its estimate by the factor of all together.
        let factor = took.as_secs_f64() / expected;
        let rates = match side {
            Side::Host => &mut self.host,
            Side::Device => &mut self.device,
        };
        for (_, tokens) in experts {
            rates.correct(*tokens, factor);
        }
    }

    /// The faster side by estimate, unless the other was not chosen for so long that its estimate may be out of date.
    fn choose(&mut self, faster: Side, tokens: usize) -> Side {
        let (bucket, other) = (Rates::bucket(tokens), faster.other());
        let not_chosen = &mut self.not_chosen[other as usize][bucket];
        *not_chosen += 1;
        let side = if *not_chosen < RETRY_AFTER { faster } else { other };
        self.not_chosen[side as usize][bucket] = 0;
        side
    }

    fn rates(&self, side: Side) -> &Rates {
        match side {
            Side::Host => &self.host,
            Side::Device => &self.device,
        }
    }
}

/// The time at which each side finishes the experts assigned so far, as experts are assigned one after the other.
pub(super) struct Schedule<'a> {
    costs: &'a mut CostModel,
    link_s: f64,
    host_s: f64,
}

impl<'a> Schedule<'a> {
    /// The link still has `queued_bytes` to copy; the CPU is free.
    pub fn new(costs: &'a mut CostModel, queued_bytes: usize) -> Self {
        Schedule { link_s: costs.copy_s(queued_bytes), host_s: 0.0, costs }
    }

    /// Assigns the next expert to the side that finishes it sooner, or to the side that is due to be measured again.
    pub fn assign(&mut self, bytes: usize, tokens: usize) -> Side {
        let link_s = self.link_s + self.costs.copy_s(bytes);
        let host_s = self.host_s + self.costs.compute_s(Side::Host, bytes, tokens);
        let device_s = link_s + self.costs.compute_s(Side::Device, bytes, tokens);
        let side = self.costs.choose(if device_s <= host_s { Side::Device } else { Side::Host }, tokens);
        match side {
            Side::Device => self.link_s = link_s,
            Side::Host => self.host_s = host_s,
        }
        side
    }
}

/// Seconds per byte of an expert, by its number of tokens.
#[derive(Clone, PartialEq, Debug)]
struct Rates([Option<f64>; TOKEN_BUCKETS]);

impl Rates {
    fn new(one_token: f64) -> Self {
        let mut rates = [None; TOKEN_BUCKETS];
        rates[0] = Some(one_token);
        Rates(rates)
    }

    fn bucket(tokens: usize) -> usize {
        (tokens.max(1).ilog2() as usize).min(TOKEN_BUCKETS - 1)
    }

    /// As measured, else in proportion to the nearest smaller number of tokens.
    fn per_byte(&self, tokens: usize) -> f64 {
        let bucket = Rates::bucket(tokens);
        let known = self.0[..=bucket].iter().enumerate().rev().find_map(|(s, rate)| Some((s, (*rate)?)));
        let (known, rate) = known.expect("the cost of one token is known from the start");
        rate * (1u64 << (bucket - known)) as f64
    }

    fn correct(&mut self, tokens: usize, factor: f64) {
        let (bucket, expected) = (Rates::bucket(tokens), self.per_byte(tokens));
        let weight = if self.0[bucket].is_some() { EWMA_WEIGHT } else { 1.0 };
        self.0[bucket] = Some(corrected(expected, expected * factor, weight));
    }
}

/// The estimate after a measurement. An estimate of 0 is replaced at once.
fn corrected(expected: f64, measured: f64, weight: f64) -> f64 {
    if expected > 0.0 {
        (expected + weight * (measured - expected)).clamp(expected / CORRECTION_MAX, expected * CORRECTION_MAX)
    } else {
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: MeasuredCosts = MeasuredCosts { copy: 4e-11, host: 2e-11, device: 1e-12 };

    fn given(costs: &mut CostModel, queued_bytes: usize, tokens: &[usize]) -> Vec<Side> {
        let mut schedule = Schedule::new(costs, queued_bytes);
        tokens.iter().map(|tokens| schedule.assign(1 << 20, *tokens)).collect()
    }

    #[test]
    fn both_sides_work_and_finish_at_about_the_same_time() {
        let costs = &mut CostModel::new(MEASURED);
        use Side::{Device, Host};
        assert_eq!(given(costs, 0, &[1; 6]), [Host, Host, Device, Host, Host, Device]);
        assert_eq!(given(costs, 1 << 22, &[1; 4]), [Host; 4], "a busy link is avoided");
        assert_eq!(given(costs, 0, &[64; 2]), [Device; 2], "the device computes many tokens sooner");
    }

    #[test]
    fn initial_estimates_give_way_to_measurements() {
        let mut costs = CostModel::new(MEASURED);
        for _ in 0..100 {
            costs.copied(1 << 20, Duration::from_secs_f64(8e-11 * (1 << 20) as f64));
            costs.computed(Side::Host, &[(1 << 20, 1), (1 << 20, 1)], Duration::from_secs_f64(2e-4));
        }
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.01;
        assert!(close(costs.copy_s(1 << 20), 8e-11 * (1 << 20) as f64));
        assert!(close(costs.compute_s(Side::Host, 1 << 20, 1), 1e-4));
        assert!(close(costs.compute_s(Side::Device, 1 << 20, 1), 1e-12 * (1 << 20) as f64), "not measured since");
    }

    #[test]
    fn more_tokens_cost_in_proportion_until_measured() {
        let mut costs = CostModel::new(MEASURED);
        let at = |costs: &CostModel, tokens| costs.compute_s(Side::Host, 1000, tokens);
        assert_eq!(at(&costs, 8), 8.0 * at(&costs, 1));
        costs.computed(Side::Host, &[(1000, 8)], Duration::from_secs_f64(5.0 * at(&costs, 1)));
        assert!((at(&costs, 8) / at(&costs, 1) - 5.0).abs() < 1e-3);
        assert!((at(&costs, 20) / at(&costs, 1) - 10.0).abs() < 1e-3);
        assert_eq!(at(&costs, 4), 4.0 * at(&costs, 1));
        costs.computed(Side::Host, &[], Duration::ZERO);
        assert!(at(&costs, usize::MAX).is_finite());
    }

    #[test]
    fn one_outlier_changes_little() {
        for (took, factor) in [(Duration::from_secs(1), 2.0), (Duration::ZERO, 0.5)] {
            let mut costs = CostModel::new(MEASURED);
            let before = costs.clone();
            costs.copied(1 << 20, took);
            costs.computed(Side::Host, &[(1 << 20, 8), (1 << 20, 1)], took);
            let change = |cost: fn(&CostModel) -> f64| cost(&costs) / cost(&before);
            assert!((change(|c| c.compute_s(Side::Host, 1 << 20, 8)) - factor).abs() < 1e-9, "never measured before");
            for known in [change(|c| c.copy_s(1 << 20)), change(|c| c.compute_s(Side::Host, 1 << 20, 1))] {
                assert!((factor.min(1.0)..=factor.max(1.0)).contains(&known) && known != 1.0, "{known}");
            }
        }
    }

    /// Makes decisions, and feeds back the true time of each; returns how many went to the device.
    fn simulate(costs: &mut CostModel, truly: MeasuredCosts, tokens: usize, decisions: usize) -> usize {
        let (bytes, mut on_device) = (1 << 20, 0);
        let took = |per_byte: f64| Duration::from_secs_f64(per_byte * bytes as f64);
        for _ in 0..decisions {
            match Schedule::new(costs, 0).assign(bytes, tokens) {
                Side::Host => costs.computed(Side::Host, &[(bytes, tokens)], took(truly.host * tokens as f64)),
                Side::Device => {
                    on_device += 1;
                    costs.copied(bytes, took(truly.copy));
                    costs.computed(Side::Device, &[(bytes, tokens)], took(truly.device * tokens as f64));
                }
            }
        }
        on_device
    }

    #[test]
    fn a_far_too_high_first_estimate_is_corrected() {
        // Until the avoided side is faster, each trial takes an eighth off the error.
        let most = 24 * RETRY_AFTER as usize;
        for (truly, device_is_sooner) in
            [(MeasuredCosts { copy: 1e-11, ..MEASURED }, true), (MeasuredCosts { copy: 4e-11, ..MEASURED }, false)]
        {
            let dear = if device_is_sooner {
                MeasuredCosts { copy: 10.0 * truly.copy, ..truly }
            } else {
                MeasuredCosts { host: 10.0 * truly.host, ..truly }
            };
            for tokens in [1, 2] {
                // Two tokens have an estimate of their own, even where one token was measured all the time.
                let truly = MeasuredCosts { copy: truly.copy * tokens as f64, ..truly };
                let dear = MeasuredCosts { copy: dear.copy * tokens as f64, ..dear };
                let mut costs = CostModel::new(dear);
                simulate(&mut costs, truly, tokens, most);
                let on_device = simulate(&mut costs, truly, tokens, 640);
                assert_eq!(on_device > 320, device_is_sooner, "{on_device} of 640");
                let (copy_s, host_s) = (costs.copy_s(1 << 20), costs.compute_s(Side::Host, 1 << 20, tokens));
                let (copy_x, host_x) = (copy_s / truly.copy, host_s / truly.host / tokens as f64);
                let right = |x: f64| (x / (1 << 20) as f64 - 1.0).abs() < 0.1;
                assert!(right(copy_x) && right(host_x), "{copy_x} {host_x}");
            }
        }
    }

    #[test]
    fn a_side_is_tried_again_only_after_long_without_measurements() {
        let tries = |copied_every: usize| {
            let mut costs = CostModel::new(MEASURED);
            let took = Duration::from_secs_f64(MEASURED.copy * (1 << 20) as f64);
            let decided = (1..=6 * RETRY_AFTER as usize).filter(|i| {
                if i % copied_every == 0 {
                    costs.copied(1 << 20, took);
                }
                given(&mut costs, 0, &[1]) == [Side::Device]
            });
            decided.collect::<Vec<_>>()
        };
        assert_eq!(tries(usize::MAX), [64, 128, 192, 256, 320, 384]);
        assert_eq!(tries(50), [] as [usize; 0]);
    }
}
