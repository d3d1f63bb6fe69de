//! What the fuzz targets share: mutations of JSON that stay JSON, and a limit of processor time.

use std::time::Duration;

use serde_json::{Map, Value};

/// What one input may take in processor time; sanitizers and a busy machine make it several times slower.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Runs `step` and fails if it takes more processor time, over all threads, than [`PATIENCE`].
pub fn in_time<T>(step: impl FnOnce() -> T) -> T {
    let started = processor_time();
    let out = step();
    let taken = processor_time() - started;
    assert!(taken < PATIENCE, "one input took {taken:?} of processor time");
    out
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Mutates the JSON in the first `len` bytes of `data`: one to three edits of random nodes. What is not JSON, and every
/// fourth input, is mutated byte by byte. Returns the new length.
pub fn mutate_json(data: &mut [u8], len: usize, seed: u32) -> usize {
    let mut random = Random(u64::from(seed) << 1 | 1);
    let parsed = serde_json::from_slice::<Value>(&data[..len]).ok().filter(|_| random.below(4) > 0);
    let Some(mut value) = parsed else { return libfuzzer_sys::fuzzer_mutate(data, len, data.len()) };
    for _ in 0..=random.below(3) {
        edit(&mut value, &mut random);
    }
    let text = value.to_string();
    if text.len() > data.len() {
        return libfuzzer_sys::fuzzer_mutate(data, len, data.len());
    }
    data[..text.len()].copy_from_slice(text.as_bytes());
    text.len()
}

/// One edit of one random node.
fn edit(root: &mut Value, random: &mut Random) {
    let count = nodes(root);
    let donor = node(root, random.below(count)).clone();
    let chosen = node(root, random.below(count));
    match random.below(8) {
        0 => *chosen = donor,
        1 => *chosen = Value::Array(vec![chosen.take(); random.below(4)]),
        2 => *chosen = serde_json::json!({"type": "Sequence", "processors": [chosen.clone(), donor]}),
        3 => remove_one(chosen, random),
        4 => repeat(chosen, random),
        _ => *chosen = leaf(chosen, random),
    }
}

fn remove_one(value: &mut Value, random: &mut Random) {
    match value {
        Value::Array(list) if !list.is_empty() => drop(list.remove(random.below(list.len()))),
        Value::Object(map) if !map.is_empty() => {
            let key = map.keys().nth(random.below(map.len())).cloned().expect("the map has that many keys");
            map.remove(&key);
        }
        other => *other = Value::Null,
    }
}

fn repeat(value: &mut Value, random: &mut Random) {
    let times = 1 << random.below(8);
    match value {
        Value::Array(list) if !list.is_empty() => {
            let one = list[random.below(list.len())].clone();
            list.extend(std::iter::repeat_n(one, times.min(1 + 4096 / list.len())));
        }
        Value::String(text) => *text = text.repeat(times.min(1 + 4096 / text.len().max(1))),
        Value::Object(map) => {
            let one = map.values().next().cloned().unwrap_or_default();
            map.extend((0..times).map(|i| (format!("key {i}"), one.clone())).collect::<Map<_, _>>());
        }
        other => *other = leaf(other, random),
    }
}

fn leaf(old: &Value, random: &mut Random) -> Value {
    const NUMBERS: [f64; 14] =
        [0.0, -0.0, 1.0, -1.0, 2.0, 7.0, 8.0, 255.0, 65536.0, 4294967296.0, 9.3e18, 1e-300, 1e300, 0.5];
    const TEXTS: [&str; 12] =
        ["", " ", "a", "(a+)+$", ".*", "\u{0}", "▁", "Ġ", "../x", "9999999999999999999", "\u{1b}[2J", "<|x|>"];
    match (old, random.below(6)) {
        (Value::Number(number), 0..3) => {
            let factor = [2.0, 0.5, -1.0, 1.0 + 1e-9][random.below(4)];
            let (whole, value) = (number.is_i64() || number.is_u64(), number.as_f64().unwrap_or_default() * factor);
            if whole { Value::from(value as i64) } else { Value::from(value) }
        }
        (_, 0 | 1) => Value::from(NUMBERS[random.below(NUMBERS.len())]),
        (_, 2) => Value::from(NUMBERS[random.below(NUMBERS.len())] as i64),
        (_, 3) => Value::from(random.below(2) == 0),
        (_, 4) => Value::from(TEXTS[random.below(TEXTS.len())]),
        _ => Value::Null,
    }
}

/// Number of nodes of a tree.
fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(nodes).sum(),
        Value::Object(map) => map.values().map(nodes).sum(),
        _ => 0usize,
    }
}

/// Node number `at` in depth-first order.
fn node(value: &mut Value, at: usize) -> &mut Value {
    if at == 0 {
        return value;
    }
    let children: Vec<&mut Value> = match value {
        Value::Array(list) => list.iter_mut().collect(),
        Value::Object(map) => map.values_mut().collect(),
        _ => unreachable!("leaves have no further nodes"),
    };
    let mut at = at - 1;
    for child in children {
        let count = nodes(child);
        if at < count {
            return node(child, at);
        }
        at -= count;
    }
    unreachable!("the number is below the count of nodes")
}

/// A seeded stream of pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}
