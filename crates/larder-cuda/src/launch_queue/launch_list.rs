//! Launches in order, with their arguments.

use std::hash::{Hash, Hasher};
use std::ops::Range;

use crate::driver::{Argument, Launch};

/// Launches that own their arguments.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct LaunchList {
    entries: Vec<Entry>,
    arguments: Vec<Argument>,
}

#[derive(Clone, PartialEq, Hash, Debug)]
struct Entry {
    kernel: &'static str,
    grid: [u32; 2],
    block: u32,
    arguments: Range<usize>,
}

impl LaunchList {
    /// Adds a launch.
    pub fn push(&mut self, launch: &Launch) {
        let Launch { kernel, grid, block, arguments } = *launch;
        let first = self.arguments.len();
        self.arguments.extend_from_slice(arguments);
        self.entries.push(Entry { kernel, grid, block, arguments: first..self.arguments.len() });
    }

    /// The launches in order.
    pub fn iter(&self) -> impl Iterator<Item = Launch<'_>> {
        self.entries.iter().map(|entry| Launch {
            kernel: entry.kernel,
            grid: entry.grid,
            block: entry.block,
            arguments: &self.arguments[entry.arguments.clone()],
        })
    }

    /// Adds launches of another list.
    pub fn append(&mut self, other: &LaunchList) {
        other.iter().for_each(|launch| self.push(&launch));
    }

    /// Removes the last launch. Returns whether there was one.
    pub fn pop(&mut self) -> bool {
        let last = self.entries.pop();
        if let Some(last) = &last {
            self.arguments.truncate(last.arguments.start);
        }
        last.is_some()
    }

    /// Removes all launches.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.arguments.clear();
    }

    /// Number of launches.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl Hash for LaunchList {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.entries.hash(hasher);
        for argument in &self.arguments {
            match argument {
                Argument::Address(value) | Argument::Bytes(value) => value.hash(hasher),
                Argument::Word(value) => value.hash(hasher),
                Argument::Float(value) => value.to_bits().hash(hasher),
                Argument::Double(value) => value.to_bits().hash(hasher),
            }
        }
    }
}
