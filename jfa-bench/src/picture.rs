//! The picture of an A/B comparison: a dot with its interval per shape and pass, on a logarithmic axis of speed.

use std::ops::Range;
use std::path::Path;
use std::sync::Once;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::statistics::Estimate;

/// One dot.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// Where it stands.
    pub estimate: Estimate,
    /// Backward, else forward.
    pub backward: bool,
}

/// One line of the picture.
#[derive(Clone, Debug)]
pub struct Row {
    /// The shape.
    pub label: String,
    /// Its dots.
    pub marks: Vec<Mark>,
    /// Set apart and bold: the mean of the others.
    pub summary: bool,
}

/// Everything in the picture.
#[derive(Clone, Debug)]
pub struct Picture {
    /// Above it.
    pub title: String,
    /// Below the title, small.
    pub notes: Vec<String>,
    /// From top to bottom.
    pub rows: Vec<Row>,
}

const FONT: &str = "jfa";
/// Two hues that people with any colour vision can tell apart, and their shapes differ too.
const FORWARD: RGBColor = RGBColor(0, 94, 162);
const BACKWARD: RGBColor = RGBColor(213, 94, 0);
const TEXT: RGBColor = RGBColor(40, 40, 40);
const QUIET: RGBColor = RGBColor(120, 120, 120);
const GRID: RGBColor = RGBColor(226, 226, 226);
const WIDTH: i32 = 960;
const ROW: i32 = 38;

/// Writes `path` with the extensions `.svg` and `.png` (the latter at twice the size).
pub fn draw(picture: &Picture, path: &Path) -> Result<()> {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // A picture must look alike everywhere, so the font comes with the program. It fails only for a broken font.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
    let height = picture_height(picture);
    let with = |extension: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(extension);
        std::path::PathBuf::from(name)
    };
    let fail = |e: &dyn std::fmt::Display| anyhow!("{e}");
    {
        let file = with(".svg");
        let root = SVGBackend::new(&file, (WIDTH as u32, height as u32)).into_drawing_area();
        paint(picture, &root, 1).map_err(|e| fail(&e))?;
        root.present().map_err(|e| fail(&e))?;
    }
    let file = with(".png");
    let root = BitMapBackend::new(&file, (2 * WIDTH as u32, 2 * height as u32)).into_drawing_area();
    paint(picture, &root, 2).map_err(|e| fail(&e))?;
    root.present().map_err(|e| fail(&e))?;
    Ok(())
}

fn header(picture: &Picture) -> i32 {
    58 + 20 * picture.notes.len() as i32 + 34
}

fn picture_height(picture: &Picture) -> i32 {
    header(picture) + ROW * picture.rows.len() as i32 + 12 + 64
}

/// Ends of the axis and its ticks: 1, 2, 5 in every decade, finer where the range is small.
fn axis(rows: &[Row]) -> (Range<f64>, Vec<f64>) {
    let ends = rows.iter().flat_map(|r| &r.marks).flat_map(|m| [m.estimate.low, m.estimate.high, 1.0]);
    let (mut low, mut high) = ends.fold((1.0_f64, 1.0_f64), |(l, h), x| (l.min(x), h.max(x)));
    // Room beside the outermost interval, and never less than 10 % to either side of 1.
    let room = (high / low).powf(0.08).max(1.02);
    low = (low / room).min(1.0 / 1.1);
    high = (high * room).max(1.1);
    let candidates: Vec<f64> = match high / low {
        r if r < 1.6 => (1..60).map(|i| f64::from(i) * 0.05).collect(),
        r if r < 5.0 => (1..80).map(|i| f64::from(i) * 0.25).collect(),
        _ => (-3..6).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10_f64.powi(e))).collect(),
    };
    (low..high, candidates.into_iter().filter(|t| (low..=high).contains(t)).collect())
}

type Fallible<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

