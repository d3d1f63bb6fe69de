//! Tests of the reader.

use serde_json::json;

use super::*;

fn refusals(v: Value, stated: &[(&str, Vec<Value>)]) -> Vec<String> {
    Config::new(&v).unwrap().judge(stated).iter().map(Refusal::to_string).collect()
}

#[test]
fn unknown_keys_are_refused_together_unless_they_are_neutral_or_off() {
    let neutral = json!({"use_cache": true, "im_end_token_id": 4, "mtp": {"a": 1}, "router_aux_loss_coef": 0.1});
    assert!(refusals(neutral, &[]).is_empty());
    let off = json!({"a": null, "b": false, "c": 0, "d": 0.0, "e": "", "f": [], "g": {}});
    assert!(refusals(off, &[]).is_empty());
    let on = json!({"attention_flavour": "x", "odd_norm": 2, "z": [true]});
    let said = [
        "attention_flavour is not supported (\"x\": might change attention)",
        "odd_norm is not supported (2: might change norms)",
        "z is not supported ([true]: might change the result)",
    ];
    assert_eq!(refusals(on.clone(), &[]), said);
    let error = refused(&Config::new(&on).unwrap().judge(&[])).to_string();
    let all = format!(
        "config.json: {}. To go on as if they were absent: --ignore-config attention_flavour,odd_norm,z",
        said.join("; ")
    );
    assert_eq!(error, all);
}

#[test]
fn keys_that_state_what_is_so_anyway_pass_and_others_are_refused_also_if_they_turn_it_off() {
    let stated = [("normed", vec![json!(true)]), ("groups", vec![json!(1), json!(0)]), ("shared", vec![])];
    let of = |v: Value| refusals(v, &stated);
    assert!(
        of(json!({"normed": true, "groups": 1.0})).is_empty() && of(json!({"normed": null, "shared": null})).is_empty()
    );
    assert_eq!(of(json!({"normed": false})), ["normed is not supported (false: only true)"]);
    assert_eq!(of(json!({"groups": 2})), ["groups is not supported (2: only 1 or 0)"]);
    assert_eq!(of(json!({"shared": 0})), ["shared is not supported (0: this model has it anyway)"]);
    let config = json!({"normed": false});
    let mut read = Config::new(&config).unwrap();
    assert!(
        !read.flag_or("normed", true).unwrap() && read.judge(&stated).is_empty(),
        "an architecture reads it itself"
    );
}

#[test]
fn refusals_of_nested_objects_have_their_path_and_messages_an_end() {
    let config = json!({"rope": {"kind": 7, "off": 0}, "score": "odd", "x".repeat(99): "y".repeat(99)});
    let mut c = Config::new(&config).unwrap();
    c.opt_object("rope", "rope.").unwrap().unwrap().finish();
    c.only("score", "usual");
    let said: Vec<String> = c.judge(&[]).iter().map(Refusal::to_string).collect();
    assert_eq!(
        said[..2],
        ["rope.kind is not supported (7: might change positions)", "score is not supported (\"odd\": only \"usual\")"]
    );
    assert!(said[2].len() < 200, "{}", said[2]);
    let many: Vec<Refusal> = (0..99).map(|n| Refusal::unknown(format!("k{n}"), &json!(n))).collect();
    assert!(refused(&many).to_string().contains("; and 59 more keys. To go on"));
}

#[test]
fn keys_may_have_further_names() {
    let v = json!({"model_max_length": 8, "renormalise": false});
    let mut c = Config::new(&v).unwrap();
    c.also_named(&[("context", "model_max_length"), ("norm", "renormalise")]);
    assert_eq!((c.size(&["context"]).unwrap(), c.flag_or("norm", true).unwrap()), (8, false));
    assert!(c.size(&["other"]).is_err() && c.judge(&[]).is_empty());
    let mut c = Config::new(&v).unwrap();
    c.leave_out(&["model_max_length"]);
    assert_eq!((c.size_or(&["model_max_length"], 3).unwrap(), c.contains("model_max_length")), (3, false));
}

#[test]
fn sizes_are_bounded_and_typed() {
    let v = json!({"zero": 0, "huge": 1e18 as u64, "minus": -4, "text": "8", "float": 1.5, "ok": 7});
    let mut c = Config::new(&v).unwrap();
    for key in ["zero", "huge", "minus", "text", "float", "absent"] {
        assert!(c.size(&[key]).is_err(), "{key}");
    }
    assert_eq!(c.size(&["absent", "ok"]).unwrap(), 7);
}

#[test]
fn lists_may_have_nulls_or_be_texts_where_the_reader_says_so() {
    let v = json!({"text": "3, 4,5,", "list": [3, 4], "bad": "3,x", "huge": "99999999999", "nulls": [null, 1.5]});
    let mut c = Config::new(&v).unwrap();
    assert_eq!(c.opt_counts_or_text("text").unwrap(), Some(vec![3, 4, 5]));
    assert_eq!(c.opt_counts_or_text("list").unwrap(), Some(vec![3, 4]));
    assert_eq!(c.opt_counts_or_text("absent").unwrap(), None);
    assert!(c.opt_counts_or_text("bad").is_err() && c.opt_counts_or_text("huge").is_err());
    assert_eq!(c.opt_numbers_or("nulls", 0.0).unwrap(), Some(vec![0.0, 1.5]));
    assert!(c.opt_numbers_or("text", 0.0).is_err());
}

#[test]
fn limits_may_be_infinite_and_are_in_order() {
    let read = |v: Value| Config::new(&json!({ "k": v })).unwrap().opt_limits("k").ok();
    assert_eq!(read(json!([0.0, {"__float__": "Infinity"}])), Some(Some([0.0, f64::INFINITY])));
    assert_eq!(read(json!([{"__float__": "-Infinity"}, 2])), Some(Some([f64::NEG_INFINITY, 2.0])));
    assert_eq!((read(json!(null)), read(json!([1.5, 1.5]))), (Some(None), Some(Some([1.5, 1.5]))));
    for bad in [json!([2, 1]), json!([1]), json!(["x", 1]), json!([{"__float__": "NaN"}, 1]), json!(3)] {
        assert_eq!(read(bad.clone()), None, "{bad}");
    }
}

#[test]
fn a_size_may_be_auto() {
    let v = json!({"auto": "auto", "given": 3, "other": "some"});
    let mut c = Config::new(&v).unwrap();
    assert_eq!((c.opt_size_or_auto(&["auto"]).unwrap(), c.opt_size_or_auto(&["given"]).unwrap()), (None, Some(3)));
    assert!(c.opt_size_or_auto(&["absent"]).unwrap().is_none() && c.opt_size_or_auto(&["other"]).is_err());
}

#[test]
fn a_size_of_layers_is_one_number_or_the_same_for_all() {
    let read = |v: Value| Config::new(&json!({ "k": v })).unwrap().opt_size_of_layers(&["k"], 2).ok();
    assert_eq!(read(json!(3)), Some(Some(3)));
    assert_eq!(read(json!(null)), Some(None));
    assert_eq!((read(json!([3, 3])), read(json!([3, 3, 3]))), (Some(Some(3)), Some(Some(3))));
    for other in [json!([3]), json!([3, 4]), json!([]), json!([0, 0]), json!([3, "3"]), json!([1e18, 1e18])] {
        assert_eq!(read(other.clone()), None, "{other}");
    }
}
