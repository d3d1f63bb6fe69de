//! The slash commands of the chat.

use crate::print;

/// A slash command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChatCommand {
    /// List the commands.
    Help,
    /// Clear the conversation.
    Reset,
    /// Show the system message, or set it.
    System(Option<String>),
    /// Put the picture in a file before the next message.
    Image(String),
    /// Generate the last answer again.
    Regen,
    /// Save the session to its own file.
    SaveSession,
    /// Save the conversation to a file.
    Save {
        /// Path of the file.
        path: String,
        /// Whether a file that exists is replaced without a question.
        replace: bool,
    },
    /// Load the conversation of a file.
    Load(String),
    /// Show statistics.
    Stats,
    /// Show what λ costs, or set it.
    Lambda(Option<String>),
    /// Show the settings, or change one.
    Set(Option<(String, String)>),
    /// End the chat.
    Quit,
}

/// What a command takes, which decides how Tab completes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgumentKind {
    /// Nothing.
    None,
    /// Any text.
    Text,
    /// The path of a file.
    File,
    /// A setting and its value.
    Setting,
}

/// A command with its names and its help.
pub struct CommandRow {
    /// Its names, without the slash.
    pub names: &'static [&'static str],
    /// What it takes.
    pub argument: ArgumentKind,
    /// The argument as the help shows it.
    form: &'static str,
    help: &'static str,
    /// Makes the command of its argument; an error goes on from the command's name.
    make: fn(&str) -> Result<ChatCommand, String>,
}

/// All commands, in the order of the help.
pub const COMMANDS: &[CommandRow] = &[
    CommandRow {
        names: &["help", "?"],
        argument: ArgumentKind::None,
        form: "",
        help: "show this help",
        make: |rest| alone(rest, ChatCommand::Help),
    },
    CommandRow {
        names: &["clear", "reset"],
        argument: ArgumentKind::None,
        form: "",
        help: "clear the conversation, but not the system message",
        make: |rest| alone(rest, ChatCommand::Reset),
    },
    CommandRow {
        names: &["system"],
        argument: ArgumentKind::Text,
        form: "[TEXT]",
        help: "show or set the system message",
        make: |rest| Ok(ChatCommand::System((!rest.is_empty()).then(|| rest.to_owned()))),
    },
    CommandRow {
        names: &["image"],
        argument: ArgumentKind::File,
        form: "FILE",
        help: "show the picture in FILE before the next message",
        make: |rest| file(rest, ChatCommand::Image),
    },
    CommandRow {
        names: &["regen"],
        argument: ArgumentKind::None,
        form: "",
        help: "generate the last answer again",
        make: |rest| alone(rest, ChatCommand::Regen),
    },
    CommandRow {
        names: &["save"],
        argument: ArgumentKind::File,
        form: "[FILE]",
        help: "save conversation and settings to FILE (JSON); without FILE, the chat to that of --session",
        make: |rest| match rest {
            "" => Ok(ChatCommand::SaveSession),
            path => Ok(ChatCommand::Save { path: path.into(), replace: false }),
        },
    },
    CommandRow {
        names: &["save!"],
        argument: ArgumentKind::File,
        form: "FILE",
        help: "the same, and replace FILE without a question",
        make: |rest| file(rest, |path| ChatCommand::Save { path, replace: true }),
    },
    CommandRow {
        names: &["load"],
        argument: ArgumentKind::File,
        form: "FILE",
        help: "load conversation and settings from FILE",
        make: |rest| file(rest, ChatCommand::Load),
    },
    CommandRow {
        names: &["stats"],
        argument: ArgumentKind::None,
        form: "",
        help: "show token counts, speed, memory, cache hits and the cost of routing",
        make: |rest| alone(rest, ChatCommand::Stats),
    },
    CommandRow {
        names: &["lambda"],
        argument: ArgumentKind::Text,
        form: "[L]",
        help: "show what the cache bias λ costs, or set it from the next answer on",
        make: |rest| Ok(ChatCommand::Lambda((!rest.is_empty()).then(|| rest.to_owned()))),
    },
    CommandRow {
        names: &["set"],
        argument: ArgumentKind::Setting,
        form: "[NAME VALUE]",
        help: "show the settings, or change one from the next answer on",
        make: |rest| setting(rest).map(ChatCommand::Set),
    },
    CommandRow {
        names: &["quit", "exit"],
        argument: ArgumentKind::None,
        form: "",
        help: "end the chat",
        make: |rest| alone(rest, ChatCommand::Quit),
    },
];

