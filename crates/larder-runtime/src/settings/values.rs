//! Values of settings, as typed.

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::str::FromStr;

use larder_core::parse_bytes;
use larder_engine::Speculation;

use crate::options::{CacheSize, THREADS_MAX};

/// What is wrong with a setting, as the end of a sentence that begins with its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SettingError(String);

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SettingError {}

impl From<String> for SettingError {
    fn from(text: String) -> Self {
        SettingError(text)
    }
}

impl From<&str> for SettingError {
    fn from(text: &str) -> Self {
        SettingError(text.into())
    }
}

pub type Result<T> = std::result::Result<T, SettingError>;

/// A value that says itself how it is written.
pub fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T> {
    text.parse().map_err(|e: T::Err| e.to_string().into())
}

/// One of some values by its name.
pub fn one_of<T: Copy>(text: &str, all: &[(&str, T)]) -> Result<T> {
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let found = all.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    let (last, others) = names.split_last().map_or(("", &[][..]), |(last, others)| (*last, others));
    found.ok_or_else(|| format!("must be {} or {last}", others.join(", ")).into())
}

/// True or false; nothing is true, as in `-o pin`.
pub fn truth(text: &str) -> Result<bool> {
    match text.to_ascii_lowercase().as_str() {
        "" | "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("must be true or false".into()),
    }
}

pub fn number(text: &str) -> Result<usize> {
    text.parse().map_err(|_| "must be a number".into())
}

/// A number, which is 0 if it is off.
pub fn off_or_number(text: &str) -> Result<usize> {
    if text == "off" { Ok(0) } else { number(text).map_err(|_| "must be off or a number".into()) }
}

pub fn at_least_one(text: &str) -> Result<usize> {
    number(text).and_then(|number| if number > 0 { Ok(number) } else { Err("must be at least 1".into()) })
}

pub fn threads(text: &str) -> Result<usize> {
    match at_least_one(text)? {
        n if n > THREADS_MAX => Err(format!("must be at most {THREADS_MAX}").into()),
        n => Ok(n),
    }
}

/// The most tokens of an image: 16 to 16,384, which is a square of 4096 pixels for the models that see.
pub fn image_tokens(text: &str) -> Result<usize> {
    let tokens = number(text)?;
    if (16..=16_384).contains(&tokens) { Ok(tokens) } else { Err("must be from 16 to 16384".into()) }
}

pub fn file(text: &str) -> Result<PathBuf> {
    if text.is_empty() { Err("must be the name of a file".into()) } else { Ok(text.into()) }
}

/// `16x`: experts per layer. `None` for what is written otherwise.
pub fn experts_per_layer(text: &str) -> Option<Result<usize>> {
    let digits = text.strip_suffix('x').filter(|digits| digits.bytes().all(|c| c.is_ascii_digit()))?;
    Some(at_least_one(digits))
}

pub fn cache(text: &str) -> Result<CacheSize> {
    match (text, experts_per_layer(text)) {
        ("fit", _) => Ok(CacheSize::Available),
        ("auto", _) => Ok(CacheSize::Auto),
        ("all", _) => Ok(CacheSize::All),
        (_, Some(experts)) => experts.map(CacheSize::ExpertsPerLayer),
        (size, None) => {
            let wrong = |why| format!("'{size}' {why}, of experts per layer such as 16x, or one of all, auto and fit");
            Ok(CacheSize::Bytes(parse_bytes(size).map_err(wrong)?))
        }
    }
}

/// VRAM in bytes, or in experts per layer.
pub fn vram(text: &str) -> Result<(Option<u64>, Option<usize>)> {
    match (text, experts_per_layer(text)) {
        ("fit", _) => Ok((None, None)),
        (_, Some(experts)) => experts.map(|experts| (None, Some(experts))),
        (size, None) => Ok((
            Some(parse_bytes(size).map_err(|why| format!("'{size}' {why}, of experts per layer such as 16x, or fit"))?),
            None,
        )),
    }
}

pub fn speculation(text: &str) -> Result<(Speculation, Option<PathBuf>)> {
    const WRONG: &str = "must be off, lookup, mtp, auto, draft=STORE or auto+draft=STORE";
    match (text.strip_prefix("draft="), text.strip_prefix("auto+draft=")) {
        (Some(""), _) | (_, Some("")) => Err(WRONG.into()),
        (Some(store), _) => Ok((Speculation::Draft, Some(store.into()))),
        (_, Some(store)) => Ok((Speculation::Auto, Some(store.into()))),
        _ => match text.parse() {
            Ok(Speculation::Draft) | Err(_) => Err(WRONG.into()),
            Ok(other) => Ok((other, None)),
        },
    }
}