fn paint<DB: DrawingBackend>(picture: &Picture, root: &DrawingArea<DB, Shift>, zoom: i32) -> Fallible<DB> {
    let z = |x: i32| x * zoom;
    let text = |s: &str, x: i32, y: i32, size: i32, color: RGBColor, h: HPos| {
        let style = TextStyle::from((FONT, z(size)).into_font()).color(&color).pos(Pos::new(h, VPos::Center));
        root.draw(&Text::new(s.to_owned(), (z(x), z(y)), style))
    };
    root.fill(&WHITE)?;
    text(&picture.title, 24, 32, 24, TEXT, HPos::Left)?;
    for (i, note) in picture.notes.iter().enumerate() {
        text(note, 24, 62 + 20 * i as i32, 14, QUIET, HPos::Left)?;
    }

    let longest = picture.rows.iter().map(|r| r.label.chars().count()).max().unwrap_or(0) as i32;
    let left = (24 + longest * 8 + 16).clamp(140, 430);
    let right = WIDTH - 150;
    let top = header(picture);
    let bottom = top + ROW * picture.rows.len() as i32 + 12;
    let (range, ticks) = axis(&picture.rows);
    let x = |value: f64| {
        let share = (value.ln() - range.start.ln()) / (range.end.ln() - range.start.ln());
        left + (share * f64::from(right - left)).round() as i32
    };

    for tick in ticks {
        let at = x(tick);
        root.draw(&PathElement::new([(z(at), z(top - 6)), (z(at), z(bottom))], GRID.stroke_width(zoom as u32)))?;
        let label = format!("{}x", (tick * 1000.0).round() / 1000.0);
        text(&label, at, bottom + 14, 14, QUIET, HPos::Center)?;
    }
    root.draw(&PathElement::new(
        [(z(x(1.0)), z(top - 6)), (z(x(1.0)), z(bottom))],
        QUIET.stroke_width(2 * zoom as u32),
    ))?;
    text("B slower", x(1.0) - 10, top - 16, 13, QUIET, HPos::Right)?;
    text("B faster", x(1.0) + 10, top - 16, 13, QUIET, HPos::Left)?;
    text("speed of B, logarithmic (A = 1)", (left + right) / 2, bottom + 40, 14, QUIET, HPos::Center)?;

    for (i, row) in picture.rows.iter().enumerate() {
        let extra = if row.summary { 12 } else { 0 };
        let y = top + ROW * i as i32 + ROW / 2 + extra;
        if row.summary {
            let line = [(z(24), z(y - ROW / 2 - 4)), (z(WIDTH - 24), z(y - ROW / 2 - 4))];
            root.draw(&PathElement::new(line, GRID.stroke_width(2 * zoom as u32)))?;
        }
        text(&row.label, left - 16, y, if row.summary { 16 } else { 15 }, TEXT, HPos::Right)?;
        for (j, mark) in row.marks.iter().enumerate() {
            let offset = if row.marks.len() > 1 { j as i32 * 14 - 7 } else { 0 };
            let (color, e) = (if mark.backward { BACKWARD } else { FORWARD }, mark.estimate);
            let y = y + offset;
            let span = [(z(x(e.low)), z(y)), (z(x(e.high)), z(y))];
            root.draw(&PathElement::new(span, color.stroke_width(3 * zoom as u32)))?;
            let center = (z(x(e.value)), z(y));
            if mark.backward {
                root.draw(&Rectangle::new(
                    [(center.0 - z(5), center.1 - z(5)), (center.0 + z(5), center.1 + z(5))],
                    color.filled(),
                ))?;
            } else {
                root.draw(&Circle::new(center, z(5), color.filled()))?;
            }
            text(&format!("{:.2}x", e.value), right + 16, y, 13, color, HPos::Left)?;
        }
    }

    // The key, above the numbers.
    let passes = |backward: bool| picture.rows.iter().flat_map(|r| &r.marks).any(|m| m.backward == backward);
    let mut y = 32;
    if passes(false) {
        root.draw(&Circle::new((z(WIDTH - 118), z(y)), z(5), FORWARD.filled()))?;
        text("forward", WIDTH - 104, y, 14, TEXT, HPos::Left)?;
        y += 20;
    }
    if passes(true) {
        let at = (z(WIDTH - 118), z(y));
        root.draw(&Rectangle::new([(at.0 - z(5), at.1 - z(5)), (at.0 + z(5), at.1 + z(5))], BACKWARD.filled()))?;
        text("backward", WIDTH - 104, y, 14, TEXT, HPos::Left)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(label: &str, value: f64) -> Row {
        let mark = |backward| Mark { estimate: Estimate { value, low: value * 0.97, high: value * 1.03 }, backward };
        Row { label: label.to_owned(), marks: vec![mark(false), mark(true)], summary: false }
    }

    #[test]
    fn the_axis_holds_every_interval_and_one() {
        for values in [vec![1.0], vec![3.0, 8.0], vec![0.01, 40.0]] {
            let rows: Vec<_> = values.iter().map(|v| row("x", *v)).collect();
            let (range, ticks) = axis(&rows);
            assert!(range.contains(&1.0));
            assert!(values.iter().all(|v| range.start < v * 0.97 && v * 1.03 < range.end), "{values:?}: {range:?}");
            assert!((3..=20).contains(&ticks.len()), "{values:?}: {ticks:?}");
        }
    }

    #[test]
    fn both_files_are_pictures() {
        let folder = std::env::temp_dir().join(format!("jfa-bench-picture-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let picture = Picture {
            title: "Speed of b relative to a".into(),
            notes: vec!["a note".into()],
            rows: vec![row("gem_self_half-256", 1.3), row("heavy_tail-causal", 0.8)],
        };
        draw(&picture, &folder.join("ab")).unwrap();
        let svg = std::fs::read_to_string(folder.join("ab.svg")).unwrap();
        assert!(svg.contains("gem_self_half-256") && svg.contains("</svg>"));
        let png = std::fs::read(folder.join("ab.png")).unwrap();
        assert_eq!(&png[1..4], b"PNG");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
