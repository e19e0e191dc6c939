//! Tables of text, aligned as Markdown reads them.

/// A table; the first column is left-aligned, the others right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// With these headings.
    pub fn new(headings: &[&str]) -> Self {
        Table { rows: vec![headings.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.rows[0].len(), "a cell for every column");
        self.rows.push(cells);
    }

    /// The lines.
    pub fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|c| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0).max(3))
            .collect();
        let mut out = String::new();
        for (i, row) in self.rows.iter().enumerate() {
            let cells: Vec<_> = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(c, (cell, w))| if c == 0 { format!("{cell:<w$}") } else { format!("{cell:>w$}") })
                .collect();
            out += &format!("| {} |\n", cells.join(" | "));
            if i == 0 {
                let rules: Vec<_> = widths
                    .iter()
                    .enumerate()
                    .map(|(c, w)| if c == 0 { format!("{:-<1$}", "", w + 2) } else { format!("{:->1$}", ":", w + 2) })
                    .collect();
                out += &format!("|{}|\n", rules.join("|"));
            }
        }
        out
    }
}

/// With thousands separated.
pub fn count(n: i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    if n < 0 { format!("-{out}") } else { out }
}

/// Useful FLOP/s with a unit that fits.
pub fn rate(flops: f64, seconds: f64) -> String {
    let per_second = flops / seconds;
    if per_second >= 1e12 {
        format!("{:.1} TFLOP/s", per_second / 1e12)
    } else {
        format!("{:.1} GFLOP/s", per_second / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["shape", "ms"]);
        t.row(vec!["a".into(), "12.5".into()]);
        assert_eq!(t.render(), "| shape |   ms |\n|-------|-----:|\n| a     | 12.5 |\n");
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!((count(1_234_567), count(999), count(-1000)), ("1,234,567".into(), "999".into(), "-1,000".into()));
        assert_eq!(rate(2e12, 1.0), "2.0 TFLOP/s");
        assert_eq!(rate(2e9, 0.1), "20.0 GFLOP/s");
    }
}
