//! Spending bytes where they lower the cost most.

/// One way to store a group of matrices.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Candidate {
    /// Bytes of the group.
    pub bytes: u64,
    /// What it costs in quality.
    pub cost: f64,
}

/// The candidate of each group, by its index, with which the sum of costs is small and that of bytes at most `budget`;
/// `None` if even the smallest candidates are more.
///
/// Each group starts with its smallest candidate. Then the step that lowers the cost most per byte is taken, as long as
/// there is one that fits. Where the budget ends between two steps, the result is the best there is; else it is worse
/// by less than the last step.
pub fn allocate(groups: &[Vec<Candidate>], budget: u64) -> Option<Vec<usize>> {
    let hulls: Vec<Vec<usize>> = groups.iter().map(|candidates| lower_hull(candidates)).collect();
    let mut at = vec![0; groups.len()];
    let mut left = budget.checked_sub(groups.iter().zip(&hulls).map(|(group, hull)| group[hull[0]].bytes).sum())?;
    // The gain per byte of the next step of a group, and its bytes.
    let next = |group: usize, at: usize| {
        let [from, to] = [at, at + 1].map(|at| hulls[group].get(at).map(|candidate| groups[group][*candidate]));
        from.zip(to).map(|(from, to)| ((from.cost - to.cost) / (to.bytes - from.bytes) as f64, to.bytes - from.bytes))
    };
    loop {
        let steps = (0..groups.len()).filter_map(|group| Some((group, next(group, at[group])?)));
        let fitting = steps.filter(|(_, (_, bytes))| *bytes <= left);
        let Some((group, (_, bytes))) = fitting.max_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b)) else { break };
        at[group] += 1;
        left -= bytes;
    }
    Some(at.iter().zip(&hulls).map(|(at, hull)| hull[*at]).collect())
}

/// The candidates that are best for some price of a byte, by ascending bytes. There is at least one.
fn lower_hull(candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (candidates[*a], candidates[*b]);
        a.bytes.cmp(&b.bytes).then(a.cost.total_cmp(&b.cost))
    });
    let mut hull: Vec<usize> = Vec::new();
    for candidate in order {
        let c = candidates[candidate];
        if hull.last().is_some_and(|last| c.cost >= candidates[*last].cost) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            let [a, b] = [a, b].map(|i| candidates[i]);
            let (run, whole) = ((b.bytes - a.bytes) as f64, (c.bytes - a.bytes) as f64);
            // b lies on or above the line from a to c.
            if (a.cost - b.cost) * whole > (a.cost - c.cost) * run {
                break;
            }
            hull.pop();
        }
        hull.push(candidate);
    }
    hull
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;

    fn candidate(bytes: u64, cost: f64) -> Candidate {
        Candidate { bytes, cost }
    }

    #[test]
    fn candidates_that_no_price_chooses_are_not_on_the_hull() {
        let all = [candidate(4, 1.0), candidate(1, 9.0), candidate(2, 8.9), candidate(3, 2.0), candidate(3, 5.0)];
        assert_eq!(lower_hull(&all), [1, 3, 0]);
        assert_eq!(lower_hull(&[candidate(5, 0.0), candidate(6, 1.0)]), [0]);
    }

    #[test]
    fn bytes_go_where_they_help_most() {
        let groups = [vec![candidate(1, 10.0), candidate(2, 1.0)], vec![candidate(1, 3.0), candidate(2, 2.0)]];
        assert_eq!(allocate(&groups, 1), None);
        assert_eq!(allocate(&groups, 2), Some(vec![0, 0]));
        assert_eq!(allocate(&groups, 3), Some(vec![1, 0]));
        assert_eq!(allocate(&groups, 4), Some(vec![1, 1]));
    }

    /// The least cost of all combinations within the budget.
    fn best(groups: &[Vec<Candidate>], budget: u64) -> f64 {
        let Some((first, rest)) = groups.split_first() else { return 0.0 };
        let fitting = first.iter().filter(|c| c.bytes <= budget);
        fitting.map(|c| c.cost + best(rest, budget - c.bytes)).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn the_cost_is_within_one_step_of_the_best() {
        let mut rng = Rng::new(7);
        let mut number = |below: u64| rng.below(below as usize) as u64;
        let mut exact = 0;
        for _ in 0..300 {
            let mut groups = Vec::new();
            for _ in 0..4 {
                let some = |number: &mut dyn FnMut(u64) -> u64| candidate(1 + number(20), number(1000) as f64);
                groups.push((0..5).map(|_| some(&mut number)).collect::<Vec<_>>());
            }
            let budget = 4 + number(60);
            let least = best(&groups, budget);
            let Some(chosen) = allocate(&groups, budget) else {
                assert_eq!(least, f64::INFINITY);
                continue;
            };
            let chosen: Vec<Candidate> = chosen.iter().zip(&groups).map(|(c, group)| group[*c]).collect();
            let cost: f64 = chosen.iter().map(|c| c.cost).sum();
            let widest = groups.iter().flatten().map(|c| c.cost).fold(0.0, f64::max);
            assert!(chosen.iter().map(|c| c.bytes).sum::<u64>() <= budget);
            assert!(cost >= least && cost <= least + widest, "{cost} {least}");
            exact += usize::from(cost == least);
        }
        assert!(exact > 150, "{exact} of 300");
    }
}
