//! Rust and WGSL text with comments and literals blanked, so that rules look at code only.
//!
//! Guarantees: every byte keeps its line and column; strings, raw strings, characters and (nested) comments become
//! spaces. It does not parse: functions and test modules are found by keywords and braces.

use std::ops::Range;

/// `text` with comments and literals blanked; line breaks stay.
pub fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        match end {
            Some(end) => {
                for byte in &mut code[at..end] {
                    if *byte != b'\n' {
                        *byte = b' ';
                    }
                }
                at = end;
            }
            None => at += 1,
        }
    }
    String::from_utf8(code).expect("whole characters are blanked or kept")
}

/// The end of the comment or literal that starts at `at`, if one does.
fn literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let follows_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return Some(at + rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()));
    }
    if rest.starts_with(b"/*") {
        return Some(at + block_comment_len(rest));
    }
    if rest[0] == b'"' {
        return Some(at + quoted_len(rest, b'"'));
    }
    if rest[0] == b'\'' {
        return char_len(rest).map(|len| at + len);
    }
    let prefix = [&b"br"[..], b"r"].into_iter().find(|p| rest.starts_with(p));
    match prefix {
        Some(prefix) if !follows_word => raw_string_len(&rest[prefix.len()..]).map(|len| at + prefix.len() + len),
        _ => None,
    }
}

fn block_comment_len(rest: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b if b == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// A character literal; `None` for lifetimes and labels.
fn char_len(rest: &[u8]) -> Option<usize> {
    match rest {
        [b'\'', b'\\', ..] => Some(quoted_len(rest, b'\'')),
        [b'\'', first, ..] => {
            let width = match first {
                0xf0.. => 4,
                0xe0.. => 3,
                0xc0.. => 2,
                _ => 1,
            };
            (rest.get(1 + width) == Some(&b'\'')).then_some(2 + width)
        }
        _ => None,
    }
}

fn raw_string_len(rest: &[u8]) -> Option<usize> {
    let hashes = rest.iter().take_while(|&&b| b == b'#').count();
    if rest.get(hashes) != Some(&b'"') {
        return None;
    }
    let end = [&b"\""[..], &b"#".repeat(hashes)].concat();
    let body = &rest[hashes + 1..];
    let len = body.windows(end.len()).position(|w| w == end).map_or(body.len(), |at| at + end.len());
    Some(hashes + 1 + len)
}

/// True for files that are test modules of their own: `tests.rs` or in a folder `tests`.
pub fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.starts_with("tests/") || path.contains("/tests/")
}

/// Lines (from 0) of items under `#[cfg(test)]`.
pub fn test_lines(code: &str) -> Vec<Range<usize>> {
    let lines: Vec<&str> = code.lines().collect();
    let marks = (0..lines.len()).filter(|&i| lines[i].contains("#[cfg(test)]"));
    marks.map(|start| start..block_end(&lines, start) + 1).collect()
}

/// A function with a body.
pub struct Function {
    pub name: String,
    /// From the line of `fn` to that of the closing brace, from 0.
    pub lines: Range<usize>,
}

/// All functions with bodies in `code`, also nested ones.
pub fn functions(code: &str) -> Vec<Function> {
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        found.push(Function { name: name.to_owned(), lines: i..block_end(&lines, i) + 1 });
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let before_name = line.split_once("fn ")?;
    let starts_word = before_name.0.is_empty() || before_name.0.ends_with([' ', '(']);
    let name = before_name.1.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (starts_word && !name.is_empty()).then_some(name)
}

/// The line on which the block opened at or after `start` closes, or where a `;` ends the item before any block.
fn block_end(lines: &[&str], start: usize) -> usize {
    let mut depth = 0_i32;
    let mut parens = 0_i32;
    for (i, line) in lines.iter().enumerate().skip(start) {
        for c in line.chars() {
            match c {
                '(' | '[' => parens += 1,
                ')' | ']' => parens -= 1,
                '{' => depth += 1,
                '}' => {
                    depth -= 1;
                    if depth == 0 && parens == 0 {
                        return i;
                    }
                }
                ';' if depth == 0 && parens == 0 => return i,
                _ => {}
            }
        }
    }
    lines.len().saturating_sub(1)
}

#[test]
fn comments_and_literals_are_blanked_and_places_kept() {
    let text = "let a = \"x // {\"; // b {\nlet c = '{'; let d: &'static str = r#\"}\"\"#; /* { /* } */ */ e('\\'')";
    let code = code_of(text);
    assert_eq!(code.len(), text.len());
    assert!(!code.contains(['{', '}']), "{code}");
    assert!(code.contains("let a =") && code.contains("let d: &'static str =") && code.contains("e("), "{code}");
}

#[test]
fn functions_and_test_modules_end_at_their_braces() {
    let text = "fn one() {\n    let x = [1; 2];\n}\ntrait T {\n    fn no_body();\n}\n#[cfg(test)]\nmod tests {\n    fn two() {}\n}\nfn three(\n    a: u8,\n) -> u8\n{\n    a\n}\n";
    let code = code_of(text);
    let spans: Vec<_> = functions(&code).into_iter().map(|f| (f.name, f.lines)).collect();
    assert_eq!(
        spans,
        [
            ("one".to_owned(), 0..3),
            ("no_body".to_owned(), 4..5),
            ("two".to_owned(), 8..9),
            ("three".to_owned(), 10..16)
        ]
    );
    assert_eq!(test_lines(&code).first(), Some(&(6..10)));
}
