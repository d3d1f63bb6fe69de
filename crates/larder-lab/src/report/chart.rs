//! Line charts.

use std::fmt::Write;

use super::box_plot::BoxPlot;
use super::page::escape;
use super::plot::{Frame, Mark, WIDTH, figure, number, round_numbers, shape, span};

const HEIGHT: f64 = 270.0;

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
            Style::Dashed => "line dashed",
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

/// Charts side by side, below a legend of all their curves.
pub fn chart_group(charts: &[Chart]) -> String {
    figures(charts, &[])
}

/// Charts and box plots side by side.
pub(super) fn figures(charts: &[Chart], plots: &[BoxPlot]) -> String {
    let mut named: Vec<&Line> = Vec::new();
    for line in charts.iter().flat_map(|chart| &chart.lines).filter(|line| !line.points.is_empty()) {
        if !named.iter().any(|other| other.name == line.name) {
            named.push(line);
        }
    }
    let class = if charts.len() + plots.len() == 1 { "charts single" } else { "charts" };
    let figures: String = charts.iter().map(Chart::figure).chain(plots.iter().map(BoxPlot::figure)).collect();
    let legend = if named.len() > 1 { legend(&named) } else { String::new() };
    format!("{legend}<div class=\"{class}\">\n{figures}</div>\n")
}

fn legend(lines: &[&Line]) -> String {
    let item = |line: &&Line| {
        let (color, name) = (line.color, escape(&line.name));
        format!(
            "<li><button type=\"button\" data-s=\"{name}\" aria-pressed=\"false\">\
             <svg viewBox=\"0 0 28 12\" aria-hidden=\"true\"><g class=\"c{color}\"><path class=\"{}\" d=\"M1 6H27\"/>\
             <path class=\"mark\" d=\"{}\"/></g></svg>{name}</button></li>\n",
            line.style.class(),
            shape(line.color, 14.0, 6.0, 3.4)
        )
    };
    format!("<ul class=\"legend\" aria-label=\"Curves\">\n{}</ul>\n", lines.iter().map(item).collect::<String>())
}

impl Chart {
    /// The chart as a figure.
    fn figure(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let mut x = span(points().map(|p| p.0), None);
        if points().any(|p| p.0.fract() != 0.0) {
            let margin = 0.04 * (x.1 - x.0);
            x = (x.0 - margin, x.1 + margin);
        }
        let ends = points().filter_map(|p| p.2).flat_map(|(low, high)| [low, high]);
        let y = span(points().map(|p| p.1).chain(ends), self.y_range);
        let ticks = round_numbers(y);
        let y = (ticks[0].min(y.0), ticks[ticks.len() - 1].max(y.1));
        let frame = Frame { left: 48.0, right: WIDTH - 10.0, top: 8.0, bottom: HEIGHT - 42.0, x, y };
        let mut out = String::new();
        frame.y_ticks(&mut out, &ticks, self.percent);
        frame.x_ticks(&mut out, &self.x_ticks(&frame), "axis");
        frame.x_name(&mut out, &self.x);
        let _ = write!(out, "<path class=\"axis\" d=\"M{} {}H{}\"/>", frame.left, frame.bottom, frame.right);
        for line in &self.lines {
            self.draw(&mut out, &frame, line);
        }
        figure(&self.title, &self.y, HEIGHT, &out)
    }

    /// Integers, such as capacities, get ticks at the points themselves; other values at round numbers.
    fn x_ticks(&self, frame: &Frame) -> Vec<f64> {
        let mut xs: Vec<f64> = self.lines.iter().flat_map(|line| line.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        if xs.iter().all(|x| x.fract() == 0.0) {
            xs.iter().copied().step_by(xs.len().div_ceil(9).max(1)).collect()
        } else {
            round_numbers(frame.x)
        }
    }

    fn draw(&self, out: &mut String, frame: &Frame, line: &Line) {
        let path: Vec<String> =
            line.points.iter().map(|p| format!("{:.1} {:.1}", frame.at_x(p.0), frame.at_y(p.1))).collect();
        let _ = write!(out, "<g class=\"c{}\" data-s=\"{}\">", line.color, escape(&line.name));
        if path.len() > 1 {
            let _ = write!(out, "<path class=\"{}\" d=\"M{}\"/>", line.style.class(), path.join("L"));
        }
        for (x, y, range) in &line.points {
            let at = frame.at_x(*x);
            let clamped = |y: f64| frame.at_y(y.clamp(frame.y.0, frame.y.1));
            if let Some((low, high)) = range {
                let _ =
                    write!(out, "<path class=\"whisker\" d=\"M{at:.1} {:.1}V{:.1}\"/>", clamped(*low), clamped(*high));
            }
            let path = shape(line.color, at, clamped(*y), 3.4);
            Mark { series: &line.name, class: "", path, says: self.says(line, *x, *y, *range) }.draw(out);
        }
        out.push_str("</g>");
    }

    /// A point in words.
    fn says(&self, line: &Line, x: f64, y: f64, range: Option<(f64, f64)>) -> String {
        let show = |value| number(value, self.percent);
        let interval = range.map(|(low, high)| format!(" ({} to {})", show(low), show(high))).unwrap_or_default();
        format!("{}, {} {}: {}{interval} {}", line.name, number(x, false), self.x, show(y), self.y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charts_contain_no_nan_and_escaped_names() {
        let at = |x, range| (x, 0.5, range);
        let line = |points| Line { name: "a<b".into(), color: 1, style: Style::Plain, points };
        let chart =
            |lines| Chart { title: "t".into(), x: "x".into(), y: "y".into(), lines, percent: true, y_range: None };
        for lines in
            [vec![], vec![line(vec![at(1.0, None)])], vec![line(vec![at(1.0, Some((0.1, 0.7))), at(2.0, None)])]]
        {
            let html = chart_group(&[chart(lines)]);
            assert!(!html.contains("NaN") && !html.contains("inf") && !html.contains("a<b"), "{html}");
        }
    }

    #[test]
    fn a_point_says_its_value_with_the_interval() {
        let line = Line { name: "lru".into(), color: 0, style: Style::Strong, points: vec![] };
        let (title, x, y) = ("t".into(), "slots".into(), "hits".into());
        let chart = Chart { title, x, y, lines: vec![], percent: true, y_range: None };
        assert_eq!(chart.says(&line, 4.0, 0.5, Some((0.25, 0.75))), "lru, 4 slots: 50 % (25 % to 75 %) hits");
    }

    #[test]
    fn the_axis_has_room_for_whole_intervals() {
        let points = vec![(1.0, 30.0, Some((15.0, 660.0)))];
        let line = Line { name: "a".into(), color: 1, style: Style::Plain, points };
        let (title, x, y) = ("t".into(), "x".into(), "y".into());
        let chart = Chart { title, x, y, lines: vec![line], percent: false, y_range: Some((0.0, 0.0)) };
        let html = chart.figure();
        assert!(html.contains(">800</text>") || html.contains(">700</text>"), "{html}");
    }

    #[test]
    fn curves_of_several_charts_are_once_in_the_legend() {
        let line =
            |name: &str| Line { name: name.into(), color: 1, style: Style::Plain, points: vec![(1.0, 1.0, None)] };
        let chart = || Chart {
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            lines: vec![line("a"), line("b")],
            percent: false,
            y_range: None,
        };
        assert_eq!(chart_group(&[chart(), chart()]).matches("<button").count(), 2);
    }
}
