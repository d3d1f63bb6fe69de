//! Tests of tokenizers built from metadata.

use serde_json::{Value, json};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

use super::builder::GgufBuilder;
use crate::{
    error::{Result, StoreErrorKind},
    source::gguf::tokenizer::{generation_config, tokenizer, tokenizer_config},
};

const CONTROL: i32 = 3;

fn pieces() -> GgufBuilder {
    GgufBuilder::new()
        .text("tokenizer.ggml.model", "llama")
        .texts(
            "tokenizer.ggml.tokens",
            &["<unk>", "<s>", "</s>", "<0x0A>", "\u{2581}", "a", "b", "ab", "\u{2581}ab", "abb"],
        )
        .floats("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -1.0, -3.0, -2.0])
        .ints("tokenizer.ggml.token_type", &[2, CONTROL, CONTROL, 6, 1, 1, 1, 1, 1, 1])
        .uint("tokenizer.ggml.bos_token_id", 1)
        .uint("tokenizer.ggml.eos_token_id", 2)
        .uint("tokenizer.ggml.unknown_token_id", 0)
}

fn bytes(pre: &str) -> GgufBuilder {
    GgufBuilder::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<end>", "<x>"])
        .texts("tokenizer.ggml.merges", &["a b"])
        .ints("tokenizer.ggml.token_type", &[1, 1, 1, CONTROL, 4])
        .uint("tokenizer.ggml.eos_token_id", 3)
}

fn json(file: &GgufBuilder) -> Value {
    tokenizer(&file.metadata()).unwrap()
}

fn error_of(result: Result<Value>) -> String {
    result.unwrap_err().message
}

#[test]
fn merges_are_ordered_by_score() {
    let json = json(&pieces());
    assert_eq!(json["model"]["merges"], json!([["a", "b"], ["ab", "b"], ["\u{2581}", "ab"]]));
    assert_eq!(json["model"]["unk_token"], "<unk>");
    assert_eq!(json["normalizer"]["normalizers"][0], json!({ "type": "Prepend", "prepend": "\u{2581}" }));
    let added: Vec<&Value> = json["added_tokens"].as_array().unwrap().iter().map(|t| &t["content"]).collect();
    assert_eq!(added, ["<unk>", "<s>", "</s>"]);
    assert_eq!(json["post_processor"]["single"][0]["SpecialToken"]["id"], "<s>");
    assert_eq!(json["post_processor"]["special_tokens"]["<s>"]["ids"], json!([1]));
}

#[test]
fn gemma_4_merges_as_the_file_says_and_ends_at_turns() {
    let file = GgufBuilder::new()
        .text("tokenizer.ggml.model", "gemma4")
        .texts("tokenizer.ggml.tokens", &["<eos>", "<bos>", "<unk>", "<turn|>", "a", "b", "ab", "\u{2581}"])
        .texts("tokenizer.ggml.merges", &["a b"])
        .ints("tokenizer.ggml.token_type", &[CONTROL, CONTROL, CONTROL, 1, 1, 1, 1, 1])
        .uint("tokenizer.ggml.eos_token_id", 0)
        .uint("tokenizer.ggml.bos_token_id", 1)
        .uint("tokenizer.ggml.unknown_token_id", 2);
    let json = json(&file);
    assert_eq!(json["model"]["merges"], json!([["a", "b"]]));
    let spaces = json!([{ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" }]);
    assert_eq!(json["normalizer"]["normalizers"], spaces);
    assert_eq!(json["post_processor"]["special_tokens"]["<bos>"]["ids"], json!([1]));
    let added: Vec<_> = json["added_tokens"].as_array().unwrap().iter().map(|t| (&t["id"], &t["special"])).collect();
    assert_eq!(added[3], (&json!(3), &json!(true)));
    assert_eq!(generation_config(&file.metadata()).unwrap()["eos_token_id"], json!([0, 3]));
}

#[test]
fn the_leading_space_can_be_disabled() {
    let json = json(&pieces().entry("tokenizer.ggml.add_space_prefix", 7, &[0]));
    assert_eq!(json["normalizer"]["normalizers"].as_array().unwrap().len(), 1);
    assert_eq!(json["decoder"]["decoders"].as_array().unwrap().len(), 3);
}

#[test]
fn byte_level_tokens_keep_ids_and_special_flags() {
    let json = json(&bytes("qwen2"));
    assert_eq!(json["model"]["vocab"], json!({ "a": 0, "b": 1, "ab": 2, "<end>": 3, "<x>": 4 }));
    assert_eq!(json["model"]["merges"], json!([["a", "b"]]));
    assert_eq!(json["normalizer"]["type"], "NFC");
    let special: Vec<_> = json["added_tokens"].as_array().unwrap().iter().map(|t| (&t["id"], &t["special"])).collect();
    assert_eq!(special, [(&json!(3), &json!(true)), (&json!(4), &json!(false))]);
    assert_eq!(json["post_processor"]["type"], "ByteLevel");
}

#[test]
fn bos_is_added_by_metadata_or_by_the_default_of_the_pre_tokenizer() {
    let marked = |file: GgufBuilder| tokenizer_config(&file.metadata()).unwrap()["add_bos_token"].clone();
    let with = |pre| bytes(pre).uint("tokenizer.ggml.bos_token_id", 4);
    assert_eq!(marked(with("qwen2")), false);
    assert_eq!(marked(with("llama-bpe")), true);
    assert_eq!(marked(with("llama-bpe").entry("tokenizer.ggml.add_bos_token", 7, &[0])), false);
    assert_eq!(marked(pieces()), true);
}

#[test]
fn turns_of_kimi_end_where_its_files_do_not_say() {
    let file = GgufBuilder::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "kimi-k2")
        .texts("tokenizer.ggml.tokens", &["a", "[EOS]", "[EOT]", "<|im_end|>"])
        .texts("tokenizer.ggml.merges", &[])
        .ints("tokenizer.ggml.token_type", &[1, CONTROL, CONTROL, CONTROL])
        .uint("tokenizer.ggml.eos_token_id", 1);
    assert_eq!(generation_config(&file.metadata()).unwrap()["eos_token_id"], json!([1, 3, 2]));
    assert!(json(&file)["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"].as_str().unwrap().contains("Han"));
}

#[test]
fn pre_tokenizers_split_as_their_names_say() {
    // As characters for bytes: Ġ is a space, Ċ a line feed.
    let words = |pre: &str, text: &str| {
        let steps = json(&bytes(pre))["pre_tokenizer"].clone();
        let steps: PreTokenizerWrapper = serde_json::from_value(steps).unwrap();
        let mut split = PreTokenizedString::from(text);
        steps.pre_tokenize(&mut split).unwrap();
        let words = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(word, ..)| word.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(words("afmoe", "a 1234567, 12"), ["a", "Ġ", "1", "234", "567", ",", "Ġ", "12"]);
    assert_eq!(words("afmoe", "ab가나c").len(), 3);
    assert_eq!(words("laguna", "a\n\nb12"), ["a", "ĊĊ", "b", "1", "2"]);
    assert_eq!(words("mellum2", "a12 34"), ["a", "1", "2", "Ġ", "3", "4"]);
    assert_eq!(words("bailingmoe2", "it's\n\n12!\n"), ["it", "'s", "ĊĊ", "1", "2", "!Ċ"]);
    assert_eq!(words("tekken", "aBc12D"), ["a", "Bc", "1", "2", "D"]);
    assert_eq!(words("exaone-moe", "a b c1"), ["aĠbĠc", "1"]);
    assert_eq!(words("kimi-k2", "中a1234")[1..], ["a", "123", "4"]);
}

#[test]
fn configs_contain_end_tokens_and_chat_template() {
    let file = bytes("olmo").text("tokenizer.chat_template", "{{ x }}").uint("tokenizer.ggml.eot_token_id", 4);
    let file = file.float("general.sampling.temp", 0.7);
    let config = tokenizer_config(&file.metadata()).unwrap();
    assert_eq!((&config["eos_token"], &config["chat_template"]), (&json!("<end>"), &json!("{{ x }}")));
    let generation = generation_config(&file.metadata()).unwrap();
    assert_eq!(generation, json!({ "eos_token_id": [3, 4], "temperature": 0.7 }));
}

#[test]
fn contradictory_vocabularies_are_refused() {
    let unknown = tokenizer(&bytes("martian").metadata()).unwrap_err();
    assert_eq!(unknown.kind, StoreErrorKind::Unsupported);
    assert!(unknown.message.contains("'martian' (tokenizer.ggml.pre)"), "{}", unknown.message);
    let other = GgufBuilder::new().text("tokenizer.ggml.model", "rwkv").texts("tokenizer.ggml.tokens", &["a"]);
    assert!(error_of(tokenizer(&other.metadata())).contains("tokenizer model 'rwkv'"));
    let twice = GgufBuilder::new().text("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", &["a", "a"]);
    assert!(error_of(tokenizer(&twice.metadata())).contains("\"a\" twice, with ids 0 and 1"));
    assert!(error_of(tokenizer(&pieces().uint("tokenizer.ggml.padding_token_id", 10).metadata())).contains("only 10"));
    let unknown_merge = GgufBuilder::new()
        .text("tokenizer.ggml.model", "gpt2")
        .texts("tokenizer.ggml.tokens", &["a"])
        .texts("tokenizer.ggml.merges", &["a c"]);
    assert!(error_of(tokenizer(&unknown_merge.metadata())).contains("the merge \"a c\""));
    let short = GgufBuilder::new()
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &["a", "b"])
        .floats("tokenizer.ggml.scores", &[0.0]);
    assert!(error_of(tokenizer(&short.metadata())).contains("2 tokens, but 1 scores"));
}
