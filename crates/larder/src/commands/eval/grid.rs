//! The strategies that a sweep compares.

use anyhow::Result;
use larder_core::Geometry;
use larder_policy::routing::{RoutingSpec, kept_experts};

use crate::cli::eval::{DeltaFlag, GridFlags};

/// A strategy to try.
pub struct Trial {
    /// The strategy with its parameters.
    pub spec: RoutingSpec,
    /// Name of the group of strategies that differ from it by one number only.
    pub family: String,
}

/// The model's own routing, and the strategies of the flags or, without any, a few of each family.
pub fn trials(grid: &GridFlags, geometry: &Geometry) -> Result<Vec<Trial>> {
    let grid = if is_empty(grid) { default_grid(grid, geometry) } else { grid.clone() };
    let keep = format!(",j={}", grid.keep.unwrap_or(kept_experts(geometry.top_k)));
    let mut all = vec![trial("original", "original")?];
    for delta in &grid.delta {
        let (of, named) = match delta {
            DeltaFlag::Running => (String::new(), String::new()),
            other => (format!(",delta={other}"), format!(", {other} Δ")),
        };
        for lambda in &grid.lambda {
            all.push(trial(&format!("prior:lambda={lambda}{keep}{of}"), &format!("prior{named}"))?);
        }
        for budget in &grid.budget {
            all.push(trial(&format!("prior:budget={budget}{keep}{of}"), &format!("budget{named}"))?);
        }
    }
    for p in &grid.cumsum {
        all.push(trial(&format!("cumsum:p={p}{keep}"), "cumsum")?);
    }
    for m in &grid.max_rank {
        all.push(trial(&format!("max-rank:m={m}{keep}"), "max-rank")?);
    }
    for h in &grid.prune {
        all.push(trial(&format!("prune:h={h}"), "prune")?);
    }
    // Those of the same parts are a family, whatever their numbers.
    for spec in &grid.strategy {
        let text = spec.to_string();
        let parts: Vec<&str> = text.split('+').map(|part| part.split(':').next().unwrap_or(part)).collect();
        all.push(trial(&text, &parts.join("+"))?);
    }
    Ok(all)
}

fn trial(spec: &str, family: &str) -> Result<Trial> {
    Ok(Trial { spec: spec.parse()?, family: family.to_owned() })
}

fn is_empty(grid: &GridFlags) -> bool {
    let GridFlags { lambda, budget, max_rank, cumsum, prune, strategy, .. } = grid;
    strategy.is_empty() && [lambda, budget, max_rank, cumsum, prune].into_iter().all(Vec::is_empty)
}

fn default_grid(grid: &GridFlags, geometry: &Geometry) -> GridFlags {
    let (experts, top_k) = (geometry.experts, geometry.top_k);
    let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
    let between = |from: usize, to: usize, most: usize| -> Vec<String> {
        let mut all: Vec<usize> = (1..=most).map(|i| from + (to - from) * i / most).collect();
        all.dedup();
        all.retain(|n| *n > from);
        all.iter().map(usize::to_string).collect()
    };
    GridFlags {
        lambda: texts(&["0.05", "0.1", "0.2", "0.4", "0.8"]),
        budget: texts(&["0.003", "0.01", "0.03"]),
        max_rank: between(top_k, (2 * top_k).max(experts / 2).min(experts), 3),
        cumsum: texts(&["0.5", "0.7", "0.9"]),
        prune: (1..top_k).rev().take(3).map(|h| h.to_string()).collect(),
        ..grid.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(grid: &GridFlags, experts: usize, top_k: usize) -> Vec<String> {
        trials(grid, &Geometry::narrow(1, [0], experts, top_k))
            .unwrap()
            .iter()
            .map(|trial| trial.spec.to_string())
            .collect()
    }

    #[test]
    fn flags_replace_the_default_strategies() {
        let delta = vec![DeltaFlag::Running, DeltaFlag::Token];
        let grid = GridFlags { lambda: vec!["0.1".into()], delta, ..GridFlags::default() };
        let all = specs(&grid, 8, 2);
        assert_eq!(all, ["original", "prior:lambda=0.1,j=1", "prior:lambda=0.1,j=1,delta=token"]);
        let plain = GridFlags { max_rank: vec!["4".into()], keep: Some(0), ..GridFlags::default() };
        assert_eq!(specs(&plain, 8, 2), ["original", "max-rank:m=4,j=0"]);
        let strategy = vec!["prior:lambda=0.05+light:tau=0.1".parse().unwrap()];
        let more =
            GridFlags { strategy, lambda: vec!["1".into()], delta: vec![DeltaFlag::Running], ..GridFlags::default() };
        assert_eq!(specs(&more, 8, 2), ["original", "prior:lambda=1,j=1", "prior:lambda=0.05+light:tau=0.1"]);
        let families = trials(&more, &Geometry::narrow(1, [0], 8, 2)).unwrap();
        assert_eq!(families[2].family, "prior+light");
    }

    #[test]
    fn the_default_strategies_are_valid_for_every_geometry() {
        let grid = GridFlags { delta: vec![DeltaFlag::Running], ..GridFlags::default() };
        for (experts, top_k) in [(8, 2), (64, 8), (16, 1), (6, 6), (128, 8)] {
            let all = specs(&grid, experts, top_k);
            assert!(all.len() >= 12, "{all:?}");
            let ranks = all.iter().filter_map(|s| s.strip_prefix("max-rank:m="));
            let ranks: Vec<usize> = ranks.map(|s| s.split(',').next().unwrap().parse().unwrap()).collect();
            assert!(ranks.iter().all(|m| *m > top_k && *m <= experts), "{ranks:?}");
        }
    }
}
