/// A device, as far as reading experts goes.
///
/// The model: a token takes `compute_s` for everything that is no expert, and each expert it uses `expert_bytes /
/// memory_rate`. Each expert that is missed takes `expert_bytes / ssd_rate + latency_s`. Of the computing time, the share
/// `overlap` can pass while the SSD reads.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct MachineProfile {
    /// Bytes of one expert.
    pub expert_bytes: f64,
    /// Bytes per second from the SSD.
    pub ssd_rate: f64,
    /// Bytes per second from memory.
    pub memory_rate: f64,
    /// Seconds per token besides experts.
    pub compute_s: f64,
    /// Seconds until a read begins.
    pub latency_s: f64,
    /// From 0 to 1.
    pub overlap: f64,
}

/// What a replay asks of a device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReplayLoad {
    /// Tokens.
    pub tokens: u64,
    /// Experts used.
    pub wanted: u64,
    /// Experts read.
    pub misses: u64,
}

impl MachineProfile {
    /// Whether its numbers can be; the error says which cannot.
    pub fn check(&self) -> Result<(), String> {
        let positive = |name: &str, n: f64| match n.is_finite() && n > 0.0 {
            true => Ok(()),
            false => Err(format!("a device's {name} must be above 0, not {n}")),
        };
        positive("bytes per expert", self.expert_bytes)?;
        positive("SSD rate", self.ssd_rate)?;
        positive("memory rate", self.memory_rate)?;
        for (name, n) in [("compute time", self.compute_s), ("latency", self.latency_s)] {
            if !n.is_finite() || n < 0.0 {
                return Err(format!("a device's {name} must be at least 0, not {n}"));
            }
        }
        match (0.0..=1.0).contains(&self.overlap) {
            true => Ok(()),
            false => Err(format!("a device's overlap must be from 0 to 1, not {}", self.overlap)),
        }
    }

    /// Seconds that a load takes.
    pub fn seconds(&self, load: &ReplayLoad) -> f64 {
        let computing = load.tokens as f64 * self.compute_s + load.wanted as f64 * self.expert_bytes / self.memory_rate;
        let reading = load.misses as f64 * (self.expert_bytes / self.ssd_rate + self.latency_s);
        computing + (reading - self.overlap * computing).max(0.0)
    }

    /// Tokens per second under a load.
    pub fn tokens_per_second(&self, load: &ReplayLoad) -> f64 {
        load.tokens as f64 / self.seconds(load).max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: MachineProfile = MachineProfile {
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
        assert!((DEVICE.seconds(&load) - (0.01 + 0.01 + 0.022)).abs() < 1e-12);
        let overlapped = MachineProfile { overlap: 0.5, ..DEVICE };
        assert!((overlapped.seconds(&load) - (0.02 + 0.012)).abs() < 1e-12);
        let hidden = MachineProfile { overlap: 1.0, ..DEVICE };
        let few = ReplayLoad { misses: 1, ..load };
        assert!((hidden.seconds(&few) - 0.02).abs() < 1e-12);
    }

    #[test]
    fn impossible_devices_are_refused() {
        assert!(DEVICE.check().is_ok());
        assert!(MachineProfile { ssd_rate: 0.0, ..DEVICE }.check().unwrap_err().contains("SSD rate"));
        assert!(MachineProfile { compute_s: f64::NAN, ..DEVICE }.check().unwrap_err().contains("compute time"));
        assert!(MachineProfile { overlap: 1.5, ..DEVICE }.check().unwrap_err().contains("overlap"));
    }
}
