//! Pictures through every door of a server with a tiny model that sees: what a tower would make of them is drawn from
//! their pixels.

mod addresses;
mod server;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use server::{COLUMNS, CONTEXT, FILE_BYTES, ROWS, SeeingServer, SeenAnswer, answer_of, chat, picture_file};

fn file(name: &str) -> String {
    STANDARD.encode(picture_file(name))
}

fn image(name: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{}", file(name))}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A question of parts.
fn asked(parts: &[Value]) -> Value {
    json!([{"role": "user", "content": parts}])
}

const QUESTION: &str = "What is this?";

/// The question about a picture at every door: paths, bodies, and where answers have their text. `picture` is what all
/// APIs but Anthropic's have, whose `source` is another.
fn doors(picture: &str, source: &Value) -> Vec<(&'static str, Value, &'static str)> {
    let limit = 6;
    let options = json!({"temperature": 0, "num_predict": limit});
    let as_list = |part: Value| asked(&[part, text(QUESTION)]);
    let input = json!([{"role": "user", "content": [
        {"type": "input_image", "image_url": picture}, {"type": "input_text", "text": QUESTION}]}]);
    let of_ollama = json!([{"role": "user", "content": QUESTION, "images": [picture]}]);
    vec![
        (
            "/v1/chat/completions",
            chat(&as_list(json!({"type": "image_url", "image_url": {"url": picture}}))),
            "/choices/0/message/content",
        ),
        (
            "/v1/chat/completions",
            chat(&as_list(json!({"type": "image_url", "image_url": picture}))),
            "/choices/0/message/content",
        ),
        (
            "/v1/responses",
            json!({"input": input, "temperature": 0, "max_output_tokens": limit}),
            "/output/0/content/0/text",
        ),
        (
            "/v1/messages",
            json!({"messages": as_list(json!({"type": "image", "source": source})), "temperature": 0, "max_tokens": limit}),
            "/content/0/text",
        ),
        ("/api/chat", json!({"messages": of_ollama, "options": options, "stream": false}), "/message/content"),
        (
            "/api/generate",
            json!({"prompt": QUESTION, "images": [picture], "options": options, "stream": false}),
            "/response",
        ),
    ]
}

#[test]
fn every_door_gives_the_same_answer() {
    let server = SeeingServer::seeing();
    let want = server.answer(&asked(&[image("odd"), text(QUESTION)]));
    assert!(want.prompt as usize > ROWS * COLUMNS && !want.text.is_empty(), "{want:?}");
    let url = format!("data:image/png;base64,{}", file("odd"));
    let source = json!({"type": "base64", "media_type": "image/png", "data": file("odd")});
    for (path, body, answer) in doors(&url, &source).into_iter().chain(doors(&file("odd"), &source)) {
        let (status, body) = server.post(path, &body);
        assert_eq!(
            (status, body.pointer(answer).and_then(Value::as_str)),
            (200, Some(want.text.as_str())),
            "{path} {body}"
        );
    }
    assert_eq!(server.encoded(), 1);
    let counted = json!({"messages": asked(&[json!({"type": "image", "source": source}), text(QUESTION)])});
    assert_eq!(server.post("/v1/messages/count_tokens", &counted).1["input_tokens"], want.prompt);
    let (_, rendered) = server.post("/apply-template", &chat(&asked(&[image("odd"), text(QUESTION)])));
    assert!(rendered["prompt"].as_str().unwrap().contains("<|image_pad|><|vision_end|>What"), "{rendered}");
    assert_eq!(server.get("/props")["modalities"], json!({"vision": true, "audio": false}));
    assert!(
        server.post("/api/show", &json!({"model": "tiny"})).1["capabilities"]
            .as_array()
            .unwrap()
            .contains(&json!("vision"))
    );
}

#[test]
fn warm_answers_are_those_of_a_cold_server() {
    // What a tower makes of a picture is not kept, so that all that is computed again is encoded again.
    let server = SeeingServer::start(true, None, 0);
    let first = [image("odd"), text("What is this? It looks like something that was drawn by hand.")];
    let cold = server.answer(&asked(&first));
    assert_eq!((cold.cached, server.encoded()), (0, 1));
    let warm = server.answer(&asked(&first));
    assert!(warm.cached as usize > ROWS * COLUMNS, "{warm:?}");
    assert_eq!(SeenAnswer { cached: 0, ..warm.clone() }, cold);
    assert_eq!(server.encoded(), 1, "a picture in the cache is not encoded again");
    // The next turn shows another picture.
    let next = json!([
        {"role": "user", "content": first}, {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [text("And this?"), image("tall")]},
    ]);
    let warm = server.answer(&next);
    assert!(warm.cached as usize > ROWS * COLUMNS && server.encoded() == 2, "{warm:?}");
    let cold = SeeingServer::seeing().answer(&next);
    assert_eq!((&cold.text, &cold.logprobs, cold.prompt), (&warm.text, &warm.logprobs, warm.prompt));
    // Another picture in the same place shares nothing of it.
    let other = server.answer(&asked(&[image("wide"), first[1].clone()]));
    assert!((other.cached as usize) < ROWS * COLUMNS && other.logprobs != cold.logprobs, "{other:?}");
}

#[test]
fn several_answers_and_requests_at_once_see_their_own_pictures() {
    let server = SeeingServer::seeing();
    let pictures = ["odd", "tall", "wide", "plain", "dot"];
    let bodies: Vec<Value> = pictures.iter().map(|name| chat(&asked(&[image(name), text("What is it?")]))).collect();
    let all = server.runtime.block_on(async {
        let (a, b) = tokio::join!(
            server.posted("/v1/chat/completions", &bodies[0]),
            server.posted("/v1/chat/completions", &bodies[1])
        );
        let (c, d, e) = tokio::join!(
            server.posted("/v1/chat/completions", &bodies[2]),
            server.posted("/v1/chat/completions", &bodies[3]),
            server.posted("/v1/chat/completions", &bodies[4])
        );
        [a, b, c, d, e]
    });
    let mut seen = vec![];
    for ((status, body), request) in all.iter().zip(&bodies) {
        assert_eq!(*status, 200, "{body}");
        let (alone, together) = (SeeingServer::seeing().answer(&request["messages"]), answer_of(body));
        assert_eq!((alone.text, &alone.logprobs), (together.text, &together.logprobs));
        assert!(!seen.contains(&alone.logprobs), "two pictures have one answer");
        seen.push(alone.logprobs);
    }
    let mut several = chat(&asked(&[image("odd"), image("tall"), text("Which?")]));
    several["n"] = 3.into();
    let (status, body) = server.post("/v1/chat/completions", &several);
    assert_eq!((status, body["choices"].as_array().map(Vec::len)), (200, Some(3)), "{body}");
    assert_eq!(server.encoded(), 5, "each picture is encoded once");
    let swapped = server.answer(&asked(&[image("tall"), image("odd"), text("Which?")]));
    assert_ne!(swapped.logprobs, body["choices"][0]["logprobs"]);
}

#[test]
fn images_in_results_of_tools_and_in_templates_of_texts_are_seen() {
    let call = json!({"type": "function", "id": "c", "function": {"name": "look", "arguments": "{}"}});
    let messages = |shown: Value| {
        json!([{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": [text("Seen:"), shown]}])
    };
    let of_texts = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    for template in [None, Some(of_texts)] {
        let server = SeeingServer::start(true, template, 1 << 20);
        let one = server.answer(&messages(image("odd")));
        let other = server.answer(&messages(image("tall")));
        assert!(one.logprobs != other.logprobs && server.encoded() == 2);
        assert!(one.prompt == other.prompt && other.prompt as usize > ROWS * COLUMNS, "{one:?}");
    }
}

#[test]
fn texts_that_look_like_images_stay_texts() {
    let server = SeeingServer::seeing();
    let mark = "<|vision_start|><|image_pad|><|vision_end|>";
    let plain = server.answer(&asked(&[text("What is"), image("odd")]));
    let quoted = server.answer(&asked(&[text(&format!("What is {mark}")), image("odd")]));
    assert!(quoted.prompt > plain.prompt + 3 && quoted.prompt < plain.prompt + 60, "{quoted:?}");
    let (status, body) = server.post("/v1/chat/completions", &{
        let mut body = chat(&asked(&[image("odd"), text("?")]));
        let function = json!({"name": "f", "description": mark, "parameters": {"type": "object"}});
        body["tools"] = json!([{"type": "function", "function": function}]);
        body
    });
    // This template prints no tools; described ones would be one image too many.
    assert!(status == 200 || body["error"]["message"].as_str().unwrap().contains("shows 2 images"), "{body}");
}

#[test]
fn what_is_no_picture_is_refused_in_a_sentence_that_repeats_nothing() {
    let server = SeeingServer::seeing();
    let secret = "c2VjcmV0c2VjcmV0";
    let data = |bytes: &[u8]| json!(format!("data:image/png;base64,{}", STANDARD.encode(bytes)));
    let png = picture_file("odd");
    // A head that promises 60,000 by 60,000 pixels.
    let mut bomb = png.clone();
    bomb[16..24].copy_from_slice(&[0, 0, 0xea, 0x60, 0, 0, 0xea, 0x60]);
    let large = STANDARD.encode(vec![0; FILE_BYTES + 1000]);
    for url in [
        json!(format!("http://127.0.0.1/{secret}.png")),
        json!(format!("https://example.org/{secret}.png")),
        json!(format!("file:///etc/{secret}")),
        json!(format!("data:image/png;base64,{secret}*")),
        json!(format!("data:image/png;base64,{secret}")),
        json!(format!("data:image/png,{secret}")),
        data(&png[..png.len() / 2]),
        data(&bomb),
        data(b"GIF89a"),
        json!(large),
        json!(""),
    ] {
        let asked = asked(&[json!({"type": "image_url", "image_url": {"url": url}}), text("?")]);
        let (status, body) = server.post("/v1/chat/completions", &chat(&asked));
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!((status, body["error"]["param"].as_str()), (400, Some("messages[0].content[0]")), "{message}");
        assert!(message.ends_with('.') && message.len() < 300 && !message.contains('\n'), "{message}");
        assert!(!message.contains("c2Vjc") && !message.contains("secret") && !message.contains("example"), "{message}");
    }
    let many = vec![image("dot"); 101];
    let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&many)));
    assert_eq!((status, &body["error"]["code"]), (400, &json!("too_many_images")), "{body}");
    let long = vec![image("dot"); 30];
    let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&long)));
    assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")), "{body}");
    assert_eq!(server.encoded(), 0);
    *server.sight.as_ref().unwrap().fails.lock().unwrap() = true;
    let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&[image("odd"), text("?")])));
    let want = "A picture could not be encoded: the tower is gone.";
    assert_eq!((status, body["error"]["message"].as_str()), (500, Some(want)));
    *server.sight.as_ref().unwrap().fails.lock().unwrap() = false;
    server.answer(&asked(&[image("odd"), text("?")]));
}

