//! Tool calls in an answer's text, in the notations of common models, as they come.
//!
//! Guarantees: the parts do not depend on how the text was cut; text is held back only while it may be the start of a
//! call; what turns out not to be a call is given back as text; a call's id and name come once, before its arguments.

use super::pythonic;
use super::scanner::{CallScanner, Scanned, ValueScan};
use crate::server::reducer::Part;

/// How a model writes its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen).
    Hermes,
    /// `[TOOL_CALLS]` and a JSON list, or `name[ARGS]{…}`.
    Mistral,
    /// The whole answer is `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`, several divided by `;`.
    Llama3Json,
    /// The whole answer is `[f(a=1), g(b='x')]`.
    Pythonic,
    /// `<｜tool▁call▁begin｜>` and a name, then a JSON object.
    DeepSeek,
    /// OpenAI's channels: read by [`super::harmony`].
    Harmony,
    /// As [`Format::Llama3Json`], also a list or in a fence.
    Generic,
    /// The answer is a list of calls, enforced by a grammar.
    Required,
    /// The answer is the arguments of this tool, enforced by a grammar.
    Named(String),
}

impl Format {
    /// The marks that begin and end calls.
    fn marks(&self) -> (&'static str, &'static str) {
        match self {
            Format::Hermes => ("<tool_call>", "</tool_call>"),
            Format::Mistral => ("[TOOL_CALLS]", ""),
            Format::DeepSeek => ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            Format::Llama3Json => ("<|python_tag|>", ""),
            _ => ("", ""),
        }
    }

    /// What the tokenizer may have as special tokens.
    pub fn tokens(&self) -> &'static [&'static str] {
        match self {
            Format::Hermes => &["<tool_call>", "</tool_call>"],
            Format::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Format::DeepSeek => &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
            Format::Llama3Json => &["<|python_tag|>"],
            _ => &[],
        }
    }

    /// True when a call has no mark before it: the answer begins with it.
    fn may_be_bare(&self) -> bool {
        matches!(self, Format::Llama3Json | Format::Pythonic | Format::Generic)
    }
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but space came yet.
    Start,
    Text,
    /// JSON objects with a name.
    Objects,
    /// A name is being read, up to the `{` of its arguments.
    Head,
    /// The arguments are read as they are.
    Arguments(ValueScan),
    Python,
    /// Everything is the arguments of one call.
    Whole,
}

/// Parses one answer.
#[derive(Clone, Debug)]
pub struct ToolParser {
    format: Format,
    /// Tools that were offered; others are no calls where a call has no mark.
    names: Vec<String>,
    is_parallel: bool,
    state: State,
    /// Text that may be the start of a mark or of a call.
    held: String,
    scanner: CallScanner,
    /// Arguments that came before their name.
    early: String,
    has_name: bool,
    has_arguments: bool,
    num_calls: usize,
    /// Calls before the last mark.
    num_before_mark: usize,
}

impl ToolParser {
    pub fn new(format: Format, names: Vec<String>, is_parallel: bool) -> Self {
        let state = match &format {
            Format::Required => State::Objects,
            Format::Named(_) => State::Whole,
            _ => State::Start,
        };
        ToolParser {
            format,
            names,
            is_parallel,
            state,
            held: String::new(),
            scanner: CallScanner::default(),
            early: String::new(),
            has_name: false,
            has_arguments: false,
            num_calls: 0,
            num_before_mark: 0,
        }
    }

