//! Calls written as Python: `f(a=1, b='x', c=[True, None])`, with arguments as JSON.

use serde_json::{Map, Value};

/// What a text is, read from its start.
#[derive(Clone, Debug, PartialEq)]
pub enum Parsed {
    /// The start of a call, or nothing yet.
    Open,
    Call {
        name: String,
        arguments: String,
    },
    /// No call.
    None,
}

/// Reads one call that spans the whole text.
pub fn call(text: &str) -> Parsed {
    let text = text.trim_end();
    let name_len = text.find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '.')).unwrap_or(text.len());
    let (name, rest) = text.split_at(name_len);
    if name.starts_with(|c: char| c.is_ascii_digit()) || (name.is_empty() && !rest.is_empty()) {
        return Parsed::None;
    }
    let Some(inside) = rest.strip_prefix('(') else {
        return if rest.is_empty() { Parsed::Open } else { Parsed::None };
    };
    let Some(end) = closing(inside) else { return Parsed::Open };
    let mut reader = Reader { text: &inside[..end] };
    match reader.keywords() {
        Some(fields) => Parsed::Call { name: name.to_owned(), arguments: Value::Object(fields).to_string() },
        None => Parsed::None,
    }
}

/// Where the bracket that is open at the start closes.
fn closing(text: &str) -> Option<usize> {
    let (mut nest, mut quote, mut is_escaped) = (0usize, None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(_), _) if is_escaped => is_escaped = false,
            (Some(_), '\\') => is_escaped = true,
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '(' | '[' | '{') => nest += 1,
            (None, ')') if nest == 0 => return Some(at),
            (None, ')' | ']' | '}') => nest = nest.saturating_sub(1),
            _ => {}
        }
    }
    None
}

struct Reader<'a> {
    text: &'a str,
}

impl Reader<'_> {
    fn keywords(&mut self) -> Option<Map<String, Value>> {
        let mut fields = Map::new();
        loop {
            self.skip(&[',']);
            if self.text.is_empty() {
                return Some(fields);
            }
            let (name, rest) = self.text.split_once('=')?;
            self.text = rest;
            fields.insert(name.trim().to_owned(), self.value()?);
        }
    }

    fn value(&mut self) -> Option<Value> {
        self.skip(&[]);
        let first = self.text.chars().next()?;
        match first {
            '"' | '\'' => self.string(first).map(Value::from),
            '[' | '(' => {
                self.text = &self.text[1..];
                let mut items = Vec::new();
                loop {
                    self.skip(&[',']);
                    if let Some(rest) = self.text.strip_prefix([']', ')']) {
                        self.text = rest;
                        return Some(items.into());
                    }
                    items.push(self.value()?);
                }
            }
            '{' => {
                self.text = &self.text[1..];
                let mut fields = Map::new();
                loop {
                    self.skip(&[',']);
                    if let Some(rest) = self.text.strip_prefix('}') {
                        self.text = rest;
                        return Some(fields.into());
                    }
                    let key = self.value()?.as_str()?.to_owned();
                    self.skip(&[]);
                    self.text = self.text.strip_prefix(':')?;
                    fields.insert(key, self.value()?);
                }
            }
            _ => self.word(),
        }
    }

    fn word(&mut self) -> Option<Value> {
        let len = self.text.find(|c: char| matches!(c, ',' | ')' | ']' | '}' | ':') || c.is_whitespace());
        let (word, rest) = self.text.split_at(len.unwrap_or(self.text.len()));
        self.text = rest;
        match word {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Value::Null),
            number => serde_json::from_str::<serde_json::Number>(number).ok().map(Value::Number),
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut out = String::new();
        let mut chars = self.text[1..].char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => match chars.next()?.1 {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    other => out.push(other),
                },
                c if c == quote => {
                    self.text = &self.text[1 + at + 1..];
                    return Some(out);
                }
                c => out.push(c),
            }
        }
        None
    }

    fn skip(&mut self, also: &[char]) {
        self.text = self.text.trim_start_matches(|c: char| c.is_whitespace() || also.contains(&c));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyword_arguments_become_json() {
        let check = |text: &str, name: &str, want: &str| match call(text) {
            Parsed::Call { name: found, arguments } => {
                assert_eq!((found.as_str(), arguments.as_str()), (name, want), "{text}")
            }
            other => panic!("{text}: {other:?}"),
        };
        check("f()", "f", "{}");
        check("a.b(x=1, y='it\\'s (ok)')", "a.b", r#"{"x":1,"y":"it's (ok)"}"#);
        check(r#"f(x=[True, None, -1.5], y={"k": (1, 2)})"#, "f", r#"{"x":[true,null,-1.5],"y":{"k":[1,2]}}"#);
        for open in ["", "f", "f(", "f(x=')'"] {
            assert_eq!(call(open), Parsed::Open, "{open}");
        }
        for none in ["1f()", "f x", "\"a\"", "f(1)"] {
            assert_eq!(call(none), Parsed::None, "{none}");
        }
    }
}
