//! Reports: results of sweeps and measurements as JSON, CSV and self-contained HTML pages.

mod chart;
mod heatmap;
pub mod html;
mod speed_page;
mod sweep_csv;
mod sweep_page;
mod sweep_report;
mod tradeoffs_page;

pub use chart::{Chart, Line, Point, Style};
pub use heatmap::{Heatmap, HeatmapWindow};
pub use speed_page::{SpeedReport, SpeedSection, speed_page};
pub use sweep_csv::sweep_csv;
pub use sweep_page::sweep_page;
pub use sweep_report::{SweepReport, SweepRow, TraceSummary};
pub use tradeoffs_page::tradeoffs_page;
