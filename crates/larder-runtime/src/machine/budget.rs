//! One owner of the memory that an engine takes: the printed ceiling, and what has been taken of it.

use std::fmt;
use std::sync::Arc;

use anyhow::{Result, bail};
use larder_core::format_bytes;
use larder_os::memory;
use parking_lot::Mutex;

use crate::notices::Setting;

/// Requests of at least this many bytes read the limits of the machine and of the control groups again.
const LARGE_BYTES: u64 = 1 << 20;

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryUse {
    /// Code, stacks and what the program has allocated before.
    Process,
    /// Resident weights.
    ResidentWeights,
    /// KV caches of all sequences, those of a prefix cache included.
    KvCache,
    /// Activations and staging buffers.
    Workspaces,
    /// Slots for experts, or all experts.
    Experts,
    /// A draft model with all that it needs.
    DraftModel,
    /// The image tower and what it makes of pictures.
    Images,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            MemoryUse::Process => "the process",
            MemoryUse::ResidentWeights => "resident weights",
            MemoryUse::KvCache => "the KV cache",
            MemoryUse::Workspaces => "activations",
            MemoryUse::Experts => "experts",
            MemoryUse::DraftModel => "the draft model",
            MemoryUse::Images => "images",
        })
    }
}

/// The memory ceiling of an engine and its owner: whatever an engine holds for long is taken from it and given back to
/// it, and the sum never exceeds the ceiling. Clones share the account.
#[derive(Clone, Debug)]
pub struct MemoryBudget(Arc<Mutex<Account>>);

#[derive(Debug)]
struct Account {
    ceiling: u64,
    taken: u64,
}

impl MemoryBudget {
    /// A budget of `ceiling` bytes, of which nothing is taken.
    pub fn new(ceiling: u64) -> Self {
        MemoryBudget(Arc::new(Mutex::new(Account { ceiling, taken: 0 })))
    }

    /// The ceiling in bytes: what the plan prints.
    pub fn ceiling_bytes(&self) -> u64 {
        self.0.lock().ceiling
    }

    /// Bytes that are taken.
    pub fn taken_bytes(&self) -> u64 {
        self.0.lock().taken
    }

    /// Raises the ceiling by `bytes`, for memory that the plan does not have.
    pub(crate) fn raise(&self, bytes: u64) {
        let mut account = self.0.lock();
        account.ceiling = account.ceiling.saturating_add(bytes);
    }

    /// Takes `bytes` until the lease is dropped. Fails if the ceiling would be exceeded, or, for large requests, if the
    /// machine or a control group has less than that now: a limit may have been lowered since the plan was made.
    pub fn take(&self, purpose: MemoryUse, bytes: u64) -> Result<MemoryLease> {
        let mut account = self.0.lock();
        let taken = account.taken.saturating_add(bytes);
        if taken > account.ceiling {
            bail!(
                "{} for {purpose} exceed the memory plan: {} of {} are taken",
                format_bytes(bytes),
                format_bytes(account.taken),
                format_bytes(account.ceiling)
            );
        }
        if bytes >= LARGE_BYTES && purpose != MemoryUse::Process {
            check_machine(purpose, bytes, taken)?;
        }
        account.taken = taken;
        drop(account);
        Ok(MemoryLease { budget: self.clone(), bytes })
    }
}

/// Refuses a request with which the process would need more memory than there is for it now. Memory that was taken but
/// not touched yet is not in use for the system, so all that is taken is compared with what is used and available.
fn check_machine(purpose: MemoryUse, bytes: u64, taken: u64) -> Result<()> {
    let (Some(used), Some(available)) = (memory::current(), memory::available()) else { return Ok(()) };
    if taken <= used.saturating_add(available) {
        return Ok(());
    }
    bail!(
        "not enough memory for {purpose}: {} are needed, and {} are available now, less than when the memory plan was made; \
         try a smaller {} or {}",
        format_bytes(bytes),
        format_bytes(available),
        Setting::Cache,
        Setting::Context
    )
}

