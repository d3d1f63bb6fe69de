//! Chat templates as models ship them, and hostile ones.

use serde_json::{Map, Value as Json, json};

use super::*;

pub(super) fn template(source: &str) -> ChatTemplate {
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": source});
    let config = TokenizerConfig::from_bytes(config.to_string().as_bytes()).unwrap();
    ChatTemplate::new(None, &config).unwrap().unwrap()
}

pub(super) fn try_render(source: &str, message: Json) -> Result<String, TemplateError> {
    template(source).render(&ChatInput::new(&[message]))
}

fn render(source: &str) -> String {
    try_render(source, json!({"role": "user", "content": "Hi"})).unwrap()
}

#[test]
fn all_variables_are_defined() {
    let extra = Map::from_iter([("mood".to_owned(), json!("calm")), ("eos_token".to_owned(), json!("<end>"))]);
    let messages = [json!({"role": "user", "content": "Hi"})];
    let input = ChatInput { extra: &extra, add_generation_prompt: false, ..ChatInput::new(&messages) };
    let source = "{{ bos_token }}{{ eos_token }}{{ mood }}{{ messages[0].content }}{{ add_generation_prompt }}\
                  {{ tools is none }}{{ documents }}{{ pad_token is defined }}{{ pad_token }}";
    assert_eq!(template(source).render(&input).unwrap(), "<s><end>calmHiFalseTrueNoneFalse");
}

#[test]
fn blocks_remove_their_line() {
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
    assert_eq!(render("{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b'.partition('-') }}"), "['a-b', 'c']('a', '-', 'b')");
    assert_eq!(render("{{ 'xyz'.removeprefix('x').removesuffix('z') }}"), "y");
    assert_eq!(
        render("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}"),
        "1"
    );
    assert_eq!(render("{{ messages[0].items() | list | length }}{{ messages[0].get('x', 'y') }}"), "2y");
    assert_eq!(render("{{ [1.0, 'a', none] | string }}{{ none }}{{ true }}"), "[1.0, 'a', None]NoneTrue");
}

#[test]
fn values_are_judged_as_jinja2_judges_them() {
    let judged =
        [("none", false), ("7", false), ("true", false), ("''", true), ("{}", true), ("[]", true), ("missing", true)];
    for (value, holds) in judged {
        let holds = if holds { "True" } else { "False" };
        let both = format!("{{{{ {value} is iterable }}}} {{{{ {value} is sequence }}}}");
        assert_eq!(render(&both), format!("{holds} {holds}"), "{value}");
    }
    // So do templates ask whether there are tools.
    assert_eq!(render("{% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}"), "none");
    assert_eq!(render("{{ missing | length }}{{ missing | first }}{{ missing | last is defined }}"), "0False");
    assert_eq!(render("{{ 'x' | int }} {{ '' | float }} {{ 'x' | int(3) }} {{ '12' | int }}"), "0 0.0 3 12");
    let named = "{{ '' | default('a', boolean=true) }}{{ missing | default(default_value='b') }}";
    assert_eq!(render(named), "ab");
    assert_eq!(render("{{ none | default(none) }}"), "None");
}

