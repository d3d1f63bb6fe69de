//! An eviction policy of one's own, run in a replay against lru: CLOCK, which keeps experts in order of arrival
//! and gives each one that was used since a second chance. `cargo run --release -p larder-lab --example own_policy`

use std::collections::VecDeque;
use std::error::Error;
use std::path::Path;

use larder_core::{CacheScope, Trace};
use larder_lab::{Requests, replay_policies};
use larder_policy::eviction::{CacheShape, Eviction, EvictionSpec, Key, PolicyInputs};

/// The experts of one pool, the one whose turn comes next in front.
struct Clock {
    ring: VecDeque<Key>,
    /// Whether an expert was used since its last turn, by key.
    used: Vec<bool>,
}

impl Clock {
    /// One object for each pool of the cache.
    fn for_pools(shape: &CacheShape) -> Vec<Box<dyn Eviction>> {
        let clock = || Clock { ring: VecDeque::new(), used: vec![false; shape.keys_per_pool()] };
        (0..shape.pools()).map(|_| Box::new(clock()) as Box<dyn Eviction>).collect()
    }
}

impl Eviction for Clock {
    fn admit(&mut self, key: Key) {
        self.used[key.index()] = false;
        self.ring.push_back(key);
    }

    fn touch(&mut self, key: Key) {
        self.used[key.index()] = true;
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        // After one round every mark is gone, so two rounds find a victim if there is one.
        for _ in 0..2 * self.ring.len() {
            let key = *self.ring.front()?;
            if evictable(key) && !std::mem::take(&mut self.used[key.index()]) {
                return Some(key); // it leaves the ring with `forget`
            }
            self.ring.rotate_left(1);
        }
        None
    }

    fn forget(&mut self, key: Key) {
        self.ring.retain(|other| *other != key);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces/gpt-oss-slice.safetensors");
    let trace = Trace::read(&path)?;
    let requests = Requests::all(&trace);
    let lru: EvictionSpec = "lru".parse()?;
    println!("{} requests of {} tokens", requests.len(), requests.tokens());
    for slots in [8, 12, 16, 24] {
        let shape = requests.cache_shape(slots, CacheScope::Layer, 0)?;
        let known = replay_policies(&requests, &shape, lru.make(&shape, &PolicyInputs::default())?);
        let own = replay_policies(&requests, &shape, Clock::for_pools(&shape));
        let (known, own) = (known.counts.misses, own.counts.misses);
        let change = 100.0 * (own as f64 - known as f64) / known as f64;
        println!("{slots:2} slots per layer: lru {known} misses, clock {own} ({change:+.1} %)");
    }
    Ok(())
}
