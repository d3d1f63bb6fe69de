//! What was written: tokens, and the logits that they were drawn from, compared bit by bit and kept in a file.

use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use larder_core::DEFINITION;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};

/// Names of the texts.
pub const TEXTS: [&str; 2] = ["greedy", "sampled"];

/// Key of the number of the definition of matmuls and attention in the metadata of a file.
const DEFINITION_KEY: &str = "definition";

/// A text.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct WrittenText {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// For each of them the logits of the whole vocabulary.
    pub logits: Vec<f32>,
}

/// The texts of a proof, in the order of their names.
#[derive(Clone, PartialEq, Debug)]
pub struct WrittenTexts {
    /// What they continue.
    pub prompt: Vec<u32>,
    /// As many tokens each.
    pub texts: Vec<WrittenText>,
}

/// Where a text differs first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FirstDifference {
    /// Name of the text.
    pub text: String,
    /// Index of the token behind the prompt.
    pub token: usize,
    /// Its id as expected, and as found.
    pub ids: [u32; 2],
    /// The first logit that differs; `None` if only the token does.
    pub logit: Option<DifferentLogit>,
}

/// A logit that differs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DifferentLogit {
    /// The token that it is of.
    pub id: usize,
    /// Its bits as expected, and as found.
    pub bits: [u32; 2],
}

impl fmt::Display for FirstDifference {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let FirstDifference { text, token, ids: [expected, found], logit } = self;
        write!(f, "{text} text, token {token}: id {found}, expected {expected}")?;
        let Some(DifferentLogit { id, bits }) = logit else { return Ok(()) };
        let [expected, found] = bits.map(|bits| format!("{} (0x{bits:08x})", f32::from_bits(bits)));
        write!(f, "; logit {id} is {found}, expected {expected}")
    }
}

impl WrittenText {
    /// The logits of each token.
    fn vocab(&self) -> usize {
        self.logits.len() / self.ids.len().max(1)
    }

    /// The index of the first token that differs in a text of as many tokens, and what differs.
    fn difference(&self, found: &WrittenText) -> Option<(usize, [u32; 2], Option<DifferentLogit>)> {
        let vocab = self.vocab();
        (0..self.ids.len()).find_map(|token| {
            let ids = [self, found].map(|text| text.ids[token]);
            let rows = [self, found].map(|text| &text.logits[token * vocab..][..vocab]);
            let bits_of = |id: usize| rows.map(|row| row[id].to_bits());
            let id = (0..vocab).find(|id| bits_of(*id)[0] != bits_of(*id)[1]);
            let logit = id.map(|id| DifferentLogit { id, bits: bits_of(id) });
            (logit.is_some() || ids[0] != ids[1]).then_some((token, ids, logit))
        })
    }
}

impl WrittenTexts {
    /// Tokens of each text.
    pub fn tokens_each(&self) -> usize {
        self.texts.first().map_or(0, |text| text.ids.len())
    }

    /// Tokens of all texts.
    pub fn tokens(&self) -> usize {
        self.texts.len() * self.tokens_each()
    }

    /// Where `found` differs first, and the tokens before it. Both have as many tokens of the same vocabulary.
    pub fn difference(&self, found: &WrittenTexts) -> Option<(FirstDifference, usize)> {
        let pairs = self.texts.iter().zip(&found.texts).zip(TEXTS).enumerate();
        pairs.into_iter().find_map(|(index, ((expected, found), name))| {
            let (token, ids, logit) = expected.difference(found)?;
            let before = index * self.tokens_each() + token;
            Some((FirstDifference { text: name.to_owned(), token, ids, logit }, before))
        })
    }

    /// A safetensors file of them, whose bytes depend on nothing else.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut tensors = vec![("prompt".to_owned(), Dtype::U32, vec![self.prompt.len()], bytes_of(&self.prompt))];
        for (text, name) in self.texts.iter().zip(TEXTS) {
            tensors.push((ids_of(name), Dtype::U32, vec![text.ids.len()], bytes_of(&text.ids)));
            let bits: Vec<u32> = text.logits.iter().map(|logit| logit.to_bits()).collect();
            tensors.push((logits_of(name), Dtype::F32, vec![text.ids.len(), text.vocab()], bytes_of(&bits)));
        }
        let view = |(name, dtype, shape, bytes)| Ok((name, TensorView::new(dtype, shape, bytes)?));
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| view((name, *dtype, shape.clone(), bytes)));
        let views = views.collect::<Result<Vec<_>>>()?;
        let metadata = HashMap::from([(DEFINITION_KEY.to_owned(), DEFINITION.to_string())]);
        safetensors::serialize(views, Some(metadata)).context("the texts cannot be serialized")
    }

    /// Reads such a file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let file = SafeTensors::deserialize(bytes).context("is not a file of `larder prove --save`")?;
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let definition = header.metadata().as_ref().and_then(|metadata| metadata.get(DEFINITION_KEY));
        if definition != Some(&DEFINITION.to_string()) {
            bail!("is of another version of larder, which computes other bits; write it again with --save");
        }
        let numbers = |name: &str, dtype: Dtype| -> Result<Vec<u32>> {
            let tensor = file.tensor(name).with_context(|| format!("lacks {name}; write it again with --save"))?;
            ensure!(tensor.dtype() == dtype, "has {name} as {:?}; write it again with --save", tensor.dtype());
            Ok(tensor.data().as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
        };
        let text = |name: &str| -> Result<WrittenText> {
            let logits = numbers(&logits_of(name), Dtype::F32)?.into_iter().map(f32::from_bits).collect();
            Ok(WrittenText { ids: numbers(&ids_of(name), Dtype::U32)?, logits })
        };
        let texts = TEXTS.into_iter().map(text).collect::<Result<Vec<_>>>()?;
        let read = WrittenTexts { prompt: numbers("prompt", Dtype::U32)?, texts };
        let each = read.tokens_each();
        ensure!(
            each > 0 && read.texts.iter().all(|text| text.ids.len() == each),
            "has texts of unequal lengths; write it again with --save"
        );
        Ok(read)
    }

    /// Fails unless these texts can be compared with those of a model of this vocabulary and this prompt.
    pub fn check(&self, prompt: &[u32], vocab: usize) -> Result<()> {
        let is_of = |text: &WrittenText| text.logits.len() == text.ids.len() * vocab;
        ensure!(
            self.prompt == prompt && self.texts.iter().all(is_of),
            "is of a model with other tokens; name a model with the same tokenizer"
        );
        Ok(())
    }
}

