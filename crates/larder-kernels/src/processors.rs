//! Which processors to compute on. Where cores differ, as on a phone, the rest would only wait for the smallest ones.

use std::fs;
use std::path::Path;

use crate::affinity;

/// Where Linux describes its processors.
const SYSTEM: &str = "/sys/devices/system/cpu";

/// Number of performance cores: processors that this thread may use and that have at least half the capacity of the
/// strongest of them. At least 1.
pub fn performance_cores() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    strongest_first().map_or(usable, |strong| strong.len().clamp(1, usable))
}

/// The performance cores that this thread may use, the strongest first.
pub(crate) fn strongest_first() -> std::io::Result<Vec<usize>> {
    Ok(strong_of(affinity::allowed()?, Path::new(SYSTEM)))
}

fn strong_of(allowed: Vec<usize>, system: &Path) -> Vec<usize> {
    let strengths = |file: &str| allowed.iter().map(|cpu| strength(system, *cpu, file)).collect::<Option<Vec<u64>>>();
    // The capacity that the scheduler uses, or else the highest clock rate.
    let Some(strengths) = strengths("cpu_capacity").or_else(|| strengths("cpufreq/cpuinfo_max_freq")) else {
        return allowed;
    };
    let most = strengths.iter().copied().max().unwrap_or_default();
    let mut strong: Vec<(u64, usize)> = strengths.into_iter().zip(allowed).filter(|(s, _)| *s >= most / 2).collect();
    strong.sort_by_key(|(strength, cpu)| (u64::MAX - strength, *cpu));
    strong.into_iter().map(|(_, cpu)| cpu).collect()
}

fn strength(system: &Path, cpu: usize, file: &str) -> Option<u64> {
    fs::read_to_string(system.join(format!("cpu{cpu}")).join(file)).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(file: &str, strengths: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (cpu, strength) in strengths.iter().enumerate() {
            let path = dir.path().join(format!("cpu{cpu}")).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, strength).unwrap();
        }
        dir
    }

    #[test]
    fn efficiency_cores_are_left_out_and_the_strongest_come_first() {
        // As on a phone: four small, three large, one larger.
        let phone = system("cpu_capacity", &["250\n", "250\n", "250\n", "250\n", "800\n", "800\n", "800\n", "1024\n"]);
        assert_eq!(strong_of((0..8).collect(), phone.path()), [7, 4, 5, 6]);
        assert_eq!(strong_of(vec![0, 2], phone.path()), [0, 2], "if only efficiency cores are allowed they are used");
        let clocks = system("cpufreq/cpuinfo_max_freq", &["1800000", "3800000", "x"]);
        assert_eq!(strong_of(vec![0, 1], clocks.path()), [1]);
        assert_eq!(
            strong_of(vec![0, 1, 2], clocks.path()),
            [0, 1, 2],
            "a strength that one core lacks is used for none"
        );
        assert_eq!(strong_of(vec![3], clocks.path()), [3]);
    }

    #[test]
    fn there_is_always_a_performance_core() {
        assert!(performance_cores() >= 1);
    }
}
