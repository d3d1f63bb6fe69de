//! Machines whose memory is in several nodes, each near to some of the processors. Any thread may read any weight, so
//! pages are taken from all nodes in turns: then no node's memory is read by all, and none is always far.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
use std::io;

/// Has the memory that this thread, and those that it starts from now on, touch first come from all nodes in turns.
/// Returns the number of nodes; `None` if there is one, if the system does not say or refuses, or if another way was
/// chosen for this process.
pub fn use_all() -> Option<usize> {
    #[cfg(target_os = "linux")]
    if let Some(nodes) = allowed().filter(|nodes| nodes.len() > 1)
        && policy().is_ok_and(|policy| policy == libc::MPOL_DEFAULT)
    {
        return interleave(&nodes).ok().map(|()| nodes.len());
    }
    None
}

/// The nodes that this process may have memory of.
#[cfg(target_os = "linux")]
fn allowed() -> Option<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")).and_then(numbers)
}

/// The numbers of a list as `0-2,5`.
#[cfg(target_os = "linux")]
fn numbers(list: &str) -> Option<Vec<usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse::<usize>().ok()?)
    };
    let ranges: Option<Vec<_>> = list.trim().split(',').map(range).collect();
    ranges.map(|ranges| ranges.into_iter().flatten().collect())
}

/// How this thread gets memory.
#[cfg(target_os = "linux")]
fn policy() -> io::Result<i32> {
    let mut policy = 0_i32;
    let null = std::ptr::null::<u64>();
    // SAFETY: the call writes one number, and nothing where the other pointers are null.
    match unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, null, 0_usize, null, 0_usize) } {
        0 => Ok(policy),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(target_os = "linux")]
fn interleave(nodes: &[usize]) -> io::Result<()> {
    let words = nodes.iter().max().map_or(0, |last| last / 64 + 1);
    let mut mask = vec![0_u64; words];
    nodes.iter().for_each(|node| mask[node / 64] |= 1 << (node % 64));
    // The kernel reads one bit less than it is told.
    let bits = 64 * words + 1;
    // SAFETY: the mask has that many bits.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_INTERLEAVE, mask.as_ptr(), bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(numbers("\t0\n"), Some(vec![0]));
        assert_eq!(numbers("0-2,5,64-65"), Some(vec![0, 1, 2, 5, 64, 65]));
        assert_eq!((numbers("0-x"), numbers("")), (None, None));
    }

    #[test]
    fn a_thread_and_those_that_it_starts_take_memory_in_turns() {
        let nodes = allowed().expect("Linux says which nodes there are");
        std::thread::spawn(move || {
            // A sandbox may refuse both calls.
            if policy().and_then(|_| interleave(&nodes)).is_err() {
                return assert_eq!(use_all(), None);
            }
            let of_child = std::thread::spawn(|| policy().unwrap());
            assert_eq!((policy().unwrap(), of_child.join().unwrap()), (libc::MPOL_INTERLEAVE, libc::MPOL_INTERLEAVE));
            assert_eq!(use_all(), None, "what was chosen before stays");
        })
        .join()
        .unwrap();
        assert_eq!(policy().ok().unwrap_or(libc::MPOL_DEFAULT), libc::MPOL_DEFAULT);
    }
}
