//! Prompt lookup: the draft of what follows is what followed the same tokens earlier in the sequence.

use std::collections::HashMap;

use larder_core::FIRST_IMAGE_ID;
use larder_model::{ModelError, Tap};

use super::source::{Draft, DraftSource, TextSoFar};
use crate::sequence::OwnLayer;

/// Tokens at the end of the sequence that must have occurred earlier, at least.
pub const NGRAM: usize = 3;
/// How many tokens before the n-gram are compared, to choose between several places.
const COMPARED: usize = 32;
/// How many earlier places of the same n-gram are compared.
const PLACES: usize = 8;
/// There is no earlier place.
const NONE: u32 = u32::MAX;

/// The tokens of a sequence with an index of their n-grams, which grow with it.
#[derive(Default)]
pub struct PromptLookup {
    /// Tokens at the end of the sequence that must have occurred earlier, if more than [`NGRAM`].
    least: usize,
    /// The index of the token behind the place that was found last.
    found: usize,
    tokens: Vec<u32>,
    /// The newest place of each n-gram: the index of the token behind it.
    newest: HashMap<[u32; NGRAM], u32>,
    /// For the n-gram that ends before each token: the place before that, or `NONE`.
    earlier: Vec<u32>,
}

/// What was found earlier in a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EarlierPlace<'a> {
    /// The tokens that followed there, at least one.
    pub following: &'a [u32],
    /// How many tokens before them are those at the end of the sequence.
    pub matching: usize,
}

impl PromptLookup {
    /// A lookup that finds matches of `least` tokens and more, or of [`NGRAM`].
    pub fn new(least: usize) -> Self {
        PromptLookup { least, ..PromptLookup::default() }
    }

    /// The place in a sequence whose preceding tokens are the longest match of those at the end; of equally long ones
    /// the newest. The sequence has the tokens `before` and then `last`, and begins with that of the last call.
    pub fn find(&mut self, before: &[u32], last: u32) -> Option<EarlierPlace<'_>> {
        self.tokens.extend_from_slice(&before[self.tokens.len()..]);
        self.tokens.push(last);
        let (tokens, end) = (&self.tokens[..], self.tokens.len());
        // The place at the end itself is added with the next token, when something follows it.
        for next in self.earlier.len()..end {
            let place = ngram_before(tokens, next).and_then(|ngram| self.newest.insert(ngram, next as u32));
            self.earlier.push(place.unwrap_or(NONE));
        }
        let mut place = *self.newest.get(&ngram_before(tokens, end)?)?;
        let mut best: Option<EarlierPlace> = None;
        for _ in 0..PLACES {
            let (preceding, following) = tokens.split_at(place as usize);
            let matching = matching_ends(preceding, tokens);
            if best.is_none_or(|best| best.matching < matching) {
                best = Some(EarlierPlace { following, matching });
            }
            place = self.earlier[place as usize];
            if place == NONE {
                break;
            }
        }
        best
    }

    /// Forgets all, because tokens of the sequence were dropped.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.newest.clear();
        self.earlier.clear();
    }
}

impl DraftSource for PromptLookup {
    /// The number of tokens that match: short matches are often chance.
    fn at_hand(&mut self, text: TextSoFar, _: Option<&OwnLayer>) -> usize {
        let least = self.least;
        let Some(place) = self.find(text.before, text.last).filter(|place| place.matching >= least) else { return 0 };
        let (matching, following, next) = (place.matching, place.following.len(), place.following[0]);
        self.found = self.tokens.len() - following;
        // An image is never drafted.
        if next < FIRST_IMAGE_ID { matching } else { 0 }
    }

    fn draft(
        &mut self,
        _: TextSoFar,
        most: usize,
        _: Option<&mut OwnLayer>,
        _: &mut dyn Tap,
    ) -> Result<Draft, ModelError> {
        // A repetition that reaches the end of the text goes on in the same way.
        let following = self.tokens[self.found..].iter().cycle().take(most).copied();
        let tokens = following.take_while(|id| *id < FIRST_IMAGE_ID).collect();
        Ok(Draft { tokens, unseen: 0 })
    }

