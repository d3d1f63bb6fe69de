//! A heat map of one layer's cache over some passes.

use std::fmt::Write;
use std::ops::Range;

use larder_cache::{Ledger, SlotAssignment};
use larder_core::{MoeRow, Presence, Residency};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};

use super::html::escape;
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
        match heat.columns.is_empty() {
            true => {
                let (from, has) = (heat.window.passes.start, heat.seen);
                Err(LabError::InvalidInput(format!("no passes to draw from pass {from} on: there are {has}")))
            }
            false => Ok(heat),
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

    /// The heat map as SVG: passes to the right, experts downwards.
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
            self.window.row.index(),
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
            for run in self.columns.chunk_by(|a, b| a.states[expert] == b.states[expert]) {
                match run[0].states[expert] {
                    CellState::Absent => {}
                    CellState::Resident => spot(&mut out, at, run.len(), expert, "stays"),
                    CellState::Hit => (at..at + run.len()).for_each(|c| spot(&mut out, c, 1, expert, "hit")),
                    CellState::Miss => (at..at + run.len()).for_each(|c| spot(&mut out, c, 1, expert, "miss")),
                }
                at += run.len();
            }
        }
        out.push_str("<path class=\"out\" d=\"");
        for (at, column) in self.columns.iter().enumerate() {
            for expert in (0..self.experts).filter(|e| column.evicted[*e]) {
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
        assert!(heat.svg().contains("lru, layer 0, 2 slots: 1 hits, 2 misses"));
    }

    #[test]
    fn windows_outside_the_trace_are_refused() {
        assert!(heat(9..12, 0).map(drop).unwrap_err().to_string().contains("there are 5"));
        assert!(heat(0..2, 1).map(drop).unwrap_err().to_string().contains("layer 1"));
    }
}