    /// Takes the next text.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        text.chars().for_each(|c| self.char(c, parts));
    }

    /// The end of the answer.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        match &self.state {
            State::Start | State::Text | State::Head | State::Python => {
                let held = std::mem::take(&mut self.held);
                content(parts, &held);
            }
            State::Objects if self.scanner.is_inside() && !self.has_name => {
                let held = std::mem::take(&mut self.held);
                content(parts, &held);
            }
            State::Objects | State::Arguments(_) | State::Whole => {}
        }
    }

    fn char(&mut self, c: char, parts: &mut Vec<Part>) {
        match &mut self.state {
            State::Start => self.start(c, parts),
            State::Text => self.text(c, parts),
            State::Objects => self.object(c, parts),
            State::Head => self.head(c, parts),
            State::Arguments(scan) => {
                let is_over = scan.push(c);
                self.arguments(&c.to_string(), parts);
                if is_over {
                    self.end_call(parts);
                    self.state = State::Head;
                }
            }
            State::Python => self.python(c, parts),
            State::Whole => {
                if let (0, Format::Named(name)) = (self.num_calls, &self.format) {
                    let name = name.clone();
                    self.name(name, parts);
                }
                self.arguments(&c.to_string(), parts);
            }
        }
    }

    /// The first character that is no space decides whether a bare call may come.
    fn start(&mut self, c: char, parts: &mut Vec<Part>) {
        let fence = self.held.trim();
        let is_fence =
            self.format == Format::Generic && ("```json".starts_with(&format!("{fence}{c}")) || fence == "```json");
        if self.format.may_be_bare() && matches!(c, '{' | '[') && (fence.is_empty() || fence == "```json") {
            self.held.push(c);
            if c == '{' {
                self.state = State::Objects;
                self.scanner.push(c, &mut Vec::new());
            } else {
                self.state = State::Python;
            }
        } else if c.is_whitespace() || is_fence {
            self.held.push(c);
        } else {
            self.state = State::Text;
            self.text(c, parts);
        }
    }

    fn text(&mut self, c: char, parts: &mut Vec<Part>) {
        self.held.push(c);
        let (open, _) = self.format.marks();
        if open.is_empty() {
            let held = std::mem::take(&mut self.held);
            return content(parts, &held);
        }
        if let Some(before) = self.held.strip_suffix(open) {
            content(parts, before.trim_end());
            self.held.clear();
            self.num_before_mark = self.num_calls;
            self.state = match self.format {
                Format::DeepSeek | Format::Mistral => State::Head,
                _ => State::Objects,
            };
            return;
        }
        // Space before a mark belongs to the mark.
        let is_open = |at: &usize| open.starts_with(self.held[*at..].trim_start());
        let keep = self.held.char_indices().map(|(at, _)| at).find(is_open).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        content(parts, &self.held);
        self.held = rest;
    }

    fn object(&mut self, c: char, parts: &mut Vec<Part>) {
        if !self.scanner.is_inside() && c != '{' {
            return self.between(c, parts);
        }
        if !self.scanner.is_inside() && !matches!(self.format, Format::Llama3Json | Format::Generic | Format::Pythonic)
        {
            self.held.clear();
        }
        self.held.push(c);
        let mut scanned = Vec::new();
        self.scanner.push(c, &mut scanned);
        for event in scanned {
            match event {
                Scanned::Name(name) => {
                    if self.format.may_be_bare() && !self.names.contains(&name) {
                        // An answer that happens to be JSON.
                        self.give_back(parts);
                        return;
                    }
                    self.held.clear();
                    self.name(name, parts);
                }
                Scanned::Arguments(text) => self.arguments(&text, parts),
                Scanned::End => {
                    if !self.has_name && self.format.may_be_bare() && self.num_calls == 0 {
                        self.give_back(parts);
                        return;
                    }
                    let held = std::mem::take(&mut self.held);
                    if !self.has_name {
                        content(parts, &held);
                    }
                    self.end_call(parts);
                }
            }
        }
    }

    /// Between calls: brackets, commas, space, the closing mark.
    fn between(&mut self, c: char, parts: &mut Vec<Part>) {
        self.held.push(c);
        let (open, close) = self.format.marks();
        let held = self.held.trim();
        if !close.is_empty() && held.ends_with(close) {
            self.held.clear();
            self.state = State::Text;
            return;
        }
        let is_filler = |c: char| c.is_whitespace() || matches!(c, '[' | ']' | ',' | ';' | '`');
        let is_mark = |mark: &str| !mark.is_empty() && mark.starts_with(held.trim_start_matches(is_filler));
        if self.format == Format::Required || self.held.chars().all(is_filler) || is_mark(close) || is_mark(open) {
            if !open.is_empty() && held.ends_with(open) {
                self.held.clear();
            }
            return;
        }
        if self.num_calls > 0 || !self.format.may_be_bare() {
            // Text after the calls.
            let held = std::mem::take(&mut self.held);
            if self.num_calls == self.num_before_mark && !self.format.may_be_bare() {
                // No call came after the mark.
                content(parts, open);
                content(parts, &held);
            } else {
                content(parts, held.trim_start_matches(is_filler));
            }
            self.state = State::Text;
        }
    }

    /// A name up to its arguments: `NAME{`, `NAME[ARGS]{`, `type<sep>NAME … {`; or, after Mistral's mark, a list.
    fn head(&mut self, c: char, parts: &mut Vec<Part>) {
        self.held.push(c);
        let (_, close) = self.format.marks();
        if !close.is_empty() && self.held.ends_with(close) {
            self.held.clear();
            self.state = State::Text;
            return;
        }
        let is_list = self.format == Format::Mistral && matches!(self.held.trim(), "[" | "[{" | "{");
        if is_list {
            if c == '{' {
                self.held.clear();
                self.state = State::Objects;
                self.object(c, parts);
            }
            return;
        }
        if c == '{' {
            let name = name_of_head(&self.held);
            self.held.clear();
            if name.is_empty() {
                self.state = State::Text;
                return content(parts, "{");
            }
            self.name(name, parts);
            self.arguments("{", parts);
            let mut scan = ValueScan::default();
            scan.push('{');
            self.state = State::Arguments(scan);
        }
    }

    /// `[f(a=1), g()]`, a call at a time; a list of objects is read as such.
    fn python(&mut self, c: char, parts: &mut Vec<Part>) {
        let is_empty_list = self.num_calls == 0 && self.held.trim_end().ends_with('[');
        if c == '{' && is_empty_list && self.format != Format::Pythonic {
            self.held.push(c);
            self.state = State::Objects;
            self.scanner.push(c, &mut Vec::new());
            return;
        }
        self.held.push(c);
        let text = self.held.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '[' | ','));
        match pythonic::call(text) {
            pythonic::Parsed::Open => {}
            pythonic::Parsed::Call { name, arguments } if self.names.contains(&name) => {
                self.held.clear();
                self.name(name, parts);
                self.arguments(&arguments, parts);
                self.end_call(parts);
            }
            pythonic::Parsed::Call { .. } | pythonic::Parsed::None => {
                let is_end = self.num_calls > 0 && self.held.trim() == "]";
                if is_end {
                    self.held.clear();
                    self.state = State::Text;
                } else {
                    self.give_back(parts);
                }
            }
        }
    }

    fn give_back(&mut self, parts: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        content(parts, &held);
        (self.scanner, self.early) = (CallScanner::default(), String::new());
        self.state = State::Text;
    }

    fn is_dropped(&self) -> bool {
        !self.is_parallel && self.num_calls > 1
    }

    fn name(&mut self, name: String, parts: &mut Vec<Part>) {
        if std::mem::replace(&mut self.has_name, true) {
            return;
        }
        self.num_calls += 1;
        if !self.is_dropped() {
            parts.push(Part::ToolCall { index: self.num_calls - 1, id: self.new_id(), name });
        }
        let early = std::mem::take(&mut self.early);
        self.arguments(&early, parts);
    }

    fn arguments(&mut self, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        if !self.has_name {
            self.early.push_str(text);
            return;
        }
        self.has_arguments = true;
        if self.is_dropped() {
            return;
        }
        let at = self.num_calls - 1;
        match parts.last_mut() {
            Some(Part::Arguments { index, text: all }) if *index == at => all.push_str(text),
            _ => parts.push(Part::Arguments { index: at, text: text.to_owned() }),
        }
    }

    fn end_call(&mut self, parts: &mut Vec<Part>) {
        if self.has_name && !self.has_arguments {
            self.arguments("{}", parts);
        }
        (self.has_name, self.has_arguments) = (false, false);
        self.early.clear();
    }

    /// Mistral's templates take nine letters and digits only.
    fn new_id(&self) -> String {
        let id = uuid::Uuid::now_v7().simple().to_string();
        match self.format {
            Format::Mistral => id[id.len() - 9..].to_owned(),
            _ => format!("call_{}", &id[id.len() - 24..]),
        }
    }
}

fn content(parts: &mut Vec<Part>, text: &str) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(Part::Content(all)) => all.push_str(text),
        _ => parts.push(Part::Content(text.to_owned())),
    }
}

/// The name in what stands before the arguments.
fn name_of_head(head: &str) -> String {
    const MARKS: [&str; 6] =
        ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "[ARGS]", "```json", "```"];
    let mut head = head.trim_end_matches('{').to_owned();
    if let Some((before, _)) = head.clone().split_once("[CALL_ID]") {
        head = before.to_owned();
    }
    MARKS.iter().for_each(|mark| head = head.replace(mark, ""));
    let mut sides = head.split("<｜tool▁sep｜>").map(str::trim).filter(|side| !side.is_empty());
    let first = sides.next().unwrap_or_default();
    sides.next().unwrap_or(first).trim_matches(|c: char| matches!(c, ',' | ']' | '[') || c.is_whitespace()).to_owned()
}
