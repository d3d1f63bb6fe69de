//! Responses in the format of llama.cpp's `/completion` and `/infill`.

use larder_engine::FinishReason;
use serde_json::{Value, json};

use super::{
    Answer, AnswerMessage, CONTEXT_USE, MessagePart, PROMPT_PROGRESS, ResponseEvent, ResponseFormat, prompt_progress,
    timings,
};
use crate::queue::job::{GenerationSummary, PrefillProgress, SampledToken};

/// Builds the response to one request.
pub struct LlamaFormat {
    model: String,
    /// The request's stop strings.
    stops: Vec<String>,
}

impl LlamaFormat {
    /// The format of a response.
    pub fn new(model: &str, stops: Vec<String>) -> Self {
        LlamaFormat { model: model.to_owned(), stops }
    }

    /// The last object of an answer, with `content` as the rest of its text.
    fn last(&self, content: &str, summary: &GenerationSummary) -> Value {
        let stop = summary.stop_string.and_then(|index| self.stops.get(index));
        json!({
            "content": content,
            "stop": true,
            "model": self.model,
            "tokens_predicted": summary.generated_tokens,
            "tokens_evaluated": summary.prompt_tokens,
            "tokens_cached": summary.context.tokens,
            "truncated": summary.context.cut.dropped_tokens > 0,
            "stop_type": stop_type(summary.finish),
            "stopping_word": stop.map_or("", String::as_str),
            "timings": timings(summary),
            CONTEXT_USE: summary.context.json(),
        })
    }
}

fn stop_type(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText => "eos",
        FinishReason::StopString => "word",
        FinishReason::Length | FinishReason::Context => "limit",
        FinishReason::Cancelled => "none",
    }
}

impl ResponseFormat for LlamaFormat {
    /// One answer, or a list of those to several prompts.
    fn complete(&mut self, answers: &[Answer]) -> Value {
        let whole = |answer: &Answer| self.last(&answer.message.content, &answer.summary);
        match answers {
            [answer] => whole(answer),
            several => several.iter().map(whole).collect(),
        }
    }

    fn prefilled(&mut self, index: usize, progress: &PrefillProgress) -> Vec<ResponseEvent> {
        let event = json!({"index": index, "content": "", "stop": false, PROMPT_PROGRESS: prompt_progress(progress)});
        vec![ResponseEvent::unnamed(event)]
    }

    fn begin(&mut self, _: usize) -> Vec<ResponseEvent> {
        vec![]
    }

    fn parts(
        &mut self,
        index: usize,
        parts: &[MessagePart],
        _: &AnswerMessage,
        _: &[SampledToken],
    ) -> Vec<ResponseEvent> {
        let event = |part: &MessagePart| match part {
            MessagePart::Content(text) => {
                Some(ResponseEvent::unnamed(json!({"index": index, "content": text, "stop": false})))
            }
            _ => None,
        };
        parts.iter().filter_map(event).collect()
    }

    fn end(&mut self, index: usize, answer: &Answer) -> Vec<ResponseEvent> {
        let mut last = self.last("", &answer.summary);
        last["index"] = index.into();
        vec![ResponseEvent::unnamed(last)]
    }
}
