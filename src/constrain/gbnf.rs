//! Grammars in GBNF (`name ::= …`, as llama.cpp has it) rewritten in Lark's notation.
//!
//! Guarantees: the same texts are allowed; `root` becomes the start; errors name the line. It does not attempt W3C's EBNF
//! beyond what the two share: literals, classes, groups, alternatives, `* + ? {m,n}`.

use std::collections::HashMap;

/// Groups in groups.
const MAX_DEPTH: usize = 64;

/// True for a grammar in this notation: Lark's rules have a plain colon.
pub fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// The grammar in Lark's notation.
pub fn to_lark(text: &str) -> Result<String, String> {
    let mut reader = Reader { rest: text, line: 1, depth: 0, names: HashMap::new(), defined: Vec::new() };
    let mut rules = String::new();
    reader.skip(true);
    while !reader.rest.is_empty() {
        let name = reader.name().ok_or_else(|| reader.fault("a rule's name is wanted"))?;
        reader.skip(true);
        if !reader.take("::=") {
            return Err(reader.fault("::= is wanted"));
        }
        let name = reader.lark_name(name);
        if reader.defined.contains(&name) {
            return Err(reader.fault("the rule is defined twice"));
        }
        reader.defined.push(name.clone());
        reader.skip(true);
        let body = reader.alternatives()?;
        rules.push_str(&format!("{name}: {body}\n"));
        reader.skip(true);
    }
    if !reader.defined.iter().any(|name| name == "start") {
        return Err("the grammar has no rule `root`".into());
    }
    match reader.names.iter().find(|(_, lark)| !reader.defined.contains(lark)) {
        Some((name, _)) => Err(format!("the rule `{name}` is not defined")),
        None => Ok(rules),
    }
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    depth: usize,
    names: HashMap<&'a str, String>,
    defined: Vec<String>,
}

impl<'a> Reader<'a> {
    fn fault(&self, what: &str) -> String {
        let at: String = self.rest.chars().take(12).take_while(|c| *c != '\n').collect();
        format!("line {}: {what}, at `{at}`", self.line)
    }

    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Leaves out spaces and comments, and line ends where they mean nothing.
    fn skip(&mut self, with_lines: bool) {
        while let Some(c) = self.rest.chars().next() {
            match c {
                '#' => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.rest = &self.rest[end..];
                }
                '\n' | '\r' if !with_lines => return,
                c if c.is_whitespace() => _ = self.next(),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    /// Lark tells rules from terminals by their case, and knows no dashes.
    fn lark_name(&mut self, name: &'a str) -> String {
        let number = self.names.len();
        let lark = || if name == "root" { "start".into() } else { format!("rule{number}") };
        self.names.entry(name).or_insert_with(lark).clone()
    }

    fn alternatives(&mut self) -> Result<String, String> {
        let mut all = vec![self.sequence()?];
        loop {
            // An alternative may stand on the next line.
            let before = (self.rest, self.line);
            self.skip(true);
            if !self.take("|") {
                (self.rest, self.line) = before;
                return Ok(all.join(" | "));
            }
            self.skip(true);
            all.push(self.sequence()?);
        }
    }

    fn sequence(&mut self) -> Result<String, String> {
        let mut parts = Vec::new();
        loop {
            self.skip(self.depth > 0);
            let part = match self.rest.chars().next() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.next();
                    "/(?s:.)/".into()
                }
                Some('(') => self.group()?,
                Some(c) if c.is_ascii_alphanumeric() || c == '_' => {
                    let name = self.name().ok_or_else(|| self.fault("a name is wanted"))?;
                    self.lark_name(name)
                }
                Some(c) if !matches!(c, '|' | ')' | '\n' | '\r') => {
                    return Err(self.fault("this is not part of a rule"));
                }
                _ => break,
            };
            let repeat = self.repeat()?;
            parts.push(format!("{part}{repeat}"));
        }
        Ok(if parts.is_empty() { "\"\"".into() } else { parts.join(" ") })
    }

