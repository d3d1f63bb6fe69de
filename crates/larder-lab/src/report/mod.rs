//! Reports: results of sweeps and measurements as JSON, CSV and self-contained HTML pages.

mod box_plot;
mod chart;
mod heatmap;
mod page;
mod plot;
mod quality_page;
mod speed_page;
mod speed_report;
mod sweep_csv;
mod sweep_page;
mod sweep_report;
mod table;
mod tradeoffs_page;

pub use chart::{Chart, Line, Point, Style, chart_group};
pub use heatmap::{Heatmap, HeatmapWindow};
pub use page::{Page, definitions, escape, group, paragraph};
pub use quality_page::{QualityReport, quality_page};
pub use speed_page::speed_page;
pub use speed_report::{SPEED_COLUMNS, SpeedColumn, SpeedReport, SpeedRun, SpeedSection, StrategySpeeds};
pub use sweep_csv::sweep_csv;
pub use sweep_page::sweep_page;
pub use sweep_report::{SweepReport, SweepRow, TraceSummary};
pub use table::{Cell, Column, Table};
pub use tradeoffs_page::tradeoffs_page;
