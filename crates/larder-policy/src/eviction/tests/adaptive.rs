//! ARC, LeCaR and S3-FIFO, one request at a time, against their textbook form on plain lists.

use larder_core::CacheScope;
use proptest::prelude::*;

use super::rig::{Rig, no_future};
use super::*;

const KEYS: usize = 18;

/// A whole cache: whether each request is a hit.
trait Naive {
    fn request(&mut self, key: usize) -> bool;
}

fn take(list: &mut Vec<usize>, key: usize) -> bool {
    let at = list.iter().position(|k| *k == key);
    at.map(|at| list.remove(at)).is_some()
}

/// Lists from the least to the most recently used.
#[derive(Default)]
struct Arc {
    slots: usize,
    t: [Vec<usize>; 2],
    b: [Vec<usize>; 2],
    p: f64,
}

impl Arc {
    fn replace(&mut self, in_b2: bool) {
        let t1 = self.t[0].len() as f64;
        let from_t1 = t1 > 0.0 && (t1 > self.p || (in_b2 && t1 == self.p)) || self.t[1].is_empty();
        let i = usize::from(!from_t1);
        let out = self.t[i].remove(0);
        self.b[i].push(out);
    }
}

impl Naive for Arc {
    fn request(&mut self, key: usize) -> bool {
        if take(&mut self.t[0], key) || take(&mut self.t[1], key) {
            self.t[1].push(key);
            return true;
        }
        let full = self.t[0].len() + self.t[1].len() == self.slots;
        let (b1, b2) = (self.b[0].len() as f64, self.b[1].len() as f64);
        if take(&mut self.b[0], key) {
            self.p = (self.p + (b2 / b1).max(1.0)).min(self.slots as f64);
            self.replace(false);
            self.t[1].push(key);
        } else if take(&mut self.b[1], key) {
            self.p = (self.p - (b1 / b2).max(1.0)).max(0.0);
            self.replace(true);
            self.t[1].push(key);
        } else {
            if full && self.t[0].len() + self.b[0].len() == self.slots {
                if self.b[0].is_empty() {
                    self.t[0].remove(0);
                } else {
                    self.b[0].remove(0);
                    self.replace(false);
                }
            } else if full {
                if self.t.iter().chain(&self.b).map(Vec::len).sum::<usize>() == 2 * self.slots {
                    self.b[1].remove(0);
                }
                self.replace(false);
            }
            self.t[0].push(key);
        }
        false
    }
}

struct Lecar {
    slots: usize,
    /// From the least to the most recently used, each with its uses.
    inside: Vec<(usize, usize)>,
    /// The ghosts of each rule, and when they were evicted.
    ghosts: [Vec<(usize, u64)>; 2],
    weights: [f64; 2],
    time: u64,
    draw: u128,
}

impl Naive for Lecar {
    fn request(&mut self, key: usize) -> bool {
        self.time += 1;
        if let Some(at) = self.inside.iter().position(|(k, _)| *k == key) {
            let (_, uses) = self.inside.remove(at);
            self.inside.push((key, uses + 1));
            return true;
        }
        for rule in 0..2 {
            if let Some(at) = self.ghosts[rule].iter().position(|(k, _)| *k == key) {
                let (_, then) = self.ghosts[rule].remove(at);
                let regret = 0.005f64.powf(1.0 / self.slots as f64).powf((self.time - then) as f64);
                let mut w = self.weights;
                w[rule] = w[rule] * (-0.45 * regret).exp() + 1e-10;
                let sum = w[0] + w[1] + 2e-10;
                w[1 - rule] += 1e-10;
                self.weights = w.map(|w| w / sum);
            }
        }
        if self.inside.len() == self.slots {
            let least = self.inside.iter().map(|(_, uses)| *uses).min().unwrap();
            let frequent = self.inside.iter().position(|(_, uses)| *uses == least).unwrap();
            if frequent == 0 {
                self.inside.remove(0);
            } else {
                self.draw = self.draw.wrapping_mul(0xda942042e4dd58b5);
                let share = ((self.draw >> 64) as u64 % 100) as f64 / 100.0;
                let rule = usize::from(share >= self.weights[0]);
                let (out, _) = self.inside.remove([0, frequent][rule]);
                self.ghosts[rule].push((out, self.time));
                if self.ghosts[rule].len() > self.slots / 2 {
                    self.ghosts[rule].remove(0);
                }
            }
        }
        self.inside.push((key, 1));
        false
    }
}

#[derive(Default)]
struct S3Fifo {
    slots: usize,
    /// Oldest first, each with its uses.
    small: Vec<(usize, usize)>,
    main: Vec<(usize, usize)>,
    ghosts: Vec<usize>,
    full: bool,
}

impl S3Fifo {
    fn evict(&mut self) {
        self.full = true;
        let small = self.slots / 10;
        if self.main.len() <= self.slots - small {
            while !self.small.is_empty() {
                let (key, uses) = self.small.remove(0);
                if uses < 2 {
                    self.ghosts.push(key);
                    if self.ghosts.len() > self.slots * 9 / 10 {
                        self.ghosts.remove(0);
                    }
                    return;
                }
                self.main.push((key, 0));
            }
        }
        loop {
            let (key, uses) = self.main.remove(0);
            if uses == 0 {
                return;
            }
            self.main.push((key, uses.min(3) - 1));
        }
    }
}

impl Naive for S3Fifo {
    fn request(&mut self, key: usize) -> bool {
        if let Some((_, uses)) = self.small.iter_mut().chain(&mut self.main).find(|(k, _)| *k == key) {
            *uses += 1;
            return true;
        }
        let ghost = take(&mut self.ghosts, key);
        if self.small.len() + self.main.len() == self.slots {
            self.evict();
        }
        if ghost || (!self.full && self.small.len() >= self.slots / 10) {
            self.main.push((key, 0));
        } else {
            self.small.push((key, 0));
        }
        false
    }
}

fn naive(name: &str, slots: usize) -> Box<dyn Naive> {
    match name {
        "arc" => Box::new(Arc { slots, ..Arc::default() }),
        "s3fifo" => Box::new(S3Fifo { slots, ..S3Fifo::default() }),
        _ => Box::new(Lecar {
            slots,
            inside: vec![],
            ghosts: [vec![], vec![]],
            weights: [0.5; 2],
            time: 0,
            draw: 0xdead_beef,
        }),
    }
}

proptest! {
    #[test]
    fn behaves_as_the_textbook_says(
        // Low keys far more often than high ones.
        requests in prop::collection::vec((0..KEYS, 0..KEYS).prop_map(|(a, b)| a.min(b)), 1..600),
        slots in 1usize..16,
        query_worst in any::<bool>(),
    ) {
        let shape = CacheShape { rows: 1, experts: KEYS, top_k: 1, slots, scope: CacheScope::Global, scratch: 0 };
        for name in ["arc", "lecar", "s3fifo"] {
            let mut rig = Rig::new(name, &shape, no_future());
            let mut naive = naive(name, slots);
            for (i, key) in requests.iter().enumerate() {
                let misses = rig.misses;
                rig.serve(MoeRow(0), &[*key]);
                prop_assert_eq!(naive.request(*key), rig.misses == misses, "{} at request {}", name, i);
                if query_worst && name != "s3fifo" {
                    rig.check_worst();
                }
            }
        }
    }
}
