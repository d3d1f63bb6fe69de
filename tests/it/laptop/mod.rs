//! What happens on a laptop: a drive is unplugged, the power supply changes, the machine sleeps.

mod battery;
mod drive;
mod suspend;
