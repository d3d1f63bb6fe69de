//! Text of strangers for a terminal.

/// Characters of a name or a message of a stranger that are shown.
pub const PRINTABLE_CHARS: usize = 1000;

/// `text` on one line and without effect on a terminal: control characters, line ends, and characters that are
/// invisible or change the direction of writing are escaped, and what is beyond [`PRINTABLE_CHARS`] is left out.
///
/// Names of tensors and files, keys, tokens and messages of servers are strangers' words. Where they enter an error, a
/// notice or a table, they pass through this.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len().min(4 * PRINTABLE_CHARS));
    for (at, c) in text.chars().enumerate() {
        if at == PRINTABLE_CHARS {
            shown.push('…');
            break;
        }
        match c {
            '\n' | '\r' | '\t' => shown.extend(c.escape_default()),
            c if c.is_control() || is_invisible(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    shown
}

/// Line and paragraph separators, zero-width characters, marks of direction, and tags.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_a_cursor_is_escaped() {
        assert_eq!(printable("a\x1b[2Jb\r\n\tc\u{9b}31m\u{7f}"), "a\\u{1b}[2Jb\\r\\n\\tc\\u{9b}31m\\u{7f}");
        assert_eq!(printable("a\u{202e}b\u{200b}\u{2028}\u{e0041}"), "a\\u{202e}b\\u{200b}\\u{2028}\\u{e0041}");
        assert_eq!(printable("blk.0 'ü' 模型 \\ \"x\" 🦆"), "blk.0 'ü' 模型 \\ \"x\" 🦆");
    }

    #[test]
    fn long_text_is_cut() {
        let shown = printable(&"ä".repeat(PRINTABLE_CHARS + 1));
        assert!(shown.ends_with('…') && shown.chars().count() == PRINTABLE_CHARS + 1);
        assert_eq!(printable(&"ä".repeat(PRINTABLE_CHARS)).chars().count(), PRINTABLE_CHARS);
    }
}
