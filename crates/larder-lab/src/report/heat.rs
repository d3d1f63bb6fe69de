use std::fmt::Write;
use std::ops::Range;

use larder_cache::{Ledger, Wave};
use larder_core::Presence;
use larder_core::Residency;
use larder_policy::eviction::{EvictionSpec, Help, Setting};

use super::html::escape;
use crate::replay::{Observer, drive};
use crate::requests::Ask;
use crate::{LabError, Requests};

/// Which part of a replay is drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Window {
    /// The layer, among those that have experts.
    pub row: usize,
    /// The forward passes, counted from the start of the requests.
    pub passes: Range<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Spot {
    Absent,
    /// In memory and not wanted.
    Stays,
    Hit,
    Miss,
}

/// One pass: each expert of the layer, and whether it left then or before the layer's next turn.
struct Column {
    spots: Vec<Spot>,
    left: Vec<bool>,
}

/// The experts of one layer over some passes: wanted and there, wanted and missed, there without being wanted, leaving.
pub struct Heat {
    name: String,
    slots: usize,
    window: Window,
    columns: Vec<Column>,
    /// Passes of that layer so far.
    seen: usize,
    experts: usize,
}

impl Heat {
    /// Replays `requests` and keeps what happens in `window`.
    pub fn replay(
        requests: &Requests,
        setting: &Setting,
        spec: &EvictionSpec,
        help: &Help,
        window: &Window,
    ) -> Result<Self, LabError> {
        if window.row >= setting.rows {
            let rows = setting.rows;
            return Err(LabError::Impossible(format!("layer {} is not among the {rows} of the trace", window.row)));
        }
        let window = window.clone();
        let Setting { slots, experts, .. } = *setting;
        let mut heat = Heat { name: spec.to_string(), slots, window, columns: Vec::new(), seen: 0, experts };
        drive(requests, setting, spec, help, &mut heat)?;
        match heat.columns.is_empty() {
            true => {
                let (from, has) = (heat.window.passes.start, heat.seen);
                Err(LabError::Impossible(format!("nothing can be drawn from pass {from} on: there are {has}")))
            }
            false => Ok(heat),
        }
    }

    /// The column that is under way, if the window is open.
    fn present(&mut self) -> Option<&mut Column> {
        let open = self.seen > 0 && self.window.passes.contains(&(self.seen - 1));
        self.columns.last_mut().filter(|_| open)
    }

    /// Hits and misses in the window.
    fn counts(&self) -> (usize, usize) {
        let count = |spot| self.columns.iter().flat_map(|c| &c.spots).filter(|s| **s == spot).count();
        (count(Spot::Hit), count(Spot::Miss))
    }

