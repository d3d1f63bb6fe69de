//! Cuts where a chat or a text is longer than the context: the oldest turns of a chat, the middle of a text, and
//! older tokens of an answer under way.

use larder_core::common_prefix;
use larder_text::{ContextFull, DialogueTurns, answer_room, kept_tokens};
use serde_json::{Value, json};

use crate::error::Result;
use crate::model::ServedModel;
use crate::prompt::{ChatPrompt, TOO_LONG};
use crate::request::content::parts_of;
use crate::request::{ChatRequest, GenerationParams, Prompt};

/// A request's use of its context.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ContextPlan {
    /// Tokens at the beginning that are kept when the context is full and the answer goes on; `None` to end it then.
    pub keep: Option<usize>,
    /// What was cut so far.
    pub cut: ContextCut,
}

/// What was cut to make room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ContextCut {
    /// Turns that the prompt leaves out.
    pub dropped_turns: usize,
    /// Tokens of those turns without the marks of the template, tokens of a text, and tokens of shifts.
    pub dropped_tokens: usize,
    /// Shifts during the answer.
    pub shifts: usize,
}

/// How full the context is at the end of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ContextUse {
    /// Tokens in it.
    pub tokens: usize,
    /// Tokens that fit.
    pub size: usize,
    /// What was cut.
    pub cut: ContextCut,
}

impl ContextPlan {
    /// The limit of an answer to a prompt of `prompt` tokens. Without shifts it ends where the context does; with
    /// shifts and without a limit of its own, it has as many tokens as the context.
    pub fn answer_limit(&self, requested: Option<usize>, prompt: usize, context: usize) -> usize {
        let requested = requested.unwrap_or(usize::MAX);
        match self.keep {
            None => requested.min(context - prompt),
            Some(_) if requested == usize::MAX => context,
            Some(_) => requested,
        }
    }
}

impl ContextCut {
    /// Counts a shift that dropped these tokens.
    pub fn shifted(&mut self, tokens: usize) {
        self.dropped_tokens += tokens;
        self.shifts += 1;
    }
}

impl ContextUse {
    /// As responses have it.
    pub fn json(&self) -> Value {
        let ContextCut { dropped_turns, dropped_tokens, shifts } = self.cut;
        json!({
            "tokens": self.tokens,
            "size": self.size,
            "dropped_turns": dropped_turns,
            "dropped_tokens": dropped_tokens,
            "shifts": shifts,
        })
    }
}

impl ServedModel {
    /// The prompt of a chat, which `full` may shorten.
    pub fn fitted_chat(&self, request: &ChatRequest, full: ContextFull) -> Result<(ChatPrompt, ContextPlan)> {
        let (prompt, cut) = match full {
            ContextFull::Stop => (self.chat(request)?, ContextCut::default()),
            ContextFull::DropTurns | ContextFull::Shift => self.without_oldest_turns(request)?,
        };
        let keep = match full {
            ContextFull::Shift => Some(self.kept_of_chat(request, &prompt.tokens)),
            ContextFull::Stop | ContextFull::DropTurns => None,
        };
        Ok((prompt, ContextPlan { keep, cut }))
    }

    fn without_oldest_turns(&self, request: &ChatRequest) -> Result<(ChatPrompt, ContextCut)> {
        let most = self.context.tokens - answer_room(self.context.tokens, limit(&request.params));
        let turns = DialogueTurns::of(&request.messages);
        let prompt = |dropped| match self.chat(&request.with_messages(turns.without(dropped))) {
            Ok(prompt) => Ok(Some(prompt).filter(|prompt| prompt.tokens.len() <= most)),
            Err(error) if error.code == Some(TOO_LONG) => Ok(None),
            Err(error) => Err(error),
        };
        let fit = turns.fit(|message| self.tokens_of_message(request, message), self.context.tokens / 4, prompt)?;
        let (dropped_turns, prompt) = match fit {
            Some(fit) => fit,
            // The last turn may use the room of the answer too.
            None => {
                let last = turns.count().saturating_sub(1);
                (last, self.chat(&request.with_messages(turns.without(last)))?)
            }
        };
        let dropped_tokens = turns.oldest(dropped_turns).map(|message| self.tokens_of_message(request, message)).sum();
        Ok((prompt, ContextCut { dropped_turns, dropped_tokens, shifts: 0 }))
    }