#[test]
fn lines_end_in_line_feeds() {
    assert_eq!(render("a\r\n{% if true %}\r\nb\rc\r\n{% endif %}\r\n"), "a\nb\nc\n");
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
fn the_time_is_that_of_the_input() {
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
fn raised_messages_are_unchanged() {
    let raised = Err(TemplateError::Raised("No 'system' role!".into()));
    assert_eq!(try_render(r#"{{ raise_exception("No 'system' role!") }}"#, json!({})), raised);
    let within = r#"{% macro m() %}{{ raise_exception("No 'system' role!") }}{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}"#;
    assert_eq!(try_render(within, json!({})), raised);
}

#[test]
fn other_errors_name_the_line() {
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

/// A template as models with tools and reasoning have it.
const TOOLS: &str = r##"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
                {{- '}</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('Unexpected role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"##;

#[test]
fn tools_their_calls_and_results_are_rendered() {
    let tools = [json!({"type": "function", "function": {"name": "add", "parameters": {"x": 1}}})];
    let call = json!({"type": "function", "function": {"name": "add", "arguments": {"a": [1, 2]}}});
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "1+2?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "content": "3"}),
        json!({"role": "assistant", "content": "<think>\nso 3\n</think>\n\n3."}),
        json!({"role": "user", "content": "And?"}),
    ];
    let extra = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
    let input = ChatInput { tools: Some(&tools), extra: &extra, ..ChatInput::new(&messages) };
    let expected = concat!(
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n",
        r#"{"type": "function", "function": {"name": "add", "parameters": {"x": 1}}}"#,
        "\n</tools><|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n",
        "<|im_start|>assistant\n",
        r#"<tool_call>{"name": "add", "arguments": {"a": [1, 2]}}</tool_call>"#,
        "<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3.<|im_end|>\n",
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    );
    assert_eq!(template(TOOLS).render(&input).unwrap(), expected);
    let raised = template(TOOLS).render(&ChatInput::new(&[json!({"role": "judge", "content": ""})])).unwrap_err();
    assert_eq!(raised, TemplateError::Raised("Unexpected role: judge".into()));
}

#[test]
fn thinking_after_the_last_question_stays() {
    let messages = [
        json!({"role": "user", "content": "1?"}),
        json!({"role": "assistant", "content": "1.", "reasoning_content": "\none\n"}),
    ];
    let input = ChatInput { add_generation_prompt: false, ..ChatInput::new(&messages) };
    assert_eq!(
        template(TOOLS).render(&input).unwrap(),
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n<think>\none\n</think>\n\n1.<|im_end|>\n"
    );
}

#[test]
fn common_template_features_work() {
    for (source, expected) in [
        ("{{ 'a b'.title() }}{{ 'aXa'.count('a') }}{{ 'abc'.find('c') }}{{ 'a'.join(['x', 'y']) }}", "A B22xay"),
        ("{{ 'x'.isdigit() }}{{ '12'.isnumeric() }}{{ 'aB'.lower() }}{{ 'ab'.capitalize() }}", "FalseTrueabAb"),
        ("{{ 'a-b'.replace('-', '+') }}{{ ' a'.lstrip() }}{{ 'a\n\nb'.splitlines() | length }}", "a+ba3"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='content') | join(', ') }}{{ [3, 1] | sort | first }}", "Hi1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ {'a': 1} | items | list }}", "a=1[('a', 1)]"),
        ("{% macro f(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('a', y='b') }}", "adab"),
        ("{{ [1, 2, 3][-1] }}{{ [1, 2, 3][:-1] | length }}{{ 'abc'[1:] }}{{ 'b' not in 'abc' }}", "32bcFalse"),
        (
            "{{ {} is mapping }}{{ [] is sequence }}{{ 'a' is iterable }}{{ none is none }}{{ 1 is number }}",
            "TrueTrueTrueTrueTrue",
        ),
        ("{{ x | default('d') }}{{ (x or 'e') if x is defined else 'u' }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}", "du318"),
        ("{%- set x %}a{% endset -%}{{ x }}{{ 'é' | upper }}{{ ' a ' | trim }}{{ 'a' ~ 1 ~ none }}", "aÉaa1None"),
        ("{{ 'a,b'.split(',', 1)[1] }}{{ 'abc'.startswith(('x', 'a')) }}{{ dict(a=1).a }}", "bTrue1"),
        ("{{ '%s-%d' % ('a', 3) if false else '{}-{}'.format('a', 3) }}{{ 'a' * 3 }}", "a-3aaa"),
        (
            "{{ messages[0]['content'] | length }}{{ [1, 2] + [3] }}{{ range(3) | list }}{{ loop is defined }}",
            "2[1, 2, 3][0, 1, 2]False",
        ),
        ("{% macro m(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) m(1) %}{{ y }}{% endcall %}", "<1>"),
        ("{% filter upper | replace('A', 'b') %}xa{% endfilter %}{% set y | trim %} z {% endset %}{{ y }}", "Xbz"),
        ("{{ 0 < 1 < 2 }}{{ 1 < 1 <= 2 }}{{ 'a' in 'abc' in ['abc'] }}{{ 3 not in [1] }}", "TrueFalseTrueTrue"),
        (
            "{% for x in [1, 2, 3] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x // 2) }}{% endfor %}",
            "aTruebTrueaFalse",
        ),
        (
            "{% set d = {'a': 1, 'b' ~ 1: 2} %}{{ dict(d, c=3) }}{{ dict(**d).b1 }}{{ d['a'] + d.b1 }}",
            "{'a': 1, 'b1': 2, 'c': 3}23",
        ),
        (
            "{{ (1, 2) + (3,) }}{{ (1, 2)[::-1] }}{{ 'abcdef'[-4:-1] }}{{ [1] * 2 }}{{ 2 * 'ab' }}{{ 1 + 1.5 }}",
            "(1, 2, 3)(2, 1)cde[1, 1]abab2.5",
        ),
        ("{% macro m(a, b, c) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(*[1, 2], **{'c': 3}) }}", "123"),
        ("{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') | map(attribute='a') | list }}{{ [1, 2] | sum }}", "[1, 2]3"),
        (
            "{{ [1, 2, 3] | batch(2) | list }}{{ 'a\nb' | indent(2) }}{{ '%s-%03d' | format('a', 7) }}",
            "[[1, 2], [3]]a\n  ba-007",
        ),
        ("{% for a, b in [[1, 2]] if a is odd %}{{ a }}{{ b }}{% else %}none{% endfor %}{{ 1 if false }}", "12"),
        ("{% with a = 1 %}{{ a }}{% endwith %}{% block b %}c{% endblock %}{{ -1 | abs }}{{ not true }}", "1c1False"),
        (
            "{{ ['b', 'a'] | sort | join(',') }}{{ [1, 1] | unique | list }}{{ {'b': 1} | dictsort }}",
            "a,b[1][('b', 1)]",
        ),
        ("{{ [{'a': 1}] | tojson(indent=4) }}", "[\n    {\n        \"a\": 1\n    }\n]"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}
