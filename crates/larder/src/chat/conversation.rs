//! The messages of a conversation, and the prompt made of them.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result, anyhow, bail};
use larder_engine::Picture;
use larder_runtime::content_with_images;
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

/// An image in a message.
#[derive(Clone, Debug)]
pub struct ChatImage {
    /// The file of its picture.
    pub path: PathBuf,
    /// The picture, without what a tower made of it; `None` if the file was not read yet.
    pub picture: Option<Picture>,
}

/// Whether they are of the same file.
impl PartialEq for ChatImage {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for ChatImage {}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The author.
    pub role: Role,
    /// The text.
    pub content: String,
    /// Images before the text.
    pub images: Vec<ChatImage>,
    /// The model's reasoning before the answer.
    pub reasoning: String,
}

impl Message {
    /// A user message.
    pub fn user(content: String) -> Self {
        Message { role: Role::User, content, images: vec![], reasoning: String::new() }
    }

    /// An empty assistant message.
    pub fn assistant() -> Self {
        Message { role: Role::Assistant, ..Message::user(String::new()) }
    }

    /// As templates have it: with images, the content is a list of parts.
    fn json(&self) -> Value {
        let mut json = self.saved_json();
        if json.as_object_mut().and_then(|json| json.remove("images")).is_some() {
            json["content"] = content_with_images(self.images.len(), &self.content);
        }
        json
    }

    /// As files have it: images are paths.
    fn saved_json(&self) -> Value {
        let mut json = json!({"role": self.role.name(), "content": self.content});
        if !self.images.is_empty() {
            json["images"] = self.images.iter().map(|image| image.path.to_string_lossy().into_owned()).collect();
        }
        if !self.reasoning.is_empty() {
            json["reasoning_content"] = json!(self.reasoning);
        }
        json
    }

    fn from_json(json: &Value) -> Option<Self> {
        let role = [Role::User, Role::Assistant].into_iter().find(|role| json["role"] == role.name())?;
        let content = json["content"].as_str()?.to_owned();
        let reasoning = json.get("reasoning_content").map_or(Some(""), Value::as_str)?.to_owned();
        let none = vec![];
        let paths = json.get("images").map_or(Some(&none), Value::as_array)?;
        let image = |path: &Value| Some(ChatImage { path: path.as_str()?.into(), picture: None });
        Some(Message { role, content, images: paths.iter().map(image).collect::<Option<_>>()?, reasoning })
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
    /// The prompt for the next answer. Without a template, the texts of all messages in a row, with the mark `image`
    /// for each image.
    pub fn text(&self, template: Option<&ChatTemplate>, image: &str) -> Result<String> {
        match template {
            Some(template) => Ok(template.render(&ChatInput::new(&self.json()))?),
            None => Ok(self.plain(image)),
        }
    }

    fn plain(&self, image: &str) -> String {
        let mut text = String::new();
        let system = self.system.iter().map(|text| (Role::User, 0, text));
        for (role, images, content) in system.chain(self.messages.iter().map(|m| (m.role, m.images.len(), &m.content)))
        {
            if role == Role::User && !text.is_empty() && !text.ends_with(char::is_whitespace) {
                text.push('\n');
            }
            text.push_str(&image.repeat(images));
            text.push_str(content);
        }
        text
    }

    /// The images of all messages, in order.
    pub fn images(&self) -> impl Iterator<Item = &ChatImage> {
        self.messages.iter().flat_map(|message| &message.images)
    }

    /// Reads the files of all images; those that cannot be read are left out, and the errors returned.
    pub fn read_images(&mut self, read: impl Fn(&Path) -> Result<ChatImage>) -> Vec<Error> {
        let mut errors = Vec::new();
        for message in &mut self.messages {
            let files = std::mem::take(&mut message.images);
            for image in files {
                match read(&image.path) {
                    Ok(image) => message.images.push(image),
                    Err(error) => errors.push(error),
                }
            }
        }
        errors
    }

    /// The messages as JSON, as templates have them.
    pub fn json(&self) -> Vec<Value> {
        self.json_of(Message::json)
    }

    /// The messages as JSON, as files have them.
    pub fn saved_json(&self) -> Vec<Value> {
        self.json_of(Message::saved_json)
    }

    fn json_of(&self, message: fn(&Message) -> Value) -> Vec<Value> {
        let system = self.system.iter().map(|s| json!({"role": "system", "content": s}));
        system.chain(self.messages.iter().map(message)).collect()
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
        assert_eq!(talk_of(&["Once", " upon", "a time\n", "x", "y"]).plain("[i]"), "S\nOnce upon\na time\nx\ny");
        assert_eq!(Conversation { system: None, ..talk_of(&["Once"]) }.plain("[i]"), "Once");
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
        talk.messages[2].images = ["a.png", "b.png"].map(|path| ChatImage { path: path.into(), picture: None }).into();
        assert_eq!(Conversation::from_json(&json!(talk.saved_json())).unwrap(), talk);
        let image = json!({"type": "image"});
        let parts = json!([image, image, {"type": "text", "text": "c"}]);
        assert_eq!((&talk.json()[3]["content"], talk.images().count()), (&parts, 2));
        assert!(talk.plain("[i]").ends_with("\n[i][i]c"));
        for wrong in [
            json!({}),
            json!([{"role": "system", "content": 7}]),
            json!([{"role": "assistant", "content": "x"}]),
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": "x", "reasoning_content": 1}]),
            json!([{"role": "user", "content": "x", "images": [1]}]),
            json!([7]),
        ] {
            assert!(Conversation::from_json(&wrong).is_err(), "{wrong}");
        }
    }
}
