//! The tokenizer and chat cases of a folder of reference models, if the variable LARDER_REFERENCE names one.

use std::{env, fs, path::Path};

use serde_json::Value;

use crate::{ChatInput, ChatTemplate, Tokenizer, TokenizerConfig};

const FOLDER: &str = "LARDER_REFERENCE";

#[test]
fn tokenizers_and_chat_templates_match_the_reference() {
    let Some(folder) = env::var_os(FOLDER) else {
        println!("skipped: {FOLDER} does not name a folder of reference models");
        return;
    };
    let (mut models, mut cases) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let model = entry.unwrap().path();
        if model.join("reference.json").exists() {
            cases += check(&model);
            models += 1;
        }
    }
    println!("{cases} cases of {models} models");
    assert!(models > 0 && cases > models);
}

fn check(model: &Path) -> usize {
    let read = |name: &str| fs::read(model.join(name)).ok();
    let reference: Value = serde_json::from_slice(&read("reference.json").unwrap()).unwrap();
    let config = read("tokenizer_config.json").map(|bytes| TokenizerConfig::from_bytes(&bytes).unwrap());
    let config = config.unwrap_or_default();
    let tokenizer = Tokenizer::from_bytes(&read("tokenizer.json").unwrap(), &config).unwrap();
    let template = ChatTemplate::new(read("chat_template.jinja").as_deref(), &config).unwrap().unwrap();
    let texts = reference["tokenizer_tests"].as_array().unwrap();
    texts.iter().for_each(|case| check_text(model, &tokenizer, case));
    let chats = reference["chat_tests"].as_array().unwrap();
    chats.iter().for_each(|case| check_chat(model, &tokenizer, &template, case));
    texts.len() + chats.len()
}

fn check_text(model: &Path, tokenizer: &Tokenizer, case: &Value) {
    let text = case["text"].as_str().unwrap();
    let ids = ids(&case["ids"]);
    let plain = self::ids(&case["ids_no_special"]);
    assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{model:?} {text:?}");
    assert_eq!(tokenizer.encode(text, false).unwrap(), plain, "{model:?} {text:?}");
    assert_eq!(tokenizer.decode(&ids, true), case["decoded"], "{model:?} {text:?}");
    assert_eq!(tokenizer.decode(&plain, false), case["decoded"], "{model:?} {text:?}");
}

fn check_chat(model: &Path, tokenizer: &Tokenizer, template: &ChatTemplate, case: &Value) {
    let input = ChatInput {
        tools: case["tools"].as_array().map(Vec::as_slice),
        documents: case["documents"].as_array().map(Vec::as_slice),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        ..ChatInput::new(case["messages"].as_array().unwrap())
    };
    let rendered = template.render(&input);
    match case.get("error") {
        Some(error) => assert_eq!(rendered.unwrap_err().to_string(), *error, "{model:?}"),
        None => {
            let text = rendered.unwrap();
            assert_eq!(text, case["text"], "{model:?}");
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids(&case["ids"]), "{model:?}");
        }
    }
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}
