//! OpenAI's harmony notation: messages on channels, divided by special tokens.
//!
//! The analysis channel is reasoning, the final one and preambles are the answer, and a message to `functions.NAME` is a
//! call.

use crate::server::reducer::Part;

const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];
const MESSAGE: &str = "<|message|>";

#[derive(Clone, Debug, PartialEq, Eq)]
enum Body {
    Reasoning,
    Content,
    Call(usize),
}

/// Parses one answer.
#[derive(Clone, Debug, Default)]
pub struct HarmonyParser {
    /// `None` in a message's head.
    body: Option<Body>,
    held: String,
    num_calls: usize,
}

impl HarmonyParser {
    /// True in a message of reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.body == Some(Body::Reasoning)
    }

    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        for c in text.chars() {
            self.held.push(c);
            match &self.body {
                None => self.head(parts),
                Some(_) => self.body(parts),
            }
        }
    }

    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        if let Some(body) = &self.body {
            emit(body, &held, parts);
        } else if !held.contains("<|channel|>") {
            // An answer without channels.
            emit(&Body::Content, &held, parts);
        }
    }

    fn head(&mut self, parts: &mut Vec<Part>) {
        let Some(head) = self.held.strip_suffix(MESSAGE) else { return };
        let to = head
            .split("to=functions.")
            .nth(1)
            .map(|rest| rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().to_owned());
        self.body = Some(match to {
            Some(name) => {
                let id = uuid::Uuid::now_v7().simple().to_string();
                let index = self.num_calls;
                self.num_calls += 1;
                parts.push(Part::ToolCall { index, id: format!("call_{}", &id[id.len() - 24..]), name });
                Body::Call(index)
            }
            None if head.contains("<|channel|>analysis") => Body::Reasoning,
            None => Body::Content,
        });
        self.held.clear();
    }

    fn body(&mut self, parts: &mut Vec<Part>) {
        let Some(body) = self.body.clone() else { return };
        if let Some(text) = ENDS.iter().find_map(|end| self.held.strip_suffix(end)) {
            emit(&body, text, parts);
            self.held.clear();
            self.body = None;
            return;
        }
        let is_open = |at: &usize| ENDS.iter().any(|end| end.starts_with(&self.held[*at..]));
        let keep = self.held.char_indices().map(|(at, _)| at).find(is_open).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        emit(&body, &self.held, parts);
        self.held = rest;
    }
}

fn emit(body: &Body, text: &str, parts: &mut Vec<Part>) {
    if text.is_empty() {
        return;
    }
    match (body, parts.last_mut()) {
        (Body::Reasoning, Some(Part::Reasoning(all))) | (Body::Content, Some(Part::Content(all))) => all.push_str(text),
        (Body::Call(_), Some(Part::Arguments { text: all, .. })) => all.push_str(text),
        (Body::Reasoning, _) => parts.push(Part::Reasoning(text.to_owned())),
        (Body::Content, _) => parts.push(Part::Content(text.to_owned())),
        (Body::Call(index), _) => parts.push(Part::Arguments { index: *index, text: text.to_owned() }),
    }
}
