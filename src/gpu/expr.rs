//! Integer expressions of the shader preprocessor: `R * 4 + 1`, `C > 1 && SG == 8`.
//!
//! Grammar, loosest first: `||`, `&&`, comparison, `+ -`, `* / %`, unary `-`, number, name, parentheses.
//! Comparisons give 0 or 1. Unknown names, overflow and division by zero are errors.

use std::iter::Peekable;
use std::str::CharIndices;

/// The value of `text`, with names looked up by `lookup`.
pub(super) fn evaluate(text: &str, lookup: &dyn Fn(&str) -> Option<i64>) -> Result<i64, String> {
    let mut parser = Parser { tokens: tokens(text)?, next: 0, lookup };
    let value = parser.binary(0)?;
    match parser.peek() {
        None => Ok(value),
        Some(extra) => Err(format!("unexpected `{extra}` in `{text}`")),
    }
}

/// Splits into numbers, names and operators.
fn tokens(text: &str) -> Result<Vec<&str>, String> {
    let mut found = Vec::new();
    let mut chars = text.char_indices().peekable();
    while let Some((start, c)) = chars.next() {
        if c.is_whitespace() {
            continue;
        }
        let end = if c.is_ascii_alphanumeric() || c == '_' {
            word_end(text, &mut chars)
        } else {
            let two = text.get(start..start + 2).unwrap_or("");
            if ["||", "&&", "==", "!=", "<=", ">="].contains(&two) {
                chars.next();
                start + 2
            } else if "+-*/%()<>".contains(c) {
                start + 1
            } else {
                return Err(format!("unexpected `{c}` in `{text}`"));
            }
        };
        found.push(&text[start..end]);
    }
    Ok(found)
}

fn word_end(text: &str, chars: &mut Peekable<CharIndices<'_>>) -> usize {
    while let Some(&(idx, c)) = chars.peek() {
        if !(c.is_ascii_alphanumeric() || c == '_') {
            return idx;
        }
        chars.next();
    }
    text.len()
}

/// Binary operators by how tightly they bind.
const LEVELS: [&[&str]; 5] = [&["||"], &["&&"], &["==", "!=", "<", "<=", ">", ">="], &["+", "-"], &["*", "/", "%"]];

struct Parser<'a> {
    tokens: Vec<&'a str>,
    next: usize,
    lookup: &'a dyn Fn(&str) -> Option<i64>,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.tokens.get(self.next).copied()
    }

    fn take(&mut self) -> Option<&'a str> {
        let token = self.peek();
        self.next += 1;
        token
    }

    fn binary(&mut self, level: usize) -> Result<i64, String> {
        let Some(operators) = LEVELS.get(level) else {
            return self.unary();
        };
        let mut left = self.binary(level + 1)?;
        while let Some(op) = self.peek().filter(|t| operators.contains(t)) {
            self.next += 1;
            let right = self.binary(level + 1)?;
            left = apply(op, left, right)?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<i64, String> {
        match self.take() {
            None => Err("the expression ends too early".into()),
            Some("-") => self.unary()?.checked_neg().ok_or_else(|| "overflow".into()),
            Some("(") => {
                let value = self.binary(0)?;
                match self.take() {
                    Some(")") => Ok(value),
                    _ => Err("a `)` is missing".into()),
                }
            }
            Some(word) if word.starts_with(|c: char| c.is_ascii_digit()) => {
                word.parse().map_err(|_| format!("`{word}` is not a number"))
            }
            Some(word) => (self.lookup)(word).ok_or_else(|| format!("`{word}` is not defined")),
        }
    }
}

fn apply(op: &str, a: i64, b: i64) -> Result<i64, String> {
    let value = match op {
        "||" => Some(i64::from(a != 0 || b != 0)),
        "&&" => Some(i64::from(a != 0 && b != 0)),
        "==" => Some(i64::from(a == b)),
        "!=" => Some(i64::from(a != b)),
        "<" => Some(i64::from(a < b)),
        "<=" => Some(i64::from(a <= b)),
        ">" => Some(i64::from(a > b)),
        ">=" => Some(i64::from(a >= b)),
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "/" => a.checked_div(b),
        "%" => a.checked_rem(b),
        _ => None,
    };
    value.ok_or_else(|| format!("{a} {op} {b} has no value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Result<i64, &str>) {
        let lookup = |name: &str| (name == "R").then_some(4);
        match (evaluate(text, &lookup), expect) {
            (Ok(got), Ok(want)) => assert_eq!(got, want, "{text}"),
            (Err(got), Err(want)) => assert!(got.contains(want), "{text}: {got}"),
            (got, want) => panic!("{text}: {got:?}, expected {want:?}"),
        }
    }

    #[test]
    fn expressions_follow_the_usual_precedence() {
        check("1 + 2 * 3", Ok(7));
        check("(1+2)*3", Ok(9));
        check("R*4 - -1", Ok(17));
        check("7 / 2 % 2", Ok(1));
        check("R >= 4 && R != 5", Ok(1));
        check("R < 4 || 0", Ok(0));
    }

    #[test]
    fn broken_expressions_say_why() {
        check("S", Err("not defined"));
        check("1 +", Err("too early"));
        check("(1", Err("missing"));
        check("1 2", Err("unexpected `2`"));
        check("1 / 0", Err("no value"));
        check("1 @ 2", Err("unexpected `@`"));
        check("9223372036854775807 + 1", Err("no value"));
        check("12ab", Err("not a number"));
    }
}
