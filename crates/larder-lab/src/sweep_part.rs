//! Sweeps in parts, for several machines.

use std::str::FromStr;

/// A part of a sweep: each `of`-th piece, from the piece `number` on. All parts of one `of` are the sweep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SweepPart {
    number: usize,
    of: usize,
}

impl Default for SweepPart {
    /// The whole.
    fn default() -> Self {
        SweepPart { number: 0, of: 1 }
    }
}

impl SweepPart {
    /// Whether it has this piece.
    pub fn has(&self, piece: usize) -> bool {
        piece % self.of == self.number
    }

    /// Whether it is the whole sweep.
    pub fn is_whole(&self) -> bool {
        self.of == 1
    }
}

impl FromStr for SweepPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((number, of)) if number < of => Ok(SweepPart { number, of }),
            _ => Err("must be a part as 0/4, 1/4, 2/4 or 3/4".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_all_pieces() {
        let parts: Vec<SweepPart> = ["0/3", "1/3", "2/3"].map(|text| text.parse().unwrap()).to_vec();
        for piece in 0..20 {
            assert_eq!(parts.iter().filter(|part| part.has(piece)).count(), 1);
            assert!(SweepPart::default().has(piece));
        }
        assert!(parts.iter().all(|part| !part.is_whole()) && "0/1".parse() == Ok(SweepPart::default()));
        for wrong in ["", "3/3", "1", "-1/2", "0/0", "a/2"] {
            assert!(wrong.parse::<SweepPart>().is_err(), "{wrong}");
        }
    }
}
