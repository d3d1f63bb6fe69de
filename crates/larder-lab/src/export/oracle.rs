//! Export to libCacheSim.

use std::io::Write;
use std::path::Path;

use larder_core::Trace;

use super::write_atomically;
use crate::LabError;

/// Marks an object that is not requested again.
const NEVER: i64 = -1;

/// Writes the requests of a trace in libCacheSim's `oracleGeneral` format, in the engine's order: 24 bytes each,
/// little-endian, without padding. The time is the number of the forward pass, the object
/// `layer * experts + expert + 1` (0 is not an object there), its size 1, and the last field the index of the object's
/// next request.
///
/// Returns the number of requests.
pub fn oracle_general(trace: &Trace, path: &Path) -> Result<u64, LabError> {
    let mut requests: Vec<(u32, usize)> = Vec::new();
    let mut pass = 0;
    for step in trace.steps() {
        requests.extend(step.wanted.iter().map(|expert| (pass, step.row.expert(*expert).index(trace.experts))));
        pass += u32::from(step.row.index() + 1 == trace.rows);
    }
    let next = next_uses(&requests, trace.rows * trace.experts);
    write_atomically(path, |out| {
        for ((time, object), next) in requests.iter().zip(next) {
            out.write_all(&time.to_le_bytes())?;
            out.write_all(&(*object as u64 + 1).to_le_bytes())?;
            out.write_all(&1u32.to_le_bytes())?;
            out.write_all(&next.to_le_bytes())?;
        }
        Ok(())
    })?;
    Ok(requests.len() as u64)
}

fn next_uses(requests: &[(u32, usize)], objects: usize) -> Vec<i64> {
    let mut seen = vec![NEVER; objects];
    let mut next = vec![NEVER; requests.len()];
    for (at, (_, object)) in requests.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut seen[*object], at as i64);
    }
    next
}

#[cfg(test)]
mod tests {
    use larder_core::TracePass;

    use super::*;

    #[test]
    fn records_are_packed_and_know_the_next_use() {
        let mut trace = Trace::new(2, 3, 1);
        for ids in [[0, 2], [1, 2], [0, 0]] {
            trace.push(&TracePass { ids: &ids, ..TracePass::default() }).unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.oracleGeneral");
        assert_eq!(oracle_general(&trace, &path).unwrap(), 6);
        let bytes = std::fs::read(&path).unwrap();
        let records: Vec<_> = bytes
            .as_chunks::<24>()
            .0
            .iter()
            .map(|r| {
                let (time, object) = (u32::from_le_bytes(r[..4].try_into().unwrap()), r[4]);
                let (size, next) = (r[12], i64::from_le_bytes(r[16..].try_into().unwrap()));
                assert!(r[5..12].iter().chain(&r[13..16]).all(|b| *b == 0));
                (time, object, size, next)
            })
            .collect();
        let want = [(0, 1, 1, 4), (0, 6, 1, 3), (1, 2, 1, -1), (1, 6, 1, -1), (2, 1, 1, -1), (2, 4, 1, -1)];
        assert_eq!((records, bytes.len()), (want.to_vec(), 144));
    }
}
