//! What copying and computing an expert cost, as measured so far, and what follows for where it is computed.

use std::time::Duration;

/// How much a new measurement counts.
const WEIGHT: f64 = 0.125;
/// Numbers of tokens are told apart by their power of two up to here.
const SIZES: usize = 16;

/// Seconds per byte that were measured before anything ran.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// Copying to the device.
    pub copy: f64,
    /// Computing one token on the CPU.
    pub host: f64,
    /// Computing one token on the device.
    pub device: f64,
}

/// Where an expert that is in memory is computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// On the CPU, from memory.
    Host,
    /// On the device, once it has been copied there.
    Device,
}

/// What copying and computing take, corrected by what they took.
#[derive(Clone, PartialEq, Debug)]
pub struct Costs {
    copy: f64,
    host: Rates,
    device: Rates,
}

impl Costs {
    /// Starts from what was measured.
    pub fn new(measured: Measured) -> Self {
        Costs { copy: measured.copy, host: Rates::new(measured.host), device: Rates::new(measured.device) }
    }

    /// Seconds for copying so many bytes to the device.
    pub fn copy_s(&self, bytes: usize) -> f64 {
        self.copy * bytes as f64
    }

    /// Seconds for computing an expert of so many bytes for so many tokens.
    pub fn compute_s(&self, side: Side, bytes: usize, tokens: usize) -> f64 {
        bytes as f64 * self.rates(side).per_byte(tokens)
    }

    /// A copy to the device took so long.
    pub fn copied(&mut self, bytes: usize, took: Duration) {
        if bytes > 0 {
            self.copy += WEIGHT * (took.as_secs_f64() / bytes as f64 - self.copy);
        }
    }

    /// Experts, bytes and tokens of each, were computed together in that time.
    pub fn computed(&mut self, side: Side, experts: &[(usize, usize)], took: Duration) {
        let expected: f64 = experts.iter().map(|(bytes, tokens)| self.compute_s(side, *bytes, *tokens)).sum();
        if expected <= 0.0 {
            return;
        }
        // Each is taken to have been as much slower than expected as all together were.
        let factor = took.as_secs_f64() / expected;
        let rates = match side {
            Side::Host => &mut self.host,
            Side::Device => &mut self.device,
        };
        for (_, tokens) in experts {
            rates.correct(*tokens, factor);
        }
    }

    fn rates(&self, side: Side) -> &Rates {
        match side {
            Side::Host => &self.host,
            Side::Device => &self.device,
        }
    }
}

/// The seconds after which either side is through with what it was given, as experts are given out one after the other.
pub(super) struct Schedule<'a> {
    costs: &'a Costs,
    link_s: f64,
    host_s: f64,
}

impl<'a> Schedule<'a> {
    /// The link has so many bytes to copy yet; the CPU is free.
    pub fn new(costs: &'a Costs, queued_bytes: usize) -> Self {
        Schedule { costs, link_s: costs.copy_s(queued_bytes), host_s: 0.0 }
    }

    /// Where the next expert is done sooner, which is then where it is.
    pub fn give(&mut self, bytes: usize, tokens: usize) -> Side {
        let link_s = self.link_s + self.costs.copy_s(bytes);
        let host_s = self.host_s + self.costs.compute_s(Side::Host, bytes, tokens);
        if link_s + self.costs.compute_s(Side::Device, bytes, tokens) <= host_s {
            self.link_s = link_s;
            Side::Device
        } else {
            self.host_s = host_s;
            Side::Host
        }
    }
}

/// Seconds per byte of an expert by the number of its tokens.
#[derive(Clone, PartialEq, Debug)]
struct Rates([Option<f64>; SIZES]);

impl Rates {
    fn new(one_token: f64) -> Self {
        let mut rates = [None; SIZES];
        rates[0] = Some(one_token);
        Rates(rates)
    }

    fn size(tokens: usize) -> usize {
        (tokens.max(1).ilog2() as usize).min(SIZES - 1)
    }

    /// As measured, else in proportion to what fewer tokens took.
    fn per_byte(&self, tokens: usize) -> f64 {
        let size = Rates::size(tokens);
        let known = self.0[..=size].iter().enumerate().rev().find_map(|(s, rate)| Some((s, (*rate)?)));
        let (known, rate) = known.expect("one token is known from the start");
        rate * (1u64 << (size - known)) as f64
    }

    fn correct(&mut self, tokens: usize, factor: f64) {
        let (size, expected) = (Rates::size(tokens), self.per_byte(tokens));
        let weight = if self.0[size].is_some() { WEIGHT } else { 1.0 };
        self.0[size] = Some(expected * (1.0 + weight * (factor - 1.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Measured = Measured { copy: 4e-11, host: 2e-11, device: 1e-12 };

    fn given(costs: &Costs, queued_bytes: usize, tokens: &[usize]) -> Vec<Side> {
        let mut schedule = Schedule::new(costs, queued_bytes);
        tokens.iter().map(|tokens| schedule.give(1 << 20, *tokens)).collect()
    }

    #[test]
    fn both_sides_work_and_are_through_at_about_the_same_time() {
        let costs = Costs::new(MEASURED);
        use Side::{Device, Host};
        assert_eq!(given(&costs, 0, &[1; 6]), [Host, Host, Device, Host, Host, Device]);
        assert_eq!(given(&costs, 1 << 22, &[1; 4]), [Host; 4], "a link that is busy is avoided");
        assert_eq!(given(&costs, 0, &[64; 2]), [Device; 2], "many tokens are for the device");
    }

    #[test]
    fn what_was_measured_at_first_gives_way_to_what_is() {
        let mut costs = Costs::new(MEASURED);
        for _ in 0..100 {
            costs.copied(1 << 20, Duration::from_secs_f64(8e-11 * (1 << 20) as f64));
            costs.computed(Side::Host, &[(1 << 20, 1), (1 << 20, 1)], Duration::from_secs_f64(2e-4));
        }
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.01;
        assert!(close(costs.copy_s(1 << 20), 8e-11 * (1 << 20) as f64));
        assert!(close(costs.compute_s(Side::Host, 1 << 20, 1), 1e-4));
        assert!(close(costs.compute_s(Side::Device, 1 << 20, 1), 1e-12 * (1 << 20) as f64), "nobody said otherwise");
    }

    #[test]
    fn more_tokens_cost_in_proportion_until_somebody_knows_better() {
        let mut costs = Costs::new(MEASURED);
        let at = |costs: &Costs, tokens| costs.compute_s(Side::Host, 1000, tokens);
        assert_eq!(at(&costs, 8), 8.0 * at(&costs, 1));
        costs.computed(Side::Host, &[(1000, 8)], Duration::from_secs_f64(3.0 * at(&costs, 1)));
        assert!((at(&costs, 8) / at(&costs, 1) - 3.0).abs() < 1e-3);
        assert!((at(&costs, 20) / at(&costs, 1) - 6.0).abs() < 1e-3);
        assert_eq!(at(&costs, 4), 4.0 * at(&costs, 1));
        costs.computed(Side::Host, &[], Duration::ZERO);
        assert!(at(&costs, usize::MAX).is_finite());
    }
}
