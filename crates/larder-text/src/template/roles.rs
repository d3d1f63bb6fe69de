//! What a template prints of turns that its model's chats did not have: instructions in the middle, several turns of a
//! person in a row, or any instructions at all.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::{ChatInput, ChatTemplate};

/// The turns that a template prints where they stand. It may refuse, leave out or move the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TemplateRoles {
    /// Instructions before all other turns.
    first_system: bool,
    /// Instructions after other turns.
    late_system: bool,
    /// A person's turn after another one.
    repeated_user: bool,
}

impl ChatTemplate {
    /// Whether the template shows an image, as `mark`, that is a part of what this role says, between the texts before
    /// and behind it. A template that does not know images may refuse such a content, or print the list itself.
    pub fn shows_images(&self, role: &str, mark: &str) -> bool {
        let roles = self.roles.get_or_init(|| TemplateRoles::of(self));
        if *roles != (TemplateRoles { first_system: true, late_system: true, repeated_user: true }) {
            return false;
        }
        let text = |text: &str| json!({"type": "text", "text": text});
        let shown = json!([text("probe0text"), {"type": "image"}, text("probe1text")]);
        let function = json!({"name": "probe", "arguments": {}});
        let call = json!({"id": "probe0000", "type": "function", "function": function});
        let before = match role {
            "tool" => vec![
                json!({"role": "user", "content": "probe"}),
                json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            ],
            "assistant" => vec![json!({"role": "user", "content": "probe"})],
            _ => vec![],
        };
        let message = json!({"role": role, "content": shown, "tool_call_id": "probe0000", "name": "probe"});
        let messages: Vec<Value> = before.into_iter().chain([message]).collect();
        let printed = self.render(&ChatInput::new(&messages)).unwrap_or_default();
        let places = ["probe0text", mark, "probe1text"].map(|text| printed.find(text));
        let is_plain = !printed.contains("'type'") && !printed.contains("\"type\"");
        places.iter().all(Option::is_some) && places.is_sorted() && printed.matches(mark).count() == 1 && is_plain
    }

    /// The messages of a chat as the template prints each where it stands: instructions that it does not know there are
    /// a person's turn, and turns that it wants joined are one.
    pub fn adapted<'a>(&self, messages: &'a [Value]) -> Cow<'a, [Value]> {
        self.roles.get_or_init(|| TemplateRoles::of(self)).adapted(messages)
    }
}

impl TemplateRoles {
    /// Renders small chats and looks for their texts.
    fn of(template: &ChatTemplate) -> Self {
        let keeps = |roles: &[&str]| {
            let text = |i: usize| format!("probe{i}text");
            let messages: Vec<Value> =
                roles.iter().enumerate().map(|(i, role)| json!({"role": role, "content": text(i)})).collect();
            let printed = template.render(&ChatInput::new(&messages)).unwrap_or_default();
            let places: Vec<Option<usize>> = (0..roles.len()).map(|i| printed.find(&text(i))).collect();
            places.iter().all(Option::is_some) && places.is_sorted()
        };
        let first_system = keeps(&["system", "user"]);
        let late: &[&str] = if first_system { &["system"] } else { &[] };
        TemplateRoles {
            first_system,
            late_system: keeps(&[late, &["user", "assistant", "system", "user"]].concat()),
            repeated_user: keeps(&["user", "user"]),
        }
    }

    fn adapted<'a>(&self, messages: &'a [Value]) -> Cow<'a, [Value]> {
        if *self == (TemplateRoles { first_system: true, late_system: true, repeated_user: true }) {
            return Cow::Borrowed(messages);
        }
        let mut all: Vec<Value> = Vec::new();
        for message in messages {
            let before = all.last().map(|last| last["role"].clone());
            let is_first = before.as_ref().is_none_or(|role| role == "system");
            let role = match message["role"].as_str() {
                Some("system") if is_first && !self.first_system => "user",
                Some("system") if !is_first && !self.late_system => "user",
                other => other.unwrap_or_default(),
            };
            let is_joined = match role {
                "system" => !self.late_system,
                "user" => !self.repeated_user,
                _ => false,
            };
            match all.last_mut().filter(|_| is_joined && before.is_some_and(|before| before == role)) {
                Some(last) => join(last, message),
                None => all.push(with_role(message, role)),
            }
        }
        Cow::Owned(all)
    }
}

fn with_role(message: &Value, role: &str) -> Value {
    let mut message = message.clone();
    message["role"] = role.into();
    message
}

fn join(last: &mut Value, next: &Value) {
    let text = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    last["content"] = format!("{}\n\n{}", text(last), text(next)).into();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::TokenizerConfig;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(Some(source.as_bytes()), &TokenizerConfig::default()).unwrap().unwrap()
    }

    fn chat(turns: &[(&str, &str)]) -> Vec<Value> {
        turns.iter().map(|(role, text)| json!({"role": role, "content": text})).collect()
    }

    const TURNS: [(&str, &str); 6] =
        [("system", "A"), ("system", "B"), ("user", "C"), ("system", "D"), ("assistant", "E"), ("user", "F")];

    #[test]
    fn a_template_that_prints_all_turns_gets_them_as_they_are() {
        let plain = template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}");
        assert!(matches!(plain.adapted(&chat(&TURNS)), Cow::Borrowed(_)));
    }

    #[test]
    fn instructions_that_a_template_refuses_moves_or_drops_stay_where_they_are() {
        let refusing = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
            {{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let moving = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}\
            {% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
        let dropping = "{% for m in messages %}{% if loop.first or m.role != 'system' %}<{{ m.role }}>{{ m.content }}\
            {% endif %}{% endfor %}";
        let want = [("system", "A\n\nB"), ("user", "C"), ("user", "D"), ("assistant", "E"), ("user", "F")];
        for source in [refusing, moving, dropping] {
            assert_eq!(*template(source).adapted(&chat(&TURNS)), chat(&want), "{source}");
        }
    }

    #[test]
    fn images_are_parts_for_templates_that_show_them() {
        let (open, close) = ("{% for m in messages %}<{{ m.role }}>", "{% endfor %}");
        let parts = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
            {% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}";
        let of_users = format!("{{% if m.role == 'user' %}}{parts}{{% else %}}{{{{ m.content }}}}{{% endif %}}");
        for (source, roles) in [(parts, [true, true]), (&of_users, [true, false]), ("{{ m.content }}", [false, false])]
        {
            let own = template(&format!("{open}{source}{close}"));
            assert_eq!(["user", "tool"].map(|role| own.shows_images(role, "[IMG]")), roles, "{source}");
        }
    }

    #[test]
    fn turns_alternate_where_a_template_wants_that() {
        let alternating = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
            {{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let want = [("user", "A\n\nB\n\nC\n\nD"), ("assistant", "E"), ("user", "F")];
        assert_eq!(*template(alternating).adapted(&chat(&TURNS)), chat(&want));
    }
}
