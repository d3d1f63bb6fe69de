//! Which processors to compute on. Where cores differ, as on a phone, the rest would only wait for the smallest ones.

use crate::affinity;

/// Number of performance cores: processors that this thread may use and that have at least half the capacity of the
/// strongest of them. At least 1.
pub fn performance_cores() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, |n| n.get());
    let strong = strongest_first().ok().map(|strong| strong.len()).or_else(named_performance_cores);
    strong.map_or(usable, |strong| strong.clamp(1, usable))
}

/// The performance cores that this thread may use, the strongest first.
pub fn strongest_first() -> std::io::Result<Vec<usize>> {
    let allowed = affinity::allowed()?;
    Ok(match affinity::strengths(&allowed) {
        Some(strengths) => strong_of(allowed, strengths),
        None => allowed,
    })
}

/// The processors with at least half of the strength of the strongest, the strongest first.
fn strong_of(allowed: Vec<usize>, strengths: Vec<u64>) -> Vec<usize> {
    let most = strengths.iter().copied().max().unwrap_or_default();
    let mut strong: Vec<(u64, usize)> = strengths.into_iter().zip(allowed).filter(|(s, _)| *s >= most / 2).collect();
    strong.sort_by_key(|(strength, cpu)| (u64::MAX - strength, *cpu));
    strong.into_iter().map(|(_, cpu)| cpu).collect()
}

/// The number of performance cores, where the system names it and not the cores.
#[cfg(not(target_vendor = "apple"))]
fn named_performance_cores() -> Option<usize> {
    None
}

/// The processors of the first performance level, on a Mac with cores of two kinds; all on one with one kind.
#[cfg(target_vendor = "apple")]
fn named_performance_cores() -> Option<usize> {
    use crate::sysctl_number;
    let named = sysctl_number(c"hw.perflevel0.logicalcpu").or_else(|| sysctl_number(c"hw.logicalcpu"));
    named.map(|number| number as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efficiency_cores_are_left_out_and_the_strongest_come_first() {
        // As on a phone: four small, three large, one larger.
        let phone = vec![250, 250, 250, 250, 800, 800, 800, 1024];
        assert_eq!(strong_of((0..8).collect(), phone), [7, 4, 5, 6]);
        assert_eq!(strong_of(vec![0, 2], vec![250, 250]), [0, 2], "if only efficiency cores are allowed they are used");
        assert_eq!(strong_of(vec![0, 1], vec![1_800_000, 3_800_000]), [1]);
        assert_eq!(strong_of(vec![3], vec![5]), [3]);
        assert!(strong_of(vec![], vec![]).is_empty());
    }

    #[test]
    fn there_is_always_a_performance_core() {
        assert!(performance_cores() >= 1);
    }
}
