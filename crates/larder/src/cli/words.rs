//! Words instead of flags: `larder run MODEL PROMPT` is `larder run -m MODEL -p PROMPT`.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, Error};
use larder_runtime::models::HubName;

use super::Cli;

const MODEL: &str = "model_word";
const PROMPT: &str = "prompt_word";

/// The first word of a command: a model.
pub fn model() -> [Arg; 1] {
    [Arg::new(MODEL).value_name("MODEL").help("Model, as -m").help_heading(None)]
}

/// The words of a command that takes several models.
#[cfg(feature = "serve")]
pub fn models() -> [Arg; 1] {
    model().map(|arg| arg.num_args(0..).help("Models, as -m"))
}

/// The words of a command that takes a model and a prompt.
pub fn model_and_prompt() -> [Arg; 2] {
    let [model] = model();
    let model = model.help("Model, as -m; a word that is neither a path nor like org/name is the prompt");
    [model, Arg::new(PROMPT).value_name("PROMPT").help("Prompt text, as -p").help_heading(None)]
}

/// The line with a flag for each word, behind the name of its command.
pub fn with_flags(mut line: Vec<OsString>, matches: &ArgMatches) -> Result<Vec<OsString>, Error> {
    let Some((command, inner)) = matches.subcommand() else { return Ok(line) };
    let of = |id| inner.try_get_many::<String>(id).ok().flatten().into_iter().flatten().cloned();
    let (mut named, mut prompt): (Vec<String>, Option<String>) = (of(MODEL).collect(), of(PROMPT).next());
    let typed =
        |id: &str| inner.ids().any(|known| known == id) && inner.value_source(id) == Some(ValueSource::CommandLine);
    if let ("run", [word], None) = (command, &named[..], &prompt)
        && !typed("prompt_text")
        && (typed("model") || !is_model(word))
    {
        prompt = named.pop();
    }
    for (word, id) in [(named.first(), "model"), (prompt.as_ref(), "prompt_text")] {
        if let Some(word) = word.filter(|_| typed(id)) {
            let what = format!("'{word}' is a word too many: a flag has said that already");
            return Err(Cli::command().error(ErrorKind::TooManyValues, what));
        }
    }
    if command == "run" && prompt.is_none() && !typed("prompt_text") {
        let model = named.first().map(|model| format!(" {model}")).unwrap_or_default();
        let what = format!(
            "there is no prompt: `larder run{model} \"Once upon a time\"` continues a text, `larder chat{model}` answers questions"
        );
        return Err(Cli::command().error(ErrorKind::MissingRequiredArgument, what));
    }
    let flags = named.iter().map(|model| format!("--model={model}"));
    let flags = flags.chain(prompt.iter().map(|prompt| format!("--prompt={prompt}")));
    let rest = line.split_off(2);
    line.extend(flags.map(OsString::from));
    line.extend(rest);
    Ok(line)
}

/// Whether a word that stands alone is a model and not a prompt.
fn is_model(word: &str) -> bool {
    Path::new(word).exists() || HubName::parse(word).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags_of(words: &[&str]) -> Result<String, Error> {
        let line: Vec<OsString> = [&["larder"], words].concat().into_iter().map(OsString::from).collect();
        let matches = Cli::command().try_get_matches_from(&line)?;
        let found = with_flags(line, &matches)?;
        let added = found.len() - words.len() - 1;
        Ok(found[2..2 + added].iter().map(|flag| flag.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn words_are_models_and_prompts() {
        for (words, flags) in [
            (&["run", "-m", "s", "-p", "x"][..], ""),
            (&["run", "a/b", "Once upon"], "--model=a/b --prompt=Once upon"),
            (&["run", "Once upon"], "--prompt=Once upon"),
            (&["run", "and"], "--prompt=and"),
            (&["run", "org/name", "-p", "x"], "--model=org/name"),
            (&["run", "anything", "-p", "x"], "--model=anything"),
            (&["run", "-m", "s", "org/name"], "--prompt=org/name"),
            (&["run", "-m", "s", "-"], "--prompt=-"),
            (&["chat", "anything"], "--model=anything"),
            (&["serve", "a", "b=c"], "--model=a --model=b=c"),
            (&["plan"], ""),
        ] {
            assert_eq!(flags_of(words).unwrap(), flags, "{words:?}");
        }
        for word in ["org/name", "."] {
            let refused = flags_of(&["run", word]).unwrap_err().to_string();
            assert!(refused.contains(&format!("no prompt: `larder run {word} \"Once")), "{refused}");
        }
        for wrong in [
            &["run", "-m", "s", "a", "b"][..],
            &["run", "-p", "x", "a", "b"],
            &["run", "-m", "s", "-p", "x", "a"],
            &["chat", "-m", "s", "a"],
        ] {
            assert!(flags_of(wrong).unwrap_err().to_string().contains("a word too many"), "{wrong:?}");
        }
    }
}
