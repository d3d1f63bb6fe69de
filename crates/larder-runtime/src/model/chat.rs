//! Chats: messages to a prompt by the model's template, and the answer as a message.

use anyhow::{Context, Result, bail};
use larder_text::{ChatInput, ToolSchema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::model::Model;
use crate::model::chat_images::{SeenMessages, without_pictures};
use crate::model::generation::GeneratedText;
use crate::model::options::GenerateOptions;
use crate::model::piece::{PieceListener, TextPiece};
use crate::model::prompt::PromptTokens;
use crate::vision::ImagePrompt;

/// The messages of a chat, with what its template may read besides.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ChatMessages {
    /// Each an object with `role` and `content`. A content may be a list of parts: texts, and images, as `image_url`
    /// with a `data:` URL or as `image` with a picture of [`GenerateOptions::images`].
    pub messages: Vec<Value>,
    /// Tools that the model may call, in OpenAI's form.
    pub tools: Vec<Value>,
    /// Further variables of the template.
    pub template_variables: Map<String, Value>,
}

impl ChatMessages {
    /// Parses a JSON object.
    pub fn from_json(json: &str) -> Result<Self> {
        serde_json::from_str(json).context("the chat is not valid")
    }
}

impl Model {
    /// Answers a user's message, without what was said before.
    pub fn ask(&mut self, message: &str) -> Result<GeneratedText> {
        let chat = ChatMessages { messages: vec![json!({"role": "user", "content": message})], ..Default::default() };
        self.chat(&chat, &GenerateOptions::default(), &mut |_: TextPiece| true)
    }

    /// Answers the last message. What the prompt has in common with the last chat is not computed again.
    pub fn chat(
        &mut self,
        chat: &ChatMessages,
        options: &GenerateOptions,
        listener: &mut dyn PieceListener,
    ) -> Result<GeneratedText> {
        let SeenMessages { messages, files } = SeenMessages::of(&chat.messages, &options.images)?;
        if !files.is_empty() {
            let marks = self.eyes()?.marks();
            ImagePrompt::check_text(&serde_json::to_string(&messages)?, marks, &self.text.tokenizer)?;
        }
        let text = self.rendered(&messages, chat)?;
        let marked = self.text.tokenizer.encode_for(self.context, &text, false)?;
        let prompt = self.prompt(marked, &files)?;
        let schemas = chat.tools.iter().map(schema).collect::<Result<Vec<_>>>()?;
        if options.trace || options.trace_logits {
            // The trace shall have all tokens.
            self.chat = None;
        }
        let (parser, shown) = (self.chat_format.parser(&text, schemas), self.chat_format.shown_tokens().to_vec());
        self.answer(PromptTokens { parser: Some(parser), shown, ..prompt }, options, listener)
    }

    /// The text that the model's template makes of a chat, in which marks stand for images.
    pub fn chat_prompt(&self, chat: &ChatMessages) -> Result<String> {
        self.rendered(&without_pictures(chat.messages.clone()), chat)
    }

    /// The text of messages as templates have them, with what a chat has beside its own.
    fn rendered(&self, messages: &[Value], chat: &ChatMessages) -> Result<String> {
        let Some(template) = &self.text.template else {
            bail!("the model has no chat template; generate from a prompt")
        };
        let tools = (!chat.tools.is_empty()).then_some(&*chat.tools);
        let (messages, tools) = self.chat_format.for_template(messages, tools);
        let input = ChatInput { tools, extra: &chat.template_variables, ..ChatInput::new(&messages) };
        Ok(template.render(&input)?)
    }
}

/// Name and schema of a tool in OpenAI's form.
fn schema(tool: &Value) -> Result<ToolSchema> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name").and_then(Value::as_str);
    let name = name.context("each tool of a chat must have a function with a name")?.to_owned();
    Ok(ToolSchema { name, parameters: function.get("parameters").cloned().unwrap_or(json!({})) })
}
