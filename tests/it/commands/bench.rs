//! `larder bench --llama-bench`: rows that stand beside those of llama-bench.

use serde_json::Value;

use crate::support::{fixture, larder, larder_ok};

/// The fields of CSV of llama-bench (build 5163), in their order.
const LLAMA_FIELDS: &str = "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,\
    model_n_params,n_batch,n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,n_gpu_layers,split_mode,main_gpu,\
    no_kv_offload,flash_attn,tensor_split,tensor_buft_overrides,use_mmap,embeddings,n_prompt,n_gen,n_depth,test_time,\
    avg_ns,stddev_ns,avg_ts,stddev_ts";

/// A table as llama-bench prints it on a CPU.
const LLAMA_TABLE: &str = "\
| model                          |       size |     params | backend    | threads |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | --------------: | -------------------: |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CPU        |       2 |    pp512 @ d512 |         64.25 ± 0.88 |
";

const TESTS: [&str; 4] = ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"];

fn rows(format: &str) -> String {
    let demo = fixture("../models/demo");
    let flags = ["-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "--cache", "8x", "--threads", "2"];
    larder_ok(&[&["bench", "-m", demo.to_str().unwrap(), "--llama-bench", format][..], &flags].concat())
}

/// The values of a line of CSV, each of which is quoted.
fn values(line: &str) -> Vec<&str> {
    let inside = line.strip_prefix('"').and_then(|line| line.strip_suffix('"'));
    inside.unwrap_or_else(|| panic!("{line}")).split("\",\"").collect()
}

#[test]
fn json_and_csv_have_fields_of_llama_bench() {
    let json: Vec<Value> = serde_json::from_str(&rows("json")).unwrap();
    let csv = rows("csv");
    let (heading, lines) = csv.split_once('\n').unwrap();
    let mut theirs = LLAMA_FIELDS.split(',');
    for field in heading.split(',') {
        assert!(theirs.any(|known| known == field), "{field} is not a field of llama-bench in this place");
    }
    assert_eq!((json.len(), lines.lines().count()), (TESTS.len(), TESTS.len()));
    for (row, line) in json.iter().zip(lines.lines()) {
        assert_eq!(row.as_object().unwrap().len(), heading.split(',').count() + 2, "{row}");
        for (field, value) in heading.split(',').zip(values(line)) {
            match &row[field] {
                Value::String(text) if field != "test_time" => assert_eq!(text, value, "{field}"),
                Value::Number(number) if !["avg", "stddev"].iter().any(|part| field.starts_with(part)) => {
                    assert_eq!(number.to_string(), value, "{field}");
                }
                // Another run has other times.
                Value::String(time) => assert_eq!((time.len(), value.len()), (20, 20), "{field}"),
                Value::Number(_) => assert!(value.parse::<f64>().unwrap() >= 0.0, "{field}"),
                other => panic!("{field}: {other}"),
            }
        }
    }
}

#[test]
fn averages_are_those_of_the_samples() {
    let json: Vec<Value> = serde_json::from_str(&rows("json")).unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value}"));
    for row in &json {
        let tokens = number(&row["n_prompt"]) + number(&row["n_gen"]);
        let (times, rates) = (row["samples_ns"].as_array().unwrap(), row["samples_ts"].as_array().unwrap());
        assert_eq!((times.len(), rates.len()), (2, 2), "{row}");
        for (time, rate) in times.iter().zip(rates) {
            assert!((tokens * 1e9 / number(time) / number(rate) - 1.0).abs() < 1e-6, "{row}");
        }
        let mean = (number(&rates[0]) + number(&rates[1])) / 2.0;
        assert!((number(&row["avg_ts"]) / mean - 1.0).abs() < 1e-9, "{row}");
        let deviation = (number(&rates[0]) - number(&rates[1])).abs() / 2_f64.sqrt();
        assert!((number(&row["stddev_ts"]) - deviation).abs() < 1e-6 * mean, "{row}");
    }
    let shapes: Vec<[u64; 3]> =
        json.iter().map(|row| ["n_prompt", "n_gen", "n_depth"].map(|field| row[field].as_u64().unwrap())).collect();
    assert_eq!(shapes, [[8, 0, 0], [0, 4, 0], [8, 0, 16], [0, 4, 16]]);
}

/// The cells of each row of a Markdown table below its heading, and the two lines of that.
fn table(text: &str) -> (Vec<&str>, Vec<Vec<&str>>) {
    let mut lines = text.lines();
    let heading = lines.by_ref().take(2).collect();
    (heading, lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect())
}

#[test]
fn a_row_of_llama_bench_fits_below_the_table() {
    let ours = rows("md");
    let both = ours.clone() + LLAMA_TABLE.lines().last().unwrap();
    let ((heading, rows), (theirs, _)) = (table(&both), table(LLAMA_TABLE));
    assert_eq!(heading, theirs);
    let tests: Vec<&str> = rows.iter().map(|row| row[5]).collect();
    assert_eq!(tests, [&TESTS[..], &["pp512 @ d512"]].concat());
    for row in &rows {
        let (rate, deviation) = row[6].split_once(" ± ").unwrap_or_else(|| panic!("{row:?}"));
        assert!(rate.parse::<f64>().unwrap() > 0.0 && deviation.parse::<f64>().unwrap() >= 0.0, "{row:?}");
        assert!(row[1].ends_with("iB") && (row[2].ends_with(" B") || row[2].ends_with(" M")), "{row:?}");
    }
    let widths: Vec<usize> = both.lines().map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|width| *width == widths[0]), "{both}");
    assert_eq!(rows[0][3..5], ["larder", "2"]);
}

#[test]
fn what_llama_bench_does_not_measure_is_refused_beside_it() {
    for flags in [&["--json"][..], &["--clients", "2"], &["--vs-resident"], &["--first-token", "8"]] {
        let line = [&["bench", "--llama-bench", "md"], flags].concat();
        assert_eq!(larder(&line).status.code(), Some(2), "{flags:?}");
    }
    let several = larder(&["bench", "-d", "0,16"]);
    assert!(String::from_utf8_lossy(&several.stderr).contains("several depths are for --llama-bench"));
}
