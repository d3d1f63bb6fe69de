//! What a sweep found, as numbers and as one page that needs nothing else.

mod chart;
mod heat;
pub mod html;
mod outcome;
mod page;
mod speeds;
mod table;
mod tradeoffs;

pub use chart::{Chart, Line, Point, Style};
pub use heat::{Heat, Window};
pub use outcome::{About, Outcome, Row};
pub use page::page;
pub use speeds::{Part, Speeds, speeds_page};
pub use table::csv;
pub use tradeoffs::tradeoffs_page;
