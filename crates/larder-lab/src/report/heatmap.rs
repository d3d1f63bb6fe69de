//! A heat map of one layer's cache over some passes.

use std::fmt::Write;
use std::ops::Range;

use larder_cache::{Ledger, SlotAssignment};
use larder_core::{MoeRow, Presence, Residency};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};

use super::page::escape;
use crate::replay::{Observer, replay_observed};
use crate::requests::LayerRequest;
use crate::{LabError, Requests};

/// The part of a replay to draw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeatmapWindow {
    /// The layer.
    pub row: MoeRow,
    /// Forward passes, counted from the start of the requests.
    pub passes: Range<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CellState {
    Absent,
    /// Resident and not requested.
    Resident,
    Hit,
    Miss,
}

/// One pass: the state of each expert, and whether it was evicted in this pass or before the layer's next visit.
struct PassColumn {
    states: Vec<CellState>,
    evicted: Vec<bool>,
}

/// The experts of one layer over some passes: hits, misses, residents and evictions.
pub struct Heatmap {
    name: String,
    slots: usize,
    window: HeatmapWindow,
    columns: Vec<PassColumn>,
    /// Visits of the layer so far.
    seen: usize,
    experts: usize,
}

impl Heatmap {
    /// Replays `requests` and records `window`.
    pub fn replay(
        requests: &Requests,
        shape: &CacheShape,
        spec: &EvictionSpec,
        inputs: &PolicyInputs,
        window: &HeatmapWindow,
    ) -> Result<Self, LabError> {
        if window.row.index() >= shape.rows {
            let rows = shape.rows;
            return Err(LabError::InvalidInput(format!(
                "layer {} does not exist: the trace has {rows} layers",
                window.row.index()
            )));
        }
        let window = window.clone();
        let CacheShape { slots, experts, .. } = *shape;
        let mut heat = Heatmap { name: spec.to_string(), slots, window, columns: Vec::new(), seen: 0, experts };
        let policies = spec.make(shape, &requests.policy_inputs(spec, inputs))?;
        replay_observed(requests, shape, policies, &mut heat);
        if heat.columns.is_empty() {
            let (from, has) = (heat.window.passes.start, heat.seen);
            Err(LabError::InvalidInput(format!("no passes to draw from pass {from} on: there are {has}")))
        } else {
            Ok(heat)
        }
    }

    /// The column of the current pass, if it is in the window.
    fn current(&mut self) -> Option<&mut PassColumn> {
        let open = self.seen > 0 && self.window.passes.contains(&(self.seen - 1));
        self.columns.last_mut().filter(|_| open)
    }

    /// Hits and misses in the window.
    fn counts(&self) -> (usize, usize) {
        let count = |spot| self.columns.iter().flat_map(|c| &c.states).filter(|s| **s == spot).count();
        (count(CellState::Hit), count(CellState::Miss))
    }

