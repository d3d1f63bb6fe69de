//! Eviction policies on a fixed trace, and the commands of the lab.

use std::fmt::Write;
use std::path::Path;

use larder_core::{CacheScope, Trace};
use larder_lab::{InitialCache, ReplaySweep, Requests, SweepAxes, SweepCell, eighths};
use larder_policy::eviction::{EvictionSpec, PolicyInputs, compared_specs};

use crate::support::reference::Reference;
use crate::support::report_page::{PageTable, check_frame, csv_lines};
use crate::support::{fixture, larder, larder_ok, larder_refuses};

fn slice() -> Trace {
    Trace::read(fixture("traces/gpt-oss-slice.safetensors")).unwrap()
}

/// Every policy that needs nothing but the trace, at eight capacities in both scopes.
fn cells(start: InitialCache) -> Vec<SweepCell> {
    let trace = slice();
    let requests = Requests::all(&trace);
    let setting = requests.cache_shape(1, CacheScope::Layer, 0).unwrap();
    let can =
        |spec: &EvictionSpec| spec.make(&setting, &requests.policy_inputs(spec, &PolicyInputs::default())).is_ok();
    let specs: Vec<_> = compared_specs().filter(can).collect();
    let (slots, scopes) = (eighths(trace.experts), [CacheScope::Layer, CacheScope::Global]);
    let axes = SweepAxes { policies: &specs, routings: &[], slots: &slots, scopes: &scopes, scratch: 0 };
    ReplaySweep::new(&trace, &axes, &PolicyInputs::default(), start).unwrap().run(2, &|_| ()).unwrap()
}

/// A line for each policy, scope and start, the misses at each capacity behind it.
fn table(all: &[(InitialCache, Vec<SweepCell>)]) -> String {
    let mut out = String::from("# misses at 4, 8, … 32 slots per layer\n");
    for (start, cells) in all {
        let mut sorted: Vec<&SweepCell> = cells.iter().collect();
        sorted.sort_by_key(|c| (c.scope == CacheScope::Global, c.policy.clone()));
        for line in sorted.chunk_by(|a, b| (a.scope, &a.policy) == (b.scope, &b.policy)) {
            let _ = write!(out, "{start} {} {}", line[0].scope, line[0].policy);
            line.iter().for_each(|c| write!(out, " {}", c.replayed.counts.misses).expect("strings grow"));
            out.push('\n');
        }
    }
    out
}

