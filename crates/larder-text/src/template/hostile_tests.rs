//! Templates that try to take memory, time or the stack. Each is refused in little of either, with its line.

use std::time::Instant;

use serde_json::json;

use super::{
    compile::MAX_SOURCE_BYTES,
    tests::{template, try_render},
    *,
};

/// What a refused template may take: the limit of time, and what a busy machine adds.
const PATIENCE: Duration = Duration::from_secs(20);
/// The limit of time where another limit is tested, for a busy machine.
const LONG: Duration = Duration::from_secs(15);

/// The error of a template that is refused when it is opened or when it is rendered.
fn refused(source: &str) -> TemplateError {
    refused_within(source, MAX_TIME)
}

fn refused_within(source: &str, time: Duration) -> TemplateError {
    let started = Instant::now();
    let config = json!({"chat_template": source});
    let config = TokenizerConfig::from_bytes(config.to_string().as_bytes()).unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let rendered = ChatTemplate::new(None, &config).map(Option::unwrap);
    let rendered = rendered.and_then(|template| template.render_within(&ChatInput::new(&messages), time));
    assert!(started.elapsed() < PATIENCE, "{:?}: {}", started.elapsed(), &source[..source.len().min(200)]);
    match rendered {
        Ok(text) => panic!("rendered {} bytes: {}", text.len(), &source[..source.len().min(200)]),
        Err(error) => error,
    }
}

fn too_large(source: &str) {
    let error = refused_within(&format!("\n{source}"), LONG);
    assert_eq!(error, TemplateError::TooLarge { line: 2, limit: MAX_BYTES }, "{source}");
}

fn too_slow(source: &str) {
    let error = refused(&format!("\n{source}"));
    assert_eq!(error, TemplateError::TooSlow { line: 2 }, "{source}");
}

/// A template that applies `step` to `ns.x` again and again, beginning with `start`.
fn repeated(start: &str, step: &str) -> String {
    format!("{{% set ns = namespace(x={start}) %}}{{% for i in range(1000) %}}{{% set ns.x = {step} %}}{{% endfor %}}")
}

#[test]
fn values_that_double_are_too_large() {
    for (start, step) in [
        ("'x'", "ns.x ~ ns.x"),
        ("'x'", "ns.x + ns.x"),
        ("'x'", "ns.x * 2"),
        ("[1]", "ns.x + ns.x"),
        ("[1]", "ns.x * 2"),
        ("(1,)", "ns.x + ns.x"),
        ("(1,)", "3 * ns.x"),
        ("'xx'", "ns.x | replace('x', ns.x)"),
        ("'xx'", "ns.x.replace('x', ns.x)"),
        ("'xx'", "ns.x.replace('', ns.x)"),
        ("'xx'", "[ns.x, ns.x] | join(ns.x)"),
        ("'xx'", "ns.x.join([ns.x, ns.x])"),
        ("'x\\nx'", "ns.x | indent(ns.x | length, true, true)"),
        ("'x'", "'%s%s' | format(ns.x, ns.x)"),
        ("'x'", "'{}{}'.format(ns.x, ns.x)"),
        ("'x'", "'{0}{0}'.format(ns.x)"),
        ("'x'", "[ns.x, ns.x] | string"),
        ("'x'", "[ns.x, ns.x] | tojson"),
        ("'x'", "{'a': ns.x, 'b': ns.x} | tojson(indent=4)"),
        ("[1]", "(ns.x | list) + (ns.x | list)"),
        ("[1]", "ns.x | chain(ns.x) | list"),
        ("['a']", "(ns.x ~ '').split(',') + (ns.x ~ '').split(',')"),
    ] {
        too_large(&repeated(start, step));
    }
    let text = "0".repeat(1000);
    let nested = format!("{{% for i in range(9999) %}}{{% for j in range(99) %}}{text}{{% endfor %}}{{% endfor %}}");
    too_large(&nested);
    too_large(&format!("{{% set x %}}{nested}{{% endset %}}"));
}

