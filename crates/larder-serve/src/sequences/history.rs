//! Prompts of earlier requests, and why the prefix cache has less of another one than it could.

use std::collections::VecDeque;
use std::fmt;

use larder_core::common_prefix;
use larder_engine::SequenceOrigin;

use crate::prompt::turns::{PromptBlock, PromptTurns};

/// The most tokens of all prompts, of four bytes each.
const TOKENS_MAX: usize = 1 << 20;
/// Tokens of a prompt that are computed without a reason being looked for: a page, which is what is shared.
const PAGE_TOKENS: usize = 64;

/// The prompts of earlier requests, the latest last.
#[derive(Default)]
pub struct PromptHistory {
    prompts: VecDeque<(SequenceOrigin, Vec<u32>)>,
    tokens: usize,
}

/// Why tokens of a prompt are computed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MissReason {
    /// No earlier prompt has them.
    Differs,
    /// Recurrent states or windows cannot go back to where prompts differ.
    StateNotKept,
    /// The sequence that had them made room for others.
    Evicted,
    /// The model, its routing or its KV cache was another one.
    OtherSettings,
}

impl MissReason {
    /// All of them, with their names in metrics.
    pub const ALL: [(MissReason, &str); 4] = [
        (MissReason::Differs, "differs"),
        (MissReason::StateNotKept, "state_not_kept"),
        (MissReason::Evicted, "evicted"),
        (MissReason::OtherSettings, "other_settings"),
    ];
}

/// A prompt of which the prefix cache does not have all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheMiss {
    /// Why.
    pub reason: MissReason,
    /// Tokens that an earlier prompt begins with as well.
    pub common: usize,
    /// The block that the next token is in.
    pub block: PromptBlock,
}

impl fmt::Display for CacheMiss {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let CacheMiss { reason, common, block } = self;
        match reason {
            MissReason::Differs => write!(f, "the prompt differs from token {common} on, in {block}"),
            MissReason::StateNotKept => write!(f, "the state before token {common}, in {block}, was not kept"),
            MissReason::Evicted => write!(f, "the sequence with its first {common} tokens made room for others"),
            MissReason::OtherSettings => {
                write!(f, "its first {common} tokens were computed by another model or with other settings")
            }
        }
    }
}

/// Bytes of the prompts that are kept, and of another one of up to `context` tokens.
pub fn history_bytes(context: usize) -> u64 {
    size_of::<u32>() as u64 * (TOKENS_MAX as u64).saturating_add(context as u64)
}

impl PromptHistory {
    /// Adds a prompt, in the place of those that it begins with. The oldest ones make room.
    pub fn add(&mut self, origin: SequenceOrigin, prompt: &[u32]) {
        self.prompts.retain(|(other, earlier)| *other != origin || !prompt.starts_with(earlier));
        self.prompts.push_back((origin, prompt.to_vec()));
        self.tokens = self.prompts.iter().map(|(_, prompt)| prompt.len()).sum();
        while self.tokens > TOKENS_MAX && self.prompts.len() > 1 {
            self.tokens -= self.prompts.pop_front().map_or(0, |(_, prompt)| prompt.len());
        }
    }

    /// Why `cached` tokens of a prompt are not more, where sequences in memory have `held` in common with it; `None` if
    /// no more than a page is computed that an earlier prompt has, or there is none. `bytes` is the length of a text of
    /// tokens.
    pub fn miss(
        &self,
        origin: SequenceOrigin,
        (prompt, turns): (&[u32], &PromptTurns),
        (cached, held): (usize, usize),
        bytes: impl Fn(&[u32]) -> usize,
    ) -> Option<CacheMiss> {
        let longest = |same: bool| {
            let prompts = self.prompts.iter().filter(|(other, _)| (*other == origin) == same);
            prompts.map(|(_, earlier)| common_prefix(earlier, prompt)).max().unwrap_or(0)
        };
        let (same, other) = (longest(true), longest(false));
        let lacks = |common: usize| cached + PAGE_TOKENS <= common.min(prompt.len().saturating_sub(1));
        let (reason, common) = match () {
            () if lacks(same) && lacks(held) => (MissReason::StateNotKept, same),
            () if lacks(same) => (MissReason::Evicted, same),
            () if lacks(other) => (MissReason::OtherSettings, other),
            () if !self.prompts.is_empty() && cached + PAGE_TOKENS <= prompt.len() => (MissReason::Differs, same),
            () => return None,
        };
        Some(CacheMiss { reason, common, block: turns.block(common, || bytes(&prompt[..common])) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_from_the_others() {
        let [own, other] = ["", "q8_0"].map(|settings| SequenceOrigin::new("model", settings));
        let tokens = |range: std::ops::Range<u32>| range.collect::<Vec<u32>>();
        let turns = PromptTurns { pinned: vec![], begins: vec![150, 190, 260], tools: 40..280 };
        let mut history = PromptHistory::default();
        let prompt = [tokens(0..200), tokens(900..1200)].concat();
        let miss = |history: &PromptHistory, cached, held| {
            history.miss(own, (&prompt, &turns), (cached, held), |tokens| 2 * tokens.len())
        };
        assert_eq!(miss(&history, 0, 0), None, "nothing was there before");
        history.add(own, &tokens(0..100));
        history.add(own, &tokens(0..400));
        assert_eq!(history.tokens, 400, "a longer prompt takes the place of its beginning");
        let reason = |cached, held| miss(&history, cached, held).map(|miss| (miss.reason, miss.common));
        assert_eq!(reason(200, 200), Some((MissReason::Differs, 200)));
        assert_eq!(reason(100, 200), Some((MissReason::StateNotKept, 200)));
        assert_eq!(reason(100, 100), Some((MissReason::Evicted, 200)));
        assert_eq!(reason(137, 200).unwrap().0, MissReason::Differs, "less than a page is not looked at");
        let said = miss(&history, 200, 200).unwrap().to_string();
        assert_eq!(said, "the prompt differs from token 200 on, in turn 2");
        let blocks = [10, 20, 140, 150].map(|at| turns.block(at, || 2 * at).to_string());
        assert_eq!(blocks, ["the system text", "the tools", "the system text", "turn 1"]);
        let mut history = PromptHistory::default();
        history.add(other, &tokens(0..400));
        assert_eq!(miss(&history, 0, 0).unwrap().reason, MissReason::OtherSettings);
    }

    #[test]
    fn old_prompts_make_room() {
        let (mut history, origin) = (PromptHistory::default(), SequenceOrigin::new("model", ""));
        for first in 0..20 {
            history.add(origin, &vec![first; TOKENS_MAX / 8]);
        }
        assert_eq!((history.prompts.len(), history.tokens), (8, TOKENS_MAX));
    }
}
