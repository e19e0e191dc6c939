//! What `check` prints and writes.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::json;

use super::{Context, Finished, Outcome};

/// One line per case, and its findings under it.
pub fn line(case: &Finished, quiet: bool) {
    match &case.outcome {
        Outcome::Passed(text) if !quiet && case.time.as_secs() > 0 => {
            println!("ok    {}  {text} ({:.1} s)", case.name, case.time.as_secs_f64());
        }
        Outcome::Passed(text) if !quiet => println!("ok    {}  {text}", case.name),
        Outcome::Skipped(reason) if !quiet => println!("skip  {}  {reason}", case.name),
        Outcome::Passed(_) | Outcome::Skipped(_) => {}
        Outcome::Failed(findings) => {
            println!("FAIL  {}  (contract, section {}: docs/conformance.md)", case.name, case.section);
            for finding in findings {
                println!("      {finding}");
            }
        }
    }
}

/// Counts, what was skipped and why, and the failures again.
pub fn summary(cases: &[Finished]) {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for case in cases {
        if let Outcome::Skipped(reason) = &case.outcome {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    if !reasons.is_empty() {
        println!("\nskipped, because");
        for (reason, count) in reasons {
            println!("  {count:4} x {reason}");
        }
    }
    let failed: Vec<_> = cases.iter().filter(|c| matches!(c.outcome, Outcome::Failed(_))).collect();
    if !failed.is_empty() {
        println!("\nfailed:");
        for case in &failed {
            println!("  {}", case.name);
        }
    }
    let passed = cases.iter().filter(|c| matches!(c.outcome, Outcome::Passed(_))).count();
    println!("\n{passed} passed, {} failed, {} skipped", failed.len(), cases.len() - passed - failed.len());
}

/// The results as JSON.
pub fn json(context: &Context, cases: &[Finished]) -> serde_json::Value {
    let list: Vec<_> = cases
        .iter()
        .map(|case| {
            let (status, text) = match &case.outcome {
                Outcome::Passed(text) => ("passed", text.clone()),
                Outcome::Failed(findings) => ("failed", findings.join("\n")),
                Outcome::Skipped(reason) => ("skipped", reason.clone()),
            };
            json!({
                "name": case.name,
                "section": case.section,
                "status": status,
                "text": text,
                "seconds": case.time.as_secs_f64(),
            })
        })
        .collect();
    json!({
        "backend": context.backend.name(),
        "description": context.backend.description(),
        "version": env!("CARGO_PKG_VERSION"),
        "cases": list,
    })
}

/// The results as JUnit XML, the form that CI services read.
pub fn junit(context: &Context, cases: &[Finished]) -> String {
    let count = |f: fn(&Outcome) -> bool| cases.iter().filter(|c| f(&c.outcome)).count();
    let failures = count(|o| matches!(o, Outcome::Failed(_)));
    let skipped = count(|o| matches!(o, Outcome::Skipped(_)));
    let seconds: f64 = cases.iter().map(|c| c.time.as_secs_f64()).sum();
    let totals =
        format!("tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\" time=\"{seconds:.3}\"", cases.len());
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(xml, "<testsuites {totals}>");
    let _ = writeln!(
        xml,
        "  <testsuite name=\"jfa conformance: {}\" errors=\"0\" {totals}>",
        escape(context.backend.name())
    );
    for case in cases {
        let (class, name) = case.name.rsplit_once('/').unwrap_or(("", &case.name));
        let class = class.replace('/', ".");
        let open = format!(
            "    <testcase classname=\"{}\" name=\"{}\" time=\"{:.3}\"",
            escape(&class),
            escape(name),
            case.time.as_secs_f64()
        );
        let _ = match &case.outcome {
            Outcome::Passed(_) => writeln!(xml, "{open}/>"),
            Outcome::Skipped(reason) => writeln!(xml, "{open}><skipped message=\"{}\"/></testcase>", escape(reason)),
            Outcome::Failed(findings) => writeln!(
                xml,
                "{open}><failure message=\"{}\">contract, section {}: docs/conformance.md\n{}</failure></testcase>",
                escape(&findings[0]),
                case.section,
                escape(&findings.join("\n"))
            ),
        };
    }
    xml.push_str("  </testsuite>\n</testsuites>\n");
    xml
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' => out.push_str("&#10;"),
            // Control characters cannot stand in XML 1.0 in any form.
            c if c.is_control() => out.push('\u{FFFD}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_break_out_of_its_attribute() {
        assert_eq!(escape("a<b & \"c\"\n\u{1}"), "a&lt;b &amp; &quot;c&quot;&#10;\u{FFFD}");
    }
}
