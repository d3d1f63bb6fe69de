//! What happens on a laptop: a drive is unplugged, the power supply changes.

mod battery;
mod drive;
