//! The page of the server, as a browser is given it. What it does is checked in one by `scripts/check/test_page.py`.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::serve::api::{Response, Server};
use crate::support::{fixture, larder_ok};

fn page(flags: &[&str]) -> (Server, Response) {
    let server = Server::start(&fixture("golden/olmoe"), flags);
    let response = server.get("/");
    assert_eq!(response.status, 200, "{}", response.body);
    (server, response)
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    let value = response.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    value.unwrap_or_else(|| panic!("no {name}: {}", response.head))
}

/// The start tags of all elements that a policy has a say in.
fn loading_tags(html: &str) -> Vec<&str> {
    let names = ["script", "style", "link", "img", "iframe", "object", "embed", "base", "form"];
    let tags = html.split('<').skip(1).filter_map(|rest| rest.split_once('>').map(|(tag, _)| tag));
    tags.filter(|tag| names.contains(&tag.split_whitespace().next().unwrap_or_default())).collect()
}

fn nonce(response: &Response) -> &str {
    let policy = header(response, "content-security-policy");
    policy.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).expect("a nonce")
}

#[test]
fn the_policy_allows_its_own_parts_and_no_others() {
    let (server, response) = page(&[]);
    assert_eq!(header(&response, "content-type"), "text/html; charset=utf-8");
    let nonce = nonce(&response);
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    assert_eq!(header(&response, "content-security-policy"), policy);
    // The page without its scripts, which may say what they like.
    let own = format!("nonce=\"{nonce}\"");
    let mut markup = String::new();
    for (i, part) in response.body.split("<script").enumerate() {
        let (tag, rest) = if i == 0 { ("", part) } else { part.rsplit_once("</script>").unwrap() };
        assert!(i == 0 || tag.trim_start().starts_with(&own));
        markup.push_str(rest);
    }
    let tags = loading_tags(&markup);
    assert_eq!(tags.iter().filter(|tag| tag.starts_with("style")).collect::<Vec<_>>(), [&format!("style {own}")]);
    assert!(tags.iter().all(|tag| !tag.starts_with("script")));
    for forbidden in [" style=", " onclick=", " onload=", "srcdoc", "innerHTML", "insertAdjacentHTML", "eval("] {
        assert!(!response.body.contains(forbidden), "{forbidden}");
    }
    assert_eq!(response.body.matches(nonce).count(), 3);
    let other = server.get("/");
    assert!(!other.head.contains(nonce) && !other.body.contains(nonce), "a nonce was used again");
}

#[test]
fn it_points_nowhere_else() {
    let (_server, response) = page(&[]);
    let page = &response.body;
    assert!(!page.contains("://") && !page.contains("@import") && !page.contains("url("), "an address");
    for attribute in ["src=\"", "href=\"", "action=\""] {
        for (at, _) in page.match_indices(attribute) {
            let target = &page[at + attribute.len()..];
            assert!(target.starts_with('#') || target.starts_with("data:image/png;base64,"), "{}", &target[..40]);
        }
    }
}

#[test]
fn the_colours_are_chosen_before_anything_is_painted() {
    let (_server, response) = page(&[]);
    let at = |text: &str| response.body.find(text).unwrap_or_else(|| panic!("no {text}"));
    assert!(at("dataset.theme") < at("</head>") && at("larder-theme") < at("<style"));
    // A module would wait for the whole page.
    let head = &response.body[at("<script")..];
    assert!(!head[..head.find('>').unwrap()].contains("type="));
}

#[test]
fn it_is_there_without_the_key_that_all_else_needs() {
    let (server, response) = page(&["--api-key", "bread"]);
    assert!(!response.body.contains("bread") && response.body.contains("key-dialog"));
    for path in ["/engine", "/events", "/metrics", "/v1/models"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    assert_eq!(server.send("GET", "/", "Origin: https://evil.example\r\n", b"").status, 403);
    assert_eq!(server.send("POST", "/", "", b"").status, 405);
}

#[test]
fn formulas_become_mathml_for_those_with_the_key() {
    let (server, _) = page(&["--api-key", "bread"]);
    let body = |formulas: serde_json::Value| json!({"formulas": formulas}).to_string();
    let formulas = body(json!([{"latex": r"\frac12", "display": true}, {"latex": r"\unknown"}, {"latex": "x<y"}]));
    assert_eq!(server.send("POST", "/mathml", "", formulas.as_bytes()).status, 401);
    let key = "Authorization: Bearer bread\r\n";
    let response = server.send("POST", "/mathml", key, formulas.as_bytes());
    assert_eq!(response.status, 200, "{}", response.body);
    let all = response.json()["formulas"].clone();
    let mathml = |i: usize| all[i]["mathml"].as_str().unwrap_or_default();
    assert!(
        mathml(0).starts_with("<math display=\"block\"") && mathml(0).contains("<mfrac><mn>1</mn><mn>2</mn></mfrac>")
    );
    assert!(all[1]["error"].as_str().unwrap().contains("unknown") && mathml(2).contains("<mo>&lt;</mo>"), "{all}");
    let many = body(json!(vec![json!({"latex": "x"}); 65]));
    let refused = server.send("POST", "/mathml", key, many.as_bytes());
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("formulas")));
}

