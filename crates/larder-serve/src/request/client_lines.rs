//! Lines that clients put into the system text for their own servers, and that differ from one request to the next: a
//! prompt with one of them shares nothing behind it with those before.

use serde_json::Value;

use super::ChatRequest;

/// A line that is left out of system texts.
struct ClientLine {
    /// What it begins with, in a spelling that no person uses.
    beginning: &'static str,
    /// Its author and reader.
    why: &'static str,
}

const CLIENT_LINES: &[ClientLine] = &[
    ClientLine {
        beginning: "x-anthropic-billing-header:",
        why: "Claude Code's account of a request, for its own servers",
    },
    ClientLine { beginning: "cc_prev_req=", why: "Claude Code's number of the request before, for its own servers" },
];

impl ChatRequest {
    /// Leaves those lines out of the system texts, and notes it for the log. A message of nothing else goes too.
    pub fn leave_out_client_lines(&mut self) {
        let mut notes = Vec::new();
        self.messages.retain_mut(|message| {
            if message["role"] != "system" {
                return true;
            }
            let Some(text) = message["content"].as_str() else { return true };
            let Some(rest) = without_client_lines(text, &mut notes) else { return true };
            let remains = !rest.is_empty();
            message["content"] = Value::String(rest);
            remains
        });
        self.params.notes.extend(notes);
    }
}

/// The text without those lines; `None` if there are none.
fn without_client_lines(text: &str, notes: &mut Vec<String>) -> Option<String> {
    let rule = |line: &str| CLIENT_LINES.iter().find(|rule| line.starts_with(rule.beginning));
    let (out, rest): (Vec<_>, Vec<_>) = text.split('\n').partition(|line| rule(line).is_some());
    for ClientLine { beginning, why } in out.iter().copied().filter_map(rule) {
        notes.push(format!("a line '{beginning}' is left out of the system text, so that the prompt is cached: {why}"));
    }
    (!out.is_empty()).then(|| rest.join("\n"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn left(messages: Value) -> (Vec<Value>, usize) {
        let mut chat = ChatRequest { messages: messages.as_array().unwrap().clone(), ..ChatRequest::default() };
        chat.leave_out_client_lines();
        (chat.messages, chat.params.notes.len())
    }

    #[test]
    fn lines_of_a_client_leave_system_texts_alone() {
        let line = "x-anthropic-billing-header: cc_version=2.1.197.8e1; cc_entrypoint=cli;";
        let before = json!([
            {"role": "system", "content": format!("{line}\nYou are an agent.\n\n{line}\ncc_prev_req=7\nBe brief.")},
            {"role": "user", "content": format!("{line}\nWhat is this?")},
            {"role": "system", "content": line},
        ]);
        let (after, notes) = left(before.clone());
        let want = json!([{"role": "system", "content": "You are an agent.\n\nBe brief."}, before[1]]);
        assert_eq!((json!(after), notes), (want, 4));
    }

    #[test]
    fn other_texts_are_as_they_were() {
        let same = json!([
            {"role": "system", "content": "Say x-anthropic-billing-header: yes.\n X-Anthropic-Billing-Header: no\n\n"},
            {"role": "system", "content": ""},
        ]);
        assert_eq!(left(same.clone()), (same.as_array().unwrap().clone(), 0));
    }
}