    fn group(&mut self) -> Result<String, String> {
        self.next();
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.fault("groups are nested too deep"));
        }
        let inner = self.alternatives()?;
        self.skip(true);
        self.depth -= 1;
        match self.take(")") {
            true => Ok(format!("({inner})")),
            false => Err(self.fault("a group is not closed")),
        }
    }

    fn repeat(&mut self) -> Result<String, String> {
        if let Some(c) = self.rest.chars().next().filter(|c| matches!(c, '*' | '+' | '?')) {
            self.next();
            return Ok(c.into());
        }
        if !self.take("{") {
            return Ok(String::new());
        }
        let end = self.rest.find('}').ok_or_else(|| self.fault("a repetition is not closed"))?;
        let (inner, rest) = self.rest.split_at(end);
        let inner: String = inner.chars().filter(|c| !c.is_whitespace()).collect();
        let is_number = |text: &str| !text.is_empty() && text.len() <= 6 && text.bytes().all(|b| b.is_ascii_digit());
        let is_good = match inner.split_once(',') {
            None => is_number(&inner),
            Some((least, most)) => is_number(least) && (most.is_empty() || is_number(most)),
        };
        if !is_good {
            return Err(self.fault("a repetition is {n}, {n,} or {n,m}"));
        }
        self.rest = &rest[1..];
        Ok(format!("{{{inner}}}"))
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                None | Some('\n') => return Err(self.fault("a text is not closed")),
                Some('"') => return Ok(serde_json::Value::from(text).to_string()),
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
            }
        }
    }

    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut class = String::from(if self.take("^") { "[^" } else { "[" });
        let start = class.len();
        loop {
            match self.next() {
                None | Some('\n') => return Err(self.fault("a class is not closed")),
                Some(']') if class.len() == start => return Err(self.fault("a class is empty")),
                Some(']') => return Ok(format!("/{class}]/")),
                Some('-') if class.len() > start && !self.rest.starts_with(']') => class.push('-'),
                Some('\\') => {
                    let c = self.escape()?;
                    class.push_str(&plain(c));
                }
                Some(c) => class.push_str(&plain(c)),
            }
        }
    }

    fn escape(&mut self) -> Result<char, String> {
        let number_of = |digits| -> Option<u32> { u32::from_str_radix(digits, 16).ok() };
        let size = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(c) if c.is_ascii_punctuation() => return Ok(c),
            _ => return Err(self.fault("this escape is not known")),
        };
        let digits = self.rest.get(..size).and_then(number_of).and_then(char::from_u32);
        let c = digits.ok_or_else(|| self.fault("an escape names no character"))?;
        self.rest = &self.rest[size..];
        Ok(c)
    }
}

/// A character as part of a class of a regular expression.
fn plain(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.into() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_rewritten() {
        let gbnf = "# a list\nroot ::= (item-name \"\\n\")+ | \"none\"\nitem-name ::= [a-z_]+\n  | [^\"\\\\\\x00-\\x1F]{2,3} .? (\n  \"é\" | \"\" )\n";
        let lark = to_lark(gbnf).unwrap();
        assert_eq!(
            lark,
            "start: (rule1 \"\\n\")+ | \"none\"\n\
             rule1: /[a-z\\x{5f}]/+ | /[^\\x{22}\\x{5c}\\x{0}-\\x{1f}]/{2,3} /(?s:.)/? (\"é\" | \"\")\n"
        );
        assert!(is_gbnf(gbnf) && !is_gbnf("start: \"a\""));
    }

    #[test]
    fn faults_name_the_line() {
        for (gbnf, what) in [
            ("a ::= \"x\"", "no rule `root`"),
            ("root ::= other", "`other` is not defined"),
            ("root ::= \"x\"\nroot ::= \"y\"", "line 2: the rule is defined twice"),
            ("root ::= \"x", "not closed"),
            ("root ::= [a", "not closed"),
            ("root ::= []", "empty"),
            ("root ::= (\"a\"", "a group is not closed"),
            ("root ::= \"a\"{x}", "repetition"),
            ("root ::= \"a\" )", "a rule's name is wanted"),
            ("root ::= \"\\q\"", "not known"),
            ("root ::= \"\\xZZ\"", "names no character"),
            ("root \"a\" ::= b", "::= is wanted"),
            ("root ::= @", "not part of a rule"),
        ] {
            let fault = to_lark(gbnf).unwrap_err();
            assert!(fault.contains(what), "{gbnf}: {fault}");
        }
        assert!(to_lark(&format!("root ::= {}", "(".repeat(1000))).unwrap_err().contains("too deep"));
    }
}
