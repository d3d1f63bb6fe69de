//! The Pareto front.

/// Whether each point is on the Pareto front, smaller being better in both coordinates. Of equal points only the first
/// is; NaN never is.
pub fn pareto_front(points: &[(f64, f64)]) -> Vec<bool> {
    let is_dominated = |at: usize, (x, y): (f64, f64)| {
        points.iter().enumerate().any(|(other, (a, b))| {
            let better = *a < x || *b < y || other < at;
            *a <= x && *b <= y && other != at && better
        })
    };
    let real = |(x, y): (f64, f64)| !x.is_nan() && !y.is_nan();
    points.iter().enumerate().map(|(at, point)| real(*point) && !is_dominated(at, *point)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_undominated_points_are_on_the_front() {
        let points = [(3.0, 1.0), (2.0, 2.0), (3.0, 2.0), (1.0, 5.0), (1.0, 6.0), (2.0, 2.0), (f64::NAN, 0.0)];
        assert_eq!(pareto_front(&points), [true, true, false, true, false, false, false]);
        assert!(pareto_front(&[]).is_empty());
    }
}
