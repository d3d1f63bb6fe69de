//! A model of a machine's speed, to turn misses into tokens per second.

/// A machine, reduced to what decides the speed of a replay.
///
/// A token takes `compute_s` for everything but experts, and `expert_bytes / memory_rate` for each expert that it uses.
/// Each miss takes `expert_bytes / ssd_rate + latency_s`. The share `overlap` of the compute time overlaps with reads.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct MachineProfile {
    /// Bytes of one expert.
    pub expert_bytes: f64,
    /// SSD throughput in bytes per second.
    pub ssd_rate: f64,
    /// Memory throughput in bytes per second.
    pub memory_rate: f64,
    /// Seconds per token for everything but experts.
    pub compute_s: f64,
    /// Latency of a read in seconds.
    pub latency_s: f64,
    /// Share of the compute time that overlaps with reads, from 0 to 1.
    pub overlap: f64,
}

/// The work of a replay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReplayLoad {
    /// Number of tokens.
    pub tokens: u64,
    /// Expert requests: hits and misses.
    pub wanted: u64,
    /// Experts that had to be read.
    pub misses: u64,
}

impl MachineProfile {
    /// Checks the ranges; the error names the value that is out of range.
    pub fn check(&self) -> Result<(), String> {
        let positive = |name: &str, n: f64| {
            if n.is_finite() && n > 0.0 {
                Ok(())
            } else {
                Err(format!("the machine's {name} must be above 0, not {n}"))
            }
        };
        positive("bytes per expert", self.expert_bytes)?;
        positive("SSD rate", self.ssd_rate)?;
        positive("memory rate", self.memory_rate)?;
        for (name, n) in [("compute time", self.compute_s), ("latency", self.latency_s)] {
            if !n.is_finite() || n < 0.0 {
                return Err(format!("the machine's {name} must be at least 0, not {n}"));
            }
        }
        if (0.0..=1.0).contains(&self.overlap) {
            Ok(())
        } else {
            Err(format!("the machine's overlap must be from 0 to 1, not {}", self.overlap))
        }
    }

    /// Seconds for this work.
    pub fn seconds(&self, load: &ReplayLoad) -> f64 {
        let computing = load.tokens as f64 * self.compute_s + load.wanted as f64 * self.expert_bytes / self.memory_rate;
        let reading = load.misses as f64 * (self.expert_bytes / self.ssd_rate + self.latency_s);
        computing + (reading - self.overlap * computing).max(0.0)
    }

    /// Tokens per second for this work.
    pub fn tokens_per_second(&self, load: &ReplayLoad) -> f64 {
        load.tokens as f64 / self.seconds(load).max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MachineProfile = MachineProfile {
        expert_bytes: 1e6,
        ssd_rate: 1e9,
        memory_rate: 1e10,
        compute_s: 0.001,
        latency_s: 0.0001,
        overlap: 0.0,
    };

    #[test]
    fn times_add_up_as_stated() {
        let load = ReplayLoad { tokens: 10, wanted: 100, misses: 20 };
        assert!((MACHINE.seconds(&load) - (0.01 + 0.01 + 0.022)).abs() < 1e-12);
        let overlapped = MachineProfile { overlap: 0.5, ..MACHINE };
        assert!((overlapped.seconds(&load) - (0.02 + 0.012)).abs() < 1e-12);
        let hidden = MachineProfile { overlap: 1.0, ..MACHINE };
        let few = ReplayLoad { misses: 1, ..load };
        assert!((hidden.seconds(&few) - 0.02).abs() < 1e-12);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        assert!(MACHINE.check().is_ok());
        assert!(MachineProfile { ssd_rate: 0.0, ..MACHINE }.check().unwrap_err().contains("SSD rate"));
        assert!(MachineProfile { compute_s: f64::NAN, ..MACHINE }.check().unwrap_err().contains("compute time"));
        assert!(MachineProfile { overlap: 1.5, ..MACHINE }.check().unwrap_err().contains("overlap"));
    }
}