    /// As a picture: passes to the right, experts downwards.
    pub(super) fn svg(&self) -> String {
        let (left, top) = (40.0, 34.0);
        let wide = (1000.0 / self.columns.len() as f64).clamp(4.0, 16.0);
        let high = (420.0 / self.experts as f64).clamp(3.0, 13.0);
        let (right, bottom) = (left + wide * self.columns.len() as f64, top + high * self.experts as f64);
        let (hits, misses) = self.counts();
        let mut out = format!(
            "<svg viewBox=\"0 0 {:.1} {:.1}\" role=\"img\" style=\"max-width:{:.0}px\">\
             <text x=\"{left}\" y=\"18\" class=\"title\">{}, layer {}, {} slots: {hits} hits, {misses} misses</text>",
            right + 10.0,
            bottom + 36.0,
            right + 10.0,
            escape(&self.name),
            self.window.row,
            self.slots
        );
        let spot = |out: &mut String, column: usize, count: usize, expert: usize, class: &str| {
            let (x, y) = (left + wide * column as f64, top + high * expert as f64);
            let (w, h) = (wide * count as f64 - 0.6, high - 0.6);
            let _ =
                write!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" class=\"{class}\"/>");
        };
        for expert in 0..self.experts {
            let mut at = 0;
            for run in self.columns.chunk_by(|a, b| a.spots[expert] == b.spots[expert]) {
                match run[0].spots[expert] {
                    Spot::Absent => {}
                    Spot::Stays => spot(&mut out, at, run.len(), expert, "stays"),
                    Spot::Hit => (at..at + run.len()).for_each(|c| spot(&mut out, c, 1, expert, "hit")),
                    Spot::Miss => (at..at + run.len()).for_each(|c| spot(&mut out, c, 1, expert, "miss")),
                }
                at += run.len();
            }
        }
        out.push_str("<path class=\"out\" d=\"");
        for (at, column) in self.columns.iter().enumerate() {
            for expert in (0..self.experts).filter(|e| column.left[*e]) {
                let (x, y) = (left + wide * (at as f64 + 0.5), top + high * (expert as f64 + 0.5));
                let r = (wide.min(high) * 0.28).max(1.2);
                let d = 2.0 * r;
                let _ = write!(out, "M{:.1} {:.1}l{d:.1} {d:.1}m0 -{d:.1}l-{d:.1} {d:.1}", x - r, y - r);
            }
        }
        out.push_str("\"/>");
        for expert in (0..self.experts).step_by(self.experts.div_ceil(8).max(1)) {
            let y = top + high * (expert as f64 + 0.5) + 4.0;
            let x = left - 6.0;
            let _ = write!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\" class=\"faint\">{expert}</text>");
        }
        for at in (0..self.columns.len()).step_by(self.columns.len().div_ceil(10).max(1)) {
            let (x, y) = (left + wide * (at as f64 + 0.5), bottom + 15.0);
            let pass = self.window.passes.start + at;
            let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" class=\"faint\">{pass}</text>");
        }
        let (x, y) = ((left + right) / 2.0, bottom + 31.0);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" class=\"faint\">pass</text></svg>");
        out
    }
}

impl Observer for Heat {
    fn visit(&mut self, ask: &Ask, ledger: &Ledger) {
        if ask.row != self.window.row {
            return;
        }
        if self.window.passes.contains(&self.seen) {
            let spot = |expert| match ledger.presence(ask.row, expert) {
                Presence::Absent | Presence::InFlight => Spot::Absent,
                Presence::Resident => Spot::Stays,
            };
            let spots = (0..self.experts).map(spot).collect();
            self.columns.push(Column { spots, left: vec![false; self.experts] });
        }
        self.seen += 1;
    }

    fn wave(&mut self, ask: &Ask, wave: &Wave) {
        let row = self.window.row;
        let Some(column) = self.present() else { return };
        if ask.row == row {
            wave.hits.iter().for_each(|(expert, _)| column.spots[*expert] = Spot::Hit);
            wave.misses.iter().for_each(|(expert, _)| column.spots[*expert] = Spot::Miss);
        }
        wave.evicted.iter().filter(|(r, _)| *r == row).for_each(|(_, expert)| column.left[*expert] = true);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{Pass, Scope, Trace};

    use super::*;

    fn heat(passes: Range<usize>, row: usize) -> Result<Heat, LabError> {
        let mut trace = Trace::new(1, 3, 1);
        for id in [0, 1, 0, 2, 1] {
            trace.push(&Pass { ids: &[id], ..Pass::default() }).unwrap();
        }
        let requests = Requests::all(&trace);
        let setting = requests.setting(2, Scope::Layer, 0).unwrap();
        Heat::replay(&requests, &setting, &"lru".parse().unwrap(), &Help::default(), &Window { row, passes })
    }

    #[test]
    fn a_window_shows_who_was_there_who_came_and_who_left() {
        let heat = heat(2..5, 0).unwrap();
        let spots: Vec<_> = heat.columns.iter().map(|c| c.spots.clone()).collect();
        use Spot::*;
        assert_eq!(spots, [[Hit, Stays, Absent], [Stays, Stays, Miss], [Stays, Miss, Stays]]);
        let left: Vec<_> = heat.columns.iter().map(|c| c.left.clone()).collect();
        assert_eq!(left, [[false; 3], [false, true, false], [true, false, false]]);
        assert!(heat.svg().contains("lru, layer 0, 2 slots: 1 hits, 2 misses"));
    }

    #[test]
    fn windows_beside_the_trace_are_refused() {
        assert!(heat(9..12, 0).map(drop).unwrap_err().to_string().contains("there are 5"));
        assert!(heat(0..2, 1).map(drop).unwrap_err().to_string().contains("layer 1"));
    }
}