/// A change here is a change of a policy. If it is meant: run with `LARDER_BLESS=1`, and read the difference.
#[test]
fn misses_are_those_of_the_golden_table() {
    let path = fixture("traces/misses.txt");
    let found = table(&[InitialCache::Cold, InitialCache::Carried].map(|start| (start, cells(start))));
    if std::env::var_os("LARDER_BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    let changed: Vec<_> = found.lines().filter(|line| !golden.lines().any(|g| g == *line)).collect();
    assert!(found == golden, "the table is now\n{found}\nand these lines are new\n{}", changed.join("\n"));
}

#[test]
fn nobody_beats_belady_and_everybody_is_equal_when_all_fits() {
    for start in [InitialCache::Cold, InitialCache::Carried] {
        let cells = cells(start);
        for cell in &cells {
            let same = |c: &&SweepCell| c.policy == "belady" && (c.scope, c.slots) == (cell.scope, cell.slots);
            let best = cells.iter().find(same).unwrap().replayed.counts;
            let counts = cell.replayed.counts;
            let name = format!("{} {} {} {start}", cell.policy, cell.scope, cell.slots);
            assert!(counts.misses >= best.misses, "{name}: {} against {}", counts.misses, best.misses);
            assert!(cell.slots < 32 || (counts.rereads, counts.evictions) == (0, 0), "{name}");
            assert!(cell.slots > 16 || counts.evictions > 100, "{name}: nothing was evicted");
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_drawn_trace_goes_through_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (trace, csv, again) = (at("a.safetensors"), at("a.csv"), at("b.safetensors"));
    let (html, table) = (at("sweep.html"), at("sweep.csv"));
    let shape = ["--layers", "3", "--experts", "8", "-k", "2", "-n", "40", "--seed", "5"];
    larder_ok(&[&["lab", "synth", "-o", text(&trace)][..], &shape].concat());
    larder_ok(&["lab", "export", text(&trace), "-o", text(&csv)]);
    larder_ok(&["lab", "import", text(&csv), "-o", text(&again), "--experts", "8"]);
    let replay = |path: &Path| larder_ok(&["lab", "replay", text(path), "--eviction", "lfu", "--json"]);
    let misses = |out: String| serde_json::from_str::<serde_json::Value>(&out).unwrap()["sequence_misses"].clone();
    assert_eq!(misses(replay(&trace)), misses(replay(&again)));
    assert_eq!(misses(replay(&trace)).as_array().unwrap().len(), 4);

    let flags =
        ["--html", text(&html), "--heat-passes", "3..20", "--expert-bytes", "13M", "--json", "--csv", text(&table)];
    larder_ok(&[&["lab", "sweep", text(&trace)][..], &flags].concat());
    let page = std::fs::read_to_string(html).unwrap();
    assert!(
        page.contains("belady, layer 1, 2 slots: ") && page.contains("tokens per second"),
        "the page lacks its pictures"
    );
    check_frame(&page, "larder lab sweep");
    let tables = PageTable::with(&page, "hit_rate");
    let mut lines = csv_lines(&table);
    // The page has a table per scope, the file has a line per policy, scope and capacity.
    lines.sort_by_key(|line| line[1].1 != "layer");
    let rows = || tables.iter().flat_map(|table| (0..table.names.len()).map(move |row| (table, row)));
    assert_eq!((tables.len(), rows().count()), (2, lines.len()));
    for ((table, row), line) in rows().zip(&lines) {
        assert_eq!(table.names[row], line[0].1);
        assert!(table.compare(row, line) >= 12, "{line:?}");
    }

    let sizes = ["--to", "oracle-general", "--sequences", "1..3"];
    let said = larder_ok(&[&["lab", "export", text(&trace), "-o", text(&csv), "--force"][..], &sizes].concat());
    assert!(said.contains("480 requests of 24 objects"), "{said}");
    assert_eq!(std::fs::metadata(&csv).unwrap().len(), 480 * 24);
}

#[test]
fn a_sweep_over_routing_is_its_replays() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (ids, trace) = (at("ids.json"), at("trace.safetensors"));
    let folder = fixture("golden/olmoe");
    let tokens = Reference::read(&folder).tokens("full_ids");
    std::fs::write(&ids, serde_json::to_string(&tokens.repeat(3)).unwrap()).unwrap();
    let record = ["--chunk", "24", "--one-by-one", "--trace", text(&trace), "--trace-logits"];
    larder_ok(&[&["eval", "ppl", text(&ids), "-m", text(&folder)][..], &record].concat());

    let flags = ["--eviction", "lru", "--eviction", "belady", "--routing", "prior:lambda=1", "--cache", "3x,4x"];
    let sweep = [&["lab", "sweep", text(&trace)][..], &flags, &["--scope", "layer", "--json"]].concat();
    let found: serde_json::Value = serde_json::from_str(&larder_ok(&sweep)).unwrap();
    let rows = found["rows"].as_array().unwrap();
    let policies: Vec<_> = rows.iter().map(|row| row["policy"].as_str().unwrap()).collect();
    assert_eq!(policies[..3], ["lru", "belady", "prior:lambda=1 + lru"]);
    assert_eq!(policies.len(), 6);
    for (row, slots) in [(&rows[0], "3x"), (&rows[2], "3x"), (&rows[3], "4x"), (&rows[5], "4x")] {
        let routing = row["policy"].as_str().unwrap().split_once(" + ").map(|(routing, _)| routing);
        let again = routing.map_or(vec![], |routing| vec!["--routing", routing]);
        let replay = [&["lab", "replay", text(&trace), "--cache", slots, "--json"][..], &again].concat();
        let alone: serde_json::Value = serde_json::from_str(&larder_ok(&replay)).unwrap();
        assert_eq!(alone["sequence_misses"], row["sequence_misses"], "{slots} {routing:?}");
        assert_eq!(routing.is_some(), row["kept_mass"].as_f64().is_some_and(|kept| kept > 0.5 && kept < 1.0));
    }
}

#[test]
fn trained_weights_are_judged_on_what_they_have_not_seen() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (trace, ours, theirs) = (at("trace.safetensors"), at("ours.safetensors"), at("theirs.safetensors"));
    let shape = ["--layers", "2", "--experts", "8", "-k", "2", "-n", "40", "--sequences", "8"];
    larder_ok(&[&["lab", "synth", "-o", text(&trace)][..], &shape].concat());
    let mut said = String::new();
    for (form, out) in [("flashmoe", &theirs), ("crosslayer", &ours)] {
        let flags = ["--form", form, "--epochs", "2", "--choose", "1", "--judge", "3"];
        said = larder_ok(&[&["lab", "train", text(&trace), "-o", text(out)][..], &flags].concat());
    }
    let judge = ["lab", "judge", text(&trace), "--evictor", text(&ours)];
    let against = ["--unseen", "--against", text(&theirs), "--against", "lru", "--against", "belady"];
    let judged = larder_ok(&[&judge[..], &against].concat());
    let table = said.split_once('\n').unwrap().1;
    assert!(judged.starts_with(table), "{judged}\n{said}");
    assert!(judged.contains("theirs.safetensors") && judged.contains("100.0; -"), "{judged}");
    let refused = |more: &[&str]| larder_refuses(&[&judge[..], more].concat());
    assert!(refused(&["--against", "psychic"]).contains("neither a file nor an eviction policy"));
    assert!(refused(&["--against", text(&trace)]).contains("weights for eviction"));
    let shorter = at("shorter.safetensors");
    larder_ok(&[&["lab", "synth", "-o", text(&shorter)][..], &shape[..8], &["--sequences", "2"]].concat());
    let other = ["lab", "judge", text(&shorter), "--evictor", text(&ours), "--unseen"];
    assert!(larder_refuses(&other).contains("not the trace of the training"));
}

#[test]
fn what_cannot_be_replayed_is_refused_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let trace = fixture("traces/gpt-oss-slice.safetensors");
    let other = dir.path().join("other.safetensors");
    larder_ok(&["lab", "synth", "-o", text(&other), "--layers", "2", "-n", "5"]);
    let replay = |more: &[&str]| larder_refuses(&[&["lab", "replay", text(&trace)][..], more].concat());
    assert!(replay(&["--cache", "0x"]).contains("capacity of 0"));
    assert!(replay(&["--cache", "33x"]).contains("more than the 32 experts"));
    assert!(replay(&["--sequences", "3..9"]).contains("beyond the 4 sequences"));
    assert!(replay(&[text(&other)]).contains("different models"));
    assert!(replay(&["--expert-bytes", "1M", "--overlap", "2"]).contains("overlap"));
    let sweep = ["lab", "sweep", text(&trace), "--cache", "4x,0x"];
    assert!(larder_refuses(&sweep).contains("capacity of 0"));
    let model = fixture("golden/olmoe/model.safetensors");
    assert!(larder_refuses(&["lab", "replay", text(&model)]).contains("is not a larder trace"));
    let short = dir.path().join("short.safetensors");
    let bytes = std::fs::read(&trace).unwrap();
    std::fs::write(&short, &bytes[..bytes.len() / 2]).unwrap();
    assert!(larder_refuses(&["lab", "replay", text(&short)]).contains("short.safetensors"));
    assert!(larder_refuses(&["lab", "import", text(dir.path()), "-o", text(&other), "--force"]).contains("index.json"));
    assert_eq!(larder(&["lab", "replay", text(&trace), "--eviction", "psychic"]).status.code(), Some(2));
}

#[test]
fn a_model_whose_tokens_may_use_no_expert_has_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let (model, trace) = (fixture("golden/zaya"), dir.path().join("trace.safetensors"));
    let said = larder_refuses(&["run", "-m", text(&model), "-p", "a", "-n", "2", "--trace", text(&trace)]);
    assert!(said.contains("may use no expert in a layer, which a trace cannot hold"), "{said}");
    assert!(!trace.exists());
}
