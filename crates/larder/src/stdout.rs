//! Standard output. std's macros panic where it cannot be written to; these end the program: quietly if the reader of a
//! pipe is gone, with one sentence if the disk is full.

use std::fmt;
use std::io::{self, ErrorKind, Write};

macro_rules! print {
    ($($text:tt)*) => { $crate::stdout::write(format_args!($($text)*)) };
}

macro_rules! println {
    () => { $crate::stdout::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::stdout::write(format_args!("{}\n", format_args!($($text)*))) };
}

/// Whether the reader of a pipe is gone.
pub fn is_closed_pipe(error: &io::Error) -> bool {
    /// `ERROR_PIPE_NOT_CONNECTED` of Windows, which std gives no kind.
    const NOT_CONNECTED: i32 = 233;
    error.kind() == ErrorKind::BrokenPipe || cfg!(windows) && error.raw_os_error() == Some(NOT_CONNECTED)
}

/// Writes to standard output, or ends the program.
pub fn write(text: fmt::Arguments) {
    if let Err(error) = io::stdout().lock().write_fmt(text) {
        if !is_closed_pipe(&error) {
            eprintln!("error: cannot write to standard output: {error}");
            std::process::exit(1);
        }
        std::process::exit(0);
    }
}