#[test]
fn one_large_step_is_too_large() {
    for source in [
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 100000000 }}",
        "{{ (1, 2) * 100000000 }}",
        "{{ ('x' * 90000000) ~ ('x' * 90000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ [1] | batch(1000000000, 2) }}",
        "{{ [1] | slice(1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%.1000000000f' | format(1.5) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ ('x' * 20000000).split('x') | length }}",
        "{{ ('x ' * 20000000).split() | length }}",
        "{{ ('\\n' * 20000000).splitlines() | length }}",
        "{{ ('x' * 20000000) | list | length }}",
        "{{ ('x' * 20000000)[::2] }}{{ ('x' * 60000000)[::-1] }}",
        "{% set x = 'x' * 60000 %}{% for a in range(9000) %}{{ x }}{% endfor %}",
        "{% set x = 'x' * 60000 %}{% set y %}{% for a in range(9000) %}{{ x }}{% endfor %}{% endset %}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{% set ns = namespace(x='xx') %}\
         {% for i in range(99) %}{% set ns.x = m(ns.x) ~ m(ns.x) %}{% endfor %}",
        "{% filter replace('x', 'x' * 1000000) %}{% for a in range(9000) %}x{% endfor %}{% endfilter %}",
        "{{ ['x'] | map('replace', 'x', 'x' * 60000) | map('replace', 'x', 'x' * 60000) | list | length }}",
        "{{ raise_exception(['x' * 60000] * 60000) }}",
        "{{ strftime_now('%c' * 60000000) }}",
    ] {
        too_large(source);
    }
}

#[test]
fn endless_work_is_too_slow() {
    let sources = [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x = 'a b ' * 100000 %}{% for a in range(90000) %}{% if x.find('c') > 0 %}{% endif %}{% endfor %}",
        "{% set x = 'a' * 10000000 %}{% for a in range(90000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
        "{% set x = 'a' * 10000000 %}{% set y = 'a' * 10000000 %}{% for a in range(90000) %}{% if x == y %}{% endif %}\
         {% endfor %}",
        "{% set x = 'a' * 10000000 %}{% for a in range(90000) %}{% if x[9999999] == 'b' %}{% endif %}{% endfor %}",
        "{% set x = 'a' * 10000000 %}{% for a in range(90000) %}{% if x | length == 1 %}{% endif %}{% endfor %}",
        "{% set x = range(99999) | list %}{% for a in range(90000) %}{% if -1 in x %}{% endif %}{% endfor %}",
        "{% set x = range(99999) | list %}{% for a in range(90000) %}{% if x is eq(x) %}{% endif %}{% endfor %}",
        "{% set x = range(99999) | list %}{% for a in range(90000) %}{% if 0 < x < 1 %}{% endif %}{% endfor %}",
        "{% set x = range(99999) | list %}{{ x | select('in', x) | list | length }}",
    ];
    thread::scope(|scope| sources.iter().for_each(|source| drop(scope.spawn(|| too_slow(source)))));
    // Splitting makes values, of which there are too many before it takes long.
    too_large("{% set x = 'a b ' * 100000 %}{% for a in range(90000) %}{% if x.split(' ') %}{% endif %}{% endfor %}");
}

#[test]
fn values_that_hold_one_another_are_read_within_the_limits() {
    let shared = "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    assert_eq!(refused(shared), TemplateError::TooSlow { line: 1 });
    let local = |last: &str| {
        let steps: String = (0..100).map(|n| format!("{{% set x{} = [x{n}, x{n}] %}}", n + 1)).collect();
        refused(&format!("{{% set x0 = [1] %}}{steps}{last}"))
    };
    for last in ["{{ x100 == x99 }}", "{{ x100 in [x100] }}", "{{ {x100: 1} }}", "{{ {}[x100] }}", "{{ x100 | sort }}"]
    {
        assert_eq!(local(last), TemplateError::TooSlow { line: 1 }, "{last}");
    }
    for last in ["{{ x100 }}", "{{ x100 ~ '' }}", "{{ x100 | tojson }}", "{{ [x100] | join }}", "{{ [x100] | string }}"]
    {
        let error = local(last);
        assert!(matches!(error, TemplateError::TooLarge { .. } | TemplateError::TooSlow { .. }), "{last}: {error}");
    }
}

#[test]
fn recursion_ends() {
    for recursive in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'default' %}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ loop.cycle() }}{% for a in [1] %}{{ loop.cycle() }}{% endfor %}",
        "{% for a in [1] %}{{ loop.cycle(*[]) }}{% endfor %}",
        "{% set n = namespace() %}{% set n.x = n %}",
        "{% set n = namespace() %}{% set n.x = [{'a': n}] %}",
        "{% set n = namespace() %}{% for i in [1] %}{% set n.x = loop %}{% endfor %}",
        "{% macro m() %}{% endmacro %}{% set n = namespace() %}{% set n.x = m %}",
        "{% macro m() %}{% endmacro %}{{ m(*range(2000)) }}",
    ] {
        let error = refused(recursive);
        assert!(matches!(error, TemplateError::Failed { .. }), "{recursive}: {error}");
    }
    let nested = "{% set n = namespace(x=[]) %}{% for i in range(300) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}";
    assert!(refused(nested).to_string().contains("nested"));
}

