//! What a person can ask of the chat itself.

/// A line that is not for the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChatCommand {
    /// Say what there is.
    Help,
    /// Forget the conversation.
    Reset,
    /// Show the system message, or have another.
    System(Option<String>),
    /// Answer the last message again.
    Regen,
    /// Write the conversation to a file.
    Save(String),
    /// Go on with the conversation of a file.
    Load(String),
    /// Say what was remembered, read and written.
    Stats,
    /// Show the settings, or change one.
    Set(Option<(String, String)>),
    /// Leave.
    Quit,
}

/// One line for each command.
pub const HELP: &str = "\
/help                this
/reset               forget the conversation
/system [TEXT]       show the system message, or have another
/regen               answer the last message again
/save FILE           write conversation and settings to FILE (JSON)
/load FILE           go on with those of FILE
/stats               what is remembered, and what was read and written
/set [NAME VALUE]    show the settings, or change one at once
/quit                leave, like Ctrl-D
A line that ends in \\ goes on in the next, and all lines between two lines of \"\"\" are one message.
Ctrl-C stops an answer. A message that begins with / needs a space before it.";

impl ChatCommand {
    /// The command of a line, or what is wrong with it; `None` if it is for the model.
    pub fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
        let (name, rest) = line.strip_prefix('/').map(|l| l.split_once(char::is_whitespace).unwrap_or((l, "")))?;
        let rest = rest.trim();
        let text = (!rest.is_empty()).then(|| rest.to_owned());
        let file = |make: fn(String) -> ChatCommand| {
            text.clone().map(make).ok_or_else(|| format!("/{name} needs the name of a file"))
        };
        let plain = |command: ChatCommand| match rest {
            "" => Ok(command),
            _ => Err(format!("/{name} takes nothing behind it")),
        };
        Some(match name {
            "help" | "?" => plain(ChatCommand::Help),
            "reset" => plain(ChatCommand::Reset),
            "system" => Ok(ChatCommand::System(text)),
            "regen" => plain(ChatCommand::Regen),
            "save" => file(ChatCommand::Save),
            "load" => file(ChatCommand::Load),
            "stats" => plain(ChatCommand::Stats),
            "set" => setting(rest).map(ChatCommand::Set),
            "quit" | "exit" => plain(ChatCommand::Quit),
            _ => {
                Err(format!("there is no command /{name}; /help lists them, and a space before the / sends it as text"))
            }
        })
    }
}

fn setting(rest: &str) -> Result<Option<(String, String)>, String> {
    match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
        _ if rest.is_empty() => Ok(None),
        Some((name, value)) if !value.trim().is_empty() => Ok(Some((name.into(), value.trim().into()))),
        _ => Err(format!("/set {rest} lacks a value; /set shows what there is")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_for_the_model_are_left_alone() {
        assert_eq!(ChatCommand::parse("hi /help"), None);
        assert_eq!(ChatCommand::parse(" /help"), None);
        assert_eq!(ChatCommand::parse(""), None);
    }

    #[test]
    fn commands_take_what_they_need() {
        let parse = |line| ChatCommand::parse(line).unwrap();
        assert_eq!(parse("/system  Be brief. "), Ok(ChatCommand::System(Some("Be brief.".into()))));
        assert_eq!(parse("/system"), Ok(ChatCommand::System(None)));
        assert_eq!(parse("/save a b.json"), Ok(ChatCommand::Save("a b.json".into())));
        let set = |name: &str, value: &str| Ok(ChatCommand::Set(Some((name.into(), value.into()))));
        assert_eq!(parse("/set top-k 40"), set("top-k", "40"));
        assert_eq!(parse("/set routing prior:lambda=0.3"), set("routing", "prior:lambda=0.3"));
        assert_eq!(parse("/set"), Ok(ChatCommand::Set(None)));
        for wrong in ["/save", "/set top-k", "/help me", "/fly", "/"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
