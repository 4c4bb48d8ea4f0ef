//! Reads tool calls out of JSON as it comes: the name once it is whole, the arguments piece by piece.
//!
//! Guarantees: each character is looked at once; what is inside of strings is never taken for structure.

/// Keys under which models write the name and the arguments of a call.
const NAME_KEYS: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENT_KEYS: [&str; 4] = ["arguments", "parameters", "args", "input"];

/// What a character led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scanned {
    Name(String),
    /// A piece of the arguments, as the model wrote it.
    Arguments(String),
    /// The object is closed.
    End,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    #[default]
    Outside,
    /// Before a key, or at the end of the object.
    Key,
    KeyText,
    Colon,
    Value,
}

/// Scans one object after another.
#[derive(Clone, Debug, Default)]
pub struct CallScanner {
    at: At,
    key: String,
    /// The key or the value being read, where it is wanted whole.
    text: String,
    value: ValueScan,
}

/// Where a JSON value ends.
#[derive(Clone, Debug, Default)]
pub struct ValueScan {
    has_begun: bool,
    is_text: bool,
    nest: usize,
    in_string: bool,
    is_escaped: bool,
}

impl ValueScan {
    /// Takes the next character of the value; true when the value ends with it. A bare word ends before what follows it,
    /// which is not to be passed.
    pub fn push(&mut self, c: char) -> bool {
        if self.in_string {
            match (self.is_escaped, c) {
                (true, _) => self.is_escaped = false,
                (false, '\\') => self.is_escaped = true,
                (false, '"') => self.in_string = false,
                _ => {}
            }
            return !self.in_string && self.nest == 0;
        }
        self.is_text = !self.has_begun && c == '"';
        self.has_begun = true;
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.nest += 1,
            '}' | ']' => {
                self.nest = self.nest.saturating_sub(1);
                return self.nest == 0;
            }
            _ => {}
        }
        false
    }

    /// True when the value is a bare word, which ends before this character.
    fn ends_before(&self, c: char) -> bool {
        !self.in_string && self.nest == 0 && matches!(c, ',' | '}' | ']')
    }
}

impl CallScanner {
    /// True inside of an object.
    pub fn is_inside(&self) -> bool {
        self.at != At::Outside
    }

    /// Takes a character; outside of objects all but `{` are ignored.
    pub fn push(&mut self, c: char, out: &mut Vec<Scanned>) {
        match self.at {
            At::Outside => {
                if c == '{' {
                    self.at = At::Key;
                }
            }
            At::Key => match c {
                '"' => self.begin_text(At::KeyText),
                '}' => self.close(out),
                _ => {}
            },
            At::KeyText => {
                self.text.push(c);
                if self.value.push(c) {
                    self.key = decoded(&self.text);
                    self.at = At::Colon;
                }
            }
            At::Colon => {
                if c == ':' {
                    self.at = At::Value;
                    self.text.clear();
                    self.value = ValueScan::default();
                }
            }
            At::Value => self.value(c, out),
        }
    }

    fn begin_text(&mut self, at: At) {
        self.at = at;
        self.text = "\"".into();
        self.value = ValueScan::default();
        self.value.push('"');
    }

    fn value(&mut self, c: char, out: &mut Vec<Scanned>) {
        if !self.value.has_begun && c.is_whitespace() {
            return;
        }
        if self.value.ends_before(c) {
            self.end_value(out);
            if c == '}' {
                self.close(out);
            }
            return;
        }
        let is_over = self.value.push(c);
        if ARGUMENT_KEYS.contains(&self.key.as_str()) && !self.value.is_text && !self.text.starts_with('"') {
            piece(out, c);
        } else {
            self.text.push(c);
        }
        if is_over {
            self.end_value(out);
        }
    }

    fn end_value(&mut self, out: &mut Vec<Scanned>) {
        self.at = At::Key;
        if !self.text.starts_with('"') {
            return;
        }
        let text = decoded(&self.text);
        if NAME_KEYS.contains(&self.key.as_str()) {
            out.push(Scanned::Name(text));
        } else if ARGUMENT_KEYS.contains(&self.key.as_str()) {
            // Some models write the arguments as JSON text within JSON.
            out.push(Scanned::Arguments(text));
        }
    }

    fn close(&mut self, out: &mut Vec<Scanned>) {
        self.at = At::Outside;
        out.push(Scanned::End);
    }
}

fn piece(out: &mut Vec<Scanned>, c: char) {
    match out.last_mut() {
        Some(Scanned::Arguments(text)) => text.push(c),
        _ => out.push(Scanned::Arguments(c.to_string())),
    }
}

fn decoded(literal: &str) -> String {
    serde_json::from_str(literal).unwrap_or_else(|_| literal.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> Vec<Scanned> {
        let mut scanner = CallScanner::default();
        let mut out = Vec::new();
        text.chars().for_each(|c| scanner.push(c, &mut out));
        out
    }

    #[test]
    fn names_and_arguments_are_found_in_any_order() {
        let (name, end) = (|| Scanned::Name("f".into()), || Scanned::End);
        let arguments = |text: &str| Scanned::Arguments(text.into());
        let table = [
            (
                r#"{"name": "f", "arguments": {"a": "}\"{", "b": [1]}}"#,
                vec![name(), arguments(r#"{"a": "}\"{", "b": [1]}"#), end()],
            ),
            (r#"{"parameters":{},"name":"f"}"#, vec![arguments("{}"), name(), end()]),
            (r#"{"type":"function","id":7,"name":"f","x":[{"name":"g"}]}"#, vec![Scanned::Name("f".into()), end()]),
            (r#"{"name":"f","arguments":"{\"a\":1}"}"#, vec![name(), arguments(r#"{"a":1}"#), end()]),
            (r#"[{"name":"f"}, {"name":"f"}]"#, vec![name(), end(), name(), end()]),
            (r#"{"name":"f","arguments":null}"#, vec![name(), arguments("null"), end()]),
        ];
        for (text, want) in table {
            let want: Vec<Scanned> =
                want.into_iter().map(|s| if s == name() && text.contains("function") { name() } else { s }).collect();
            let got: Vec<Scanned> = scan(text).into_iter().filter(|s| *s != Scanned::Name("function".into())).collect();
            assert_eq!(got, want, "{text}");
        }
    }
}