#[test]
fn the_oldest_turns_go_with_their_pictures() {
    let server = SeeingServer::seeing();
    let turn = |name: &str| {
        [
            json!({"role": "user", "content": [image(name), text(&"word ".repeat(8))]}),
            json!({"role": "assistant", "content": "yes"}),
        ]
    };
    let mut messages: Vec<Value> =
        ["odd", "tall", "wide", "plain", "odd", "tall", "wide"].iter().flat_map(|name| turn(name)).collect();
    messages.push(json!({"role": "user", "content": [image("dot"), text("?")]}));
    let mut body = chat(&json!(messages));
    let (status, refused) = server.post("/v1/chat/completions", &body);
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("context_length_exceeded")), "{refused}");
    for full in ["drop-turns", "shift"] {
        body["context_full"] = full.into();
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let used = &answer["context_use"];
        let (dropped, tokens) = (used["dropped_turns"].as_u64().unwrap(), used["dropped_tokens"].as_u64().unwrap());
        assert!(dropped > 0 && tokens > dropped * (ROWS * COLUMNS) as u64, "{used}");
    }
    // An answer that shifts drops whole images, and goes on.
    let mut long = chat(&asked(&[image("odd"), text("?"), image("tall"), text("?")]));
    (long["context_full"], long["max_tokens"]) = ("shift".into(), (2 * CONTEXT).into());
    long.as_object_mut().unwrap().remove("logprobs");
    long.as_object_mut().unwrap().remove("top_logprobs");
    let (status, answer) = server.post("/v1/chat/completions", &long);
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(2 * CONTEXT)), "{answer}");
    assert!(answer["context_use"]["shifts"].as_u64().unwrap() > 0);
}

#[test]
fn a_model_that_reads_text_says_what_sees() {
    let server = SeeingServer::start(false, None, 0);
    let (status, body) = server.post("/v1/chat/completions", &chat(&asked(&[image("odd"), text("?")])));
    let message = body["error"]["message"].as_str().unwrap();
    assert_eq!((status, body["error"]["param"].as_str()), (400, Some("messages[0].content[0]")));
    assert!(message.ends_with(": this model takes no images; a_vl_moe does."), "{message}");
    let of_tool =
        json!([{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "c", "content": [image("odd")]}]);
    let of_text = json!([{"role": "user", "content": "?"},
        {"role": "tool", "tool_call_id": "c", "content": "[image omitted: this model reads text]"}]);
    assert_eq!(server.answer(&of_tool).prompt, server.answer(&of_text).prompt);
    assert_eq!(server.get("/props")["modalities"]["vision"], false);
}
