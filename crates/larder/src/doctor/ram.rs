//! Findings about memory: size, limits, bandwidth and locking.

use std::fs;

use anyhow::Result;
use larder_os::{group as control_group, lock, memory};
use larder_runtime::machine::rates;
use serde_json::json;

use super::Finding;
use crate::print;

/// The capability to lock any amount of memory, as a bit number.
const CAP_IPC_LOCK: u32 = 14;

pub fn check() -> Result<Vec<Finding>> {
    let mut all: Vec<Finding> = size().into_iter().collect();
    all.push(group());
    all.push(rate()?);
    all.push(locking());
    Ok(all)
}

/// The machine's memory, and the limit of the control group if that is lower.
pub fn total() -> Option<String> {
    let total = memory::total()?;
    let limit = control_group::limit().filter(|limit| *limit < total);
    Some(match limit {
        Some(limit) => format!("{}, limited to {}", print::bytes(total), print::bytes(limit)),
        None => print::bytes(total),
    })
}

fn size() -> Option<Finding> {
    let (total, available) = (memory::total()?, memory::available()?);
    let pressure = control_group::pressure();
    let waiting = pressure.map(|share| format!(", tasks waited for it {} of the last 10 s", print::percent(share)));
    let found =
        format!("{}, {} available{}", print::bytes(total), print::bytes(available), waiting.unwrap_or_default());
    let numbers = json!({"total_bytes": total, "available_bytes": available, "pressure": pressure});
    Some(Finding::new("memory", found, numbers).advise_if(
        available < total / 4,
        "most memory is in use, so fewer experts can stay in memory",
        "`ps aux --sort=-rss | head` shows the largest processes",
    ))
}

fn group() -> Finding {
    let (limit, total) = (control_group::limit(), memory::total());
    let numbers = json!({"limit_bytes": limit});
    let found = limit.map_or("no limit".into(), |limit| format!("at most {}", print::bytes(limit)));
    let tight = limit.zip(total).is_some_and(|(limit, total)| limit < total);
    Finding::new(control_group::NAME, found, numbers).advise_if(
        tight,
        format!("the {} allows less than the machine has, and the page cache counts towards it", control_group::NAME),
        "a container's limit is raised with --memory, a unit's with systemctl set-property UNIT MemoryMax=SIZE",
    )
}

fn rate() -> Result<Finding> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let rate = rates::memory_bandwidth(threads)?;
    let readers = print::count(threads, "thread", "threads");
    let found = format!("{}/s, read by {readers}", print::bytes(rate as u64));
    Ok(Finding::new("memory rate", found, json!({"bytes_per_second": rate, "threads": threads})))
}

fn locking() -> Finding {
    let limit = lock::limit();
    let free = fs::read_to_string("/proc/self/status").is_ok_and(|status| has_capability(&status, CAP_IPC_LOCK));
    let found = match limit {
        _ if free => "no limit (CAP_IPC_LOCK)".to_owned(),
        Some(limit) => format!("at most {}", print::bytes(limit)),
        None => "no limit".to_owned(),
    };
    let numbers = json!({"limit_bytes": if free { None } else { limit }});
    let little = limit.zip(memory::available()).is_some_and(|(limit, available)| limit < available / 2);
    Finding::new("memlock", found, numbers).advise_if(
        !free && little,
        "-o mlock cannot lock a model's memory, so the system may swap it out",
        "`ulimit -l unlimited` as root, or `* - memlock unlimited` in /etc/security/limits.conf and a new login",
    )
}

fn has_capability(status: &str, bit: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|bits| bits >> bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_bits() {
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000004000\n", CAP_IPC_LOCK));
        assert!(!has_capability("CapEff:\t0000000000003fff\n", CAP_IPC_LOCK));
        assert!(!has_capability("", CAP_IPC_LOCK));
    }
}
