//! The messages of a conversation, and the prompt made of them.

use anyhow::{Result, anyhow, bail};
use larder_text::{ChatInput, ChatTemplate};
use serde_json::{Value, json};

/// The author of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The author.
    pub role: Role,
    /// The text.
    pub content: String,
    /// The model's reasoning before the answer.
    pub reasoning: String,
}

impl Message {
    /// A user message.
    pub fn user(content: String) -> Self {
        Message { role: Role::User, content, reasoning: String::new() }
    }

    /// An empty assistant message.
    pub fn assistant() -> Self {
        Message { role: Role::Assistant, content: String::new(), reasoning: String::new() }
    }

    fn json(&self) -> Value {
        let mut json = json!({"role": self.role.name(), "content": self.content});
        if !self.reasoning.is_empty() {
            json["reasoning_content"] = json!(self.reasoning);
        }
        json
    }

    fn from_json(json: &Value) -> Option<Self> {
        let role = [Role::User, Role::Assistant].into_iter().find(|role| json["role"] == role.name())?;
        let content = json["content"].as_str()?.to_owned();
        let reasoning = json.get("reasoning_content").map_or(Some(""), Value::as_str)?.to_owned();
        Some(Message { role, content, reasoning })
    }
}

/// A system message and turns of user and assistant.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Conversation {
    /// The system message.
    pub system: Option<String>,
    /// The messages, user and assistant in turn.
    pub messages: Vec<Message>,
}

impl Conversation {
    /// The prompt for the next answer. Without a template, the texts of all messages in a row.
    pub fn text(&self, template: Option<&ChatTemplate>) -> Result<String> {
        match template {
            Some(template) => Ok(template.render(&ChatInput::new(&self.json()))?),
            None => Ok(self.plain()),
        }
    }

    fn plain(&self) -> String {
        let mut text = String::new();
        let system = self.system.iter().map(|text| (Role::User, text));
        for (role, content) in system.chain(self.messages.iter().map(|m| (m.role, &m.content))) {
            if role == Role::User && !text.is_empty() && !text.ends_with(char::is_whitespace) {
                text.push('\n');
            }
            text.push_str(content);
        }
        text
    }

    /// The messages as JSON, as templates and files have them.
    pub fn json(&self) -> Vec<Value> {
        let system = self.system.iter().map(|s| json!({"role": "system", "content": s}));
        system.chain(self.messages.iter().map(Message::json)).collect()
    }

    /// A conversation from such messages.
    pub fn from_json(json: &Value) -> Result<Self> {
        let Value::Array(all) = json else { bail!("`messages` must be a list") };
        let is_system = |m: &&Value| m["role"] == "system";
        let system = match all.first().filter(is_system) {
            None => None,
            Some(first) => Some(
                first["content"]
                    .as_str()
                    .ok_or_else(|| anyhow!("the content of the system message must be a string"))?,
            ),
        };
        let rest = all.iter().skip(usize::from(system.is_some())).enumerate();
        let messages = rest.map(|(at, json)| {
            let expected = if at % 2 == 0 { Role::User } else { Role::Assistant };
            let message = Message::from_json(json).filter(|message| message.role == expected);
            message.ok_or_else(|| anyhow!("turn {} must be a message with the role {}", at + 1, expected.name()))
        });
        Ok(Conversation { system: system.map(str::to_owned), messages: messages.collect::<Result<_>>()? })
    }

    /// Drops the oldest question with its answer; `false` if only one turn is left.
    pub fn drop_oldest(&mut self) -> bool {
        let next = self.messages.iter().skip(1).position(|m| m.role == Role::User);
        next.map(|at| self.messages.drain(..=at)).is_some()
    }

    /// Removes the last answer; `false` if there is no question.
    pub fn remove_last_answer(&mut self) -> bool {
        if self.messages.last().is_some_and(|m| m.role == Role::Assistant) {
            self.messages.pop();
        }
        !self.messages.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk_of(texts: &[&str]) -> Conversation {
        let role = |at: usize| if at.is_multiple_of(2) { Role::User } else { Role::Assistant };
        let message = |(at, text): (usize, &&str)| Message { role: role(at), ..Message::user((*text).into()) };
        Conversation { system: Some("S".into()), messages: texts.iter().enumerate().map(message).collect() }
    }

    #[test]
    fn without_a_template_texts_continue_each_other() {
        assert_eq!(talk_of(&["Once", " upon", "a time\n", "x", "y"]).plain(), "S\nOnce upon\na time\nx\ny");
        assert_eq!(Conversation { system: None, ..talk_of(&["Once"]) }.plain(), "Once");
    }

    #[test]
    fn the_oldest_turns_are_dropped_and_the_last_one_stays() {
        let mut talk = talk_of(&["a", "b", "c", "d", "e"]);
        assert!(talk.drop_oldest());
        assert_eq!(talk, talk_of(&["c", "d", "e"]));
        assert!(talk.drop_oldest());
        assert!(!talk.drop_oldest());
        assert_eq!(talk, talk_of(&["e"]));
    }

    #[test]
    fn the_last_answer_can_be_removed() {
        let mut talk = talk_of(&["a", "b"]);
        assert!(talk.remove_last_answer() && talk.remove_last_answer());
        assert_eq!(talk, talk_of(&["a"]));
        assert!(!talk_of(&[]).remove_last_answer());
    }

    #[test]
    fn messages_are_read_back_or_refused() {
        let mut talk = talk_of(&["a", "b", "c"]);
        talk.messages[1].reasoning = "hm".into();
        assert_eq!(Conversation::from_json(&json!(talk.json())).unwrap(), talk);
        for wrong in [
            json!({}),
            json!([{"role": "system", "content": 7}]),
            json!([{"role": "assistant", "content": "x"}]),
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": "x", "reasoning_content": 1}]),
            json!([7]),
        ] {
            assert!(Conversation::from_json(&wrong).is_err(), "{wrong}");
        }
    }
}