#[test]
fn the_engine_tells_what_the_model_recommends() {
    let server = Server::start(&fixture("golden/olmoe"), &[]);
    let state = server.get("/engine").json();
    assert!(state["sampling"]["temperature"].is_number() && state["sampling"]["top_p"].is_number(), "{state}");
}

#[test]
fn the_demo_model_answers_as_larder_run_does() {
    let (demo, prompt) = (fixture("../models/demo"), "The old man looked at the door, and");
    let run = larder_ok(&["run", "-m", demo.to_str().unwrap(), "-p", prompt, "-n", "160"]);
    let server = Server::start(&demo, &[]);
    let messages = json!([{"role": "user", "content": prompt}]);
    let answer = server.post("/v1/chat/completions", json!({"messages": messages, "seed": 0})).json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"].as_str().unwrap(), run.trim_end_matches('\n'));
    assert_eq!((&choice["finish_reason"], &answer["usage"]["completion_tokens"]), (&json!("length"), &json!(160)));
    let state = server.get("/engine").json();
    let standard = server.get("/props").json()["default_generation_settings"].clone();
    assert_eq!((&state["context"], &standard["params"]["max_tokens"]), (&json!(512), &json!(160)));
    assert!(state["total"]["misses"].as_u64().unwrap() > 1000, "a quarter of the experts is in memory: {state}");
}

#[test]
fn the_first_message_suits_the_model() {
    let welcome =
        |model: &str| Server::start(&fixture(model), &["--context", "64"]).get("/engine").json()["welcome"].clone();
    assert!(welcome("golden/olmoe").is_null());
    let demo = welcome("../models/demo");
    assert!(demo["heading"].as_str().unwrap().contains("story"), "{demo}");
    assert!(demo["examples"].as_array().unwrap().len() > 2, "{demo}");
}

#[test]
fn the_context_has_a_meter_with_a_name() {
    let (server, response) = page(&["--context", "96"]);
    let meter =
        response.body.split("<div id=\"context-meter\"").nth(1).and_then(|rest| rest.split('>').next()).unwrap();
    for attribute in ["role=\"meter\"", "aria-label=\"", "aria-valuemin=\"0\"", "aria-valuemax=", "aria-valuenow="] {
        assert!(meter.contains(attribute), "{attribute} in {meter}");
    }
    assert_eq!(server.get("/engine").json()["context"], 96);
}

/// The scripts that make elements of Markdown, and one that times them.
const MARKDOWN: &str = concat!(
    include_str!("../../../crates/larder-serve/src/page/code.js"),
    include_str!("../../../crates/larder-serve/src/page/formulas.js"),
    include_str!("../../../crates/larder-serve/src/page/markdown.js"),
    include_str!("markdown.js"),
);

/// The script that says how far a prompt has come, and one that asks it.
const PREFILL: &str =
    concat!(include_str!("../../../crates/larder-serve/src/page/prefill.js"), include_str!("prefill.js"));

/// The script of what messages say and show, and one that asks it.
const CONTENT: &str =
    concat!(include_str!("../../../crates/larder-serve/src/page/content.js"), include_str!("content.js"));

/// What a script prints, if there is a program to run it.
fn printed_by(script: &str) -> Option<Value> {
    let node = Command::new("node").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut node) = node else {
        println!("skipped: there is no node here");
        return None;
    };
    node.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let output = node.wait_with_output().unwrap();
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn a_long_prompt_says_what_is_done_and_how_long_the_rest_takes() {
    let Some(printed) = printed_by(PREFILL) else { return };
    let said = json!([
        "",
        "",
        "Reading the prompt: 1536 of 8192 tokens, 243.8 tokens/s, 28 s left",
        "Reading the prompt: 1792 of 8192 tokens, 64.0 tokens/s, 1 min 40 s left",
        "Reading the prompt: 2048 of 8192 tokens, 32.0 tokens/s, 3 min 12 s left",
        "",
    ]);
    assert_eq!(printed["said"], said);
    assert_eq!(printed["long"], "Reading the prompt: 0 of 100 tokens");
    assert_eq!(printed["times"], json!(["1 s", "1 min 0 s", "3 min 24 s", "12 h 34 min"]));
}

#[test]
fn hostile_markdown_takes_linear_time() {
    let Some(times) = printed_by(MARKDOWN) else { return };
    println!("{times}");
    // Linear ones take some milliseconds, quadratic ones ten seconds.
    assert!(times.as_object().unwrap().values().all(|ms| ms.as_u64().unwrap() < 3000), "{times} ms");
}

#[test]
fn messages_have_their_files_before_their_text() {
    let Some(printed) = printed_by(CONTENT) else { return };
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}});
    let said = "b.md:\n````\nsee:\n```\nx\n```\n````\n\nhi";
    let text = |text: &str| json!({"type": "text", "text": text});
    let want = json!(["hi", [picture, text("hi")], [picture, picture], said, [picture, text(said)]]);
    assert_eq!(printed["contents"], want);
    let valid = printed["lists"].as_array().unwrap();
    assert_eq!(valid[..2], [json!(true), json!(true)]);
    assert!(valid[2..].iter().all(|valid| valid == false), "{valid:?}");
}
