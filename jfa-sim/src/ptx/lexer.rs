//! Splits PTX text into tokens.

use super::PtxError;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tok {
    /// Name, directive or opcode, with its dots and `::`.
    Word(String),
    /// Integer literal.
    Int(i128),
    /// Float literal: bits and width.
    Float(u64, u16),
    /// Quoted string.
    Str,
    /// Punctuation.
    P(char),
}

/// A token, its line and its byte range.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub tok: Tok,
    pub line: u32,
    pub start: usize,
    pub end: usize,
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%')
}

/// Tokenizes `src`; comments and preprocessor-style lines disappear.
pub(super) fn tokenize(src: &str) -> Result<Vec<Token>, PtxError> {
    let b = src.as_bytes();
    let mut out = Vec::with_capacity(b.len() / 4);
    let (mut i, mut line) = (0usize, 1u32);
    while i < b.len() {
        let c = b[i];
        if c == b'\n' {
            line += 1;
            i += 1;
            continue;
        }
        if c.is_ascii_whitespace() || c == 0 {
            i += 1;
            continue;
        }
        if c == b'/' && b.get(i + 1) == Some(&b'/') {
            while i < b.len() && b[i] != b'\n' {
                i += 1;
            }
            continue;
        }
        if c == b'/' && b.get(i + 1) == Some(&b'*') {
            i += 2;
            while i + 1 < b.len() && !(b[i] == b'*' && b[i + 1] == b'/') {
                if b[i] == b'\n' {
                    line += 1;
                }
                i += 1;
            }
            i += 2;
            continue;
        }
        let start = i;
        let tok = if c == b'"' {
            i += 1;
            while i < b.len() && b[i] != b'"' {
                i += 1;
            }
            i += 1;
            Tok::Str
        } else if c.is_ascii_digit() {
            number(src, &mut i).ok_or_else(|| PtxError {
                line,
                message: "bad number".into(),
                text: src[start..i.max(start + 1)].to_string(),
            })?
        } else if is_word_start(c) {
            i += 1;
            while i < b.len() {
                if is_word(b[i]) {
                    i += 1;
                } else if b[i] == b'.' && b.get(i + 1).is_some_and(|&n| is_word(n)) {
                    i += 2;
                } else if b[i] == b':' && b.get(i + 1) == Some(&b':') && b.get(i + 2).is_some_and(|&n| is_word(n)) {
                    i += 3;
                } else {
                    break;
                }
            }
            Tok::Word(src[start..i].to_string())
        } else {
            i += 1;
            Tok::P(c as char)
        };
        out.push(Token { tok, line, start, end: i });
    }
    Ok(out)
}

fn number(src: &str, i: &mut usize) -> Option<Tok> {
    let b = src.as_bytes();
    let start = *i;
    let two = b.get(start + 1).copied().unwrap_or(b' ');
    if b[start] == b'0' && matches!(two, b'f' | b'F' | b'd' | b'D') {
        let digits = if matches!(two, b'f' | b'F') { 8 } else { 16 };
        let hex = src.get(start + 2..start + 2 + digits)?;
        *i = start + 2 + digits;
        return Some(Tok::Float(u64::from_str_radix(hex, 16).ok()?, digits as u16 * 4));
    }
    let (radix, skip) = match two {
        b'x' | b'X' if b[start] == b'0' => (16, 2),
        b'b' | b'B' if b[start] == b'0' => (2, 2),
        _ => (10, 0),
    };
    let mut j = start + skip;
    while j < b.len() && (b[j] as char).is_digit(radix) {
        j += 1;
    }
    if radix == 10 && j < b.len() && (b[j] == b'.' || b[j] == b'e' || b[j] == b'E') {
        let mut k = j;
        while k < b.len()
            && (b[k].is_ascii_digit()
                || matches!(b[k], b'.' | b'e' | b'E')
                || (matches!(b[k], b'-' | b'+') && matches!(b[k - 1], b'e' | b'E')))
        {
            k += 1;
        }
        *i = k;
        let v: f64 = src[start..k].parse().ok()?;
        return Some(Tok::Float(v.to_bits(), 64));
    }
    let v = i128::from_str_radix(&src[start + skip..j], radix).ok()?;
    if j < b.len() && matches!(b[j], b'U' | b'u') {
        j += 1;
    }
    *i = j;
    Some(Tok::Int(v))
}
