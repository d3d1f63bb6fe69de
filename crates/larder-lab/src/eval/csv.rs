//! A parser of CSV with quotes.

/// A record and the line on which it begins, counted from 1.
pub(super) struct Record {
    pub line: usize,
    pub cells: Vec<String>,
}

/// The records of a CSV text. Quoted cells may contain commas, line ends and doubled quotes. Empty lines are skipped.
pub(super) fn records(text: &str) -> Result<Vec<Record>, String> {
    let mut all = Vec::new();
    let (mut chars, mut line) = (text.chars().peekable(), 1);
    let mut record = Record { line, cells: Vec::new() };
    let mut cell = String::new();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '"' if cell.is_empty() && !quoted => {
                quoted = true;
                inside(&mut chars, &mut cell, &mut line)
                    .ok_or_else(|| format!("has an unclosed quote in line {}", record.line))?;
            }
            ',' => {
                record.cells.push(std::mem::take(&mut cell));
                quoted = false;
            }
            '\r' if chars.peek() == Some(&'\n') => {}
            '\n' => {
                line += 1;
                end(&mut all, &mut record, &mut cell, line, quoted);
                quoted = false;
            }
            c if quoted => return Err(format!("has '{c}' after a closing quote in line {line}")),
            c => cell.push(c),
        }
    }
    end(&mut all, &mut record, &mut cell, line, quoted);
    Ok(all)
}

/// Reads a quoted cell up to its closing quote.
fn inside(chars: &mut std::iter::Peekable<std::str::Chars>, cell: &mut String, line: &mut usize) -> Option<()> {
    loop {
        match chars.next()? {
            '"' if chars.peek() == Some(&'"') => cell.extend(chars.next()),
            '"' => return Some(()),
            c => {
                *line += usize::from(c == '\n');
                cell.push(c);
            }
        }
    }
}

fn end(all: &mut Vec<Record>, record: &mut Record, cell: &mut String, next: usize, quoted: bool) {
    let mut done = std::mem::replace(record, Record { line: next, cells: Vec::new() });
    if !done.cells.is_empty() || !cell.is_empty() || quoted {
        done.cells.push(std::mem::take(cell));
        all.push(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(text: &str) -> Vec<(usize, Vec<String>)> {
        records(text).unwrap().into_iter().map(|r| (r.line, r.cells)).collect()
    }

    #[test]
    fn quotes_hold_commas_quotes_and_lines() {
        let text = "a,b\r\n\"x, \"\"y\"\"\nz\",2\n\n3,\n\"\"";
        let found = cells(text);
        let want: [(usize, &[&str]); 4] = [(1, &["a", "b"]), (2, &["x, \"y\"\nz", "2"]), (5, &["3", ""]), (6, &[""])];
        for ((line, cells), (at, texts)) in found.iter().zip(want) {
            assert_eq!((*line, cells.iter().map(String::as_str).collect::<Vec<_>>()), (at, texts.to_vec()));
        }
        assert_eq!(found.len(), 4);
        assert_eq!(cells("5\" pipe,1"), [(1, vec!["5\" pipe".to_owned(), "1".to_owned()])]);
    }

    #[test]
    fn broken_quotes_are_refused() {
        assert!(records("a\n\"b").is_err_and(|e| e.contains("line 2")));
        assert!(records("\"a\"b,c").is_err_and(|e| e.contains("'b'")));
    }
}