    fn shifted(&mut self) {
        self.clear();
    }
}

fn ngram_before(tokens: &[u32], next: usize) -> Option<[u32; NGRAM]> {
    tokens[next.checked_sub(NGRAM)?..next].try_into().ok()
}

/// With how many equal tokens both end, as far as they are compared.
fn matching_ends(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(COMPARED).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_core::Xoshiro256;

    /// The index of the token that followed, and how many before it match.
    fn find(lookup: &mut PromptLookup, tokens: &[u32]) -> Option<(usize, usize)> {
        let (last, before) = tokens.split_last()?;
        lookup.find(before, *last).map(|place| (tokens.len() - place.following.len(), place.matching))
    }

    fn found(tokens: &[u32]) -> Option<(usize, usize)> {
        find(&mut PromptLookup::default(), tokens)
    }

    #[test]
    fn short_and_new_texts_have_no_earlier_place() {
        for tokens in [&[][..], &[1], &[1, 2, 3], &[7, 7], &[1, 2, 3, 4, 5, 6]] {
            assert_eq!(found(tokens), None, "{tokens:?}");
        }
    }

    #[test]
    fn the_longest_match_wins_and_then_the_newest() {
        assert_eq!(found(&[1, 2, 3, 4, 1, 2, 3]), Some((3, 3)));
        assert_eq!(found(&[7, 7, 7, 7]), Some((3, 3)));
        // The older place is preceded by 9 as well.
        assert_eq!(found(&[9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3]), Some((4, 4)));
        assert_eq!(found(&[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]), Some((7, 3)));
    }

    /// All places, one after the other.
    fn naive(tokens: &[u32]) -> Option<(usize, usize)> {
        let places =
            (NGRAM..tokens.len()).rev().filter(|next| tokens[..*next].ends_with(&tokens[tokens.len() - NGRAM..]));
        let mut best = None;
        for next in places.take(PLACES) {
            let matching =
                (1..=COMPARED.min(next)).take_while(|n| tokens[..next].ends_with(&tokens[tokens.len() - n..]));
            let matching = matching.count();
            if best.is_none_or(|(_, most)| most < matching) {
                best = Some((next, matching));
            }
        }
        best
    }

    #[test]
    fn an_image_is_not_drafted() {
        let id = FIRST_IMAGE_ID + 5;
        let draft = |tokens: &[u32]| {
            let (mut lookup, (last, before)) = (PromptLookup::new(NGRAM), tokens.split_last().unwrap());
            let text = TextSoFar { before, last: *last };
            (lookup.at_hand(text, None), lookup.draft(text, 4, None, &mut ()).unwrap().tokens)
        };
        assert_eq!(draft(&[1, 2, 3, 4, id, id, id, id, 9, 1, 2, 3]), (3, vec![4]));
        assert_eq!(draft(&[1, 2, 3, id, id, id, id, 9, 1, 2, 3]), (0, vec![]));
        assert_eq!(draft(&[3, id, id, id, id, 9, 7, 3, id, id, id, id]), (5, vec![9, 7, 3]));
    }

    #[test]
    fn a_growing_index_finds_what_a_search_finds() {
        let (mut rng, mut matches) = (Xoshiro256::new(3), 0);
        for kinds in [1, 2, 3, 8] {
            let (mut lookup, mut tokens) = (PromptLookup::default(), Vec::new());
            while tokens.len() < 200 {
                let more = 1 + rng.bits() as usize % 5;
                tokens.extend((0..more).map(|_| (rng.bits() % kinds) as u32));
                let place = find(&mut lookup, &tokens);
                assert_eq!(place, naive(&tokens), "{tokens:?}");
                matches += usize::from(place.is_some());
            }
            lookup.clear();
            assert_eq!(find(&mut lookup, &tokens), naive(&tokens));
        }
        assert!(matches > 100, "{matches}");
    }
}
