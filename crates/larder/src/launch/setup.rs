//! What a program needs to know of a server, and how it is told.

/// A server and its model.
pub struct LocalEndpoint {
    /// Its address, without a path.
    pub url: String,
    /// The model's name in the API.
    pub model: String,
    /// Tokens of its context.
    pub context: usize,
    /// The API key, or some text where the server asks for none.
    pub key: String,
}

impl LocalEndpoint {
    /// Where the routes of OpenAI's API begin.
    pub fn api_url(&self) -> String {
        format!("{}/v1", self.url)
    }
}

/// The environment and the arguments of a program.
#[derive(Default)]
pub struct Setup {
    /// Variables that are set.
    pub env: Vec<(&'static str, String)>,
    /// Variables that are removed.
    pub unset: Vec<&'static str>,
    /// Arguments before those of the user.
    pub args: Vec<String>,
}

/// A word as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        let all = ["a-b/c=1", "", "two words", "it's", "$(x)"].map(quoted);
        assert_eq!(all, ["a-b/c=1", "''", "'two words'", r"'it'\''s'", "'$(x)'"]);
    }
}
