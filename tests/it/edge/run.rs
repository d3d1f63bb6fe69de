//! A model whose experts are computed by several processes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Signal, command, fixture, golden_models, larder, larder_ok, larder_refuses, signal};

/// A worker, ended when it is dropped.
pub struct Worker {
    child: Child,
    name: &'static str,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Worker {
    /// With a name, a model and further flags.
    pub fn start(name: &'static str, model: &Path, flags: &[&str]) -> Worker {
        Worker::start_at(name, model, "127.0.0.1:0", flags)
    }

    /// The same, at this address.
    pub fn start_at(name: &'static str, model: &Path, listen: &str, flags: &[&str]) -> Worker {
        let mut child = command()
            .args(["edge", "worker", "-m", model.to_str().unwrap(), "--name", name, "--threads", "1"])
            .args(["--listen", listen])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut all = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(said.read_line(&mut line).unwrap() > 0, "the worker ended: {all}");
            if let Some((_, address)) = line.split_once(" on http://") {
                break address.trim().parse().unwrap();
            }
            all += &line;
        };
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Worker { child, name, address }
    }

    /// Sends it a signal.
    pub fn signal(&self, which: Signal) {
        signal(&self.child, which);
    }

    /// Waits until it has ended.
    pub fn exit_code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// The most memory that it had.
    pub fn peak(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with what says which machines there are.
pub struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// An empty one.
    pub fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap() }
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A topology of these addresses, the first of them the associated one and the last the one that has all.
    pub fn topology(&self, servers: &[(&str, SocketAddr)]) -> String {
        let mut text = "[device]\nstorage = \"1 MB\"\n".to_owned();
        for (i, (name, address)) in servers.iter().enumerate() {
            text += &format!("[[server]]\nname = \"{name}\"\naddress = \"http://{address}\"\ndelay = \"1 ms\"\n");
            text += &format!("associated = {}\nall = {}\n", i == 0, i + 1 == servers.len());
        }
        fs::write(self.path("topology.toml"), text).unwrap();
        self.path("topology.toml").to_str().unwrap().to_owned()
    }

    /// A placement of the demo model: a third on the desk, a third on the shelf, all on the cloud, the last expert of
    /// each layer here.
    fn placement(&self) -> String {
        let share = |of: fn(usize) -> bool| -> String {
            let layer = (0..32).filter(|e| of(*e)).map(|e| e.to_string()).collect::<Vec<_>>().join(", ");
            format!("experts = [{}]\n", vec![format!("[{layer}]"); 8].join(", "))
        };
        let text = format!(
            "version = 1\n[server.desk.demo]\n{}[server.shelf.demo]\n{}[server.cloud.demo]\n{}[device.demo]\n{}",
            share(|e| e % 3 == 0),
            share(|e| e % 3 == 1),
            share(|_| true),
            share(|e| e == 31)
        );
        fs::write(self.path("placement.toml"), text).unwrap();
        self.path("placement.toml").to_str().unwrap().to_owned()
    }

    /// The store without the shards of any expert but the last of each layer, so that the others must be asked for.
    pub fn thin(&self, store: &Path) -> PathBuf {
        let thin = self.path("thin");
        copy(store, &thin, &|path| {
            let is_shard = path.components().any(|part| part.as_os_str() == "experts");
            !is_shard || path.ends_with("E031.safetensors") || path.ends_with("E007.safetensors")
        });
        thin
    }
}

fn copy(from: &Path, to: &Path, wanted: &dyn Fn(&Path) -> bool) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target, wanted),
            false if wanted(&entry.path()) => drop(fs::copy(entry.path(), target).unwrap()),
            false => {}
        }
    }
}

/// The demo model's store.
pub fn demo() -> PathBuf {
    fixture("../models/demo").canonicalize().unwrap()
}

/// Three workers of the demo model, and the topology of them.
fn three(place: &Place) -> ([Worker; 3], String) {
    let placement = place.placement();
    let workers = ["desk", "shelf", "cloud"].map(|name| Worker::start(name, &demo(), &["--placement", &placement]));
    let servers = [0, 1, 2].map(|i| (workers[i].name, workers[i].address));
    let topology = place.topology(&servers);
    (workers, topology)
}

const PROMPT: [&str; 9] =
    ["-p", "Once upon a time", "--ignore-eos", "--temperature", "0", "--repetition-penalty", "1", "--threads", "1"];

/// The arguments of a generation.
pub fn run_args<'a>(model: &'a str, tokens: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
    [&["run", "-m", model, "-n", tokens][..], &PROMPT, flags].concat()
}

/// What a model writes.
pub fn text(model: &Path, tokens: &str, flags: &[&str]) -> String {
    larder_ok(&run_args(model.to_str().unwrap(), tokens, flags))
}

