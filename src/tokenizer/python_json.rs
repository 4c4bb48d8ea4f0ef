//! JSON into template values, and out of them as Python's `json.dumps`: separators, spelling of numbers and escapes as Python writes them.
//!
//! It does not attempt to serialise what Python refuses (undefined values, functions): those are errors.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// JSON as template values; the order of keys is kept.
pub fn template_value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(signed), _) => Value::from(signed),
            (None, Some(unsigned)) => Value::from(unsigned),
            (None, None) => number.as_f64().map_or(Value::from(()), Value::from),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(template_value).collect::<Vec<_>>()),
        Json::Object(entries) => Value::from_pairs(entries.iter().map(|(k, v)| (k.as_str(), template_value(v)))),
    }
}

/// Nesting beyond this is refused; Python's own limit is about 1,000.
const MAX_DEPTH: usize = 200;

/// The arguments of `json.dumps`.
pub struct Style {
    pub ensure_ascii: bool,
    /// Spaces per level; `None` writes one line.
    pub indent: Option<usize>,
    pub sort_keys: bool,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
}

/// `value` as JSON text. `pay` is called with the work of each value (one, and one more per 64 bytes of text) before
/// it is written, and ends the writing by its error: lazy lists may be far longer than the memory they take.
pub fn dumps(value: &Value, style: &Style, pay: &dyn Fn(u64) -> Result<(), Error>) -> Result<String, Error> {
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if style.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut writer = Writer { out: String::new(), style, item, key, pay };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    out: String,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    pay: &'a dyn Fn(u64) -> Result<(), Error>,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(fault("tojson: the value is nested too deeply"));
        }
        let text_len = value.as_str().map_or(0, str::len);
        (self.pay)(1 + (text_len + depth * self.style.indent.unwrap_or(0)) as u64 / 64)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            other => return Err(fault(format!("tojson: a value of type {other} has no JSON form"))),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut is_empty = true;
        for item in value.try_iter()?.checked() {
            if !is_empty {
                self.out.push_str(self.item);
            }
            is_empty = false;
            self.new_line(depth + 1);
            self.value(&item?, depth + 1)?;
        }
        if !is_empty {
            self.new_line(depth);
        }
        self.out.push(']');
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()?.checked() {
            let key = key?;
            let name = key_text(&key)?;
            entries.push((name, value.get_item(&key)?));
        }
        if self.style.sort_keys {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.out.push('{');
        for (i, (name, item)) in entries.iter().enumerate() {
            if i > 0 {
                self.out.push_str(self.item);
            }
            self.new_line(depth + 1);
            self.string(name);
            self.out.push_str(self.key);
            self.value(item, depth + 1)?;
        }
        if !entries.is_empty() {
            self.new_line(depth);
        }
        self.out.push('}');
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn number(&mut self, value: &Value) {
        let text = match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => float_text(number),
            _ => value.to_string(),
        };
        self.out.push_str(&text);
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.style.ensure_ascii && !c.is_ascii()) => self.escape(c),
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(key.to_string()),
        other => Err(fault(format!("tojson: a key of type {other} has no JSON form"))),
    }
}

/// Python's `repr(float)`: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn float_text(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

fn fault(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Style {
        Style { ensure_ascii: false, indent: None, sort_keys: false, separators: None }
    }

    fn check(json: serde_json::Value, style: &Style, expected: &str) {
        let free = |_| Ok(());
        assert_eq!(dumps(&template_value(&json), style, &free).expect("serialisable"), expected);
    }

    #[test]
    fn one_line_has_pythons_separators_and_keeps_order_and_characters() {
        check(
            serde_json::json!({"b": [1, 2.5, true, null], "a": "é\"\\\n\u{1}"}),
            &plain(),
            r#"{"b": [1, 2.5, true, null], "a": "é\"\\\n\u0001"}"#,
        );
        check(serde_json::json!([]), &plain(), "[]");
        check(serde_json::json!({}), &plain(), "{}");
    }

    #[test]
    fn indent_breaks_lines_but_not_in_empty_containers() {
        let style = Style { indent: Some(2), ..plain() };
        check(
            serde_json::json!({"a": [1, []], "b": {}}),
            &style,
            "{\n  \"a\": [\n    1,\n    []\n  ],\n  \"b\": {}\n}",
        );
    }

    #[test]
    fn options_sort_keys_and_escape_to_ascii() {
        let style = Style { sort_keys: true, ensure_ascii: true, ..plain() };
        check(serde_json::json!({"b": "é😀", "a": 1}), &style, r#"{"a": 1, "b": "\u00e9\ud83d\ude00"}"#);
    }

    #[test]
    fn floats_are_spelled_as_python_does() {
        for (number, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (0.0, "0.0"),
            (1.5e300, "1.5e+300"),
        ] {
            assert_eq!(float_text(number), expected);
        }
    }

    #[test]
    fn what_has_no_json_form_is_refused() {
        assert!(dumps(&Value::UNDEFINED, &plain(), &|_| Ok(())).is_err());
    }
}