/// Keys and marks with what they do.
const KEYS: &[[&str; 2]] = &[
    ["Tab", "complete a command, a setting, its value or a file name"],
    ["Up, Down", "earlier input"],
    ["Ctrl-C", "stop an answer; a second time, end the program"],
    ["Ctrl-D", "end the chat"],
    ["\\", "at the end of a line: the message continues on the next"],
    ["\"\"\"", "on a line of its own: begins and ends a message of several lines"],
    ["space", "before a message that begins with /"],
];

/// The text of `/help`.
pub fn help() -> String {
    let slashed = |row: &CommandRow| row.names.iter().map(|name| format!("/{name}")).collect::<Vec<_>>().join(", ");
    let commands = COMMANDS.iter().map(|row| [format!("{} {}", slashed(row), row.form).trim().into(), row.help.into()]);
    let keys = KEYS.iter().map(|row| row.map(str::to_owned));
    let rows: Vec<Vec<String>> = commands.chain(keys).map(Vec::from).collect();
    print::columns(&rows).trim_end().to_owned()
}

impl CommandRow {
    /// The command with this name.
    pub fn find(name: &str) -> Option<&'static CommandRow> {
        COMMANDS.iter().find(|row| row.names.contains(&name))
    }
}

impl ChatCommand {
    /// Parses a line: a command, an error, or `None` if the line is a message for the model.
    pub fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
        let (name, rest) = line.strip_prefix('/').map(|l| l.split_once(char::is_whitespace).unwrap_or((l, "")))?;
        Some(match CommandRow::find(name) {
            Some(row) => (row.make)(rest.trim()).map_err(|what| format!("/{name} {what}")),
            None => Err(format!(
                "there is no command /{name}; /help lists the commands, and a space before the / sends it as a message"
            )),
        })
    }
}

fn alone(rest: &str, command: ChatCommand) -> Result<ChatCommand, String> {
    if rest.is_empty() { Ok(command) } else { Err("takes no argument".into()) }
}

fn file(rest: &str, make: impl Fn(String) -> ChatCommand) -> Result<ChatCommand, String> {
    if rest.is_empty() { Err("needs a file name".into()) } else { Ok(make(rest.into())) }
}

/// Splits the argument of `/set` into a name and a value, which may be empty.
pub fn split_setting(rest: &str) -> Option<(&str, &str)> {
    rest.split_once(|c: char| c.is_whitespace() || c == '=')
}

fn setting(rest: &str) -> Result<Option<(String, String)>, String> {
    match split_setting(rest) {
        _ if rest.is_empty() => Ok(None),
        Some((name, value)) if !value.trim().is_empty() => Ok(Some((name.into(), value.trim().into()))),
        _ => Err(format!("{rest} needs a value; /set alone shows all settings")),
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
        let save = |path: &str, replace| Ok(ChatCommand::Save { path: path.into(), replace });
        assert_eq!(parse("/save a b.json"), save("a b.json", false));
        assert_eq!(parse("/save! a b.json"), save("a b.json", true));
        assert_eq!(parse("/save"), Ok(ChatCommand::SaveSession));
        assert_eq!(parse("/image a b.png"), Ok(ChatCommand::Image("a b.png".into())));
        assert_eq!(parse("/load a"), Ok(ChatCommand::Load("a".into())));
        for (one, other) in [("/clear", "/reset"), ("/exit", "/quit"), ("/?", "/help")] {
            assert_eq!(parse(one).unwrap(), parse(other).unwrap());
        }
        let set = |name: &str, value: &str| Ok(ChatCommand::Set(Some((name.into(), value.into()))));
        assert_eq!(parse("/set top-k 40"), set("top-k", "40"));
        assert_eq!(parse("/set routing prior:lambda=0.3"), set("routing", "prior:lambda=0.3"));
        assert_eq!(parse("/set"), Ok(ChatCommand::Set(None)));
        for wrong in ["/load", "/save!", "/set top-k", "/help me", "/fly", "/"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_help_lists_every_command_in_columns() {
        let help = help();
        let lines: Vec<&str> = help.lines().collect();
        assert_eq!(lines.len(), COMMANDS.len() + KEYS.len());
        let at = lines[0].find("show this help").unwrap();
        for (row, line) in COMMANDS.iter().zip(&lines) {
            assert_eq!(line.find(row.help), Some(at), "{line}");
            assert!(row.names.iter().all(|name| line.contains(&format!("/{name}"))), "{line}");
        }
    }
}