/// The file that `larder logits` writes.
fn logits(place: &Place, model: &Path, flags: &[&str]) -> Vec<u8> {
    let (tokens, out) = (place.path("tokens.json"), place.path("out.safetensors"));
    fs::write(&tokens, "[5, 17, 3, 3, 60, 41, 8, 101, 7, 12]").unwrap();
    let args = ["logits", "-m", model.to_str().unwrap(), "--tokens", tokens.to_str().unwrap(), "--threads", "1"];
    let rest = ["--out", out.to_str().unwrap(), "--force", "-o", "prefill-tokens=6", "--generate", "4"];
    larder_ok(&[&args[..], &rest, flags].concat());
    fs::read(out).unwrap()
}

#[test]
fn three_workers_write_what_one_machine_writes() {
    let place = Place::new();
    let (_workers, topology) = three(&place);
    let placement = place.placement();
    let thin = place.thin(&demo());
    let edge = ["--edge", &topology, "-o", &format!("edge-placement={placement}")];
    let want = logits(&place, &demo(), &["--cache=all"]);
    assert!(want == logits(&place, &thin, &edge), "other logits");
    assert!(want == logits(&place, &demo(), &[&edge[..], &["--cache", "3x"]].concat()), "other logits");
    let args = run_args(thin.to_str().unwrap(), "40", &edge);
    let json: Value = serde_json::from_str(&larder_ok(&[&args[..], &["--json"]].concat())).unwrap();
    assert_eq!(json["text"].as_str().unwrap(), text(&demo(), "40", &["--cache=all"]).trim_end_matches('\n'));
    let edge = &json["edge"];
    assert_eq!(edge["workers"].as_array().unwrap().len(), 3, "{json}");
    for worker in edge["workers"].as_array().unwrap() {
        assert!(worker["answers"].as_u64() > Some(0) && worker["failures"] == 0, "{edge}");
        assert!(worker["sent_bytes"].as_u64() > Some(1000) && worker["received_bytes"].as_u64() > Some(1000), "{edge}");
    }
    let said = larder(&args).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("desk: holds 88 of 256 experts") && said.contains(" by shelf ("), "{said}");
}

#[test]
fn every_kind_of_model_can_be_asked_for() {
    for model in golden_models() {
        let place = Place::new();
        let store = place.path("store");
        larder_ok(&["convert", model.to_str().unwrap(), store.to_str().unwrap()]);
        let worker = Worker::start("cloud", &store, &[]);
        let topology = place.topology(&[("cloud", worker.address)]);
        let want = logits(&place, &store, &["--cache=all"]);
        let shard =
            fs::read_dir(store.join("experts")).unwrap().next().unwrap().unwrap().path().join("E000.safetensors");
        let thin = place.path("thin");
        copy(&store, &thin, &|path| !path.starts_with(store.join("experts")) || path == shard);
        assert!(want == logits(&place, &thin, &["--edge", &topology]), "{}", model.display());
    }
}

#[test]
fn half_the_bytes_come_close() {
    let place = Place::new();
    let (_workers, topology) = three(&place);
    let thin = place.thin(&demo());
    // Of a request: how many there are depends on how fast workers seem.
    let bytes = |format: &str| -> f64 {
        let flags = ["--edge", &topology, "-o", &format!("edge-format={format}"), "--json"];
        let json: Value = serde_json::from_str(&text(&thin, "30", &flags)).unwrap();
        assert!(json["text"].as_str().unwrap().len() > 30, "{json}");
        let workers = json["edge"]["workers"].as_array().unwrap();
        let sum = |name: &str| workers.iter().map(|worker| worker[name].as_f64().unwrap()).sum::<f64>();
        sum("sent_bytes") / (sum("answers") + sum("failures"))
    };
    let (full, half) = (bytes("f32"), bytes("bf16"));
    assert!(half < 0.7 * full, "{half} of {full} bytes");
}

/// Long enough that something can happen on the way.
pub const TOKENS: &str = "250";

/// Starts writing, does something to the workers once text comes, and returns all that was written and said.
pub fn disturbed(model: &Path, flags: &[&str], disturb: impl FnOnce()) -> (Output, Duration) {
    let args = run_args(model.to_str().unwrap(), TOKENS, flags);
    let mut child = command().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 20];
    out.read_exact(&mut first).unwrap();
    disturb();
    let start = Instant::now();
    let mut all = first.to_vec();
    let rest = std::thread::spawn(move || {
        out.read_to_end(&mut all).unwrap();
        all
    });
    let mut output = child.wait_with_output().unwrap();
    output.stdout = rest.join().unwrap();
    (output, start.elapsed())
}

#[test]
fn a_worker_that_is_killed_or_stopped_in_the_middle_changes_nothing() {
    let place = Place::new();
    let want = text(&demo(), TOKENS, &["--cache=all"]);
    for signal in [Signal::KILL, Signal::STOP] {
        let (workers, topology) = three(&place);
        let flags = ["--edge", &topology, "-o", "edge-deadline=300", "--cache", "4x"];
        let (output, _) = disturbed(&demo(), &flags, || workers[0].signal(signal));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{signal:?} {said}");
    }
}

