//! Changes to a template's source before parsing, for the two things that the template engine has no hook for.
//!
//! 1. `{% generation %}` marks the assistant's words for training and renders as nothing.
//! 2. `'a'|safe + b` escapes `b` for HTML even where nothing else is escaped, since that is what Python's `Markup`
//!    does. Sums printed by `{{ … }}` with a safe operand become a call of [`add_markup`]; sums elsewhere are not
//!    attempted.

use minijinja::value::{Rest, Value};
use minijinja::{Error, ErrorKind};

/// The name under which [`add_markup`] is called.
pub(super) const ADD_MARKUP: &str = "__add_markup";

/// The source that the engine parses.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let (end, changed) = match rest.as_bytes().get(1) {
            Some(b'%') => tag(rest),
            Some(b'{') => expression(rest),
            Some(b'#') => (rest[2..].find("#}").map_or(rest.len(), |at| at + 4), None),
            _ => (1, None),
        };
        match changed {
            Some(changed) => out.push_str(&changed),
            None => out.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

/// The end of the `{% … %}` at the start of `text`, and what replaces it.
fn tag(text: &str) -> (usize, Option<String>) {
    // The mark's own character is no part of the end: `{%}` does not close itself.
    let Some(len) = find_outside_strings(&text[2..], "%}") else { return (text.len(), None) };
    let (inside, end) = (&text[2..2 + len], len + 4);
    // A scope without variables has the same effect and the same handling of white space.
    let changed = match inside.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
        "generation" => Some(inside.replace("generation", "with")),
        "endgeneration" => Some(inside.replace("endgeneration", "endwith")),
        _ => None,
    };
    (end, changed.map(|inside| format!("{{%{inside}%}}")))
}

/// The end of the `{{ … }}` at the start of `text`, and what replaces it.
fn expression(text: &str) -> (usize, Option<String>) {
    let Some(len) = find_outside_strings(&text[2..], "}}") else { return (text.len(), None) };
    let (inside, end) = (&text[2..2 + len], len + 4);
    let (start_mark, inside) = match inside.strip_prefix(['-', '+']) {
        Some(rest) => (&inside[..1], rest),
        None => ("", inside),
    };
    let (inside, end_mark) = match inside.strip_suffix('-') {
        Some(rest) => (rest, "-"),
        None => (inside, ""),
    };
    let changed = operands_of_sum(inside)
        .filter(|operands| operands.iter().any(|operand| is_marked_safe(operand)))
        .map(|operands| format!("{{{{{start_mark} {ADD_MARKUP}({}) {end_mark}}}}}", operands.join(", ")));
    (end, changed)
}

fn is_marked_safe(operand: &str) -> bool {
    operand.rsplit_once('|').is_some_and(|(_, filter)| filter.trim() == "safe")
}

/// The operands of `a + b + …`; `None` for expressions with any operator that binds less tightly.
fn operands_of_sum(expression: &str) -> Option<Vec<&str>> {
    let mut operands = Vec::new();
    let mut start = 0;
    for (at, c) in outermost_chars(expression) {
        match c {
            '+' => {
                operands.push(expression[start..at].trim());
                start = at + 1;
            }
            '-' | '<' | '>' | '=' | '!' | ',' => return None,
            _ => {}
        }
    }
    operands.push(expression[start..].trim());
    let binds_loosely = |word: &str| matches!(word, "if" | "else" | "and" | "or" | "not" | "in" | "is");
    let has_loose_word = |operand: &&str| operand.split_whitespace().any(binds_loosely);
    let is_sum = operands.len() > 1 && operands.iter().all(|operand| !operand.is_empty());
    (is_sum && !operands.iter().any(|operand| has_loose_word(&without_strings(operand).as_str()))).then_some(operands)
}

/// The outermost characters of an operand: what is neither in a string nor in brackets.
fn without_strings(operand: &str) -> String {
    outermost_chars(operand).map(|(_, c)| c).collect()
}

/// Characters outside strings and brackets, with their places.
fn outermost_chars(text: &str) -> impl Iterator<Item = (usize, char)> + '_ {
    let mut depth = 0_usize;
    chars_outside_strings(text).filter(move |&(_, c)| match c {
        '(' | '[' | '{' => {
            depth += 1;
            false
        }
        ')' | ']' | '}' => {
            depth = depth.saturating_sub(1);
            false
        }
        _ => depth == 0,
    })
}

fn chars_outside_strings(text: &str) -> impl Iterator<Item = (usize, char)> + '_ {
    let mut quote: Option<char> = None;
    let mut is_escaped = false;
    text.char_indices().filter(move |&(_, c)| match quote {
        Some(open) => {
            let ends = !is_escaped && c == open;
            is_escaped = !is_escaped && c == '\\';
            if ends {
                quote = None;
            }
            false
        }
        None if c == '\'' || c == '"' => {
            quote = Some(c);
            false
        }
        None => true,
    })
}

fn find_outside_strings(text: &str, mark: &str) -> Option<usize> {
    chars_outside_strings(text).map(|(at, _)| at).find(|&at| text[at..].starts_with(mark))
}

/// The sum of strings of which some are safe: as soon as one side is, the other is escaped.
pub(super) fn add_markup(operands: Rest<Value>) -> Result<Value, Error> {
    let mut text = String::new();
    let mut is_safe = false;
    for (i, operand) in operands.iter().enumerate() {
        let Some(next) = operand.as_str() else {
            let message = format!("can only concatenate strings, not a value of type {}", operand.kind());
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        };
        match (i > 0 && is_safe, operand.is_safe()) {
            (true, false) => text.push_str(&escape(next)),
            (false, true) => text = format!("{}{next}", escape(&text)),
            (true, true) | (false, false) => text.push_str(next),
        }
        is_safe |= operand.is_safe();
    }
    Ok(if is_safe { Value::from_safe_string(text) } else { Value::from(text) })
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn generation_tags_become_scopes_and_keep_their_marks() {
        assert_eq!(rewrite("a{%- generation -%}b{% endgeneration %}c"), "a{%- with -%}b{% endwith %}c");
        assert_eq!(rewrite("{% set generation = 1 %}"), "{% set generation = 1 %}");
    }

    #[test]
    fn printed_sums_with_a_safe_operand_become_a_call() {
        assert_eq!(rewrite(r#"{{- "a + b"|safe + x['+'] -}}"#), r#"{{- __add_markup("a + b"|safe, x['+']) -}}"#);
        assert_eq!(rewrite("{{ a(1 + 2) + 'x' | safe }}"), "{{ __add_markup(a(1 + 2), 'x' | safe) }}");
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        for source in [
            "{{ a + b }}",
            "{{ a|safe }}",
            "{{ a|safe + b if c else d }}",
            "{{ a|safe + b == c }}",
            "{# {{ a|safe + b }} #}",
            "{% if a|safe + b %}x{% endif %}",
            "{ plain } {{",
            "{{ '}}' + \"\\\"}}\" }}",
            "{% unclosed",
            "{%} {% x %}",
            "{#} {{ a|safe + b }} #}",
            "{{}",
            "{{}}",
            "",
        ] {
            assert_eq!(rewrite(source), source);
        }
    }
}
