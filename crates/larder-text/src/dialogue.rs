//! What to do when a context is full: which turns of a dialogue a prompt leaves out, and how much of it a shift keeps.

use std::str::FromStr;

use serde_json::Value;

/// What to do when a prompt or an answer is longer than the context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ContextFull {
    /// Refuse the prompt, end the answer.
    Stop,
    /// Leave the oldest turns out of the prompt.
    DropTurns,
    /// The same, and go on with the answer over the beginning and the newest tokens.
    Shift,
}

impl ContextFull {
    /// All of them.
    pub const ALL: [ContextFull; 3] = [ContextFull::Stop, ContextFull::DropTurns, ContextFull::Shift];

    /// Its name in flags and requests.
    pub const fn name(self) -> &'static str {
        match self {
            ContextFull::Stop => "stop",
            ContextFull::DropTurns => "drop-turns",
            ContextFull::Shift => "shift",
        }
    }
}

impl FromStr for ContextFull {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|full| full.name() == text);
        found.ok_or_else(|| format!("'{text}' is not one of {}", names()))
    }
}

/// Tokens of the context that a prompt leaves free for its answer: the answer's limit, but at most half of the context;
/// a quarter where there is no limit.
pub fn answer_room(context: usize, max_tokens: Option<usize>) -> usize {
    max_tokens.map_or(context / 4, |limit| limit.min(context / 2)).max(1)
}

/// Tokens at the beginning that shifts keep of a context, where `wanted` are to be kept: at most three quarters, so
/// that a shift makes room for at least an eighth.
pub fn kept_tokens(context: usize, wanted: usize) -> usize {
    wanted.min(context * 3 / 4)
}

/// The turns of a dialogue. A turn is a message of the user with everything up to the next one, so calls of tools and
/// their results go together. System messages belong to none.
#[derive(Debug)]
pub struct DialogueTurns<'a> {
    messages: &'a [Value],
    /// The turn of each message; `None` for system messages.
    turns: Vec<Option<usize>>,
    count: usize,
}

impl<'a> DialogueTurns<'a> {
    /// The turns of these messages, as chat templates read them.
    pub fn of(messages: &'a [Value]) -> Self {
        let (mut turns, mut count) = (Vec::with_capacity(messages.len()), 0);
        for message in messages {
            let role = message["role"].as_str();
            let is_system = matches!(role, Some("system" | "developer"));
            if !is_system && (role == Some("user") || count == 0) {
                count += 1;
            }
            turns.push((!is_system).then(|| count - 1));
        }
        DialogueTurns { messages, turns, count }
    }

    /// Number of turns.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The messages without those of the `dropped` oldest turns.
    pub fn without(&self, dropped: usize) -> Vec<Value> {
        let kept = |turn: &Option<usize>| turn.is_none_or(|turn| turn >= dropped);
        self.zipped().filter(|(_, turn)| kept(turn)).map(|(message, _)| message.clone()).collect()
    }

    /// The messages of the `dropped` oldest turns.
    pub fn oldest(&self, dropped: usize) -> impl Iterator<Item = &'a Value> + '_ {
        self.zipped().filter(move |(_, turn)| turn.is_some_and(|turn| turn < dropped)).map(|(message, _)| message)
    }

    /// The prompt of all messages or, if that does not fit, the longest that fits with as many of the oldest turns left
    /// out as a cut allows; and how many those are. `prompt` makes the prompt without a number of turns, or `None` if
    /// it does not fit; cuts are searched by halves. The result is `None` if even the last turn alone does not fit.
    ///
    /// `tokens` is the number of tokens of a message, and `step` that between two cuts.
    pub fn fit<P, E>(
        &self,
        tokens: impl Fn(&Value) -> usize,
        step: usize,
        mut prompt: impl FnMut(usize) -> Result<Option<P>, E>,
    ) -> Result<Option<(usize, P)>, E> {
        if let Some(whole) = prompt(0)? {
            return Ok(Some((0, whole)));
        }
        let cuts = self.cuts(tokens, step);
        let (mut least, mut most, mut best) = (0, cuts.len(), None);
        while least < most {
            let middle = (least + most) / 2;
            match prompt(cuts[middle])? {
                Some(made) => (most, best) = (middle, Some((cuts[middle], made))),
                None => least = middle + 1,
            }
        }
        Ok(best)
    }

    /// Numbers of turns that may be dropped, ascending: those before which another `step` tokens of the dialogue are
    /// complete, and all but the last. They depend only on what is before them, so a dialogue that grows is cut at the
    /// same turn until that is not enough, and its prompts have a common prefix.
    fn cuts(&self, tokens: impl Fn(&Value) -> usize, step: usize) -> Vec<usize> {
        let mut sizes = vec![0; self.count];
        for (message, turn) in self.zipped() {
            turn.into_iter().for_each(|turn| sizes[turn] += tokens(message));
        }
        let last = self.count.saturating_sub(1);
        let (mut cuts, mut before) = (Vec::new(), 0);
        for turn in 1..=last {
            let after = before + sizes[turn - 1];
            if turn == last || after / step.max(1) > before / step.max(1) {
                cuts.push(turn);
            }
            before = after;
        }
        cuts
    }

