//! Findings about the CPU: its features and usable threads.

use std::fs;

use serde_json::json;

use super::Finding;

/// A longer name of a CPU is cut.
const NAME_CHARS_MAX: usize = 80;

pub fn check() -> Vec<Finding> {
    [instructions(), threads()].into_iter().chain(load()).collect()
}

fn instructions() -> Finding {
    let features = features();
    let list = if features.is_empty() { "no relevant features".to_owned() } else { features.join(" ") };
    let name = name();
    let numbers = json!({"name": name, "features": features});
    let name = name.unwrap_or_else(|| "the CPU".into());
    Finding::new("processor", format!("{name}: it has {list}"), numbers)
}

/// The name that the system gives the CPU or, on boards and phones, the machine.
pub fn name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of_board = || fs::read_to_string("/proc/device-tree/model").ok();
    let name = named(&info).map(str::to_owned).or_else(of_board)?;
    let printable: String = name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
    Some(printable.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The name in the text of `/proc/cpuinfo`.
fn named(info: &str) -> Option<&str> {
    let value = |key: &str| {
        let lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(k, _)| k.trim() == key).map(|(_, value)| value.trim()).find(|value| !value.is_empty())
    };
    value("model name").or_else(|| value("Hardware")).or_else(|| value("Model"))
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
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

/// How many tasks wanted a CPU in the last minute; other programs make every rate lower.
fn load() -> Option<Finding> {
    let load: f64 = fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()?;
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let found = format!("{load:.1} tasks wanted a CPU on average in the last minute");
    let finding = Finding::new("load", found, json!({"tasks": load, "cpus": cpus}));
    Some(finding.advise_if(
        load > cpus as f64,
        "other programs compete for the CPUs, so what is measured here, and tokens per second, are lower than they could be",
        "`ps aux --sort=-pcpu | head` shows the programs",
    ))
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
    fn the_cpu_is_named_where_the_system_knows_it() {
        assert_eq!(named("processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\n"), Some("Some CPU @ 2.0GHz"));
        assert_eq!(named("processor\t: 0\nHardware\t: Board 5\n"), Some("Board 5"));
        assert_eq!(named("processor : 0\nmodel name :\n"), None);
    }

    #[test]
    fn lists_of_cpus_are_counted() {
        assert_eq!(listed("0-3,8\n"), Some(5));
        assert_eq!(listed("0"), Some(1));
        assert_eq!(listed("3-0"), None);
        assert_eq!(listed(""), None);
    }
}
