//! The slash commands of the chat.

/// A slash command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChatCommand {
    /// List the commands.
    Help,
    /// Clear the conversation.
    Reset,
    /// Show the system message, or set it.
    System(Option<String>),
    /// Generate the last answer again.
    Regen,
    /// Save the conversation to a file, or the session to its own.
    Save(Option<String>),
    /// Load the conversation of a file.
    Load(String),
    /// Show statistics.
    Stats,
    /// Show the settings, or change one.
    Set(Option<(String, String)>),
    /// End the chat.
    Quit,
}

/// The text of `/help`.
pub const HELP: &str = "\
/help                show this help
/reset               clear the conversation
/system [TEXT]       show or set the system message
/regen               generate the last answer again
/save FILE           save conversation and settings to FILE (JSON); without FILE, the chat to that of --session
/load FILE           load conversation and settings from FILE
/stats               show token counts, speed, memory and cache hits
/set [NAME VALUE]    show the settings, or change one
/quit                end the chat, like Ctrl-D
End a line with \\ to continue it, or put several lines between two lines of \"\"\".
Ctrl-C stops an answer. Put a space before a message that begins with /.";

impl ChatCommand {
    /// Parses a line: a command, an error, or `None` if the line is a message for the model.
    pub fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
        let (name, rest) = line.strip_prefix('/').map(|l| l.split_once(char::is_whitespace).unwrap_or((l, "")))?;
        let rest = rest.trim();
        let text = (!rest.is_empty()).then(|| rest.to_owned());
        let file = |make: fn(String) -> ChatCommand| {
            text.clone().map(make).ok_or_else(|| format!("/{name} needs a file name"))
        };
        let plain = |command: ChatCommand| match rest {
            "" => Ok(command),
            _ => Err(format!("/{name} takes no argument")),
        };
        Some(match name {
            "help" | "?" => plain(ChatCommand::Help),
            "reset" => plain(ChatCommand::Reset),
            "system" => Ok(ChatCommand::System(text)),
            "regen" => plain(ChatCommand::Regen),
            "save" => Ok(ChatCommand::Save(text)),
            "load" => file(ChatCommand::Load),
            "stats" => plain(ChatCommand::Stats),
            "set" => setting(rest).map(ChatCommand::Set),
            "quit" | "exit" => plain(ChatCommand::Quit),
            _ => Err(format!(
                "there is no command /{name}; /help lists the commands, and a space before the / sends it as a message"
            )),
        })
    }
}

fn setting(rest: &str) -> Result<Option<(String, String)>, String> {
    match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
        _ if rest.is_empty() => Ok(None),
        Some((name, value)) if !value.trim().is_empty() => Ok(Some((name.into(), value.trim().into()))),
        _ => Err(format!("/set {rest} needs a value; /set alone shows all settings")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_not_commands() {
        assert_eq!(ChatCommand::parse("hi /help"), None);
        assert_eq!(ChatCommand::parse(" /help"), None);
        assert_eq!(ChatCommand::parse(""), None);
    }

    #[test]
    fn commands_are_parsed_with_their_arguments() {
        let parse = |line| ChatCommand::parse(line).unwrap();
        assert_eq!(parse("/system  Be brief. "), Ok(ChatCommand::System(Some("Be brief.".into()))));
        assert_eq!(parse("/system"), Ok(ChatCommand::System(None)));
        assert_eq!(parse("/save a b.json"), Ok(ChatCommand::Save(Some("a b.json".into()))));
        assert_eq!(parse("/save"), Ok(ChatCommand::Save(None)));
        let set = |name: &str, value: &str| Ok(ChatCommand::Set(Some((name.into(), value.into()))));
        assert_eq!(parse("/set top-k 40"), set("top-k", "40"));
        assert_eq!(parse("/set routing prior:lambda=0.3"), set("routing", "prior:lambda=0.3"));
        assert_eq!(parse("/set"), Ok(ChatCommand::Set(None)));
        for wrong in ["/load", "/set top-k", "/help me", "/fly", "/"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