/// Bytes that are taken of a budget; dropping it gives them back.
#[derive(Debug)]
pub struct MemoryLease {
    budget: MemoryBudget,
    bytes: u64,
}

impl MemoryLease {
    /// The bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes it one with another lease of the same budget.
    pub(crate) fn join(&mut self, mut more: MemoryLease) {
        self.bytes += std::mem::take(&mut more.bytes);
    }

    /// Gives back what is more than `bytes`.
    pub(crate) fn keep(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.budget.0.lock().taken -= less;
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        self.budget.0.lock().taken -= self.bytes;
    }
}

/// What an engine takes of its budget, by the parts of its plan.
pub(crate) struct PlannedMemory {
    budget: MemoryBudget,
    parts: Vec<(MemoryUse, u64)>,
    leases: Vec<(MemoryUse, MemoryLease)>,
}

impl PlannedMemory {
    /// The parts of a plan, of which the process is taken already.
    pub fn new(parts: Vec<(MemoryUse, u64)>) -> Result<Self> {
        let budget = MemoryBudget::new(parts.iter().map(|(_, bytes)| bytes).sum());
        let mut planned = PlannedMemory { budget, parts, leases: Vec::new() };
        planned.take(MemoryUse::Process)?;
        Ok(planned)
    }

    /// The budget.
    pub fn budget(&self) -> &MemoryBudget {
        &self.budget
    }

    /// Takes what the plan has for a purpose.
    pub fn take(&mut self, purpose: MemoryUse) -> Result<()> {
        let planned = self.parts.iter().filter(|(part, _)| *part == purpose).map(|(_, bytes)| bytes).sum();
        self.replace(purpose, planned)
    }

    /// Gives back what a purpose has, and takes `bytes` for it.
    pub fn replace(&mut self, purpose: MemoryUse, bytes: u64) -> Result<()> {
        self.give_back(purpose);
        self.leases.push((purpose, self.budget.take(purpose, bytes)?));
        Ok(())
    }

    /// As [`Self::replace`]; raises the ceiling if it is exceeded.
    pub fn replace_beyond_plan(&mut self, purpose: MemoryUse, bytes: u64) -> Result<()> {
        self.give_back(purpose);
        let left = self.budget.ceiling_bytes() - self.budget.taken_bytes();
        self.budget.raise(bytes.saturating_sub(left));
        self.replace(purpose, bytes)
    }

    fn give_back(&mut self, purpose: MemoryUse) {
        self.leases.retain(|(part, _)| *part != purpose);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_is_kept_and_leases_are_given_back() {
        let budget = MemoryBudget::new(1000);
        let first = budget.take(MemoryUse::Process, 600).unwrap();
        let refused = budget.take(MemoryUse::KvCache, 401).unwrap_err().to_string();
        assert_eq!(refused, "401 B for the KV cache exceed the memory plan: 600 B of 1.00 kB are taken");
        let second = budget.clone().take(MemoryUse::Experts, 400).unwrap();
        assert_eq!((budget.taken_bytes(), first.bytes() + second.bytes()), (1000, 1000));
        drop(first);
        assert_eq!(budget.taken_bytes(), 400);
        let mut second = second;
        second.join(budget.take(MemoryUse::Experts, 500).unwrap());
        assert_eq!((budget.taken_bytes(), second.bytes()), (900, 900));
        second.keep(400);
        second.keep(1000);
        assert_eq!((budget.taken_bytes(), second.bytes()), (400, 400));
        budget.raise(1);
        assert!(budget.take(MemoryUse::Workspaces, 601).is_ok());
        assert!(budget.take(MemoryUse::Workspaces, u64::MAX).is_err());
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        if memory::available().is_none() {
            println!("skipped: the available memory is not known here");
            return;
        }
        let budget = MemoryBudget::new(u64::MAX);
        let refused = budget.take(MemoryUse::Experts, 1 << 60).unwrap_err().to_string();
        assert!(
            refused.starts_with("not enough memory for experts: ") && refused.contains("smaller --cache"),
            "{refused}"
        );
        assert_eq!(budget.taken_bytes(), 0);
    }
}
