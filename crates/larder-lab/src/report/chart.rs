//! Line charts and box plots as SVG. Colours are CSS variables of the page, so that they follow its light or dark scheme.

use std::fmt::Write;

use super::html::escape;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 128.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 48.0;

/// The style of a curve.
#[derive(Clone, Copy)]
pub enum Style {
    /// The default.
    Plain,
    /// Thicker.
    Strong,
    /// Thicker and dashed, for references.
    Dashed,
}

impl Style {
    fn class(self) -> &'static str {
        match self {
            Style::Plain => "line",
            Style::Strong => "line strong",
            Style::Dashed => "line strong dashed",
        }
    }
}

/// x, y, and the interval of y.
pub type Point = (f64, f64, Option<(f64, f64)>);

/// A curve.
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// Index of one of the page's twelve colours.
    pub color: usize,
    /// Style of the line.
    pub style: Style,
    /// Points from left to right.
    pub points: Vec<Point>,
}

/// A line chart.
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// Label of the x axis.
    pub x: String,
    /// Label of the y axis.
    pub y: String,
    /// Curves in the order of the legend.
    pub lines: Vec<Line>,
    /// Whether y values are shares, labelled in percent.
    pub percent: bool,
    /// A range that the y axis includes.
    pub y_range: Option<(f64, f64)>,
}

/// The mapping from values to coordinates.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn at_x(&self, x: f64) -> f64 {
        LEFT + (x - self.x.0) / (self.x.1 - self.x.0).max(1e-12) * (WIDTH - LEFT - RIGHT)
    }

    fn at_y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - (y - self.y.0) / (self.y.1 - self.y.0).max(1e-12) * (HEIGHT - TOP - BOTTOM)
    }
}

impl Chart {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = span(points().map(|p| p.0), None);
        let y = span(points().map(|p| p.1), self.y_range);
        let ticks = round_numbers(y);
        let frame = Frame { x, y: (ticks[0].min(y.0), ticks[ticks.len() - 1].max(y.1)) };
        let mut out = begin(&self.title);
        self.axes(&mut out, &frame, &ticks);
        for line in &self.lines {
            draw(&mut out, &frame, line);
        }
        for (i, line) in self.lines.iter().enumerate() {
            let (x, y) = (WIDTH - RIGHT + 16.0, TOP + 8.0 + 19.0 * i as f64);
            let class = line.style.class();
            let color = line.color;
            let _ = write!(
                out,
                "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" class=\"{class}\" style=\"stroke:var(--c{color})\"/>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                x + 22.0,
                x + 28.0,
                y + 4.0,
                escape(&shortened(&line.name))
            );
        }
        out.push_str("</svg>");
        out
    }

    fn axes(&self, out: &mut String, frame: &Frame, ticks: &[f64]) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in ticks {
            let (y, text) = (frame.at_y(*tick), number(*tick, self.percent));
            let _ = write!(
                out,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" class=\"grid\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" class=\"faint\">{text}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        let mut xs: Vec<f64> = self.lines.iter().flat_map(|line| line.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        // Integers, such as capacities, get ticks at the points themselves; other values at round numbers.
        let xs = match xs.iter().all(|x| x.fract() == 0.0) {
            true => xs.iter().copied().step_by(xs.len().div_ceil(12).max(1)).collect(),
            false => round_numbers(frame.x),
        };
        for x in xs.iter().filter(|x| (frame.x.0..=frame.x.1).contains(*x)) {
            let (at, text) = (frame.at_x(*x), number(*x, false));
            let _ = write!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{}\" class=\"axis\"/>\
                 <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" class=\"faint\">{text}</text>",
                bottom + 5.0,
                bottom + 19.0
            );
        }
        let _ = write!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\" class=\"axis\"/>\
             <text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" class=\"faint\">{}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\" class=\"faint\">{}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 10.0,
            escape(&self.x),
            (TOP + bottom) / 2.0,
            escape(&self.y)
        );
    }
}

fn begin(title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\"><text x=\"{LEFT}\" y=\"18\" class=\"title\">{}</text>",
        escape(title)
    )
}

fn draw(out: &mut String, frame: &Frame, line: &Line) {
    let color = format!("style=\"stroke:var(--c{})\"", line.color);
    let path: Vec<String> =
        line.points.iter().map(|p| format!("{:.1},{:.1}", frame.at_x(p.0), frame.at_y(p.1))).collect();
    let _ = write!(out, "<polyline points=\"{}\" class=\"{}\" {color}/>", path.join(" "), line.style.class());
    for (x, y, range) in &line.points {
        let at = frame.at_x(*x);
        if let Some((low, high)) = range {
            let clamp = |y: f64| frame.at_y(y.clamp(frame.y.0, frame.y.1));
            let (low, high) = (clamp(*low), clamp(*high));
            let _ = write!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{low:.1}\" x2=\"{at:.1}\" y2=\"{high:.1}\" class=\"whisker\" {color}/>"
            );
        }
        let _ = write!(
            out,
            "<circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"3\" style=\"fill:var(--c{})\"><title>{}: {x}, {y:.4}</title></circle>",
            frame.at_y(*y),
            line.color,
            escape(&line.name)
        );
    }
}