    /// The heat map as a figure: passes to the right, experts downwards.
    pub(super) fn figure(&self) -> String {
        let grid = Grid {
            wide: (1010.0 / self.columns.len() as f64).clamp(4.0, 16.0),
            high: (420.0 / self.experts as f64).clamp(3.0, 13.0),
        };
        let (right, bottom) = (grid.x(self.columns.len()), grid.y(self.experts));
        let (hits, misses) = self.counts();
        let title = format!("{}, layer {}, {} slots", escape(&self.name), self.window.row.index(), self.slots);
        let (width, height) = (right + 8.0, bottom + 36.0);
        let mut out = format!(
            "<figure class=\"heat\"><figcaption>{title} <small>{hits} hits, {misses} misses</small></figcaption>\
             <div class=\"scroll\"><svg viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" \
             role=\"img\" tabindex=\"0\" aria-label=\"{title}: {hits} hits, {misses} misses\" data-left=\"{LEFT}\" \
             data-top=\"{TOP}\" data-wide=\"{:.3}\" data-high=\"{:.3}\" data-first=\"{}\" data-cells=\"{}\">",
            grid.wide,
            grid.high,
            self.window.passes.start,
            self.cells()
        );
        (0..self.experts).for_each(|expert| self.draw_expert(&mut out, &grid, expert));
        self.draw_evictions(&mut out, &grid);
        self.draw_numbers(&mut out, &grid);
        let (x, y) = ((LEFT + right) / 2.0, bottom + 31.0);
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">pass</text><rect class=\"cursor\"/></svg></div>\
             <p class=\"readout\" aria-live=\"polite\">Point at a cell, or use tab and arrow keys.</p></figure>"
        );
        out
    }

    /// The cells as letters, a row of letters per expert: an upper-case letter, or `x` for an absent expert, if the
    /// expert was evicted.
    fn cells(&self) -> String {
        let cell = |column: &PassColumn, expert: usize| match (column.states[expert], column.evicted[expert]) {
            (CellState::Absent, false) => '.',
            (CellState::Absent, true) => 'x',
            (CellState::Resident, false) => 's',
            (CellState::Resident, true) => 'S',
            (CellState::Hit, false) => 'h',
            (CellState::Hit, true) => 'H',
            (CellState::Miss, false) => 'm',
            (CellState::Miss, true) => 'M',
        };
        let row = |expert| self.columns.iter().map(|column| cell(column, expert)).collect::<String>();
        (0..self.experts).map(row).collect::<Vec<_>>().join("|")
    }

    /// Residents without a request are one rectangle from pass to pass, hits and misses one for each pass.
    fn draw_expert(&self, out: &mut String, grid: &Grid, expert: usize) {
        let mut at = 0;
        for run in self.columns.chunk_by(|a, b| a.states[expert] == b.states[expert]) {
            let (class, width) = match run[0].states[expert] {
                CellState::Absent => ("", 1),
                CellState::Resident => ("stays", run.len()),
                CellState::Hit => ("hit", 1),
                CellState::Miss => ("miss", 1),
            };
            for column in (at..at + run.len()).step_by(width).filter(|_| !class.is_empty()) {
                let (x, y) = (grid.x(column), grid.y(expert));
                let (w, h) = (grid.wide * width as f64 - 0.6, grid.high - 0.6);
                let _ = write!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" class=\"{class}\"/>"
                );
            }
            at += run.len();
        }
    }

    fn draw_evictions(&self, out: &mut String, grid: &Grid) {
        out.push_str("<path class=\"out\" d=\"");
        let r = (grid.wide.min(grid.high) * 0.28).max(1.2);
        let d = 2.0 * r;
        for (at, column) in self.columns.iter().enumerate() {
            for expert in (0..self.experts).filter(|e| column.evicted[*e]) {
                let (x, y) = (grid.x(at) + grid.wide / 2.0 - r, grid.y(expert) + grid.high / 2.0 - r);
                let _ = write!(out, "M{x:.1} {y:.1}l{d:.1} {d:.1}m0 -{d:.1}l-{d:.1} {d:.1}");
            }
        }
        out.push_str("\"/>");
    }

    /// Numbers of experts and passes.
    fn draw_numbers(&self, out: &mut String, grid: &Grid) {
        for expert in (0..self.experts).step_by(self.experts.div_ceil(8).max(1)) {
            let (x, y) = (LEFT - 6.0, grid.y(expert) + grid.high / 2.0 + 4.0);
            let _ = write!(out, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{expert}</text>");
        }
        for at in (0..self.columns.len()).step_by(self.columns.len().div_ceil(10).max(1)) {
            let (x, y) = (grid.x(at) + grid.wide / 2.0, grid.y(self.experts) + 15.0);
            let pass = self.window.passes.start + at;
            let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{pass}</text>");
        }
    }
}

/// Left edge of the cells, with the numbers of experts beside it.
const LEFT: f64 = 30.0;
/// Top edge of the cells.
const TOP: f64 = 4.0;