    fn zipped(&self) -> impl Iterator<Item = (&'a Value, Option<usize>)> + '_ {
        self.messages.iter().zip(self.turns.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A dialogue from one letter per message, each with its number and a number of tokens.
    fn dialogue(letters: &[(char, usize)]) -> Vec<Value> {
        let role = |letter| match letter {
            's' => "system",
            'd' => "developer",
            'u' => "user",
            't' => "tool",
            _ => "assistant",
        };
        let message =
            |(i, (letter, tokens)): (usize, &(char, usize))| json!({"role": role(*letter), "content": i, "n": tokens});
        letters.iter().enumerate().map(message).collect()
    }

    fn tokens(message: &Value) -> usize {
        message["n"].as_u64().unwrap() as usize
    }

    fn size(messages: &[Value]) -> usize {
        messages.iter().map(tokens).sum()
    }

    /// What is left of a dialogue in `limit` tokens, with the number of dropped turns and of prompts that were made.
    fn fitted(messages: &[Value], limit: usize, step: usize) -> (Option<(usize, Vec<Value>)>, usize) {
        let mut made = 0;
        let turns = DialogueTurns::of(messages);
        let prompt = |dropped| {
            made += 1;
            Ok::<_, ()>(Some(turns.without(dropped)).filter(|left| size(left) <= limit))
        };
        let fit = turns.fit(tokens, step, prompt).unwrap();
        (fit, made)
    }

    #[test]
    fn calls_go_with_their_results_and_system_messages_stay() {
        let messages =
            dialogue(&[('s', 1), ('u', 1), ('a', 1), ('t', 1), ('d', 1), ('a', 1), ('u', 1), ('a', 1), ('u', 1)]);
        let turns = DialogueTurns::of(&messages);
        let numbers =
            |messages: Vec<Value>| messages.iter().map(|m| m["content"].as_u64().unwrap()).collect::<Vec<_>>();
        assert_eq!(turns.count, 3);
        assert_eq!(numbers(turns.without(1)), [0, 4, 6, 7, 8]);
        assert_eq!(numbers(turns.without(2)), [0, 4, 8]);
        assert_eq!(numbers(turns.oldest(1).cloned().collect()), [1, 2, 3, 5]);
        // What precedes the first question is a turn with it.
        assert_eq!(DialogueTurns::of(&dialogue(&[('a', 1), ('a', 1)])).count, 1);
        assert_eq!(DialogueTurns::of(&dialogue(&[('s', 1)])).count, 0);
    }

    #[test]
    fn a_growing_dialogue_is_cut_at_the_same_turn_for_a_while() {
        let mut messages = dialogue(&[('s', 5)]);
        let mut cuts = Vec::new();
        for _ in 0..60 {
            messages.extend(dialogue(&[('u', 3), ('a', 4)]));
            cuts.push(fitted(&messages, 100, 25).0.unwrap().0);
        }
        let changes = cuts.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(cuts[59] > 40 && changes <= 60 * 7 / 25, "{cuts:?}");
    }

    #[test]
    fn names_are_read_back() {
        for full in ContextFull::ALL {
            assert_eq!(full.name().parse(), Ok(full));
        }
        assert!("forget".parse::<ContextFull>().unwrap_err().contains("drop-turns"));
    }

    #[test]
    fn answers_have_room_and_shifts_make_it() {
        assert_eq!(
            (answer_room(4096, None), answer_room(4096, Some(100)), answer_room(4096, Some(9999))),
            (1024, 100, 2048)
        );
        assert_eq!((answer_room(2, None), kept_tokens(100, 7), kept_tokens(100, 99)), (1, 7, 75));
    }

    proptest! {
        #[test]
        fn what_is_left_fits_and_has_all_that_must_stay(
            letters in prop::collection::vec((prop::sample::select(vec!['s', 'd', 'u', 'a', 't']), 0_usize..40), 1..60),
            limit in 1_usize..600,
            step in 1_usize..100,
        ) {
            let messages = dialogue(&letters);
            let turns = DialogueTurns::of(&messages);
            let is_system = |m: &&Value| m["role"] == "system" || m["role"] == "developer";
            let systems = |list: &[Value]| list.iter().filter(is_system).cloned().collect::<Vec<_>>();
            let last = turns.without(turns.count.saturating_sub(1));
            let (fit, made) = fitted(&messages, limit, step);
            prop_assert!(made <= 2 + messages.len().ilog2() as usize + 1, "{} prompts of {} messages", made, messages.len());
            let Some((dropped, left)) = fit else {
                prop_assert!(size(&last) > limit);
                return Ok(());
            };
            prop_assert!(size(&left) <= limit && (dropped == 0) == (left == messages));
            prop_assert_eq!(systems(&left), systems(&messages));
            prop_assert!(last.iter().all(|message| left.contains(message)));
            // Whole turns are gone: a question stays exactly where all of its turn does.
            prop_assert_eq!(left, turns.without(dropped));
        }
    }
}
