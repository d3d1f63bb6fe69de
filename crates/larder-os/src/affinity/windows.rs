//! Affinity on Windows, within the processor group of the process: up to 64 processors.
#![allow(unsafe_code)]

use std::{io, mem::offset_of, ptr};

use windows_sys::Win32::System::{
    SystemInformation::{CpuSetInformation, GetSystemCpuSetInformation, SYSTEM_CPU_SET_INFORMATION},
    Threading::{
        GetCurrentProcess, GetCurrentProcessorNumber, GetCurrentThread, GetProcessAffinityMask, SetThreadAffinityMask,
    },
};

/// The processors that this process may use.
pub fn allowed() -> io::Result<Vec<usize>> {
    let (mut own, mut all) = (0, 0);
    // SAFETY: the handle of the current process needs no closing, and the places for the results are valid.
    if unsafe { GetProcessAffinityMask(GetCurrentProcess(), &mut own, &mut all) } == 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((0..usize::BITS as usize).filter(|cpu| own >> cpu & 1 == 1).collect())
}

/// Binds this thread to a processor.
pub fn bind(processor: usize) -> io::Result<()> {
    set_mask(1 << processor)
}

fn set_mask(mask: usize) -> io::Result<()> {
    // SAFETY: the handle of the current thread needs no closing.
    if unsafe { SetThreadAffinityMask(GetCurrentThread(), mask) } == 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Moves this thread to another of the `allowed` processors than `processor`, if there is one.
pub fn move_off(processor: usize, allowed: &[usize]) {
    let others = allowed.iter().filter(|p| **p != processor).fold(0, |mask, p| mask | 1 << p);
    if others != 0 {
        // A failure is ignored: the move only makes things faster.
        let _ = set_mask(others);
    }
}

/// The processor that this thread is on.
pub fn current() -> Option<usize> {
    // SAFETY: the call has no preconditions.
    Some(unsafe { GetCurrentProcessorNumber() } as usize)
}

/// How strong each of these processors is: a power of 4 of its efficiency class, so that a lower class has less than
/// half of the strength of a higher one. `None` where the system does not say that of all.
pub fn strengths(processors: &[usize]) -> Option<Vec<u64>> {
    let classes = efficiency_classes();
    let strength =
        |cpu: &usize| classes.iter().find(|(number, _)| number == cpu).map(|(_, class)| 4_u64 << (2 * class));
    processors.iter().map(strength).collect()
}

/// Number and efficiency class of each processor of the first group.
fn efficiency_classes() -> Vec<(usize, u32)> {
    let mut bytes = 0;
    // SAFETY: without a buffer the call only tells how long it would have to be.
    unsafe { GetSystemCpuSetInformation(ptr::null_mut(), 0, &mut bytes, GetCurrentProcess(), 0) };
    // In units of eight bytes, which the records are aligned to.
    let mut buffer = vec![0_u64; (bytes as usize).div_ceil(size_of::<u64>())];
    let start: *mut SYSTEM_CPU_SET_INFORMATION = buffer.as_mut_ptr().cast();
    // SAFETY: the buffer has at least `bytes` bytes.
    if unsafe { GetSystemCpuSetInformation(start, bytes, &mut bytes, GetCurrentProcess(), 0) } == 0 {
        return vec![];
    }
    let mut found = Vec::new();
    let (mut at, end) = (0, (bytes as usize).min(size_of_val(&buffer[..])));
    while at + size_of::<SYSTEM_CPU_SET_INFORMATION>() <= end {
        // SAFETY: the record lies within the buffer, which the system has filled up to `end`; all bytes are valid
        // numbers.
        let record = unsafe { start.byte_add(at).read_unaligned() };
        if record.Type == CpuSetInformation {
            // SAFETY: records of this type have this variant; all bytes are valid numbers.
            let (group, number, class) = unsafe {
                let set = record.Anonymous.CpuSet;
                (set.Group, set.LogicalProcessorIndex, set.EfficiencyClass)
            };
            if group == 0 {
                found.push((number.into(), u32::from(class).min(16)));
            }
        }
        let least = offset_of!(SYSTEM_CPU_SET_INFORMATION, Anonymous);
        at += (record.Size as usize).max(least);
    }
    found
}