#[test]
fn deep_templates_are_refused_when_they_are_opened() {
    for (open, close) in [
        ("not ", ""),
        ("-", ""),
        ("(", ")"),
        ("[", "]"),
        ("{1: ", "}"),
        ("1 if 1 else ", ""),
        ("a(", ")"),
        ("a[", "]"),
        ("a | f(", ")"),
        ("a is b(", ")"),
        ("1 + (", ")"),
        ("1 ** ", ""),
        ("a or ", ""),
    ] {
        let source = format!("{{{{ {}1{} }}}}", open.repeat(20_000), close.repeat(20_000));
        let error = refused(&source);
        assert!(matches!(error, TemplateError::Syntax { .. } | TemplateError::Source { .. }), "{open}: {error}");
    }
    for after in [".a", "[0]", "()", " | f", " is f", " + 1", " ~ 1", " and 1", " == 1", " if 1"] {
        let error = refused(&format!("{{{{ a{} }}}}", after.repeat(20_000)));
        assert!(matches!(error, TemplateError::Syntax { .. }), "{after}: {error}");
    }
    for (open, close) in [
        ("{% if 1 %}", "{% endif %}"),
        ("{% for a in b %}", "{% endfor %}"),
        ("{% macro m() %}", "{% endmacro %}"),
        ("{% call m() %}", "{% endcall %}"),
        ("{% set x %}", "{% endset %}"),
        ("{% filter f %}", "{% endfilter %}"),
        ("{% with %}", "{% endwith %}"),
        ("{% if 1 %}{% else %}", "{% endif %}"),
    ] {
        let source = format!("{}{}", open.repeat(6_000), close.repeat(6_000));
        let error = refused(&source);
        assert!(matches!(error, TemplateError::Syntax { .. }), "{open}: {error}");
    }
    let branches = format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(20_000));
    assert!(refused(&branches).to_string().contains("elif"));
}

/// The deepest that is accepted is parsed, compiled, rendered and dropped on the stack that it has.
#[test]
fn the_deepest_template_renders() {
    let wide = format!("{{{{ {}true }}}}", "not ".repeat(4000));
    assert_eq!(try_render(&wide, json!({})).unwrap(), "True");
    let sum = format!("{{{{ 0{} }}}}", " + 1".repeat(2000));
    assert_eq!(try_render(&sum, json!({})).unwrap(), "2000");
    let path = format!("{{{{ [messages]{} | length }}}}", " | list".repeat(2000));
    assert_eq!(try_render(&path, json!({})).unwrap(), "1");
    let branches = format!("{{% if 0 %}}{}{{% else %}}x{{% endif %}}", "{% elif 0 %}".repeat(1000));
    assert_eq!(try_render(&branches, json!({})).unwrap(), "x");
    let nested = format!("{{{{ {}1{} | string }}}}", "[".repeat(70), "]".repeat(70));
    assert!(try_render(&nested, json!({})).unwrap().starts_with("[[[["));
}

#[test]
fn opening_takes_time_by_the_length() {
    let started = Instant::now();
    for piece in [
        "{%%}",
        "{{",
        "{{}}",
        "{##}",
        "{#",
        "{%",
        "{{''}}",
        "{{ a",
        "{% raw %}",
        "{{1}}",
        "{{-a-}}\n ",
        "\n{%if a%}\n",
        "' ",
    ] {
        let source = piece.repeat(MAX_SOURCE_BYTES / piece.len());
        let config = TokenizerConfig { chat_templates: vec![("default".into(), source)], ..TokenizerConfig::default() };
        let _ = ChatTemplate::new(None, &config);
    }
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    let huge = vec![b'x'; MAX_SOURCE_BYTES + 1];
    let error = ChatTemplate::new(Some(&huge), &TokenizerConfig::default()).unwrap_err();
    assert!(matches!(error, TemplateError::Source { .. }));
}

/// The templates above again, in a process that has 2 GiB of addresses: eight times the stack of a rendering.
#[test]
#[cfg(target_os = "linux")]
fn refused_templates_take_little_memory() {
    let tests = std::env::current_exe().unwrap();
    for test in ["values_that_double", "one_large_step", "values_that_hold_one_another"] {
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "ulimit -v 2097152 && exec \"$@\"", "sh"]).arg(&tests);
        let output = limited.args([test, "--test-threads", "1"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{test}: {said}");
    }
}

#[test]
fn a_long_chat_renders() {
    let source =
        "{% for m in messages %}{{ m.role + ': ' + m.content | trim + '\\n' }}{% endfor %}{{ messages | tojson }}";
    let messages: Vec<_> =
        (0..2000).map(|n| json!({"role": "user", "content": format!("{n} {}", "x".repeat(5000))})).collect();
    let text = template(source).render(&ChatInput::new(&messages)).unwrap();
    assert!(text.len() > 20_000_000 && text.starts_with("user: 0 x"));
}
