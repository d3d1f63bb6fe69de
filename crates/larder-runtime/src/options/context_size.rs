//! How long the context of a sequence is, as options say it.

use std::fmt;
use std::str::FromStr;

/// The context of each sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ContextSize {
    /// The model's own, as far as its keys and values take no more than [a share of memory](crate::plan).
    #[default]
    Auto,
    /// The model's own.
    Model,
    /// This number of tokens; at most the model's own.
    Tokens(usize),
}

impl ContextSize {
    /// The most tokens that it is with a model whose own context is `model` tokens.
    pub fn at_most(self, model: usize) -> usize {
        self.tokens(model).unwrap_or(model)
    }

    /// What it is where `auto` means the `needed` tokens, with a model whose own context is `model` tokens.
    pub fn or_needed(self, needed: usize, model: usize) -> Self {
        match self {
            ContextSize::Auto => ContextSize::Tokens(needed.min(model)),
            asked => asked,
        }
    }

    /// The tokens with a model whose own context is `model` tokens; `None` if they depend on the memory.
    pub fn tokens(self, model: usize) -> Option<usize> {
        match self {
            ContextSize::Auto => None,
            ContextSize::Model => Some(model),
            ContextSize::Tokens(tokens) => Some(tokens.min(model)),
        }
    }
}

impl From<usize> for ContextSize {
    /// 0 is the model's own, as it is on the command line.
    fn from(tokens: usize) -> Self {
        if tokens == 0 { ContextSize::Model } else { ContextSize::Tokens(tokens) }
    }
}

impl FromStr for ContextSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.strip_suffix(['k', 'K']) {
            Some(digits) => (digits, 1 << 10),
            None => (text, 1),
        };
        match (text, digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit))) {
            ("auto", _) => Ok(ContextSize::Auto),
            ("max", _) => Ok(ContextSize::Model),
            (_, Some(tokens)) => Ok(tokens.into()),
            _ => Err("must be auto, max, or a number of tokens such as 8192 or 64K".into()),
        }
    }
}

impl fmt::Display for ContextSize {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            ContextSize::Auto => f.write_str("auto"),
            ContextSize::Model => f.write_str("max"),
            ContextSize::Tokens(tokens) => write!(f, "{tokens}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_words_are_read() {
        let read = |text: &str| text.parse::<ContextSize>();
        assert_eq!(["64K", "64k", "65536"].map(read), [const { Ok(ContextSize::Tokens(65_536)) }; 3]);
        assert_eq!(["max", "0", "0K"].map(read), [const { Ok(ContextSize::Model) }; 3]);
        assert_eq!(read("auto"), Ok(ContextSize::default()));
        for wrong in ["", "K", "-1", "4.5K", "64M", "all", "99999999999999999999", "18446744073709551615K"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        for size in [ContextSize::Auto, ContextSize::Model, ContextSize::Tokens(7)] {
            assert_eq!(read(&size.to_string()), Ok(size));
        }
        assert_eq!([9, 11].map(|tokens| ContextSize::Tokens(tokens).at_most(10)), [9, 10]);
        assert_eq!((ContextSize::Auto.tokens(10), ContextSize::Model.tokens(10)), (None, Some(10)));
    }
}
