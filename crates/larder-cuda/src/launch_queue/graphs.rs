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
/// The most lists of launches that are known and are no graph.
const MAX_LISTS: usize = 512;
/// The most launches of all graphs: a device has memory for each, which no plan counts. A token of a large model has
/// some thousand.
const MAX_LAUNCHES: usize = 16_384;
/// How often a device may fail to make a graph before none is asked for.
const MAX_FAILURES: u32 = 3;

/// The graphs of a device.
#[derive(Default)]
pub struct Graphs {
    /// By hash.
    known: HashMap<u64, KnownLaunches>,
    lookups: u64,
    /// Number of the graphs, and of the launches in them.
    graphs: usize,
    launches: usize,
    failures: u32,
    /// The device has no graphs.
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
        if known.graph.is_none() && known.sightings >= SIGHTINGS {
            known.sightings = 0;
            let graph = self.make(list, driver)?;
            self.known.get_mut(&hash)?.graph = Some(graph);
        }
        self.known.get(&hash)?.graph
    }

    /// Makes a graph, if the device has room for it.
    fn make(&mut self, list: &LaunchList, driver: &Arc<dyn Driver>) -> Option<GraphHandle> {
        if self.launches + list.len() > MAX_LAUNCHES {
            self.forget(MAX_LAUNCHES / 2, driver);
        }
        let launches: Vec<Launch> = list.iter().collect();
        // SAFETY: the callers of `launch` guaranteed it for this time. They are launched as a graph only when the same
        // launches were asked for again.
        match unsafe { driver.create_graph(&launches) } {
            Ok(Some(graph)) => {
                (self.graphs, self.launches) = (self.graphs + 1, self.launches + list.len());
                return Some(graph);
            }
            Ok(None) => self.none = true,
            Err(_) => {
                // It may be that memory is short.
                self.forget(0, driver);
                self.failures += 1;
                self.none = self.failures == MAX_FAILURES;
            }
        }
        None
    }

    /// Notes launches; if there are too many lists, in place of those that have not come for the longest time.
    fn learn(&mut self, hash: u64, list: &LaunchList, driver: &Arc<dyn Driver>) {
        if self.known.len() - self.graphs >= MAX_LISTS {
            let lists = self.known.iter().filter(|(_, known)| known.graph.is_none());
            let oldest = lists.min_by_key(|(_, known)| known.last_lookup).map(|(hash, _)| *hash);
            oldest.and_then(|hash| self.known.remove(&hash));
        }
        let known = KnownLaunches { list: list.clone(), sightings: 0, graph: None, last_lookup: self.lookups };
        if let Some(other) = self.known.insert(hash, known).filter(|other| other.graph.is_some()) {
            driver.drain();
            self.destroy(&other, driver);
        }
    }

    /// Destroys the graphs that have not come for the longest time, until at most `kept` launches are left in the
    /// others.
    fn forget(&mut self, kept: usize, driver: &Arc<dyn Driver>) {
        let graphs = self.known.iter().filter(|(_, known)| known.graph.is_some());
        let mut oldest: Vec<(u64, u64)> = graphs.map(|(hash, known)| (known.last_lookup, *hash)).collect();
        oldest.sort_unstable();
        if self.launches > kept {
            driver.drain();
        }
        for (_, hash) in oldest {
            if self.launches <= kept {
                break;
            }
            let known = self.known.remove(&hash);
            known.into_iter().for_each(|known| self.destroy(&known, driver));
        }
    }

    /// Destroys a graph that is not known any more, if there is one. Nothing is in flight.
    fn destroy(&mut self, known: &KnownLaunches, driver: &Arc<dyn Driver>) {
        if let Some(graph) = known.graph {
            (self.graphs, self.launches) = (self.graphs - 1, self.launches - known.list.len());
            // SAFETY: it is not known any more, and nothing is in flight.
            unsafe { driver.destroy_graph(graph) };
        }
    }

    /// Destroys all graphs.
    pub fn clear(&mut self, driver: &Arc<dyn Driver>) {
        self.forget(0, driver);
    }
}

fn hash_of(list: &LaunchList) -> u64 {
    let mut hasher = DefaultHasher::new();
    list.hash(&mut hasher);
    hasher.finish()
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::driver::Argument;
    use crate::emulator::{Emulator, EmulatorFault};

    fn list(number: u64, launches: usize) -> LaunchList {
        let mut list = LaunchList::default();
        let arguments = [Argument::Bytes(number)];
        (0..launches)
            .for_each(|_| list.push(&Launch { kernel: "empty", grid: [1, 1], block: 32, arguments: &arguments }));
        list
    }

    #[test]
    fn graphs_and_lists_are_bounded() {
        let Ok(emulator) = Emulator::new(1 << 20, 1) else { return };
        let (driver, mut graphs): (Arc<dyn Driver>, _) = (Arc::new(emulator), Graphs::default());
        let often = list(0, 60);
        for number in 1..2000 {
            let own = list(number, 6 + number as usize % 60);
            let found = [(); 5].map(|()| graphs.find(&own, &driver).is_some());
            assert_eq!(found, [false, false, true, true, true]);
            assert_eq!(graphs.find(&often, &driver).is_some(), number >= 3, "graphs that are used are kept");
            assert!((1..=MAX_LAUNCHES).contains(&graphs.launches));
            let known = graphs.known.values().filter(|known| known.graph.is_some());
            let counted = known.fold((0, 0), |(count, all), known| (count + 1, all + known.list.len()));
            assert_eq!(counted, (graphs.graphs, graphs.launches));
        }
        assert!(graphs.launches > MAX_LAUNCHES / 2);
        (2000..4000).for_each(|number| assert!(graphs.find(&list(number, 6), &driver).is_none()));
        assert!(graphs.known.len() - graphs.graphs <= MAX_LISTS);
        graphs.clear(&driver);
        assert_eq!((graphs.graphs, graphs.launches), (0, 0));
    }

    #[test]
    fn a_device_that_fails_to_make_graphs_is_asked_a_few_times() {
        let Ok(emulator) = Emulator::new(1 << 20, 1) else { return };
        let driver: Arc<dyn Driver> = Arc::new(emulator.with_fault(EmulatorFault::Launch, 1));
        let (mut graphs, own) = (Graphs::default(), list(0, 9));
        let tried: Vec<u32> = (0..20)
            .map(|_| {
                assert!(graphs.find(&own, &driver).is_none());
                graphs.failures
            })
            .collect();
        assert_eq!(tried[..9], [0, 0, 1, 1, 1, 2, 2, 2, 3]);
        assert_eq!((tried[19], graphs.none), (MAX_FAILURES, true));
    }
}
