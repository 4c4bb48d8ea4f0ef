//! Standard output for data, standard error for everything else; a reader that goes away ends the command quietly.

use super::error::CliError;
pub use crate::app::format::decimal_bytes as bytes;
use std::io::{IsTerminal, Write};

/// Writes text to standard output and flushes, so that a stream is seen as it comes.
pub fn text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a line to standard output.
pub fn line(line: &str) -> Result<(), CliError> {
    text(&format!("{line}\n"))
}

/// Writes one JSON value as one line to standard output.
pub fn json(value: &serde_json::Value) -> Result<(), CliError> {
    line(&value.to_string())
}

/// Writes a line to standard error; a closed standard error is no reason to stop.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// True when a person reads standard error, so that progress is worth showing.
pub fn shows_progress() -> bool {
    std::io::stderr().is_terminal()
}

/// `135M`, `7.2B`: parameters as model names write them.
pub fn params(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.0}K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0}M", count as f64 / 1e6),
        _ => format!("{:.1}B", count as f64 / 1e9),
    }
}

/// Aligns the columns of rows; the first row is the heading.
pub fn table(rows: &[Vec<String>]) -> String {
    let num_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..num_columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_naturally() {
        assert_eq!([params(134_515_008), params(7_240_000_000)], ["135M", "7.2B"]);
    }

    #[test]
    fn columns_align() {
        let rows = [vec!["a".into(), "bb".into()], vec!["ccc".into(), "d".into()]];
        assert_eq!(table(&rows), "a    bb\nccc  d\n");
    }
}
