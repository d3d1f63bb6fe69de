//! Box plots: the spread of values in several groups.

use std::fmt::Write;

use super::page::escape;
use super::plot::{Frame, Mark, WIDTH, figure, number, round_numbers, shape, shortened, span};

/// Height of a group: its name, and its box below.
const STEP: f64 = 46.0;
/// Longest name that fits above a box.
const NAME_CHARS: usize = 56;
/// Up to this number of values, each is drawn.
const DOTS_MAX: usize = 40;

/// The values of a group.
pub(super) struct BoxGroup {
    pub name: String,
    /// Index of one of the page's twelve colours.
    pub color: usize,
    pub values: Vec<f64>,
}

/// A box plot.
pub(super) struct BoxPlot {
    pub title: String,
    pub x: String,
    /// What a value is one of, such as "run".
    pub unit: &'static str,
    pub groups: Vec<BoxGroup>,
}

/// Whiskers, box and median of a group.
struct Quantiles {
    p5: f64,
    p25: f64,
    p50: f64,
    p75: f64,
    p95: f64,
}

impl Quantiles {
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let [p5, p25, p50, p75, p95] =
            [0.05, 0.25, 0.5, 0.75, 0.95].map(|q| sorted[(q * (sorted.len() - 1) as f64).round() as usize]);
        Quantiles { p5, p25, p50, p75, p95 }
    }
}

impl BoxPlot {
    /// The plot as a figure, one group per line: median, quartiles, and whiskers from the 5th to the 95th percentile.
    pub fn figure(&self) -> String {
        let groups: Vec<&BoxGroup> = self.groups.iter().filter(|g| !g.values.is_empty()).collect();
        let range = span(groups.iter().flat_map(|g| g.values.iter().copied()), None);
        let ticks = round_numbers(range);
        let bottom = 8.0 + STEP * groups.len().max(1) as f64;
        let x = (ticks[0].min(range.0), ticks[ticks.len() - 1].max(range.1));
        let frame = Frame { left: 14.0, right: WIDTH - 18.0, top: 4.0, bottom, x, y: (0.0, 1.0) };
        let mut out = String::new();
        frame.x_ticks(&mut out, &ticks, "grid");
        frame.x_name(&mut out, &self.x);
        for (i, group) in groups.iter().enumerate() {
            self.draw(&mut out, &frame, 8.0 + STEP * i as f64, group);
        }
        let subtitle = format!("box: quartiles and median; whiskers: 5th to 95th percentile; dots: {}s", self.unit);
        figure(&self.title, &subtitle, bottom + 42.0, &out)
    }

    fn draw(&self, out: &mut String, frame: &Frame, top: f64, group: &BoxGroup) {
        let BoxGroup { name, color, values } = group;
        let q = Quantiles::of(values);
        let (y, half) = (top + 29.0, 9.0);
        let at = |value| frame.at_x(value);
        let series = escape(name);
        let _ = write!(
            out,
            "<g class=\"c{color}\" data-s=\"{series}\"><text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\
             <path class=\"whisker\" d=\"M{:.1} {y:.1}H{:.1}\"/>",
            frame.left,
            top + 12.0,
            escape(&shortened(name, NAME_CHARS)),
            at(q.p5),
            at(q.p95)
        );
        let (left, width) = (at(q.p25), (at(q.p75) - at(q.p25)).max(1.0));
        let [p5, p25, p50, p75, p95] = [q.p5, q.p25, q.p50, q.p75, q.p95].map(|value| number(value, false));
        let says = format!(
            "{name}: median {p50}, quartiles {p25} to {p75}, 5th to 95th percentile {p5} to {p95}, {} {}s",
            values.len(),
            self.unit
        );
        let path = format!("M{left:.1} {:.1}h{width:.1}v{h}h-{width:.1}z", y - half, h = 2.0 * half);
        Mark { series: name, class: "box", path, says }.draw(out);
        let _ = write!(out, "<path class=\"median\" d=\"M{:.1} {:.1}v{}\"/>", at(q.p50), y - half, 2.0 * half);
        for (n, value) in values.iter().enumerate().filter(|_| values.len() <= DOTS_MAX) {
            // Up and down in turn, so that equal values do not hide each other.
            let path = shape(0, at(*value), y + [0.0, -4.5, 4.5][n % 3], 2.6);
            let says = format!("{name}, {} {}: {}", self.unit, n + 1, number(*value, false));
            Mark { series: name, class: "run", path, says }.draw(out);
        }
        out.push_str("</g>");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_a_mark_and_empty_groups_are_left_out() {
        let group = |name: &str, values: &[f64]| BoxGroup { name: name.into(), color: 1, values: values.to_vec() };
        let groups = vec![group("a<b", &[1.0, 2.0, 4.0]), group("none", &[])];
        let plot = BoxPlot { title: "t".into(), x: "x".into(), unit: "run", groups }.figure();
        assert!(!plot.contains("NaN") && !plot.contains("a<b") && !plot.contains("none"));
        assert_eq!(plot.matches("<title>").count(), 4);
        assert!(plot.contains("a&lt;b: median 2, quartiles"), "{plot}");
    }
}
