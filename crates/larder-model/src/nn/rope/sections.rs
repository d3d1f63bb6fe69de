//! Sections of a head that turn by different dimensions of a position in an image (mrope).

use crate::config::{Config, config_error};
use crate::error::Result;

/// The frequencies that turn by time, height and width, in turns: of three consecutive ones, the second turns by the
/// height and the third by the width, as far as the sections of these two reach; all others turn by the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RotarySections {
    height: usize,
    width: usize,
}

impl RotarySections {
    /// These numbers of frequencies for time, height and width.
    pub const fn new([_, height, width]: [usize; 3]) -> Self {
        RotarySections { height, width }
    }

    /// Those that a rope's object in a config states, or else these.
    pub fn parse(self, config: &mut Config) -> Result<Self> {
        config.only("mrope_interleaved", true);
        config.only("interleaved", true);
        match config.opt_counts("mrope_section")?.as_deref() {
            None => Ok(self),
            Some(&[time, height, width]) => Ok(RotarySections::new([time, height, width])),
            Some(other) => Err(config_error(format!(
                "mrope_section has {} numbers; it must have three, for time, height and width",
                other.len()
            ))),
        }
    }

    /// The dimension of a position by which the frequency with this index turns: 0 for time, 1 for height, 2 for width.
    pub fn dimension(self, frequency: usize) -> usize {
        match frequency % 3 {
            1 if frequency < 3 * self.height => 1,
            2 if frequency < 3 * self.width => 2,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heights_and_widths_take_turns_as_far_as_they_reach() {
        let dimensions = |sections, count| (0..count).map(|i| RotarySections::new(sections).dimension(i)).collect();
        let short: Vec<usize> = dimensions([4, 2, 1], 9);
        assert_eq!(short, [0, 1, 2, 0, 1, 0, 0, 0, 0]);
        let published: Vec<usize> = dimensions([11, 11, 10], 32);
        assert_eq!([0, 1, 2].map(|d| published.iter().filter(|own| **own == d).count()), [11, 11, 10]);
        let published: Vec<usize> = dimensions([24, 20, 20], 64);
        assert_eq!([0, 1, 2].map(|d| published.iter().filter(|own| **own == d).count()), [24, 20, 20]);
    }

    #[test]
    fn sections_are_three_counts() {
        let parse = |value: serde_json::Value| {
            let mut config = Config::new(&value).unwrap();
            let parsed = RotarySections::new([9, 8, 7]).parse(&mut config).map_err(|error| error.to_string());
            parsed.map(|sections| (sections, config.judge(&[]).len()))
        };
        assert_eq!(parse(json!({})), Ok((RotarySections::new([0, 8, 7]), 0)));
        let given = json!({"mrope_section": [2, 1, 1], "mrope_interleaved": true});
        assert_eq!(parse(given), Ok((RotarySections::new([2, 1, 1]), 0)));
        assert_eq!(parse(json!({"mrope_section": [2, 1, 1], "mrope_interleaved": false})).unwrap().1, 1);
        for wrong in [json!([2, 1]), json!([1, 1, 1, 1]), json!([1, -1, 1]), json!([1, 1, u64::MAX]), json!("2,1,1")] {
            let error = parse(json!({"mrope_section": wrong})).unwrap_err();
            assert!(error.contains("mrope_section"), "{error}");
        }
    }
}
