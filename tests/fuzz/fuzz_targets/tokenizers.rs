//! Files `tokenizer.json`, any bytes: refused in one sentence, or texts are tokenised and written within bounds.

#![no_main]

use larder_text::{Tokenizer, TokenizerConfig};
use larder_fuzz::{in_time, mutate_json};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

const CONTEXT: usize = 512;

fuzz_mutator!(|data: &mut [u8], size: usize, _max: usize, seed: u32| { mutate_json(data, size, seed) });

fuzz_target!(|bytes: &[u8]| {
    let config = TokenizerConfig::from_bytes(b"{}").unwrap();
    let tokenizer = match in_time(|| Tokenizer::from_bytes(bytes, &config)) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert!(!error.to_string().contains('\n'), "{error}"),
    };
    for text in ["", "Hello, world! 12345 \t\n<s> é漢字🎂", &"a".repeat(3000), &" \n".repeat(1000), &"ab1 ".repeat(700)] {
        let ids = in_time(|| tokenizer.encode_for(CONTEXT, text, true)).unwrap_or_default();
        in_time(|| tokenizer.decode(&ids[..ids.len().min(CONTEXT)], false));
    }
    let ids: Vec<u32> = (0..CONTEXT as u32).collect();
    in_time(|| tokenizer.decode(&ids, true));
});
