//! What happens on a laptop: a drive is unplugged.

mod drive;