/// A box plot: the spread of values in several groups.
pub(super) struct BoxPlot {
    pub title: String,
    pub x: String,
    /// Name, colour and values of each group.
    pub groups: Vec<(String, usize, Vec<f64>)>,
}

impl BoxPlot {
    /// The plot as SVG, one group per line: median, quartiles, and whiskers from the 5th to the 95th percentile.
    pub fn svg(&self) -> String {
        let quantiles = |values: &Vec<f64>| {
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            [0.05, 0.25, 0.5, 0.75, 0.95].map(|q| sorted[(q * (sorted.len() - 1) as f64).round() as usize])
        };
        let all: Vec<_> =
            self.groups.iter().filter(|g| !g.2.is_empty()).map(|g| (&g.0, g.1, quantiles(&g.2))).collect();
        let range = span(all.iter().flat_map(|g| g.2), None);
        let ticks = round_numbers(range);
        let frame = Frame { x: (ticks[0].min(range.0), ticks[ticks.len() - 1].max(range.1)), y: (0.0, 1.0) };
        let (left, right, bottom) = (LEFT + 60.0, WIDTH - 30.0, HEIGHT - BOTTOM);
        let at = |v: f64| left + (frame.at_x(v) - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
        let mut out = begin(&self.title);
        for tick in &ticks {
            let (x, text) = (at(*tick), number(*tick, false));
            let _ = write!(
                out,
                "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" class=\"grid\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" class=\"faint\">{text}</text>",
                bottom + 17.0
            );
        }
        let step = (bottom - TOP) / all.len().max(1) as f64;
        for (i, (name, color, q)) in all.iter().enumerate() {
            let y = TOP + step * (i as f64 + 0.5);
            let half = (step * 0.32).min(11.0);
            let stroke = format!("style=\"stroke:var(--c{color})\"");
            let _ = write!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
                 <line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" class=\"whisker\" {stroke}/>\
                 <rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" class=\"box\" \
                 style=\"fill:var(--c{color});stroke:var(--c{color})\"><title>{}: {:.4}</title></rect>\
                 <line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" class=\"line\" {stroke}/>",
                left - 10.0,
                y + 4.0,
                escape(&shortened(name)),
                at(q[0]),
                at(q[4]),
                at(q[1]),
                y - half,
                at(q[3]) - at(q[1]),
                2.0 * half,
                escape(name),
                q[2],
                at(q[2]),
                y - half,
                at(q[2]),
                y + half
            );
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" class=\"faint\">{}</text></svg>",
            (left + right) / 2.0,
            HEIGHT - 10.0,
            escape(&self.x)
        );
        out
    }
}

/// Shortens a long spec to the width of the legend.
fn shortened(name: &str) -> String {
    match name.chars().count() > 13 {
        true => name.chars().take(12).chain(['…']).collect(),
        false => name.to_owned(),
    }
}

fn number(value: f64, percent: bool) -> String {
    match percent {
        true => format!("{:.0} %", 100.0 * value),
        false if value.abs() >= 1e6 => format!("{}M", value / 1e6),
        false => format!("{}", (value * 1e6).round() / 1e6),
    }
}

fn span(values: impl Iterator<Item = f64>, least: Option<(f64, f64)>) -> (f64, f64) {
    let start = least.unwrap_or((f64::INFINITY, f64::NEG_INFINITY));
    let (low, high) = values.filter(|v| v.is_finite()).fold(start, |(low, high), v| (low.min(v), high.max(v)));
    match low < high {
        true => (low, high),
        false if low.is_finite() => (low - 0.5, low + 0.5),
        false => (0.0, 1.0),
    }
}

/// Round numbers that cover a range.
fn round_numbers((low, high): (f64, f64)) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|s| s * power).find(|s| *s >= rough * 0.999).unwrap_or(rough);
    let (from, to) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
    (from..=to).map(|i| i as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        assert_eq!(round_numbers((0.0, 1.0)), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(round_numbers((1.0, 2.4)), [1.0, 1.5, 2.0, 2.5]);
        assert_eq!(round_numbers((0.0, 1234.0)), [0.0, 250.0, 500.0, 750.0, 1000.0, 1250.0]);
    }

    #[test]
    fn charts_contain_no_nan() {
        let at = |x, range| (x, 0.5, range);
        let line = |points| Line { name: "a<b".into(), color: 1, style: Style::Plain, points };
        let chart =
            |lines| Chart { title: "t".into(), x: "x".into(), y: "y".into(), lines, percent: true, y_range: None };
        for lines in
            [vec![], vec![line(vec![at(1.0, None)])], vec![line(vec![at(1.0, Some((0.1, 0.7))), at(2.0, None)])]]
        {
            let svg = chart(lines).svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("a<b"), "{svg}");
        }
        let boxes = BoxPlot {
            title: "t".into(),
            x: "x".into(),
            groups: vec![("a".into(), 0, vec![1.0]), ("b".into(), 1, vec![])],
        };
        assert!(!boxes.svg().contains("NaN"));
    }
}
