//! Pre-tokenizers: how text is split into words before byte pairs are merged, by the name in GGUF
//! (`tokenizer.ggml.pre`).

use serde_json::{Value, json};

/// A pre-tokenizer of `tokenizer.ggml.pre`.
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    steps: &'static [SplitStep],
    /// Whether text is normalised to Unicode NFC first.
    pub nfc: bool,
    /// Whether a word that is a token is taken without merging.
    pub ignore_merges: bool,
    /// Whether a BOS token is added by default; the file can override it.
    pub adds_bos: bool,
}

enum SplitStep {
    /// Splits at each match; the text between matches forms words too.
    At(&'static str),
    /// Makes each digit a word.
    Digits,
    /// Splits into the words of GPT-2.
    Gpt2,
}

use SplitStep::{At, Digits, Gpt2};

const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], steps: &[Gpt2], nfc: false, ignore_merges: false, adds_bos: false };

const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer { names: &["gpt-2", "mpt", "jais", "trillion", "granite-docling"], ..PLAIN },
    PreTokenizer { names: &["olmo"], nfc: true, ..PLAIN },
    PreTokenizer {
        names: &["refact", "smollm", "starcoder", "command-r", "codeshell", "mellum2"],
        steps: &[Digits, Gpt2],
        ..PLAIN
    },
    PreTokenizer { names: &["qwen2"], steps: &[At(ONE_DIGIT)], nfc: true, ..PLAIN },
    PreTokenizer { names: &["qwen35"], steps: &[At(ONE_DIGIT_AND_MARKS)], nfc: true, ..PLAIN },
    PreTokenizer {
        // Ling's pattern is written differently, and matches the same.
        names: &["stablelm2", "hunyuan", "deepseek-r1-qwen", "solar-open", "bailingmoe", "bailingmoe2"],
        steps: &[At(ONE_DIGIT)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"],
        steps: &[At(THREE_DIGITS)],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"], steps: &[At(THREE_DIGITS)], ..PLAIN },
    PreTokenizer { names: &["laguna"], steps: &[At(r"[^\n]+|[\n]+"), At(ONE_DIGIT)], ..PLAIN },
    PreTokenizer { names: &["afmoe"], steps: &[At(THREE_FROM_THE_END), At(ASIAN), At(PUNCTUATED)], ..PLAIN },
    PreTokenizer { names: &["exaone-moe"], steps: &[At(SPACED_LETTERS)], ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], steps: &[At(CASED_BESIDE_HAN)], ..PLAIN },
    PreTokenizer { names: &["tekken"], steps: &[At(CASED_ONE_DIGIT)], ignore_merges: true, adds_bos: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o", "llama4", "minimax-m2"], steps: &[At(CASED)], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        steps: &[
            At("[\r\n]"),
            At(CASED_LETTERS),
            At(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            At(r"\s+$"),
            At("[一-龥ࠀ-一가-퟿]+"),
            Digits,
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        steps: &[At("[\r\n]"), At(r"\s?\p{L}+"), At(r"\s?\p{P}+"), At("[一-龥ࠀ-一가-퟿]+"), Digits],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3"],
        steps: &[At(r"\p{N}{1,3}"), At("[一-龥぀-ゟ゠-ヿ]+"), At(PUNCTUATED)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["default"],
        steps: &[At(r"[\p{P}\$\+<=>\^~\|]+"), At(GPT2), At(r"\p{N}+"), At("[0-9][0-9][0-9]")],
        ..PLAIN
    },
];

/// Letters with upper and lower case, without a few scripts that the original vocabulary lacked.
const CASED_LETTERS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}-\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}",
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}",
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}",
    r"\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}-\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}-\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+",
);

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

const ONE_DIGIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`ONE_DIGIT`] with combining marks as parts of words.
const ONE_DIGIT_AND_MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const THREE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const CASED: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Groups of three digits, counted from the end of a number; what is left over comes first.
const THREE_FROM_THE_END: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";

/// Scripts of Asia, most of them without spaces between words.
const ASIAN: &str = concat!(
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}",
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}",
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
);

/// [`CASED`] with one digit per word and without the endings of contractions.
const CASED_ONE_DIGIT: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`CASED`] where Chinese characters are words apart from letters.
const CASED_BESIDE_HAN: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`ONE_DIGIT`] where words of letters are joined by single spaces.
const SPACED_LETTERS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";

const PUNCTUATED: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

impl PreTokenizer {
    /// The pre-tokenizer of this name.
    pub fn named(name: &str) -> Option<&'static PreTokenizer> {
        PRE_TOKENIZERS.iter().find(|pre_tokenizer| pre_tokenizer.names.contains(&name))
    }

    /// The `pre_tokenizer` of a `tokenizer.json`.
    pub fn json(&self) -> Value {
        let byte_level = |words: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words });
        let mut steps: Vec<Value> = Vec::new();
        for step in self.steps {
            steps.push(match step {
                At(pattern) => {
                    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
                }
                Digits => json!({ "type": "Digits", "individual_digits": true }),
                Gpt2 => byte_level(true),
            });
        }
        if !matches!(self.steps, [.., Gpt2]) {
            steps.push(byte_level(false));
        }
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_pre_tokenizer_ends_in_bytes() {
        let mut names: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|c| c.names).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        for pre_tokenizer in PRE_TOKENIZERS {
            let json = pre_tokenizer.json();
            assert_eq!(json["pretokenizers"].as_array().unwrap().last().unwrap()["type"], "ByteLevel");
        }
        assert!(PreTokenizer::named("no-such").is_none());
    }
}