#[test]
fn where_the_ssd_cannot_help_another_worker_goes_on() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let want = text(&demo(), TOKENS, &["--cache=all"]);
    for signal in [Signal::KILL, Signal::STOP] {
        let workers = [Worker::start("near", &demo(), &[]), Worker::start("far", &demo(), &[])];
        // So that the near one is asked until it is gone.
        let (far, delay) = slow(workers[1].address);
        delay.store(1, Ordering::Relaxed);
        let topology = place.topology(&[("near", workers[0].address), ("far", far)]);
        let flags = ["--edge", &topology, "-o", "edge-deadline=300", "--cache", "4x"];
        let (output, _) = disturbed(&thin, &flags, || workers[0].signal(signal));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{signal:?} {said}");
        assert!(said.contains("rerouted after a failure; near "), "{signal:?} {said}");
    }
}

#[test]
fn without_anybody_left_it_ends_with_a_sentence_in_time() {
    let place = Place::new();
    let thin = place.thin(&demo());
    for signal in [Signal::KILL, Signal::STOP] {
        let (workers, topology) = three(&place);
        let flags = ["--edge", &topology, "-o", "edge-deadline=300", "--cache", "4x"];
        let (output, took) = disturbed(&thin, &flags, || workers.iter().for_each(|worker| worker.signal(signal)));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("not stored on this machine, and no worker can compute it: "), "{said}");
        assert!(took < Duration::from_secs(5), "{took:?}");
        let want = text(&demo(), TOKENS, &["--cache=all"]);
        assert!(want.starts_with(String::from_utf8_lossy(&output.stdout).trim_end_matches('\n')), "other text");
    }
}

/// Passes on what goes through it, as late as it is told.
pub fn slow(to: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let delay = Arc::new(AtomicU64::new(0));
    let told = delay.clone();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(to) else { continue };
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                let delay = told.clone();
                std::thread::spawn(move || {
                    let mut bytes = [0; 1 << 16];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        std::thread::sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
                        if to.write_all(&bytes[..n]).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    (address, delay)
}

#[test]
fn a_worker_that_becomes_slow_is_asked_less() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let workers = [Worker::start("near", &demo(), &[]), Worker::start("far", &demo(), &[])];
    let (address, delay) = slow(workers[0].address);
    let topology = place.topology(&[("near", address), ("far", workers[1].address)]);
    let args = run_args(thin.to_str().unwrap(), "60", &["--edge", &topology, "--json"]);
    let answers = || -> [u64; 2] {
        let json: Value = serde_json::from_str(&larder_ok(&args)).unwrap();
        [0, 1].map(|i| json["edge"]["workers"][i]["answers"].as_u64().unwrap())
    };
    delay.store(20, Ordering::Relaxed);
    let [near, far] = answers();
    assert!(near > 0 && near * 4 < far, "{near} and {far}");
}

#[test]
fn a_worker_with_another_model_is_named_and_left_alone() {
    let place = Place::new();
    let store = place.path("store");
    larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), store.to_str().unwrap()]);
    let worker = Worker::start("desk", &store, &[]);
    let topology = place.topology(&[("desk", worker.address)]);
    let output = larder(&run_args(demo().to_str().unwrap(), "20", &["--edge", &topology]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("warning: worker desk is not used for now: it serves another model"), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), text(&demo(), "20", &["--cache=all"]));
    let thin = place.thin(&demo());
    let said = larder_refuses(&run_args(thin.to_str().unwrap(), "20", &["--edge", &topology]));
    assert!(said.contains("desk serves another model"), "{said}");
}

#[test]
fn what_cannot_be_is_refused_in_one_sentence() {
    let place = Place::new();
    let thin = place.thin(&demo());
    let (thin, demo) = (thin.to_str().unwrap(), demo());
    let demo = demo.to_str().unwrap();
    let topology = place.path("none.toml");
    let topology = topology.to_str().unwrap();
    let placement = place.placement();
    let worker = |model, flags: &[&str]| {
        larder_refuses(&[&["edge", "worker", "-m", model, "--listen", "127.0.0.1:0"], flags].concat())
    };
    for (said, part) in [
        (larder_refuses(&run_args(thin, "5", &[])), "E000.safetensors"),
        (larder_refuses(&run_args(demo, "5", &["--edge", topology])), "none.toml"),
        (worker(thin, &["--placement", &placement, "--name", "desk"]), "places layer 0, expert 0 on desk, but"),
        (
            worker(demo, &["--placement", &placement, "--name", "attic"]),
            "has no entry for attic; it has entries for cloud, desk",
        ),
        (worker(demo, &["--cache", "1k"]), "at least"),
        (worker(demo, &["--cert", topology, "--key", topology]), "none.toml"),
        (worker("nowhere", &[]), "nowhere"),
    ] {
        assert!(said.contains(part), "{said}");
    }
    fs::write(topology, "[[server]]\nname = \"desk\"\naddress = \"192.168.1.2:7070\"\n").unwrap();
    let said = larder_refuses(&run_args(demo, "5", &["--edge", topology]));
    assert!(said.contains("the address of desk must begin with http:// or https://"), "{said}");
    let golden = fixture("golden/olmoe");
    let said = larder_refuses(&run_args(golden.to_str().unwrap(), "5", &["--edge", topology]));
    assert!(said.contains("make one with `larder convert"), "{said}");
}
