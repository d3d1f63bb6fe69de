//! Structured output of `larder run`.

use serde_json::{Value, json};

use crate::support::{larder, larder_ok, larder_refuses};

#[test]
fn the_text_matches_a_schema_an_expression_or_a_grammar() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let run = |format: [&str; 2], seed: &str| {
        let base = ["run", "-p", "The old man is", "-n", "120", "--temperature", "1.2", "--seed", seed, "--json"];
        let report: Value = serde_json::from_str(&larder_ok(&[&base[..], &format].concat())).unwrap();
        report["text"].as_str().unwrap().to_owned()
    };
    let schema = json!({"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
                        "required": ["age"], "additionalProperties": false});
    let schema = file("schema.json", &schema.to_string());
    let grammar = file("grammar.lark", "start: \"<\" start \">\" | \"old\" | \"young\"");
    for seed in ["1", "2", "3"] {
        let object: Value = serde_json::from_str(&run(["--format", &format!("json:{schema}")], seed)).unwrap();
        assert!((1..100).contains(&object["age"].as_u64().unwrap()), "{object}");
        let year = run(["--format", "regex:(19|20)[0-9]{2}"], seed);
        assert!(year.len() == 4 && ["19", "20"].contains(&&year[..2]) && year.parse::<u32>().is_ok(), "{year}");
        let word = run(["--format", &format!("grammar:{grammar}")], seed);
        assert!(["old", "young"].contains(&word.trim_matches(['<', '>'])), "{word}");
    }
}

#[test]
fn what_cannot_be_a_format_is_refused_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("schema.json");
    let path = path.to_str().unwrap();
    let refused = |flags: &[&str]| larder_refuses(&[&["run", "-p", "x", "-n", "2"], flags].concat());
    assert!(refused(&["--format", &format!("json:{path}")]).contains("not found"));
    std::fs::write(path, "{").unwrap();
    assert!(refused(&["--format", &format!("json:{path}")]).contains("is not JSON"));
    std::fs::write(path, "{\"type\": \"giraffe\"}").unwrap();
    let message = refused(&["--format", &format!("json:{path}")]);
    assert!(message.contains("format cannot be used") && message.contains("giraffe"), "{message}");
    assert!(!refused(&["--format", "regex:(a"]).is_empty());
    for other in [&["--format", &format!("grammar:{path}")][..], &["--ignore-eos"]] {
        let output = larder(&[&["run", "-p", "x", "--format", "regex:a"], other].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && message.contains(other[0]), "{message}");
    }
}