fn ids_of(text: &str) -> String {
    format!("{text}.ids")
}

fn logits_of(text: &str) -> String {
    format!("{text}.logits")
}

fn bytes_of(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 3;

    fn written() -> WrittenTexts {
        let text = |first: u32| WrittenText {
            ids: vec![first, first + 1],
            logits: (0..2 * VOCAB as u32).map(|n| (first + n) as f32 / 7.0 - 0.5).collect(),
        };
        WrittenTexts { prompt: vec![5, 6, 7], texts: vec![text(1), text(20)] }
    }

    #[test]
    fn every_flipped_bit_is_found_at_its_place() {
        let expected = written();
        assert_eq!(expected.difference(&expected), None);
        for (index, name) in TEXTS.into_iter().enumerate() {
            for (at, bit) in (0..2 * VOCAB).flat_map(|at| (0..32).map(move |bit| (at, bit))) {
                let mut found = written();
                let before = found.texts[index].logits[at].to_bits();
                found.texts[index].logits[at] = f32::from_bits(before ^ 1 << bit);
                let (first, tokens) = expected.difference(&found).expect("a bit differs");
                let logit = DifferentLogit { id: at % VOCAB, bits: [before, before ^ 1 << bit] };
                assert_eq!((first.text.as_str(), first.token, first.logit), (name, at / VOCAB, Some(logit)));
                assert_eq!(tokens, 2 * index + at / VOCAB);
            }
            let mut found = written();
            found.texts[index].ids[1] = 99;
            let (first, _) = expected.difference(&found).expect("a token differs");
            assert_eq!((first.token, first.ids[1], first.logit), (1, 99, None));
        }
    }

    #[test]
    fn the_sign_of_zero_and_the_bits_of_nan_count() {
        let with = |logit: f32| {
            let mut texts = written();
            texts.texts[0].logits[0] = logit;
            texts
        };
        assert!(with(0.0).difference(&with(-0.0)).is_some());
        assert_eq!(with(f32::NAN).difference(&with(f32::NAN)), None);
        let said = with(0.0).difference(&with(-0.0)).unwrap().0.to_string();
        assert_eq!(said, "greedy text, token 0: id 1, expected 1; logit 0 is -0 (0x80000000), expected 0 (0x00000000)");
    }

    #[test]
    fn a_file_has_all_bits_and_is_always_the_same() {
        let bytes = written().to_bytes().unwrap();
        assert_eq!(WrittenTexts::from_bytes(&bytes).unwrap(), written());
        assert_eq!(written().to_bytes().unwrap(), bytes);
        written().check(&[5, 6, 7], VOCAB).unwrap();
        for (prompt, vocab) in [(&[5, 6][..], VOCAB), (&[5, 6, 7], VOCAB + 1)] {
            assert!(written().check(prompt, vocab).unwrap_err().to_string().contains("other tokens"));
        }
    }

    #[test]
    fn files_that_are_no_texts_are_refused() {
        let bytes = written().to_bytes().unwrap();
        for short in [0, 7, 8, bytes.len() / 2, bytes.len() - 1] {
            assert!(WrittenTexts::from_bytes(&bytes[..short]).is_err(), "{short}");
        }
        let mut unequal = written();
        unequal.texts[1].ids.pop();
        unequal.texts[1].logits.truncate(VOCAB);
        let refused = WrittenTexts::from_bytes(&unequal.to_bytes().unwrap()).unwrap_err().to_string();
        assert!(refused.contains("unequal lengths"), "{refused}");
        let none = safetensors::serialize(Vec::<(String, TensorView)>::new(), None).unwrap();
        let refused = WrittenTexts::from_bytes(&none).unwrap_err().to_string();
        assert!(refused.contains("another version"), "{refused}");
    }
}