    /// Tokens of a message's texts and images; of texts that no context holds, at least as many as one does.
    fn tokens_of_message(&self, request: &ChatRequest, message: &Value) -> usize {
        let calls = message.get("tool_calls").map(Value::to_string);
        let fields = ["content", "reasoning_content", "reasoning", "thinking"];
        let texts = fields.iter().filter_map(|field| message[*field].as_str()).chain(calls.as_deref());
        let texts = texts.chain(parts_of(message).iter().filter_map(|part| part["text"].as_str()));
        let tokens = |text: &str| {
            self.tokenizer.encode_for(self.context.tokens, text, false).map_or(self.context.tokens, |ids| ids.len())
        };
        texts.map(tokens).sum::<usize>().saturating_add(self.tokens_of_images(request, message))
    }

    /// Tokens that shifts keep of a chat's prompt: as many as requested, otherwise up to the first question.
    fn kept_of_chat(&self, request: &ChatRequest, prompt: &[u32]) -> usize {
        let keep = request.params.keep.unwrap_or_else(|| {
            let is_system = |message: &&Value| message["role"] == "system";
            let mut messages: Vec<Value> = request.messages.iter().take_while(is_system).cloned().collect();
            messages.push(json!({"role": "user", "content": "?"}));
            // A template that refuses such a chat leaves no mark to keep the prompt up to.
            let probe = self.chat(&request.with_messages(messages));
            probe.map_or(0, |probe| common_prefix(&probe.tokens, prompt))
        });
        kept_tokens(self.context.tokens, keep.min(prompt.len()))
    }

    /// The prompt of a completion, which `full` may shorten: its beginning and its end stay.
    pub fn fitted_prompt(
        &self,
        prompt: &Prompt,
        params: &GenerationParams,
        full: ContextFull,
    ) -> Result<(Vec<u32>, ContextPlan)> {
        if full != ContextFull::Shift {
            return Ok((self.prompt(prompt)?, ContextPlan::default()));
        }
        let mut tokens = self.prompt_tokens(prompt)?;
        let begin = || self.tokenizer.encode("", true).map_or(0, |begin| common_prefix(&begin, &tokens));
        let keep = kept_tokens(self.context.tokens, params.keep.unwrap_or_else(begin).min(tokens.len()));
        let mut cut = ContextCut::default();
        if tokens.len() >= self.context.tokens {
            let most = self.context.tokens - answer_room(self.context.tokens, limit(params));
            let end = keep + tokens.len() - most.max(keep + 1);
            cut.dropped_tokens = tokens.drain(keep..end).count();
        }
        self.check(&tokens, "prompt")?;
        Ok((tokens, ContextPlan { keep: Some(keep), cut }))
    }
}

/// The limit of an answer, if the request has one.
fn limit(params: &GenerationParams) -> Option<usize> {
    params.max_tokens.filter(|limit| *limit < usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_end_where_the_context_does_unless_it_is_shifted() {
        let (stop, shift) = (ContextPlan::default(), ContextPlan { keep: Some(3), ..ContextPlan::default() });
        for (requested, stopped, shifted) in
            [(None, 60, 100), (Some(usize::MAX), 60, 100), (Some(7), 7, 7), (Some(5000), 60, 5000)]
        {
            assert_eq!(
                (stop.answer_limit(requested, 40, 100), shift.answer_limit(requested, 40, 100)),
                (stopped, shifted)
            );
        }
    }

    #[test]
    fn shifts_are_counted() {
        let mut cut = ContextCut { dropped_turns: 2, dropped_tokens: 10, shifts: 0 };
        cut.shifted(5);
        cut.shifted(6);
        let json = ContextUse { tokens: 7, size: 9, cut }.json();
        assert_eq!(json, json!({"tokens": 7, "size": 9, "dropped_turns": 2, "dropped_tokens": 21, "shifts": 2}));
    }
}
