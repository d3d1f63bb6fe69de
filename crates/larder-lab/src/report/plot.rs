//! What line charts and box plots share: the frame of a figure, axes, ticks, and marks that say their value. Colours
//! are classes, which the page's style defines for its light and its dark scheme.

use std::fmt::Write;

use super::page::escape;

/// Width of a plot, close to its width on the page, so that its text is as large as the page's.
pub(super) const WIDTH: f64 = 400.0;

/// A rectangle of the plot and the values at its edges.
pub(super) struct Frame {
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
    /// Values at `left` and `right`.
    pub x: (f64, f64),
    /// Values at `bottom` and `top`.
    pub y: (f64, f64),
}

impl Frame {
    pub fn at_x(&self, x: f64) -> f64 {
        self.left + (x - self.x.0) / (self.x.1 - self.x.0).max(1e-12) * (self.right - self.left)
    }

    pub fn at_y(&self, y: f64) -> f64 {
        self.bottom - (y - self.y.0) / (self.y.1 - self.y.0).max(1e-12) * (self.bottom - self.top)
    }

    /// Vertical lines and numbers below them.
    pub fn x_ticks(&self, out: &mut String, ticks: &[f64], class: &str) {
        let (from, to) = if class == "grid" { (self.top, self.bottom) } else { (self.bottom, self.bottom + 4.0) };
        for tick in ticks.iter().filter(|x| (self.x.0..=self.x.1).contains(*x)) {
            let (x, text) = (self.at_x(*tick), number(*tick, false));
            let _ = write!(
                out,
                "<path class=\"{class}\" d=\"M{x:.1} {from:.1}V{to:.1}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                self.bottom + 17.0
            );
        }
    }

    /// Horizontal lines and numbers beside them.
    pub fn y_ticks(&self, out: &mut String, ticks: &[f64], percent: bool) {
        for tick in ticks {
            let (y, text) = (self.at_y(*tick), number(*tick, percent));
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{:.1} {y:.1}H{:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                self.left,
                self.right,
                self.left - 7.0,
                y + 4.0
            );
        }
    }

    /// The name of the x axis.
    pub fn x_name(&self, out: &mut String, name: &str) {
        let (x, y) = ((self.left + self.right) / 2.0, self.bottom + 34.0);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>", escape(name));
    }
}

/// A figure around the SVG of a plot of this height, with a line for the values of marks.
pub(super) fn figure(title: &str, subtitle: &str, height: f64, svg: &str) -> String {
    let (title, subtitle) = (escape(title), escape(subtitle));
    format!(
        "<figure class=\"chart\"><figcaption>{title} <small>{subtitle}</small></figcaption>\
         <svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"group\" aria-label=\"{title}\">{svg}</svg>\
         <p class=\"readout\" aria-hidden=\"true\">Point at a mark, or use tab and arrow keys.</p></figure>\n"
    )
}

/// A shape of a figure that says its value when it is pointed at or focused.
pub(super) struct Mark<'a> {
    /// Name of the curve or group.
    pub series: &'a str,
    /// Further classes.
    pub class: &'a str,
    /// Path data.
    pub path: String,
    /// The value, with its unit.
    pub says: String,
}

impl Mark<'_> {
    /// Adds the mark. The first of a figure is where the tab key stops.
    pub fn draw(&self, out: &mut String) {
        let stop = if out.contains("tabindex=\"0\"") { "-1" } else { "0" };
        let _ = write!(
            out,
            "<path class=\"mark {}\" role=\"img\" tabindex=\"{stop}\" data-s=\"{}\" d=\"{}\"><title>{}</title></path>",
            self.class,
            escape(self.series),
            self.path,
            escape(&self.says)
        );
    }
}

/// A circle, square, triangle or diamond, so that curves differ not by their colours alone.
pub(super) fn shape(kind: usize, x: f64, y: f64, size: f64) -> String {
    let r = size;
    match kind % 4 {
        0 => format!("M{:.1} {y:.1}a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z", x - r, d = 2.0 * r),
        1 => format!("M{:.1} {:.1}h{d}v{d}h-{d}z", x - 0.9 * r, y - 0.9 * r, d = 1.8 * r),
        2 => format!("M{x:.1} {:.1}l{w} {h}h-{d}z", y - 1.15 * r, w = 1.15 * r, h = 2.0 * r, d = 2.3 * r),
        _ => format!("M{x:.1} {:.1}l{r} {r}l-{r} {r}l-{r} -{r}z", y - r, r = 1.2 * r),
    }
}

/// A number with four significant digits at most, or in percent.
pub(super) fn number(value: f64, percent: bool) -> String {
    let (value, unit) = match percent {
        true => (100.0 * value, " %"),
        false if value.abs() >= 1e6 => (value / 1e6, "M"),
        false => (value, ""),
    };
    let digits = (3.0 - value.abs().max(1e-9).log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let text = if text == "-0" { "0" } else { text };
    format!("{text}{unit}")
}

/// The lowest and the highest value, and the ends of a range that is included.
pub(super) fn span(values: impl Iterator<Item = f64>, included: Option<(f64, f64)>) -> (f64, f64) {
    let start = included.unwrap_or((f64::INFINITY, f64::NEG_INFINITY));
    let (low, high) = values.filter(|v| v.is_finite()).fold(start, |(low, high), v| (low.min(v), high.max(v)));
    match low < high {
        true => (low, high),
        false if low.is_finite() => (low - 0.5, low + 0.5),
        false => (0.0, 1.0),
    }
}

/// Round numbers that cover a range.
pub(super) fn round_numbers((low, high): (f64, f64)) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|s| s * power).find(|s| *s >= rough * 0.999).unwrap_or(rough);
    let (from, to) = ((low / step + 1e-9).floor() as i64, (high / step - 1e-9).ceil() as i64);
    (from..=to).map(|i| i as f64 * step).collect()
}

/// At most `chars` characters of a name.
pub(super) fn shortened(name: &str, chars: usize) -> String {
    if name.chars().count() > chars { name.chars().take(chars - 1).chain(['…']).collect() } else { name.to_owned() }
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
    fn numbers_are_short() {
        let shown = [0.6000000000000001, 0.0, -0.0, 1250.0, 12345.0, 0.00012345, 2.5e6].map(|n| number(n, false));
        assert_eq!(shown, ["0.6", "0", "0", "1250", "12345", "0.0001234", "2.5M"]);
        assert_eq!([0.5, 0.07654].map(|n| number(n, true)), ["50 %", "7.654 %"]);
    }

    #[test]
    fn only_the_first_mark_is_a_stop_of_the_tab_key() {
        let mut out = String::new();
        for series in ["a\"b", "c"] {
            Mark { series, class: "c1", path: shape(2, 0.0, 0.0, 3.0), says: "<1>".into() }.draw(&mut out);
        }
        assert_eq!((out.matches("tabindex=\"0\"").count(), out.matches("tabindex=\"-1\"").count()), (1, 1));
        assert!(out.contains("a&quot;b") && out.contains("&lt;1&gt;"));
    }
}
