//! Findings about the CPU: kernels and usable threads.

use std::fs;

use larder_kernels::instruction_set;
use serde_json::json;

use super::Finding;

pub fn check() -> Vec<Finding> {
    vec![instructions(), threads()]
}

fn instructions() -> Finding {
    let features = features();
    let kernels = instruction_set();
    let list = if features.is_empty() { "no relevant features".to_owned() } else { features.join(" ") };
    let numbers = json!({"kernels": kernels, "features": features});
    Finding::new("processor", format!("{kernels} kernels; the CPU has {list}"), numbers).advise_if(
        kernels == "portable",
        "larder has no SIMD kernels for this CPU, so products take several times as long",
        "in a virtual machine, pass the host's CPU through (qemu: -cpu host)",
    )
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    let all = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("dotprod", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    vec![]
}

fn threads() -> Finding {
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    let online = fs::read_to_string("/sys/devices/system/cpu/online").ok().and_then(|list| listed(&list));
    let numbers = json!({"usable": usable, "online": online});
    let found = match online {
        Some(online) => format!("{usable} of {online} CPUs"),
        None => format!("{usable} CPUs"),
    };
    Finding::new("threads", found, numbers).advise_if(
        online.is_some_and(|online| usable < online),
        "this process may use only some of the CPUs, by its affinity or its control group",
        "taskset -p $$ shows the affinity; a container's limit is raised with --cpus",
    )
}

/// Counts the CPUs in a list such as `0-3,8`.
fn listed(list: &str) -> Option<usize> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.trim().split(',').map(part).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_counted() {
        assert_eq!(listed("0-3,8\n"), Some(5));
        assert_eq!(listed("0"), Some(1));
        assert_eq!(listed("3-0"), None);
        assert_eq!(listed(""), None);
    }
}
