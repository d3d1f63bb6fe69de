use serde_json::{Map, Value as Json, json};

use super::*;

fn template(source: &str) -> ChatTemplate {
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": source});
    let config = TokenizerConfig::from_bytes(config.to_string().as_bytes()).unwrap();
    ChatTemplate::new(None, &config).unwrap().unwrap()
}

fn try_render(source: &str, message: Json) -> Result<String, TemplateError> {
    template(source).render(&ChatInput::new(&[message]))
}

fn render(source: &str) -> String {
    try_render(source, json!({"role": "user", "content": "Hi"})).unwrap()
}

#[test]
fn the_variables_are_there() {
    let extra = Map::from_iter([("mood".to_owned(), json!("calm")), ("eos_token".to_owned(), json!("<end>"))]);
    let messages = [json!({"role": "user", "content": "Hi"})];
    let input = ChatInput { extra: &extra, add_generation_prompt: false, ..ChatInput::new(&messages) };
    let source = "{{ bos_token }}{{ eos_token }}{{ mood }}{{ messages[0].content }}{{ add_generation_prompt }}\
                  {{ tools is none }}{{ documents }}{{ pad_token is defined }}{{ pad_token }}";
    assert_eq!(template(source).render(&input).unwrap(), "<s><end>calmHiFalseTrueNoneFalse");
}

#[test]
fn blocks_take_their_line_with_them() {
    assert_eq!(render("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
    assert_eq!(
        render(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        ),
        "023"
    );
    assert_eq!(render("x {%- generation -%} y {% set z = 1 %}{%- endgeneration %}{{ z is defined }}"), "xy False");
}

#[test]
fn python_methods_and_filters_work() {
    assert_eq!(render("{{ ' ab '.strip().upper() + 'a,b,c'.split(',')[-1] }}"), "ABc");
    assert_eq!(render("{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b'.partition('-')[2] }}"), "['a-b', 'c']b");
    assert_eq!(render("{{ 'xyz'.removeprefix('x').removesuffix('z') }}"), "y");
    assert_eq!(
        render("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}"),
        "1"
    );
    assert_eq!(render("{{ messages[0].items() | list | length }}{{ messages[0].get('x', 'y') }}"), "2y");
    assert_eq!(render("{{ [1.0, 'a', none] | string }}{{ none }}{{ true }}"), "[1.0, 'a', None]NoneTrue");
}

#[test]
fn json_has_pythons_form_and_no_html_escapes() {
    assert_eq!(render("{{ {'a': [1, '<é>']} | tojson }}"), r#"{"a": [1, "<é>"]}"#);
    assert_eq!(render("{{ {'a': [1]} | tojson(indent=1) }}"), "{\n \"a\": [\n  1\n ]\n}");
    assert_eq!(
        render("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"),
        r#"{"a":"\u00e9","b":1}"#
    );
    assert!(try_render("{{ 1 | tojson(color=1) }}", json!({})).is_err());
}

#[test]
fn the_clock_is_the_callers() {
    let messages = [json!({})];
    let input = ChatInput { now: Moment::from_unix(86_400 * 59), ..ChatInput::new(&messages) };
    assert_eq!(template("{{ strftime_now('%d %b %Y') }}").render(&input).unwrap(), "01 Mar 1970");
    assert!(matches!(template("{{ strftime_now('%!') }}").render(&input), Err(TemplateError::Failed { .. })));
}

#[test]
fn messages_lose_nulls_and_name_their_reasoning() {
    let message = json!({"role": "assistant", "content": null, "reasoning": "hm"});
    let source = "{{ messages[0].content is defined }}{{ messages[0].reasoning_content }}{{ messages[0].thinking }}";
    assert_eq!(try_render(source, message).unwrap(), "Falsehmhm");
}

#[test]
fn tools_choose_their_template_and_a_file_goes_first() {
    let config =
        json!({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]});
    let config = TokenizerConfig::from_bytes(config.to_string().as_bytes()).unwrap();
    let named = ChatTemplate::new(None, &config).unwrap().unwrap();
    let messages = [json!({})];
    let plain = ChatInput::new(&messages);
    assert_eq!(named.render(&plain).unwrap(), "d");
    assert_eq!(named.render(&ChatInput { tools: Some(&[]), ..plain }).unwrap(), "t");
    let file = ChatTemplate::new(Some(b"f"), &config).unwrap().unwrap();
    assert_eq!(file.render(&ChatInput { tools: Some(&[]), ..plain }).unwrap(), "f");
    assert!(ChatTemplate::new(None, &TokenizerConfig::default()).unwrap().is_none());
    let nameless = TokenizerConfig { chat_templates: vec![("x".into(), "y".into())], ..TokenizerConfig::default() };
    let error = ChatTemplate::new(None, &nameless).unwrap().unwrap().render(&plain).unwrap_err();
    assert_eq!(error, TemplateError::NoDefault { names: "x".into() });
}

#[test]
fn a_raised_message_arrives_word_for_word() {
    let raised = Err(TemplateError::Raised("No 'system' role!".into()));
    assert_eq!(try_render(r#"{{ raise_exception("No 'system' role!") }}"#, json!({})), raised);
    let within = r#"{% macro m() %}{{ raise_exception("No 'system' role!") }}{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}"#;
    assert_eq!(try_render(within, json!({})), raised);
}

#[test]
fn other_errors_say_where() {
    let config = TokenizerConfig::default();
    let syntax = ChatTemplate::new(Some(b"a\n{% if %}"), &config).unwrap_err();
    assert!(matches!(syntax, TemplateError::Syntax { line: 2, .. }), "{syntax}");
    assert_eq!(ChatTemplate::new(Some(&[0xff]), &config).unwrap_err(), TemplateError::NotText);
    let failed = try_render("\n{{ messages[0].a.b }}", json!({})).unwrap_err();
    assert!(matches!(failed, TemplateError::Failed { line: 2, .. }), "{failed}");
    assert!(matches!(template("x").render(&ChatInput::new(&[])), Err(TemplateError::Chat(_))));
    assert!(matches!(try_render("x", json!("Hi")), Err(TemplateError::Chat(_))));
    let files = try_render("{% include 'Cargo.toml' %}", json!({})).unwrap_err();
    assert!(matches!(files, TemplateError::Failed { .. }), "{files}");
}

#[test]
fn hostile_templates_end() {
    let endless = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
    assert_eq!(try_render(endless, json!({})), Err(TemplateError::TooSlow));
    let long = "{% set x = 'x' * 60000 %}{% for a in range(9000) %}{{ x }}{% endfor %}";
    assert_eq!(try_render(long, json!({})), Err(TemplateError::TooLong { limit: MAX_OUTPUT_BYTES }));
    for recursive in ["{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include 'default' %}"] {
        assert!(matches!(try_render(recursive, json!({})), Err(TemplateError::Failed { .. })));
    }
    let nested = "{% set n = namespace(x=[]) %}{% for i in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}";
    assert!(try_render(nested, json!({})).unwrap_err().to_string().contains("nested"));
    let deep = "{% set n = namespace(x=[]) %}{% for i in range(200) %}{% for j in range(1000) %}\
                {% set n.x = [n.x] %}{% endfor %}{% endfor %}{% set y = n.x ~ '' %}done";
    assert_eq!(try_render(deep, json!({})).unwrap(), "done");
    let huge = vec![b'x'; MAX_SOURCE_BYTES + 1];
    let error = ChatTemplate::new(Some(&huge), &TokenizerConfig::default()).unwrap_err();
    assert!(matches!(error, TemplateError::Source { .. }));
}
