//! Data rates of radio links: equations 3 and 4 of the paper.

/// A radio transmitter and its channel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Radio {
    /// Bandwidth in Hz.
    pub bandwidth: f64,
    /// Transmission power in watts.
    pub power: f64,
    /// Power factor of the antennas.
    pub antenna_gain: f64,
    /// Received power falls with distance to this power.
    pub path_loss_exponent: f64,
    /// Spectral density of the noise in watts per Hz.
    pub noise_density: f64,
}

impl Radio {
    /// Bits per second at a distance; distances below one metre count as one metre.
    pub fn rate(&self, metres: f64) -> f64 {
        let received = self.power * self.antenna_gain * metres.max(1.0).powf(-self.path_loss_exponent);
        self.bandwidth * (1.0 + received / (self.noise_density * self.bandwidth)).log2()
    }
}

/// Converts a level in dBm to watts.
pub(crate) fn dbm(level: f64) -> f64 {
    10f64.powf(level / 10.0) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_matches_a_hand_calculation() {
        assert!((dbm(38.0) - 6.3096).abs() < 1e-4 && (dbm(-174.0) - 3.981e-21).abs() < 1e-24);
        let radio = Radio {
            bandwidth: 5e6,
            power: 0.01,
            antenna_gain: 1.0,
            path_loss_exponent: 4.0,
            noise_density: dbm(-174.0),
        };
        // At 250 m 2.56e-12 W are received over 1.9905e-14 W of noise: log2(1 + 128.6) = 7.018 bits per Hz.
        assert!((radio.rate(250.0) / 1e6 - 35.09).abs() < 0.01, "{}", radio.rate(250.0));
        assert_eq!(radio.rate(0.0), radio.rate(1.0));
    }
}
