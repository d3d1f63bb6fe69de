//! Affinity on Linux and Android.

use std::{fs, io, path::Path};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Where Linux describes its processors.
const SYSTEM: &str = "/sys/devices/system/cpu";

/// The processors that this thread may use.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Binds this thread to a processor.
pub fn bind(processor: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    Ok(sched_setaffinity(None, &set)?)
}

/// Moves this thread to another of the `allowed` processors than `processor`, if there is one.
pub fn move_off(processor: usize, allowed: &[usize]) {
    let mut set = CpuSet::new();
    allowed.iter().filter(|p| **p != processor).for_each(|p| set.set(*p));
    if set.count() > 0 {
        // A failure is ignored: the move only makes things faster.
        let _ = sched_setaffinity(None, &set);
    }
}

/// The processor that this thread is on.
pub fn current() -> Option<usize> {
    Some(sched_getcpu())
}

/// How strong each of these processors is, in a unit of the system; `None` where it does not say that of all.
pub fn strengths(processors: &[usize]) -> Option<Vec<u64>> {
    strengths_in(Path::new(SYSTEM), processors)
}

/// The capacity that the scheduler uses, or else the highest clock rate.
fn strengths_in(system: &Path, processors: &[usize]) -> Option<Vec<u64>> {
    let of_all = |file: &str| processors.iter().map(|cpu| strength(system, *cpu, file)).collect::<Option<Vec<u64>>>();
    of_all("cpu_capacity").or_else(|| of_all("cpufreq/cpuinfo_max_freq"))
}

fn strength(system: &Path, cpu: usize, file: &str) -> Option<u64> {
    fs::read_to_string(system.join(format!("cpu{cpu}")).join(file)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_or_else_clocks_are_read_if_all_processors_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let set = |cpu: usize, file: &str, text: &str| {
            let path = dir.path().join(format!("cpu{cpu}")).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(strengths_in(dir.path(), &[0, 1]), None);
        set(0, "cpufreq/cpuinfo_max_freq", "1800000\n");
        set(1, "cpufreq/cpuinfo_max_freq", "3800000\n");
        assert_eq!(strengths_in(dir.path(), &[0, 1]), Some(vec![1_800_000, 3_800_000]));
        set(0, "cpu_capacity", "250\n");
        assert_eq!(strengths_in(dir.path(), &[1, 0]), Some(vec![3_800_000, 1_800_000]), "one lacks its capacity");
        set(1, "cpu_capacity", "1024\n");
        assert_eq!(strengths_in(dir.path(), &[1, 0]), Some(vec![1024, 250]));
        set(1, "cpu_capacity", "x");
        set(1, "cpufreq/cpuinfo_max_freq", "x");
        assert_eq!(strengths_in(dir.path(), &[0, 1]), None);
    }
}
