//! Grammars and schemas of strangers, any text: refused in one sentence, or a text is drawn from them, in time.

#![no_main]

use std::sync::OnceLock;

use larder_text::{Grammar, GrammarCompiler, GrammarError, TextFormat, Tokenizer, TokenizerConfig};
use larder_fuzz::in_time;
use libfuzzer_sys::fuzz_target;

/// Logits of the model whose tokenizer is used, and its end of text.
const ROWS: usize = 288;
const EOS: u32 = 285;
/// Tokens drawn from a grammar.
const TOKENS: usize = 48;

fn compiler() -> &'static GrammarCompiler {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let config = TokenizerConfig::from_bytes(b"{}").unwrap();
        let tokenizer = Tokenizer::from_bytes(include_bytes!("../../golden/olmoe/tokenizer.json"), &config).unwrap();
        GrammarCompiler::new(&tokenizer, ROWS, &[EOS]).unwrap()
    })
}

fuzz_target!(|bytes: &[u8]| {
    let [kind, text @ ..] = bytes else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let format = match kind % 4 {
        0 => match serde_json::from_str(text) {
            Ok(schema) => TextFormat::JsonSchema(schema),
            Err(_) => return,
        },
        1 => TextFormat::Regex(text.to_owned()),
        2 => TextFormat::Lark(text.to_owned()),
        _ => TextFormat::Gbnf(text.to_owned()),
    };
    let compiler = compiler();
    if let Err(error) = in_time(|| compiler.compile(&format).and_then(drawn)) {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains('\n'), "{text:?}");
    }
});

/// Draws tokens, those that are chosen differ from place to place.
fn drawn(mut grammar: Grammar) -> Result<(), GrammarError> {
    for i in 0..TOKENS {
        let mut logits = vec![0.0; ROWS];
        let token = match grammar.mask(&mut logits)? {
            Some(only) => only,
            None => {
                let allowed: Vec<usize> = (0..ROWS).filter(|id| logits[*id] == 0.0).collect();
                assert!(!allowed.is_empty(), "no token can follow");
                allowed[i * 7 % allowed.len()] as u32
            }
        };
        if token == EOS || grammar.is_complete() {
            return Ok(());
        }
        grammar.accept(token)?;
    }
    Ok(())
}