/// The size of a cell.
struct Grid {
    wide: f64,
    high: f64,
}

impl Grid {
    fn x(&self, column: usize) -> f64 {
        LEFT + self.wide * column as f64
    }

    fn y(&self, expert: usize) -> f64 {
        TOP + self.high * expert as f64
    }
}

/// The meaning of colours and crosses.
pub(super) const KEYS: &str = "<ul class=\"keys\">\
    <li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><path class=\"hit\" d=\"M1 1h12v12h-12z\"/></svg>hit</li>\
    <li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><path class=\"miss\" d=\"M1 1h12v12h-12z\"/></svg>miss</li>\
    <li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><path class=\"stays\" d=\"M1 1h12v12h-12z\"/></svg>resident, not \
    requested</li>\
    <li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><path class=\"out\" d=\"M3 3l8 8m0 -8l-8 8\"/></svg>evicted in this \
    pass, or before the next visit of the layer</li></ul>\n";

impl Observer for Heatmap {
    fn visit(&mut self, request: &LayerRequest, ledger: &Ledger) {
        if request.row != self.window.row {
            return;
        }
        if self.window.passes.contains(&self.seen) {
            let spot = |expert| match ledger.presence(request.row.expert(expert)) {
                Presence::Absent | Presence::InFlight => CellState::Absent,
                Presence::Resident => CellState::Resident,
            };
            let states = (0..self.experts).map(spot).collect();
            self.columns.push(PassColumn { states, evicted: vec![false; self.experts] });
        }
        self.seen += 1;
    }

    fn visited(&mut self, request: &LayerRequest, assignment: &SlotAssignment) {
        let row = self.window.row;
        let Some(column) = self.current() else { return };
        if request.row == row {
            assignment.hits.iter().for_each(|(expert, _)| column.states[*expert] = CellState::Hit);
            assignment.misses.iter().for_each(|(expert, _)| column.states[*expert] = CellState::Miss);
        }
        let of_row = assignment.evicted.iter().filter(|expert| expert.row == row);
        of_row.for_each(|expert| column.evicted[expert.expert.index()] = true);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{CacheScope, Trace, TracePass};

    use super::*;

    fn heat(passes: Range<usize>, row: usize) -> Result<Heatmap, LabError> {
        let mut trace = Trace::new(1, 3, 1);
        for id in [0, 1, 0, 2, 1] {
            trace.push(&TracePass { ids: &[id], ..TracePass::default() }).unwrap();
        }
        let requests = Requests::all(&trace);
        let shape = requests.cache_shape(2, CacheScope::Layer, 0).unwrap();
        Heatmap::replay(
            &requests,
            &shape,
            &"lru".parse().unwrap(),
            &PolicyInputs::default(),
            &HeatmapWindow { row: MoeRow(row), passes },
        )
    }

    #[test]
    fn a_window_shows_residents_misses_and_evictions() {
        let heat = heat(2..5, 0).unwrap();
        let states: Vec<_> = heat.columns.iter().map(|c| c.states.clone()).collect();
        use CellState::*;
        assert_eq!(states, [[Hit, Resident, Absent], [Resident, Resident, Miss], [Resident, Miss, Resident]]);
        let evicted: Vec<_> = heat.columns.iter().map(|c| c.evicted.clone()).collect();
        assert_eq!(evicted, [[false; 3], [false, true, false], [true, false, false]]);
        let figure = heat.figure();
        assert!(
            figure.contains("lru, layer 0, 2 slots: 1 hits, 2 misses") && figure.contains("\"hsS|sSm|.ms\""),
            "{figure}"
        );
    }

    #[test]
    fn windows_outside_the_trace_are_refused() {
        assert!(heat(9..12, 0).map(drop).unwrap_err().to_string().contains("there are 5"));
        assert!(heat(0..2, 1).map(drop).unwrap_err().to_string().contains("layer 1"));
    }
}
