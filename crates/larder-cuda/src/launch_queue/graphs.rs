//! Graphs of launches that come again and again: a device starts their kernels sooner than launches of their own.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::launch_list::LaunchList;
use crate::driver::{Driver, GraphHandle, Launch};

/// The fewest launches of a graph.
const MIN_LAUNCHES: usize = 6;
/// How often the same launches are seen before they become a graph, which takes as long as a few tokens.
const SIGHTINGS: u32 = 3;
/// The most lists of launches that are known.
const MAX_KNOWN: usize = 512;

/// The graphs of a device.
#[derive(Default)]
pub struct Graphs {
    /// By hash.
    known: HashMap<u64, KnownLaunches>,
    lookups: u64,
    /// The device has no graphs, or could not make one.
    none: bool,
}

/// Launches that were seen.
struct KnownLaunches {
    list: LaunchList,
    sightings: u32,
    graph: Option<GraphHandle>,
    last_lookup: u64,
}

impl Graphs {
    /// The graph of these launches, if they came often enough.
    pub fn find(&mut self, list: &LaunchList, driver: &Arc<dyn Driver>) -> Option<GraphHandle> {
        if self.none || list.len() < MIN_LAUNCHES {
            return None;
        }
        self.lookups += 1;
        let hash = hash_of(list);
        if self.known.get(&hash).is_none_or(|known| known.list != *list) {
            self.learn(hash, list, driver);
        }
        let known = self.known.get_mut(&hash)?;
        known.sightings += 1;
        known.last_lookup = self.lookups;
        if known.graph.is_none() && known.sightings == SIGHTINGS {
            let launches: Vec<Launch> = list.iter().collect();
            // SAFETY: the callers of `launch` guaranteed it for this time. They are launched as a graph only when the same launches were
            // asked for again.
            known.graph = unsafe { driver.create_graph(&launches) }.unwrap_or_default();
            self.none = known.graph.is_none();
        }
        known.graph
    }

    /// Notes launches; if there are too many, in place of those that have not come for the longest time, without a graph if possible.
    fn learn(&mut self, hash: u64, list: &LaunchList, driver: &Arc<dyn Driver>) {
        let rank = |known: &KnownLaunches| (known.graph.is_some(), known.last_lookup);
        let oldest = self.known.iter().min_by_key(|(_, known)| rank(known)).map(|(hash, _)| *hash);
        let known = KnownLaunches { list: list.clone(), sightings: 0, graph: None, last_lookup: self.lookups };
        let same_hash = self.known.insert(hash, known);
        let oldest = if self.known.len() > MAX_KNOWN { oldest.and_then(|hash| self.known.remove(&hash)) } else { None };
        for graph in [same_hash, oldest].into_iter().flatten().filter_map(|known| known.graph) {
            destroy(graph, driver);
        }
    }

    /// Destroys all graphs.
    pub fn clear(&mut self, driver: &Arc<dyn Driver>) {
        for graph in self.known.drain().filter_map(|(_, known)| known.graph) {
            destroy(graph, driver);
        }
    }
}

fn destroy(graph: GraphHandle, driver: &Arc<dyn Driver>) {
    driver.drain();
    // SAFETY: it is not known any more, and nothing is in flight.
    unsafe { driver.destroy_graph(graph) };
}

fn hash_of(list: &LaunchList) -> u64 {
    let mut hasher = DefaultHasher::new();
    list.hash(&mut hasher);
    hasher.finish()
}
